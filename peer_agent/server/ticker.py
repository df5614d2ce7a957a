"""The agent's clock: everything that happens because time passes, in one task."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvdir.obs.logs import say, say_bug
from peer_agent.server.peers import Peers
from peer_agent.server.store import Store

log = logging.getLogger(__name__)

TICK_S = 0.25


async def run_ticker(store: Store, peers: Peers, *, is_writing: Callable[[int], bool], beat: Callable[[], None]) -> None:
    """Ends leases and pins that have run out, frees what writers left behind, lets go of idle peers.

    `beat` is called every time, so that /healthz knows that the loop turns. Until cancelled.
    """
    while True:
        await asyncio.sleep(TICK_S)
        beat()
        try:
            store.tick()
            freed = store.settle_sessions(is_writing)
            peers.drop_idle()
        except Exception as error:
            say_bug(log, "tick failed; the next one tries again", error)
        else:
            if freed:
                say(log, logging.INFO, "slots that engines had left behind are free again", slots=freed)

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


async def run_ticker(store: Store, peers: Peers, *, is_writing: Callable[[int], bool], beat: Callable[[float], None]) -> None:
    """Ends leases and pins that have run out, frees what writers left behind, lets go of idle peers.

    `beat` is told every time how late we are, seconds, so that /healthz and the metrics know that the loop turns. Until
    cancelled.
    """
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + TICK_S
        await asyncio.sleep(TICK_S)
        beat(max(0.0, loop.time() - due_s))
        try:
            store.tick()
            freed = store.settle_sessions(is_writing)
            peers.drop_idle()
        except Exception as error:
            say_bug(log, "tick failed; the next one tries again", error)
        else:
            if freed:
                say(log, logging.INFO, "slots that engines had left behind are free again", slots=freed)

"""Runs one agent as a process: event loop, signals, and the announcement that it is ready.

SIGTERM or SIGINT: health says NOT_SERVING, coordinators get a goodbye, calls under way may end within grace_s. A second signal
ends the process at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from dataclasses import asdict

import uvloop

from kvdir.obs.logs import say, say_start
from kvdir.rpc.open_files import raise_open_files
from peer_agent.server.app import Agent, Ready
from peer_agent.server.config import AgentConfig
from peer_agent.server.identity import version
from peer_agent.server.own_arena import run_on_node

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def serve(config: AgentConfig, *, on_ready: Callable[[Ready, Agent], None]) -> None:
    """Until a signal. Raises what Agent.start raises."""
    run_on_node(config.numa_node)
    raise_open_files()
    uvloop.run(_serve(config, on_ready))


async def _serve(config: AgentConfig, on_ready: Callable[[Ready, Agent], None]) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            os._exit(128 + number)
        say(log, logging.INFO, "draining; once more ends at once", signal=number.name, grace_s=config.grace_s)
        stop.set()

    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    say_start(log, config, version=version())
    agent = await Agent.start(config)
    try:
        ready = {key: value or "off" for key, value in asdict(agent.ready).items()}
        say(log, logging.INFO, "serving", **ready | {"epoch": f"{agent.ready.epoch:016x}"}, version=version())
        on_ready(agent.ready, agent)
        await stop.wait()
    finally:
        await agent.close()
        say(log, logging.INFO, "stopped")

"""The only clock of the coordinator: drives the core's deadlines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvdir.server.app import AnyCoordinator

TICK_S = 0.05


async def run_ticker(coordinator: AnyCoordinator, beat: Callable[[], None]) -> None:
    """Until cancelled. `beat` tells /healthz that the loop turns.

    `loop_lag_s` of the metrics is how late the last tick was: a busy loop shows there first.
    """
    loop = asyncio.get_running_loop()
    due_s = loop.time()
    while True:
        coordinator.metrics.loop_lag_s = max(0.0, loop.time() - due_s)
        beat()
        coordinator.tick()
        due_s = max(due_s + TICK_S, loop.time())
        await asyncio.sleep(due_s - loop.time())

"""The only clock of the coordinator: drives the core's deadlines, and refreshes what /metrics shows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from kvdir.server.coordinator import Coordinator

TICK_S = 0.05
_FIGURES_EVERY = 10


async def run_ticker(coordinator: Coordinator, beat: Callable[[], None]) -> None:
    """Until cancelled. `beat` tells /healthz that the loop turns.

    `loop_lag_s` of the metrics is how late the last tick was: a busy loop shows there first.
    """
    loop = asyncio.get_running_loop()
    due_s, ticks = loop.time(), 0
    while True:
        coordinator.metrics.loop_lag_s = max(0.0, loop.time() - due_s)
        beat()
        coordinator.tick()
        if ticks % _FIGURES_EVERY == 0:
            coordinator.metrics.refresh(coordinator.directory, now_s=time.monotonic())
        ticks += 1
        due_s = max(due_s + TICK_S, loop.time())
        await asyncio.sleep(due_s - loop.time())

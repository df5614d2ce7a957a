"""How late something ended, less what the machine itself was late: for deadlines that are asserted to 50 ms on a busy machine.

While a call runs, the event loop is asked to wake up every few milliseconds. The most that one wake-up came too late is what
anything in this process may have had to wait for a core, and is subtracted; the median over some repeats is asserted. So a
loaded machine does not fail a test, and a wait that is not bound by its deadline does, however loaded it is.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

BEAT_S = 0.005
DEADLINE_SLACK_S = 0.05
"""Beyond its deadline, that is what a caller may wait."""

PROMPT_S = 0.2
"""Within that a killed or closed peer is noticed."""


async def took(call: Awaitable[T]) -> tuple[T, float]:
    """(result, seconds), the machine's own delay subtracted."""
    worst_s = 0.0

    async def beat() -> None:
        nonlocal worst_s
        while True:
            slept_s = time.monotonic()
            await asyncio.sleep(BEAT_S)
            worst_s = max(worst_s, time.monotonic() - slept_s - BEAT_S)

    beating = asyncio.ensure_future(beat())
    began_s = time.monotonic()
    try:
        result = await call
        seconds = time.monotonic() - began_s
        await asyncio.sleep(BEAT_S)  # a beat that is late together with the result counts
    finally:
        beating.cancel()
        with suppress(asyncio.CancelledError):
            await beating
    return result, max(0.0, seconds - worst_s)


async def expect_within(limit_s: float, attempt: Callable[[], Awaitable[T]], *, repeats: int = 5, what: str = "it") -> list[T]:
    """Calls `attempt` some times; AssertionError if the median took longer than limit_s. Returns the results."""
    results, seconds = [], []
    for _ in range(repeats):
        result, one_s = await took(attempt())
        results.append(result)
        seconds.append(one_s)
    middle_s = statistics.median(seconds)
    listed = ", ".join(f"{one_s * 1000:.0f}" for one_s in seconds)
    assert middle_s <= limit_s, f"{what} took {listed} ms, at most {limit_s * 1000:.0f} were allowed"
    return results

"""How late something ended, less what the machine itself was late: for deadlines that are asserted to 50 ms on a busy machine.

While a call runs, a thread sleeps for a few milliseconds again and again. The most that it came back too late is what anything
here may have had to wait for a core, and is subtracted; where it pays, the median over some repeats is asserted. So a loaded
machine does not fail a test; a wait that is not bound by its deadline does, and so does an event loop that we block ourselves.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

BEAT_S = 0.005
DEADLINE_SLACK_S = 0.05
"""Beyond its deadline, that is what a caller may wait."""

PROMPT_S = 0.2
"""Within that a killed or closed peer is noticed."""


async def took(call: Awaitable[T]) -> tuple[T, float]:
    """(result, seconds), the machine's own delay subtracted."""
    with _Beats() as beats:
        began_s = time.monotonic()
        result = await call
        seconds = time.monotonic() - began_s
    return result, max(0.0, seconds - beats.worst_s)


class _Beats:
    """worst_s: how much too late the thread woke up, at most. It needs no event loop, and the GIL for microseconds only."""

    def __init__(self) -> None:
        self.worst_s = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="beats")

    def __enter__(self) -> _Beats:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._over.is_set():
            slept_s = time.monotonic()
            time.sleep(BEAT_S)
            self.worst_s = max(self.worst_s, time.monotonic() - slept_s - BEAT_S)


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

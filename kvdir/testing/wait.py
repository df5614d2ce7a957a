"""Waiting for a condition with a deadline, instead of sleeping and hoping."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

POLL_S = 0.01


async def eventually(condition: Callable[[], object], *, within_s: float = 20.0, what: str = "") -> None:
    """Returns as soon as `condition()` is true. AssertionError with `what` when it is not within the deadline."""
    deadline_s = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"not within {within_s:g} s: {what or condition}")
        await asyncio.sleep(POLL_S)

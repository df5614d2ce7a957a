"""Waiting for a condition with a deadline, instead of sleeping and hoping."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable

POLL_S = 0.01


async def eventually(condition: Callable[[], object | Awaitable[object]], *, within_s: float = 20.0, what: str = "") -> None:
    """Returns as soon as `condition()`, or what it awaits, is true. AssertionError with `what` when it is not in time."""
    deadline_s = time.monotonic() + within_s
    while not await _value(condition()):
        if time.monotonic() > deadline_s:
            raise AssertionError(f"not within {within_s:g} s: {what or condition}")
        await asyncio.sleep(POLL_S)


async def _value(value: object | Awaitable[object]) -> object:
    return await value if inspect.isawaitable(value) else value


def wait_until(condition: Callable[[], object], what: str, *, within_s: float = 20.0) -> None:
    """As `eventually`, for tests without an event loop."""
    deadline_s = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"not within {within_s:g} s: {what}")
        time.sleep(POLL_S)

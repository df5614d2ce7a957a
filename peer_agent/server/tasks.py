"""Background work with an owner: started here, counted, and awaited when the owner closes.

A task that fails is logged with its traceback and counted, once, by the owner; it never disappears. Bounded: beyond `limit`
tasks, and once closed, `start` refuses, and the caller decides what that means.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from kvdir.obs.logs import say_bug

T = TypeVar("T")

log = logging.getLogger(__name__)


class OwnedTasks:
    """A set of running tasks. limit None: something else bounds them."""

    def __init__(self, *, limit: int | None) -> None:
        self._limit = limit
        self._closed = False
        self._running: set[asyncio.Task[Any]] = set()
        self.failures = 0

    def __len__(self) -> int:
        return len(self._running)

    def start(self, work: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T] | None:
        """The task, or None (and `work` closed unstarted) when too many run or the owner has closed."""
        if self._closed or (self._limit is not None and len(self._running) >= self._limit):
            work.close()
            return None
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failures += 1
            say_bug(log, "background task failed", error, task=task.get_name())

    async def close(self, *, timeout_s: float) -> None:
        """Lets what runs end within timeout_s, then cancels and awaits the rest."""
        if self._running:
            await asyncio.wait(self._running, timeout=timeout_s)
        self._closed = True  # what ends now must not start more behind our back
        left = list(self._running)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

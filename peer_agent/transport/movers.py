"""The threads in which native calls move bytes, and the one way to wait for them.

Rules: a bounded number of threads; who finds none free waits within its own deadline; a call that has begun is always waited
for, also when the waiting task is cancelled (it is told to abort, ends, and only then the cancellation goes on): as long as
native code may still write to a slot, nobody is told that the read is over.

Does not: know what is moved.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Movers:
    """A few named threads for blocking native calls that honour a deadline themselves."""

    def __init__(self, name: str, *, threads: int) -> None:
        if threads < 1:
            raise ValueError(f"{name} needs at least one thread, not {threads}")
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._free = asyncio.Semaphore(threads)

    async def run(self, call: Callable[[], T], *, abort: Callable[[], None], until_s: float) -> T:
        """Runs `call` in a thread. `until_s`: time.monotonic() by which a thread must be free, else TimeoutError.

        `abort` makes `call` end soon; it is called from the event loop and must not block.
        """
        if self._free.locked():
            async with asyncio.timeout(until_s - time.monotonic()):
                await self._free.acquire()
        else:
            await self._free.acquire()
        try:
            return await self._run_to_its_end(call, abort)
        finally:
            self._free.release()

    async def _run_to_its_end(self, call: Callable[[], T], abort: Callable[[], None]) -> T:
        running = asyncio.get_running_loop().run_in_executor(self._pool, call)
        cancelled: asyncio.CancelledError | None = None
        while not running.done():
            try:
                await asyncio.wait([running])
            except asyncio.CancelledError as error:
                cancelled = error
                abort()
        if cancelled is None:
            return running.result()
        running.exception()  # retrieved: the cancellation is what the caller asked for
        raise cancelled

    def close(self) -> None:
        """Ends the threads once their calls have ended. No `run` may begin afterwards."""
        self._pool.shutdown(wait=False)

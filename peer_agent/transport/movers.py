"""How coroutines wait for the native threads that move bytes (`_native.Movers`).

Rules: no more reads at once than there are threads; who finds none free waits within its own deadline; a read that has begun
is always waited for, also when the waiting task is cancelled (it is aborted, ends, and only then the cancellation goes on): as
long as native code may still write to a slot, nobody is told that the read is over.

Why not `run_in_executor`: a Python thread must take the GIL to begin and to end, which cost 65 to 130 us a read on an idle
loop and up to the switch interval (5 ms) beside a busy one; a native thread and an eventfd cost about 15 us (docs/adr/0002).

Does not: know what is moved, or where to.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from peer_agent import _native


class Movers:
    """A bounded number of native threads, bound to the event loop of its first read."""

    def __init__(self, *, threads: int) -> None:
        self._native = _native.Movers(threads)
        self._free = asyncio.Semaphore(threads)
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    async def run(self, begin: Callable[[_native.Movers], int], *, until_s: float, tickets: set[int] | None = None) -> bytes:
        """`begin` starts the read and returns its ticket; returns the statuses.

        until_s: time.monotonic() by which a thread must be free, else TimeoutError. ConnectionError: closed meanwhile. Errors
        of `begin` pass through.
        tickets: holds the read's ticket while it runs, for `abort`.
        """
        await acquire(self._free, until_s=until_s)
        try:
            if self._closed:
                raise ConnectionError("the data plane was closed")
            ticket = begin(self._native)
            if tickets is not None:
                tickets.add(ticket)
            try:
                return await self._end_of(ticket)
            finally:
                if tickets is not None:
                    tickets.discard(ticket)
        finally:
            self._free.release()

    def abort(self, tickets: set[int]) -> None:
        """Makes these reads end soon, their blocks that are not done as PEER_LOST."""
        for ticket in tickets:
            self._native.abort(ticket)

    async def close(self) -> None:
        """Aborts reads in progress and waits for them; reads begun afterwards raise ConnectionError."""
        self._closed = True
        self._native.close()
        if self._loop is None:
            return
        self._loop.remove_reader(self._native.fileno())
        self._loop = None
        self._collect()

    async def _end_of(self, ticket: int) -> bytes:
        self._listen()
        cancelled: asyncio.CancelledError | None = None
        while True:
            future = asyncio.get_running_loop().create_future()
            self._waiting[ticket] = future
            try:
                statuses: bytes = await future
            except asyncio.CancelledError as error:
                cancelled = error
                if ticket in self._waiting:  # else it ended at the same moment
                    self._native.abort(ticket)
                    continue
            if cancelled is not None:
                raise cancelled
            return statuses

    def _listen(self) -> None:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._native.fileno(), self._collect)

    def _collect(self) -> None:
        for ticket, statuses in self._native.collect():
            future = self._waiting.pop(ticket)
            if not future.done():
                future.set_result(statuses)


async def acquire(semaphore: asyncio.Semaphore, *, until_s: float) -> None:
    """Takes one of a semaphore's places, TimeoutError if none is free by time.monotonic() until_s."""
    if not semaphore.locked():
        await semaphore.acquire()
        return
    async with asyncio.timeout(until_s - time.monotonic()):
        await semaphore.acquire()

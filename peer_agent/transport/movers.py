"""How coroutines wait for the native threads that move bytes (`_native.Movers`).

Rules: a few threads run any number of jobs in turns, so a peer that says nothing holds none of them; a job ends by its own
deadline. One that has begun is always waited for, also when the waiting task is cancelled (it is aborted, ends, and only then
the cancellation goes on): as long as native code may still write to a slot, nobody is told that the read is over. What bounds
the jobs is their callers, each of whom waits for one: connections per peer (tcp), tasks (shm).

Why not `run_in_executor`: a Python thread must take the GIL to begin and to end, which cost 65 to 130 us a read on an idle
loop and up to the switch interval (5 ms) beside a busy one; a native thread and an eventfd cost about 15 us (docs/adr/0002).

Does not: know what is moved, or where to.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from peer_agent import _native

Result = tuple[bytes, int] | str | _native.TcpConnection

LOOP_BYTES = 2 << 20
"""Payload of tcp reads that the event loop itself may have under way, bytes. Waking a thread and being woken by it costs a
small read as much as its bytes do; what the loop receives at a time is what lies in the socket, some 100 us of work."""

MOST_THREADS = 8
"""Copies are bound by memory bandwidth, which a few cores use up."""


class Movers:
    """Native threads that the planes of one agent share, bound to the event loop of their first job."""

    def __init__(self, *, threads: int = 0, loop_bytes: int = LOOP_BYTES) -> None:
        """threads: 0 means one per core that we may use, 2 to MOST_THREADS. loop_bytes: see LOOP_BYTES."""
        self._threads = threads or min(max(2, len(os.sched_getaffinity(0))), MOST_THREADS)
        self._loop_bytes = loop_bytes
        self._native: _native.Movers | None = None
        self._users = 0
        self._waiting: dict[int, asyncio.Future[Result]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def attach(self) -> Movers:
        """One more plane that uses these threads, which run from the first `attach` to the last `close`. Returns itself."""
        if self._native is None:
            self._native = _native.Movers(self._threads, self._loop_bytes)
        self._users += 1
        return self

    async def read(self, begin: Callable[[_native.Movers], int], *, tickets: set[int]) -> tuple[bytes, int]:
        """`begin` starts a read and returns its ticket; returns its statuses and the payload bytes of the OK ones.

        tickets: holds the ticket while the read runs, for `abort`. ConnectionError: closed. Errors of `begin` pass through.
        """
        result = await self._run(begin, tickets)
        assert isinstance(result, tuple)
        return result

    async def connect_tcp(
        self, host: str, port: int, tls: _native.TlsCredentials | None, *, until_s: float, tickets: set[int]
    ) -> _native.TcpConnection:
        """A connection by time.monotonic() until_s. ConnectionError with the reason."""
        result = await self._run(lambda native: native.connect_tcp(host, port, int(until_s * 1e9), tls=tls), tickets)
        if isinstance(result, _native.TcpConnection):
            return result
        raise ConnectionError(result)

    def abort(self, tickets: set[int]) -> None:
        """Ends these jobs at once if they wait and soon if they move bytes; what is missing of reads is PEER_LOST."""
        for ticket in tickets:
            if self._native is not None:
                self._native.abort(ticket)

    async def close(self) -> None:
        """By each plane. The last one ends all jobs and the threads; jobs begun afterwards raise ConnectionError."""
        self._users -= 1
        if self._users != 0 or self._native is None:
            return
        self._native.close()
        if self._loop is not None:
            self._loop.remove_reader(self._native.fileno())
            self._loop = None
            self._collect()
        self._native = None  # with its descriptors

    async def _run(self, begin: Callable[[_native.Movers], int], tickets: set[int]) -> Result:
        if self._native is None:
            raise ConnectionError("the data plane is closed")
        ticket = begin(self._native)
        tickets.add(ticket)
        try:
            return await self._end_of(ticket)
        finally:
            tickets.discard(ticket)

    async def _end_of(self, ticket: int) -> Result:
        self._listen()
        cancelled: asyncio.CancelledError | None = None
        while True:
            future = asyncio.get_running_loop().create_future()
            self._waiting[ticket] = future
            try:
                result: Result = await future
            except asyncio.CancelledError as error:
                cancelled = error
                if ticket in self._waiting:  # else it ended at the same moment
                    self.abort({ticket})
                    continue
            if cancelled is not None:
                raise cancelled
            return result

    def _listen(self) -> None:
        if self._loop is None:
            assert self._native is not None
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._native.fileno(), self._collect)

    def _collect(self) -> None:
        assert self._native is not None
        for ticket, result in self._native.collect():
            future = self._waiting.pop(ticket)
            if not future.done():
                future.set_result(result)

"""The reader's side of the tcp plane towards one peer: its connections, and which read goes on which.

Rules:
- At most `connections` are open, one read at a time on each. Another is opened only when a read finds all of them busy, and who
  finds the number exhausted waits within its deadline. Those that no read needed for IDLE_S are closed, but for one.
- A connection that was late or broke is replaced by the next read.
- A reused connection may have died while it was idle. A read that finds it dead before any block was decided is tried once
  more on a fresh one; a fresh one that fails is the peer's failure.
- Native reads write from one thread at a time (a mover, or the event loop) and end by their deadline, so every outcome is
  settled. Cancelling one closes its connection and touches no other read.
"""

from __future__ import annotations

import asyncio
import time

from peer_agent import _native
from peer_agent.core.capability import CAPABILITY
from peer_agent.memory.arena import Arena
from peer_agent.transport.base import ReadList, ReadOutcome, ReadStatus
from peer_agent.transport.movers import Movers
from peer_agent.transport.outcomes import check_shape, settled_now, uniform_outcome

_ALL_LOST = bytes([ReadStatus.PEER_LOST])

CONNECT_S = 1.0
"""Longest connect. A stopped peer takes connections and says nothing on them; other owners can serve meanwhile."""

IDLE_S = 30.0
"""How long connections beyond the first stay open that no read needs."""


class TcpPeer:
    """The connections to one peer: idle ones are kept, busy ones belong to one read each."""

    def __init__(
        self,
        arena: Arena,
        address: str,
        port: int,
        movers: Movers,
        *,
        connections: int,
        check: bool,
        tls: _native.TlsCredentials | None,
    ) -> None:
        self._arena = arena
        self._address = address
        self._port = port
        self._movers = movers
        self._check = check
        self._tls = tls
        self._free = asyncio.Semaphore(connections)
        self._idle: list[_native.TcpConnection] = []
        self._unused = 0  # fewest idle ones since `_watch_idle`
        self._trimming: asyncio.TimerHandle | None = None
        self._tickets: set[int] = set()
        self._closed = False

    async def warm_up(self, *, until_s: float) -> None:
        """One connection, so that `connect` fails where reads would. Raises ConnectionError."""
        self._put_back(await self._fresh(until_s))

    async def read(self, blocks: ReadList, *, deadline_s: float) -> ReadOutcome:
        until_s = time.monotonic() + deadline_s
        if len(blocks) == 0:
            return uniform_outcome(blocks, ReadStatus.OK)
        if len(blocks.capability) != CAPABILITY.size:  # the owner gave none, or none that it would take: it would serve nothing
            check_shape(blocks)
            return uniform_outcome(blocks, ReadStatus.ABSENT)
        try:
            await _acquire(self._free, until_s=until_s)
        except TimeoutError:
            return uniform_outcome(blocks, ReadStatus.LATE)
        try:
            statuses, moved = await self._read(blocks, until_s)
            return ReadOutcome(statuses, settled_now(), moved)
        except ConnectionError:
            late = time.monotonic() >= until_s
            return uniform_outcome(blocks, ReadStatus.LATE if late else ReadStatus.PEER_LOST)
        finally:
            self._free.release()

    async def close(self) -> None:
        """Reads in progress end as PEER_LOST."""
        self._closed = True
        if self._trimming is not None:
            self._trimming.cancel()
        self._movers.abort(self._tickets)
        while self._idle:
            self._idle.pop().close()

    async def _read(self, blocks: ReadList, until_s: float) -> tuple[bytes, int]:
        while self._idle and not self._closed:
            connection = self._idle.pop()
            self._unused = min(self._unused, len(self._idle))
            result = await self._read_on(connection, blocks, until_s)
            if result[0].strip(_ALL_LOST):
                return result
        return await self._read_on(await self._fresh(until_s), blocks, until_s)

    async def _read_on(self, connection: _native.TcpConnection, blocks: ReadList, until_s: float) -> tuple[bytes, int]:
        try:
            return await self._movers.read(
                lambda movers: movers.read_tcp(
                    connection,
                    blocks.capability,
                    blocks.epoch,
                    blocks.records,
                    blocks.namespace_digest,
                    blocks.fingerprints,
                    blocks.width,
                    self._arena.region,
                    blocks.destinations,
                    self._check,
                    int(until_s * 1e9),
                ),
                tickets=self._tickets,
            )
        finally:
            self._put_back(connection)

    def _put_back(self, connection: _native.TcpConnection) -> None:
        if connection.broken or self._closed:
            connection.close()
            return
        self._idle.append(connection)
        self._watch_idle()

    def _watch_idle(self) -> None:
        if len(self._idle) > 1 and self._trimming is None:
            self._unused = len(self._idle)
            self._trimming = asyncio.get_running_loop().call_later(IDLE_S, self._trim)

    def _trim(self) -> None:
        """Closes what no read has needed since `_watch_idle`; the front of the list was used longest ago."""
        self._trimming = None
        for _ in range(min(self._unused, len(self._idle) - 1)):
            self._idle.pop(0).close()
        self._watch_idle()

    async def _fresh(self, until_s: float) -> _native.TcpConnection:
        """A new connection. Raises ConnectionError."""
        if self._closed:
            raise ConnectionError("closed")
        until_s = min(until_s, time.monotonic() + CONNECT_S)
        connection = await self._movers.connect_tcp(
            self._address, self._port, self._tls, until_s=until_s, tickets=self._tickets
        )
        if self._closed:  # meanwhile
            connection.close()
            raise ConnectionError("closed")
        return connection


async def _acquire(semaphore: asyncio.Semaphore, *, until_s: float) -> None:
    """Takes one of a semaphore's places, TimeoutError if none is free by time.monotonic() until_s."""
    if not semaphore.locked():
        await semaphore.acquire()
        return
    async with asyncio.timeout(until_s - time.monotonic()):
        await semaphore.acquire()

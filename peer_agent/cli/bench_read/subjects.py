"""What is timed. Each subject moves one request's bytes from the owner's memory into the reader's and says how long it took.

`plane` is ours, verification on; `yardstick` is what the machine gives at best (a native scattered memcpy, a native raw TCP
stream of as many contiguous bytes); `peer` is another library in processes of its own (peers.py).
"""

from __future__ import annotations

import random
import socket
import struct
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Protocol, Self

from peer_agent import _native
from peer_agent.cli.bench_read.cells import Request, offsets, packed_offset, size_class
from peer_agent.cli.bench_read.owner import DEADLINE_S, RAW_REQUEST, Offer, deadline_ns
from peer_agent.memory.arena import Arena
from peer_agent.memory.layout import HEADER_BYTES
from peer_agent.transport.base import Connection, ReadStatus


class SubjectFailed(Exception):
    """It cannot go on; the others can. Message: why."""


class Subject(Protocol):
    name: str
    kind: str  # plane, yardstick, peer
    reader_pids: tuple[int, ...]  # whose CPU time a read costs, on each side
    owner_pids: tuple[int, ...]

    def resume(self) -> None:
        """Its turn begins. Processes that poll are stopped outside of their turns, so that nobody pays for them."""

    def pause(self) -> None: ...

    async def run(self, request: Request) -> float:
        """Reads; returns seconds. Raises SubjectFailed."""

    def landed(self, request: Request) -> Iterable[memoryview] | None:
        """What lies where the blocks should be now; None where blocks are not told apart."""


class Plane:
    kind = "plane"

    def __init__(
        self, name: str, connection: Connection, reader: Arena, *, reader_pids: tuple[int, ...], owner_pids: tuple[int, ...]
    ) -> None:
        self.name = name
        self.reader_pids, self.owner_pids = reader_pids, owner_pids
        self._connection = connection
        self._reader = reader

    def resume(self) -> None: ...

    def pause(self) -> None: ...

    async def run(self, request: Request) -> float:
        start = time.perf_counter()
        outcome = await self._connection.read(request.blocks, deadline_s=DEADLINE_S)
        elapsed = time.perf_counter() - start
        if outcome.statuses.strip(bytes([ReadStatus.OK])):
            names = sorted({ReadStatus(status).name.lower() for status in outcome.statuses})
            raise SubjectFailed(f"not every block arrived: {', '.join(names)}")
        return elapsed

    def landed(self, request: Request) -> Iterable[memoryview]:
        at = struct.unpack(f"<{len(request.blocks)}Q", request.blocks.destinations)
        size = request.cell.block_bytes
        return (self._reader.region[a + HEADER_BYTES : a + HEADER_BYTES + size] for a in at)


class Packed:
    """What yardsticks and peers share: they write block after block into the packed area."""

    def __init__(self, reader: Arena, name: str, *, reader_pids: tuple[int, ...], owner_pids: tuple[int, ...]) -> None:
        self.name = name
        self.reader_pids, self.owner_pids = reader_pids, owner_pids
        self._reader = reader
        self._at = packed_offset(reader)

    def resume(self) -> None: ...

    def pause(self) -> None: ...

    def into(self, request: Request) -> memoryview:
        return self._reader.region[self._at : self._at + request.cell.read_bytes]

    def landed(self, request: Request) -> Iterable[memoryview] | None:
        into, size = self.into(request), request.cell.block_bytes
        return (into[i * size : (i + 1) * size] for i in range(request.cell.blocks))


class Memcpy(Packed):
    kind = "yardstick"

    def __init__(self, reader: Arena, peer: Arena, pid: int) -> None:
        super().__init__(reader, "memcpy", reader_pids=(pid,), owner_pids=())
        self._peer = peer

    async def run(self, request: Request) -> float:
        size = request.cell.block_bytes
        scattered = offsets(size_class(self._peer, size), request.slots)
        start = time.perf_counter()
        _native.copy_scattered(self._peer.region, scattered, size, self.into(request))
        return time.perf_counter() - start


class RawTcp(Packed):
    kind = "yardstick"

    def __init__(self, reader: Arena, peer: Arena, offer: Offer, pid: int) -> None:
        super().__init__(reader, "raw_tcp", reader_pids=(pid,), owner_pids=(offer.pid,))
        self._peer = peer
        self._random = random.Random(1)
        self._socket = socket.create_connection(("127.0.0.1", offer.raw_port), timeout=DEADLINE_S)
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def run(self, request: Request) -> float:
        slots = size_class(self._peer, request.cell.block_bytes)
        offset = self._random.randrange(slots.first, slots.end - request.cell.read_bytes)
        start = time.perf_counter()
        self._socket.sendall(RAW_REQUEST.pack(offset, request.cell.read_bytes))
        _native.stream_receive(self._socket.fileno(), self.into(request), deadline_ns())
        return time.perf_counter() - start

    def landed(self, request: Request) -> None:
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._socket.close()

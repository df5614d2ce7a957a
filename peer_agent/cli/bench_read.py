"""`peer-agent bench read`: how fast verified reads are, against what the machine can do at all, in one run.

Each round of a cell times four things one after the other, in changing order, and only their ratio counts, so that a noisy
neighbour slows all of them:
- shm and tcp: `Connection.read` of random committed blocks of an owner in another process, as an agent calls it;
- memcpy: `_native.copy_scattered` of the same blocks out of the same mapping, no header, no check;
- raw tcp: as many bytes over one loopback stream, natively, from and into contiguous arena memory.
Medians over the rounds; memory is faulted in before. The owner serves, the reader asks; both are ordinary processes.

Owns the measurement only; the command line is in main.py, the bars are in ../shared/design/08 and `bench/read.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import random
import socket
import statistics
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from typing import Any

import numpy as np
import uvloop

from peer_agent import _native
from peer_agent.memory.arena import Arena, ArenaTooLarge
from peer_agent.memory.layout import HEADER_BYTES, SUPERBLOCK_BYTES, SizeClass, stride_bytes
from peer_agent.transport.base import Connection, ReadList, ReadStatus, Transport
from peer_agent.transport.shm import ShmTransport
from peer_agent.transport.tcp import TcpTransport

BLOCK_BYTES = (64 << 10, 512 << 10, 2 << 20)
BLOCKS = (32, 256)
PLANES = ("shm", "tcp")

_DIGEST = b"bench read namespace".ljust(32, b"\0")
_WIDTH = 16
_LOCK = 1
_DEADLINE_S = 30.0
_WRITE_BATCH = 64
_SPARE_BYTES = 128 << 20
"""Up to twice as many slots as a request asks for, so that it is scattered, but no more than this beyond it."""


@dataclass(frozen=True, slots=True)
class Cell:
    block_bytes: int
    blocks: int

    @property
    def read_bytes(self) -> int:
        return self.block_bytes * self.blocks

    @property
    def slots(self) -> int:
        return self.blocks + min(self.blocks, max(1, _SPARE_BYTES // self.block_bytes))

    @property
    def needed_bytes(self) -> int:
        """Shared memory: the owner's slots, the reader's, and the packed area that memcpy and the raw stream write to."""
        return (self.slots + 2 * self.blocks) * stride_bytes(self.block_bytes) + 3 * SUPERBLOCK_BYTES


def run_read_bench(
    *,
    planes: Sequence[str] = PLANES,
    block_bytes: Sequence[int] = BLOCK_BYTES,
    blocks: Sequence[int] = BLOCKS,
    seconds_per_cell: float = 3.0,
    min_rounds: int = 7,
    directory: str = "/dev/shm",
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """{"machine": {...}, "rows": [{plane, block_bytes, blocks, gb_per_s, ratio_to_memcpy, ratio_to_raw_tcp, p50_us, p99_us,
    rounds}]}. Needs 3 * max(block_bytes * blocks) + 128 MiB in `directory`. Raises ArenaTooLarge when they are not free."""
    cells = [Cell(size, count) for size in block_bytes for count in blocks]
    _require_room(directory, max(cell.needed_bytes for cell in cells))
    rows: list[dict[str, Any]] = []
    for cell in cells:
        if progress is not None:
            progress(f"{cell.block_bytes >> 10} KiB x {cell.blocks}")
        rows.extend(_run_cell(cell, planes, seconds_per_cell, min_rounds, directory))
    return {"machine": _machine(), "rows": rows}


def _require_room(directory: str, needed: int) -> None:
    stats = os.statvfs(directory)
    free = stats.f_bavail * stats.f_frsize
    if needed > free:
        raise ArenaTooLarge(f"the bench needs {needed:,} bytes in {directory}, {free:,} are free; use smaller or fewer blocks")


def _machine() -> dict[str, Any]:
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        models = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return {"cpu": models[0] if models else "unknown", "cores": os.cpu_count(), "kernel": os.uname().release}


def _run_cell(cell: Cell, planes: Sequence[str], seconds: float, min_rounds: int, directory: str) -> Iterable[dict[str, Any]]:
    base = os.path.join(directory, f"kvdir-bench-{os.getpid()}")
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    owner = context.Process(target=_own, args=(theirs, cell, f"{base}-owner", tuple(planes)), daemon=True)
    owner.start()
    theirs.close()
    try:
        classes = [SizeClass(_DIGEST, cell.block_bytes, cell.blocks), SizeClass(_DIGEST, cell.read_bytes, 1)]
        with Arena.create(f"{base}-reader", classes, epoch=2, prefault=True) as reader:
            offer = _receive(ours)
            return uvloop.run(_measure(cell, planes, seconds, min_rounds, reader, offer))
    finally:
        ours.close()  # the owner ends when its pipe does
        owner.join(_DEADLINE_S)
        if owner.is_alive():
            owner.kill()
            owner.join()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{base}-owner")


@dataclass(frozen=True, slots=True)
class _Offer:
    """What the owner process says it serves."""

    arena_path: str
    descriptors: dict[str, bytes]
    raw_port: int
    records: bytes
    fingerprints: bytes


# ---- owner process ----


def _own(pipe: Pipe, cell: Cell, path: str, planes: tuple[str, ...]) -> None:
    """Fills an arena, serves it over the planes and a raw stream until the pipe closes."""
    with Arena.create(path, [SizeClass(_DIGEST, cell.block_bytes, cell.slots)], epoch=1, prefault=True) as arena:
        uvloop.run(_serve(pipe, cell, arena, planes))


async def _serve(pipe: Pipe, cell: Cell, arena: Arena, planes: tuple[str, ...]) -> None:
    fingerprints = random.Random(cell.slots).randbytes(cell.slots * _WIDTH)
    records = _fill(arena, cell, fingerprints)
    transports = [_transport(name, arena) for name in planes]
    descriptors = {}
    for transport in transports:
        descriptors[transport.name] = await transport.export()
        transport.grant(_LOCK, records, expires_s=time.monotonic() + 3600)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(_Offer(arena.path, descriptors, listener.getsockname()[1], records, fingerprints))
        await asyncio.to_thread(_serve_raw, listener, arena, cell)
    for transport in transports:
        await transport.close()


def _fill(arena: Arena, cell: Cell, fingerprints: bytes) -> bytes:
    size_class = arena.classes[0]
    records = []
    for first in range(0, cell.slots, _WRITE_BATCH):
        count = min(_WRITE_BATCH, cell.slots - first)
        offsets = _offsets(size_class, range(first, first + count))
        payload = np.random.default_rng(first).integers(0, 256, count * cell.block_bytes, dtype=np.uint8)
        address = payload.ctypes.data
        sources = struct.pack(f"<{count}Q", *(address + i * cell.block_bytes for i in range(count)))
        _native.begin_write(arena.region, offsets)
        sums = _native.write_blocks(arena.region, offsets, sources, cell.block_bytes)
        part = fingerprints[first * _WIDTH : (first + count) * _WIDTH]
        records.append(_native.commit(arena.region, offsets, _DIGEST, part, _WIDTH, cell.block_bytes, sums))
    return b"".join(records)


def _serve_raw(listener: socket.socket, arena: Arena, cell: Cell) -> None:
    """Answers each request (u64 offset) with read_bytes of arena memory, until the reader goes away."""
    connection, _ = listener.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while len(request := connection.recv(8, socket.MSG_WAITALL)) == 8:
            (offset,) = struct.unpack("<Q", request)
            _native.stream_send(connection.fileno(), arena.region[offset : offset + cell.read_bytes], _deadline_ns())


# ---- reader process ----


async def _measure(
    cell: Cell, planes: Sequence[str], seconds: float, min_rounds: int, reader: Arena, offer: _Offer
) -> list[dict[str, Any]]:
    destinations = _offsets(reader.classes[0], range(cell.blocks))
    _native.begin_write(reader.region, destinations)
    transports = [_transport(name, reader) for name in planes]
    peer = Arena.open(offer.arena_path, writable=False)
    raw = socket.create_connection(("127.0.0.1", offer.raw_port), timeout=_DEADLINE_S)
    try:
        raw.settimeout(None)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connections = {t.name: await t.connect(offer.descriptors[t.name], deadline_s=_DEADLINE_S) for t in transports}
        times = await _rounds(cell, seconds, min_rounds, _Subjects(cell, reader, peer, raw, connections, destinations, offer))
    finally:
        raw.close()
        for transport in transports:
            await transport.close()
        peer.close()
    return [_row(cell, plane, times) for plane in planes]


class _Subjects:
    """The things that are timed. Each call moves one request's bytes and returns seconds."""

    def __init__(
        self,
        cell: Cell,
        reader: Arena,
        peer: Arena,
        raw: socket.socket,
        connections: dict[str, Connection],
        destinations: bytes,
        offer: _Offer,
    ) -> None:
        self._cell = cell
        self._peer = peer
        self._raw = raw
        self._connections = connections
        self._destinations = destinations
        self._offer = offer
        packed = reader.classes[1].first + HEADER_BYTES
        self._into = reader.region[packed : packed + cell.read_bytes]
        self._random = random.Random(1)
        self._chosen: list[int] = []
        self._request: ReadList | None = None

    @property
    def names(self) -> list[str]:
        return [*self._connections, "memcpy", "raw_tcp"]

    def choose(self) -> None:
        """Another random request."""
        offer = self._offer
        self._chosen = self._random.sample(range(self._cell.slots), self._cell.blocks)
        self._request = ReadList(
            lock=_LOCK,
            epoch=1,
            namespace_digest=_DIGEST,
            fingerprints=b"".join(offer.fingerprints[i * _WIDTH : (i + 1) * _WIDTH] for i in self._chosen),
            width=_WIDTH,
            records=b"".join(offer.records[i * 32 : (i + 1) * 32] for i in self._chosen),
            destinations=self._destinations,
        )

    async def run(self, name: str) -> float:
        if name == "memcpy":
            return self._memcpy()
        if name == "raw_tcp":
            return self._raw_tcp()
        assert self._request is not None
        start = time.perf_counter()
        outcome = await self._connections[name].read(self._request, deadline_s=_DEADLINE_S)
        elapsed = time.perf_counter() - start
        if outcome.statuses.strip(bytes([ReadStatus.OK])):
            raise RuntimeError(f"{name}: not every block arrived, statuses {sorted(set(outcome.statuses))}")
        return elapsed

    def _memcpy(self) -> float:
        offsets = _offsets(self._peer.classes[0], self._chosen)
        start = time.perf_counter()
        _native.copy_scattered(self._peer.region, offsets, self._cell.block_bytes, self._into)
        return time.perf_counter() - start

    def _raw_tcp(self) -> float:
        slots = self._peer.classes[0]
        offset = self._random.randrange(slots.first, slots.end - self._cell.read_bytes)
        start = time.perf_counter()
        self._raw.sendall(struct.pack("<Q", offset))
        _native.stream_receive(self._raw.fileno(), self._into, _deadline_ns())
        return time.perf_counter() - start


async def _rounds(cell: Cell, seconds: float, min_rounds: int, subjects: _Subjects) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in subjects.names}
    order = subjects.names
    subjects.choose()
    for name in order:  # warm-up: connections, caches, page tables
        await subjects.run(name)
    ends = time.monotonic() + seconds
    rounds = 0
    while rounds < min_rounds or time.monotonic() < ends:
        subjects.choose()
        order = order[1:] + order[:1]
        await asyncio.sleep(0)  # requests come one a turn of the loop, so the shm plane may copy in it
        for name in order:
            times[name].append(await subjects.run(name))
        rounds += 1
    return times


def _row(cell: Cell, plane: str, times: dict[str, list[float]]) -> dict[str, Any]:
    own = times[plane]
    ordered = sorted(own)
    return {
        "plane": plane,
        "block_bytes": cell.block_bytes,
        "blocks": cell.blocks,
        "gb_per_s": round(cell.read_bytes / statistics.median(own) / 1e9, 3),
        "ratio_to_memcpy": _ratio(times["memcpy"], own),
        "ratio_to_raw_tcp": _ratio(times["raw_tcp"], own),
        "p50_us": round(statistics.median(own) * 1e6, 1),
        "p99_us": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] * 1e6, 1),
        "rounds": len(own),
    }


def _ratio(yardstick: list[float], own: list[float]) -> float:
    """Median over the rounds of our speed in parts of the yardstick's in the same round."""
    return round(statistics.median(y / o for y, o in zip(yardstick, own, strict=True)), 3)


# ---- shared ----


def _transport(name: str, arena: Arena) -> Transport:
    match name:
        case "shm":
            return ShmTransport(arena)
        case "tcp":
            return TcpTransport(arena)
        case _:
            raise ValueError(f"unknown plane {name!r}; known are {', '.join(PLANES)}")


def _offsets(size_class: SizeClass, slots: Iterable[int]) -> bytes:
    offsets = [size_class.offset(i) for i in slots]
    return struct.pack(f"<{len(offsets)}Q", *offsets)


def _deadline_ns() -> int:
    return time.monotonic_ns() + int(_DEADLINE_S * 1e9)


def _receive(pipe: Pipe) -> _Offer:
    if not pipe.poll(_DEADLINE_S):
        raise RuntimeError(f"the owner process was not ready within {_DEADLINE_S:.0f} s")
    offer = pipe.recv()
    assert isinstance(offer, _Offer)
    return offer

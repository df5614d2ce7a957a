"""What is read: cells of block size and count, the memory they need, and blocks with content.

One owner arena and one reader arena serve all cells of a run, a size class for each block size. A cell of n blocks reads n
slots out of at most 2n, chosen anew for each request, so that what is read is scattered. Beside its slots the reader has one
packed area, which yardsticks and peers write to.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from peer_agent import _native
from peer_agent.memory.arena import Arena
from peer_agent.memory.layout import HEADER_BYTES, SUPERBLOCK_BYTES, SizeClass, stride_bytes
from peer_agent.transport.base import BLOCK_RECORD_BYTES, ReadList

LOCK = 1
OWNER_EPOCH = 1
WIDTH = 16

_PACKED = b"bench read packed".ljust(32, b"\0")
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
    def label(self) -> str:
        mib, kib = self.block_bytes >> 20, self.block_bytes >> 10
        return f"{self.blocks} x {f'{mib} MiB' if mib else f'{kib} KiB'}"


@dataclass(frozen=True)
class Grid:
    """The cells of a run and where their blocks lie."""

    cells: tuple[Cell, ...]

    @cached_property
    def block_bytes(self) -> tuple[int, ...]:
        return tuple(sorted({cell.block_bytes for cell in self.cells}))

    def owner_classes(self) -> list[SizeClass]:
        return [SizeClass(digest(size), size, max(c.slots for c in self._of(size))) for size in self.block_bytes]

    def reader_classes(self) -> list[SizeClass]:
        """A class of destinations for each block size, and the packed area as the last."""
        classes = [SizeClass(digest(size), size, max(c.blocks for c in self._of(size))) for size in self.block_bytes]
        return [*classes, SizeClass(_PACKED, max(cell.read_bytes for cell in self.cells), 1)]

    @property
    def needed_bytes(self) -> int:
        """Shared memory of both arenas."""
        classes = [*self.owner_classes(), *self.reader_classes()]
        return 2 * SUPERBLOCK_BYTES + sum(c.slots * stride_bytes(c.block_bytes) for c in classes)

    def _of(self, size: int) -> list[Cell]:
        return [cell for cell in self.cells if cell.block_bytes == size]


def digest(block_bytes: int) -> bytes:
    """The namespace of blocks of this size."""
    return f"bench read {block_bytes}".encode().ljust(32, b"\0")


def size_class(arena: Arena, block_bytes: int) -> SizeClass:
    return next(c for c in arena.classes if c.namespace_digest == digest(block_bytes))


def offsets(of: SizeClass, slots: Iterable[int]) -> bytes:
    """Packed u64 LE offsets of slot headers."""
    values = [of.offset(i) for i in slots]
    return struct.pack(f"<{len(values)}Q", *values)


def packed_offset(reader: Arena) -> int:
    """Where the packed area begins in the reader's region, bytes."""
    return reader.classes[-1].first + HEADER_BYTES


@dataclass(frozen=True, slots=True)
class Content:
    """All blocks of one size, in slot order."""

    records: bytes
    fingerprints: bytes


def fill(arena: Arena) -> dict[int, Content]:
    """Commits random blocks into every slot; content by block size."""
    return {c.block_bytes: _fill_class(arena, c) for c in arena.classes}


def _fill_class(arena: Arena, of: SizeClass) -> Content:
    size = of.block_bytes
    fingerprints = random.Random(size).randbytes(of.slots * WIDTH)
    records = []
    for first in range(0, of.slots, _WRITE_BATCH):
        count = min(_WRITE_BATCH, of.slots - first)
        where = offsets(of, range(first, first + count))
        payload = np.random.default_rng(first).integers(0, 256, count * size, dtype=np.uint8)
        address = payload.ctypes.data
        sources = struct.pack(f"<{count}Q", *(address + i * size for i in range(count)))
        _native.begin_write(arena.region, where)
        sums = _native.write_blocks(arena.region, where, sources, size)
        part = fingerprints[first * WIDTH : (first + count) * WIDTH]
        records.append(_native.commit(arena.region, where, of.namespace_digest, part, WIDTH, size, sums))
    return Content(b"".join(records), fingerprints)


@dataclass(frozen=True, slots=True)
class Request:
    """One sparse read of a cell, as every subject gets it: slots of the owner, in this order."""

    cell: Cell
    slots: Sequence[int]
    blocks: ReadList


def request(cell: Cell, slots: Sequence[int], content: Content, destinations: bytes, capability: bytes) -> Request:
    fingerprints, records, width = content.fingerprints, content.records, BLOCK_RECORD_BYTES
    blocks = ReadList(
        lock=LOCK,
        epoch=OWNER_EPOCH,
        namespace_digest=digest(cell.block_bytes),
        fingerprints=b"".join(fingerprints[i * WIDTH : (i + 1) * WIDTH] for i in slots),
        width=WIDTH,
        records=b"".join(records[i * width : (i + 1) * width] for i in slots),
        destinations=destinations,
        capability=capability,
    )
    return Request(cell, slots, blocks)

"""Byte layout of an arena. The same numbers stand in csrc/slot.hpp; tests/contract/test_layout.py compares them.

    0                4096                                                              arena_bytes
    +----------------+-----------------------------+------------------------------------+
    | superblock     | class 0: slot 0 | slot 1 |..| class 1: slot 0 | ...              |
    +----------------+-----------------------------+------------------------------------+

    slot = header (128 bytes) + payload (block_bytes), stride rounded up to 128

    slot header, little endian
      0  u32  magic "KVSL"            4  u32  width of the fingerprint (8, 16, 32)
      8  u64  generation: odd = being written or free, even = committed; it never goes back. It becomes odd *before* the
              first byte of the slot may change and even only after the last one is written.
     16  u64  XXH3-64 of the payload
     24  u32  payload length         28  u32  state group (0 until typed state)
     32  32 B fingerprint, zero-padded
     64  32 B namespace digest
     96  32 B reserved, zero

    superblock, little endian
      0  u64  magic "KVDARENA"        8  u32  layout version       12  u32  header bytes (128)
     16  16 B arena id (random)      32  u64  epoch of the owning agent; 0 after a clean close
     40  u64  arena_bytes            48  u32  number of size classes   52  u32 owner pid (for people)
     56  8 B reserved, zero
     64  size classes, 64 bytes each:
          0  32 B namespace digest   32  u64 block_bytes   40  u64 stride   48  u64 offset of slot 0   56  u64 slots

Behind the last class there may be a spare part, in which the owner adds classes while others have the file mapped: the class
is written first, then, released, its number (csrc/copy.cpp add_class); readers take the number first.

Readers map the file read-only and trust nothing in it without range checks. Invariants: slots of a class never overlap;
offset = first + index * stride; all offsets are multiples of 128; classes are added, never changed or removed.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

ARENA_MAGIC = int.from_bytes(b"KVDARENA", "little")
SLOT_MAGIC = int.from_bytes(b"KVSL", "little")
LAYOUT_VERSION = 1
SUPERBLOCK_BYTES = 4096
HEADER_BYTES = 128
ALIGN_BYTES = 128
MAX_CLASSES = 63

SUPERBLOCK = struct.Struct("<QII16sQQII")
SIZE_CLASS = struct.Struct("<32sQQQQ")
SIZE_CLASSES_AT = 64
SLOT_HEADER = struct.Struct("<IIQQII32s32s32s")


def stride_bytes(block_bytes: int) -> int:
    """Distance between two slots of a class, bytes."""
    return (HEADER_BYTES + block_bytes + ALIGN_BYTES - 1) // ALIGN_BYTES * ALIGN_BYTES


@dataclass(frozen=True, slots=True)
class SizeClass:
    """Slots of one block size for one namespace. `first` is the offset of slot 0; 0 until laid out."""

    namespace_digest: bytes  # 32 bytes
    block_bytes: int
    slots: int
    first: int = 0

    @property
    def stride(self) -> int:
        return stride_bytes(self.block_bytes)

    @property
    def end(self) -> int:
        return self.first + self.slots * self.stride

    def offset(self, index: int) -> int:
        """Offset of a slot's header in the region."""
        if not 0 <= index < self.slots:
            raise IndexError(f"slot {index} of a class of {self.slots}")
        return self.first + index * self.stride


@dataclass(frozen=True, slots=True)
class Superblock:
    arena_id: bytes  # 16 bytes
    epoch: int  # of the owning agent; 0 after a clean close
    arena_bytes: int
    owner_pid: int
    classes: tuple[SizeClass, ...]


def lay_out(classes: Sequence[SizeClass], *, spare_bytes: int = 0) -> tuple[tuple[SizeClass, ...], int]:
    """Places the classes one after the other, and behind them the spare part for classes to come.

    Returns them with `first` set, and arena_bytes. ValueError names faults.
    """
    if not (0 if spare_bytes > 0 else 1) <= len(classes) <= MAX_CLASSES:
        raise ValueError(f"{len(classes)} size classes; an arena has 1 to {MAX_CLASSES}, or a spare part for them")
    placed: list[SizeClass] = []
    at = SUPERBLOCK_BYTES
    for size_class in classes:
        placed.append(place(size_class, at))
        at = placed[-1].end
    return tuple(placed), at + max(0, spare_bytes) // ALIGN_BYTES * ALIGN_BYTES


def place(size_class: SizeClass, at: int) -> SizeClass:
    """With its slots from offset `at` on. ValueError: no digest, no such blocks."""
    if len(size_class.namespace_digest) != 32:
        raise ValueError(f"a namespace digest has 32 bytes, not {len(size_class.namespace_digest)}")
    if not 0 < size_class.block_bytes < 1 << 32 or size_class.slots < 1:
        raise ValueError(f"a size class needs blocks of 1 byte to 4 GiB and at least one slot, not {size_class}")
    return SizeClass(size_class.namespace_digest, size_class.block_bytes, size_class.slots, at)


def pack_superblock(superblock: Superblock) -> bytes:
    """SUPERBLOCK_BYTES bytes."""
    head = SUPERBLOCK.pack(
        ARENA_MAGIC,
        LAYOUT_VERSION,
        HEADER_BYTES,
        superblock.arena_id,
        superblock.epoch,
        superblock.arena_bytes,
        len(superblock.classes),
        superblock.owner_pid,
    ).ljust(SIZE_CLASSES_AT, b"\0")
    classes = b"".join(map(pack_class, superblock.classes))
    return (head + classes).ljust(SUPERBLOCK_BYTES, b"\0")


def pack_class(placed: SizeClass) -> bytes:
    """SIZE_CLASS.size bytes."""
    return SIZE_CLASS.pack(placed.namespace_digest, placed.block_bytes, placed.stride, placed.first, placed.slots)


def unpack_superblock(data: bytes | memoryview) -> Superblock:
    """Reads and verifies a superblock that somebody else wrote; ValueError says what is wrong with it."""
    if len(data) < SUPERBLOCK_BYTES:
        raise ValueError(f"not an arena: {len(data)} bytes are less than a superblock")
    magic, version, header_bytes, arena_id, epoch, arena_bytes, count, pid = SUPERBLOCK.unpack_from(data)
    if magic != ARENA_MAGIC:
        raise ValueError("not an arena: wrong magic")
    if version != LAYOUT_VERSION or header_bytes != HEADER_BYTES:
        raise ValueError(f"arena has layout version {version}, this agent knows {LAYOUT_VERSION}; upgrade the older one")
    if count > MAX_CLASSES or arena_bytes < SUPERBLOCK_BYTES:
        raise ValueError(f"damaged superblock: {count} size classes")
    classes: list[SizeClass] = []
    end = SUPERBLOCK_BYTES
    for index in range(count):
        digest, block_bytes, stride, first, slots = SIZE_CLASS.unpack_from(data, SIZE_CLASSES_AT + index * SIZE_CLASS.size)
        placed = SizeClass(digest, block_bytes, slots, first)
        if stride != placed.stride or first < end or first % ALIGN_BYTES or slots < 1 or placed.end > arena_bytes:
            raise ValueError(f"damaged superblock: size class {index} overlaps another or leaves the arena")
        classes.append(placed)
        end = placed.end
    return Superblock(arena_id, epoch, arena_bytes, pid, tuple(classes))

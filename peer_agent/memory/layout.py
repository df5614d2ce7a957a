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
     64  size classes, 64 bytes each:
          0  32 B namespace digest   32  u64 block_bytes   40  u64 stride   48  u64 offset of slot 0   56  u64 slots

Readers map the file read-only and trust nothing in it without range checks. Invariants: slots of a class never overlap;
offset = first + index * stride; all offsets are multiples of 128.
"""

from __future__ import annotations

import struct

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

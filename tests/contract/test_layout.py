"""peer_agent/memory/layout.py and csrc/slot.hpp describe the same bytes."""

from __future__ import annotations

import contextlib
import ctypes
import re
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer_agent import _native
from peer_agent.core import capability
from peer_agent.memory import layout
from peer_agent.memory.layout import SizeClass, Superblock, lay_out, pack_superblock, stride_bytes, unpack_superblock
from peer_agent.transport import faulty_owner
from peer_agent.transport.outcomes import RECORD

CSRC = Path(__file__).parents[2] / "peer_agent" / "csrc"
DIGEST = bytes(range(32))


def _constant(file: str, name: str) -> int:
    found = re.search(rf"constexpr \w+ {name} = ([^;]+);", (CSRC / file).read_text())
    assert found is not None, f"{name} is gone from {file}"
    expression = re.sub(r"(?<=[0-9A-Fa-f])U?LL\b", "", found.group(1))
    return int(eval(expression, {"__builtins__": {}}))


@pytest.mark.parametrize(
    ("file", "name", "value"),
    [
        ("slot.hpp", "kSlotMagic", layout.SLOT_MAGIC),
        ("slot.hpp", "kArenaMagic", layout.ARENA_MAGIC),
        ("slot.hpp", "kLayoutVersion", layout.LAYOUT_VERSION),
        ("slot.hpp", "kSuperblockBytes", layout.SUPERBLOCK_BYTES),
        ("slot.hpp", "kHeaderBytes", layout.HEADER_BYTES),
        ("slot.hpp", "kAlignBytes", layout.ALIGN_BYTES),
        ("slot.hpp", "kMaxClasses", layout.MAX_CLASSES),
        ("wire.hpp", "kHelloMagic", faulty_owner.HELLO_MAGIC),
        ("wire.hpp", "kRequestMagic", faulty_owner.REQUEST_MAGIC),
        ("wire.hpp", "kGroupMagic", faulty_owner.GROUP_MAGIC),
        ("wire.hpp", "kVersion", faulty_owner.VERSION),
        ("wire.hpp", "kCapabilityVersion", capability.CAPABILITY_VERSION),
        ("wire.hpp", "kMaxRequestBlocks", faulty_owner.MAX_REQUEST_BLOCKS),
        ("wire.hpp", "kGroupBlocks", faulty_owner.GROUP_BLOCKS),
        ("wire.hpp", "kGroupBytes", faulty_owner.GROUP_BYTES),
    ],
)
def test_constants_are_equal_when_python_and_native_name_them(file: str, name: str, value: int) -> None:
    assert _constant(file, name) == value


def test_native_module_agrees_when_asked() -> None:
    assert _native.HEADER_BYTES == layout.HEADER_BYTES == layout.SLOT_HEADER.size
    assert RECORD.itemsize == 32


def _arena(classes: list[SizeClass]) -> tuple[bytearray, tuple[SizeClass, ...]]:
    placed, size = lay_out(classes)
    region = bytearray(size)
    region[: layout.SUPERBLOCK_BYTES] = pack_superblock(Superblock(bytes(16), 9, size, 1, placed))
    return region, placed


def test_header_has_the_documented_fields_when_native_commits() -> None:
    region, (size_class,) = _arena([SizeClass(DIGEST, 1000, 2)])
    offset = struct.pack("<Q", size_class.offset(1))
    payload_at = size_class.offset(1) + layout.HEADER_BYTES
    region[payload_at : payload_at + 1000] = bytes(i % 251 for i in range(1000))
    _native.begin_write(region, offset)
    record = _native.commit(region, offset, DIGEST, b"f" * 16, 16, 1000, None)
    header = layout.SLOT_HEADER.unpack_from(region, size_class.offset(1))
    checksum = _native.xxh3_64(region[payload_at : payload_at + 1000])
    assert header == (
        layout.SLOT_MAGIC,
        16,
        2,
        checksum,
        1000,
        0,
        b"f" * 16 + bytes(16),
        DIGEST,
        bytes(32),
    )
    assert _native.headers(region, offset) == bytes(region[size_class.offset(1) : payload_at])
    assert struct.unpack("<QQQII", record) == (size_class.offset(1), 2, checksum, 1000, 1)


# Lengths around every branch of the algorithm (0, 1-3, 4-8, 9-16, 17-128, 129-240, > 240) and of our pieces (64 KiB).
def test_checksum_is_the_same_one_shot_and_in_pieces_for_every_length_class() -> None:
    region, (size_class,) = _arena([SizeClass(DIGEST, 300_000, 1)])
    offset = struct.pack("<Q", size_class.first)
    for length in (0, 1, 3, 8, 16, 128, 240, 241, 1024, 65_535, 65_536, 65_537, 300_000):
        source = bytearray(i * 31 % 251 for i in range(length))
        address = struct.pack("<Q", _address(source) if length else 0)
        _native.begin_write(region, offset)
        (checksum,) = struct.unpack("<Q", _native.write_blocks(region, offset, address, length))
        assert checksum == _native.xxh3_64(source)
        _native.commit(region, offset, DIGEST, b"f" * 8, 8, length, None)


def test_checksum_of_nothing_is_the_published_one() -> None:
    assert _native.xxh3_64(b"") == 0x2D06800538D394C2  # XXH3_64bits of an empty input, xxHash specification


def _address(buffer: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


sizes = st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 20)), min_size=1, max_size=8)


@given(sizes)
def test_slots_never_overlap_when_laid_out(requested: list[tuple[int, int]]) -> None:
    placed, size = lay_out([SizeClass(DIGEST, block_bytes, slots) for block_bytes, slots in requested])
    at = layout.SUPERBLOCK_BYTES
    for size_class in placed:
        for index in range(size_class.slots):
            offset = size_class.offset(index)
            assert offset >= at
            assert offset % layout.ALIGN_BYTES == 0
            at = offset + layout.HEADER_BYTES + size_class.block_bytes
    assert at <= size < at + layout.ALIGN_BYTES
    superblock = Superblock(b"i" * 16, 5, size, 77, placed)
    assert unpack_superblock(pack_superblock(superblock)) == superblock


@given(sizes, st.integers(0, 4095), st.integers(1, 255))
def test_damaged_superblock_is_refused_or_harmless_when_read(
    requested: list[tuple[int, int]], position: int, flip: int
) -> None:
    """Neither side ever accepts classes that leave the arena, whatever byte is damaged."""
    region, _ = _arena([SizeClass(DIGEST, block_bytes, slots) for block_bytes, slots in requested])
    region[position] ^= flip
    try:
        superblock = unpack_superblock(bytes(region[: layout.SUPERBLOCK_BYTES]))
    except ValueError:
        pass
    else:
        assert all(c.end <= superblock.arena_bytes for c in superblock.classes)
    last = struct.pack("<Q", len(region) - stride_bytes(requested[-1][0]))
    with contextlib.suppress(ValueError):
        _native.begin_write(region, last)


@pytest.mark.parametrize("size", [0, 1, 4095])
def test_short_region_is_refused_when_it_has_no_superblock(size: int) -> None:
    with pytest.raises(ValueError, match="not an arena"):
        _native.records(bytes(size), b"")
    with pytest.raises(ValueError, match="not an arena"):
        unpack_superblock(bytes(size))


def test_impossible_classes_are_refused_when_laid_out() -> None:
    with pytest.raises(ValueError, match="0 size classes"):
        lay_out([])
    with pytest.raises(ValueError, match="64 size classes"):
        lay_out([SizeClass(DIGEST, 1, 1)] * 64)
    with pytest.raises(ValueError, match="32 bytes"):
        lay_out([SizeClass(b"short", 1, 1)])
    with pytest.raises(ValueError, match="at least one slot"):
        lay_out([SizeClass(DIGEST, 1, 0)])
    with pytest.raises(IndexError):
        SizeClass(DIGEST, 1, 1, 4096).offset(1)

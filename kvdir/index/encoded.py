"""Arithmetic on encoded sketches (layout: csrc/sketch.hpp), for whoever holds two of them and none of the sets."""

from __future__ import annotations

import struct

from kvdir.index import Sketch

_HEADER = struct.Struct("<4sHHIIq16s")
_CELL = struct.Struct("<QQII")
_U64, _U32 = 2**64 - 1, 2**32 - 1


def difference(first: bytes, second: bytes) -> tuple[bytes, bytes] | None:
    """(only in the first, only in the second) as packed 16-byte items; None when it is too large to decode.

    Raises ValueError for what is no encoded sketch, and for two of different sizes: fold the larger one.
    """
    cells = _cells_of(first)
    if cells != _cells_of(second):
        raise ValueError("the sketches have different numbers of cells: ask for both with the same")
    # Sketches are sums, so second - first is one as well, of the difference alone; nothing minus that leaves first - second.
    return Sketch(cells).difference(_minus(second, first))


def _cells_of(encoded: bytes) -> int:
    if len(encoded) < _HEADER.size:
        raise ValueError("not an encoded sketch: too short")
    cells = int(_HEADER.unpack_from(encoded)[3])
    if len(encoded) != _HEADER.size + cells * _CELL.size or not cells:
        raise ValueError("not an encoded sketch: its length does not fit its number of cells")
    return cells


def _minus(one: bytes, other: bytes) -> bytes:
    magic, version, regions, cells, zero, count, digest = _HEADER.unpack_from(one)
    *_, other_count, other_digest = _HEADER.unpack_from(other)
    sums = zip(struct.unpack("<QQ", digest), struct.unpack("<QQ", other_digest), strict=True)
    out = bytearray(
        _HEADER.pack(
            magic, version, regions, cells, zero, count - other_count, struct.pack("<QQ", *((a - b) & _U64 for a, b in sums))
        )
    )
    masks = (_U64, _U64, _U32, _U32)
    pairs = zip(_CELL.iter_unpack(one[_HEADER.size :]), _CELL.iter_unpack(other[_HEADER.size :]), strict=True)
    for ours, theirs in pairs:
        out += _CELL.pack(*((a - b) & mask for a, b, mask in zip(ours, theirs, masks, strict=True)))
    return bytes(out)

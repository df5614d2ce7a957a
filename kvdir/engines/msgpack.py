"""Where msgpack objects begin and end, without decoding them: for batches that a strict decoder refuses as a whole.

Rules: iterative, so nesting costs no stack; never reads outside the buffer; never allocates by a length it was told. Format:
msgpack specification (github.com/msgpack/msgpack/blob/master/spec.md). Does not: decode anything but the headers.
"""

from __future__ import annotations

import msgspec

from kvdir.errors import KvdirError

Buffer = bytes | memoryview | msgspec.Raw

MAX_DEPTH = 64
"""Deepest nesting of what is handed on; no engine's event has more than five levels."""

_FIXED = {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_EXT = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
_SIZED = {
    0xC4: (1, 0),
    0xC5: (2, 0),
    0xC6: (4, 0),
    0xC7: (1, 1),
    0xC8: (2, 1),
    0xC9: (4, 1),
    0xD9: (1, 0),
    0xDA: (2, 0),
    0xDB: (4, 0),
}


class Malformed(KvdirError):
    """Not msgpack from here on."""


class Truncated(Malformed):
    """The buffer ends inside an object."""


def header(data: bytes, at: int) -> tuple[int, int, bool]:
    """(where the content begins, number of objects in it, whether it is a map) of an array or map. Raises Malformed."""
    if at >= len(data):
        raise Truncated("the message ends before an array")
    first = data[at]
    if 0x90 <= first <= 0x9F or 0x80 <= first <= 0x8F:
        is_map = first < 0x90
        return at + 1, (first & 0x0F) * (2 if is_map else 1), is_map
    size = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}.get(first)
    if size is None:
        raise Malformed("neither an array nor a map")
    if at + 1 + size > len(data):
        raise Truncated("the message ends inside a length")
    is_map = first >= 0xDE
    return at + 1 + size, int.from_bytes(data[at + 1 : at + 1 + size], "big") * (2 if is_map else 1), is_map


def array_length(data: Buffer) -> int:
    """Items of the array that `data` is or begins with; -1 if it is none."""
    try:
        _, items, is_map = header(bytes(memoryview(data)[:5]), 0)
    except Malformed:
        return -1
    return -1 if is_map else items


def skip(data: bytes, at: int) -> tuple[int, int]:
    """(end of the object at `at`, how deep it nests). Raises Truncated or Malformed."""
    open_items = [1]
    deepest = 0
    while open_items:
        if not open_items[-1]:
            open_items.pop()
            continue
        open_items[-1] -= 1
        at, inside = _step(data, at)
        if inside:
            open_items.append(inside)
            deepest = max(deepest, len(open_items) - 1)
    return at, deepest


def _step(data: bytes, at: int) -> tuple[int, int]:
    """(where the next object or the content of this one begins, objects in it)."""
    if at >= len(data):
        raise Truncated("the message ends between two objects")
    first = data[at]
    if first <= 0x7F or first >= 0xE0:
        return at + 1, 0
    if first <= 0x9F or 0xDC <= first <= 0xDF:
        start, items, _ = header(data, at)
        return start, items
    if first <= 0xBF:
        end = at + 1 + (first & 0x1F)
    elif first in _FIXED:
        end = at + 1 + _FIXED[first]
    elif first in _SIZED:
        width, more = _SIZED[first]
        if at + 1 + width > len(data):
            raise Truncated("the message ends inside a length")
        end = at + 1 + width + more + int.from_bytes(data[at + 1 : at + 1 + width], "big")
    else:
        raise Malformed(f"byte 0x{first:02x} begins no object")
    if end > len(data):
        raise Truncated("the message ends inside an object")
    return end, 0

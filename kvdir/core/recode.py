"""Packed sets of holder numbers become packed sets of what an answer says in their place. Pure; numpy only where it pays."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from itertools import pairwise

import numpy as np

_MANY_BYTES = 1024
_NOBODY = 0xFFFFFFFF


def recode(sets: tuple[bytes, ...], code_of: Callable[[int], int | None]) -> list[bytes]:
    """Each set (u32) in codes (u32, below 2**32 - 1), ascending, each once; empty when nobody of it has one. code_of: called
    once for each number, ascending; None leaves it out. Some 50 ns a member where there are many.
    """
    packed = b"".join(sets)
    if len(packed) < _MANY_BYTES:
        return _few(sets, {number: code_of(number) for number in sorted(set(memoryview(packed).cast("I")))})
    numbers = np.frombuffer(packed, "<u4")
    distinct = np.unique(numbers)
    codes = [code_of(number) for number in distinct.tolist()]
    code_at = np.array([_NOBODY if code is None else code for code in codes], np.uint32)
    return _many(sets, code_at[np.searchsorted(distinct, numbers)])


def _few(sets: tuple[bytes, ...], codes: dict[int, int | None]) -> list[bytes]:
    members = ({codes[number] for number in memoryview(packed).cast("I")} for packed in sets)
    return [array("I", sorted(code for code in item if code is not None)).tobytes() for item in members]


def _many(sets: tuple[bytes, ...], codes: np.ndarray[tuple[int], np.dtype[np.uint32]]) -> list[bytes]:
    """Sorted as set << 32 | code, so that every set stays together."""
    keys = np.repeat(np.arange(len(sets), dtype=np.uint64) << np.uint64(32), [len(packed) // 4 for packed in sets])
    keys |= codes
    keys.sort()
    kept = keys.astype(np.uint32) != _NOBODY
    kept[1:] &= keys[1:] != keys[:-1]
    keys = keys[kept]
    flat = keys.astype("<u4").tobytes()
    ends = (np.bincount((keys >> np.uint64(32)).astype(np.intp), minlength=len(sets)).cumsum() * 4).tolist()
    return [flat[start:end] for start, end in pairwise((0, *ends))]

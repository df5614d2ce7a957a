"""What the index checks share: made-up fingerprints, unpacking of answers, and the implementation that is checked.

Owns no check. Needs nothing but the standard library, so that third parties can run the suite anywhere.
"""

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvdir.index import BlockIndex, BlockSketch, Lookup

__all__ = ["Implementation", "OpenIndex", "access_of", "dump_all", "fingerprints", "numbers_of", "refuses", "runs_of"]


class OpenIndex(Protocol):
    def __call__(self, *, expected_blocks: int = 0, seed: int = 0, max_bytes: int = 0) -> BlockIndex: ...


@dataclass(frozen=True, slots=True)
class Implementation:
    """What is checked: how to make an empty index, and an empty sketch with so many cells that fits it."""

    open_index: OpenIndex
    open_sketch: Callable[[int], BlockSketch]


def fingerprints(numbers: Sequence[int] | range, width: int = 16) -> bytes:
    """Packed made-up fingerprints, one per number: equal numbers give equal ones, of every width the same first bytes."""
    return b"".join(hashlib.blake2b(str(number).encode(), digest_size=32).digest()[:width] for number in numbers)


def runs_of(answer: Lookup) -> list[tuple[int, int, tuple[int, ...]]]:
    """(start, count, holders) of each run."""
    return [(start, count, numbers_of(answer.sets[at])) for start, count, at in struct.iter_unpack("<III", answer.runs)]


def numbers_of(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(packed) // 4}I", packed)


def access_of(index: BlockIndex, blocks: bytes, *, scope: int = 0) -> tuple[int, ...]:
    return numbers_of(index.last_access(blocks, 16, scope=scope))


def dump_all(index: BlockIndex, page_blocks: int) -> dict[int, tuple[int, ...]]:
    """Everything in the index by key; asserts that no key comes twice."""
    found: dict[int, tuple[int, ...]] = {}
    cursor = 0
    while True:
        cursor, keys, numbers, sets = index.dump(cursor, page_blocks)
        assert len(keys) <= 8 * page_blocks, "a page is larger than asked for"
        for (key,), (at,) in zip(struct.iter_unpack("<Q", keys), struct.iter_unpack("<I", numbers), strict=True):
            assert key not in found, "a block was dumped twice"
            found[key] = numbers_of(sets[at])
        if not cursor:
            return found


def refuses(call: Callable[[], object], *words: str) -> None:
    try:
        call()
    except ValueError as error:
        message = str(error)
    else:
        raise AssertionError(f"bad input was accepted (expected a ValueError about {words})")
    assert all(word in message for word in words), f"error {message!r} does not mention {words}"

"""Ranges of missing sequence numbers, bounded in number.

Invariant: ranges are sorted, disjoint and not empty. When there would be more than `limit` of them, neighbours are taken
together into one larger hole: the count of missing events may then be too high, never too low.
"""

from __future__ import annotations


class Holes:
    """Missing ranges, both ends included."""

    __slots__ = ("_limit", "_ranges")

    def __init__(self, *, limit: int = 64) -> None:
        self._limit = limit
        self._ranges: list[tuple[int, int]] = []

    def __bool__(self) -> bool:
        return bool(self._ranges)

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        return tuple(self._ranges)

    @property
    def missing(self) -> int:
        """How many numbers the holes cover."""
        return sum(last - first + 1 for first, last in self._ranges)

    def append(self, first: int, last: int) -> None:
        """Adds a hole above every known one."""
        if self._ranges and (len(self._ranges) >= self._limit or self._ranges[-1][1] + 1 >= first):
            first = self._ranges.pop()[0]
        self._ranges.append((first, last))

    def fill(self, first: int, last: int) -> None:
        """The numbers first..last have arrived."""
        kept: list[tuple[int, int]] = []
        room = self._limit - len(self._ranges)
        for low, high in self._ranges:
            left, right = (low, min(high, first - 1)), (max(low, last + 1), high)
            pieces = [piece for piece in (left, right) if piece[0] <= piece[1]]
            if high < first or low > last or (len(pieces) == 2 and room <= 0):
                pieces = [(low, high)]
            kept += pieces
        self._ranges = kept

    def clear(self) -> None:
        self._ranges.clear()

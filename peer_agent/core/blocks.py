"""What is known of each block of one load: packed, one element per position.

Invariants: a hit is final; otherwise the most telling status stays (MISS < STALE < SKIPPED < LATE < CORRUPT). A block is *open*
until it is here or given up. `taken` counts the reads under way for it (2: hedged).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from peer_agent.core.effects import LoadStatus

Mask = np.ndarray[Any, np.dtype[np.bool_]]
Positions = np.ndarray[Any, np.dtype[np.intp]]

_HIT = 5
_RANK = np.zeros(len(LoadStatus), np.uint8)
for _rank, _status in enumerate((LoadStatus.MISS, LoadStatus.STALE, LoadStatus.SKIPPED, LoadStatus.LATE, LoadStatus.CORRUPT)):
    _RANK[_status] = _rank
_RANK[[LoadStatus.HIT_LOCAL, LoadStatus.HIT_PEER]] = _HIT


class Blocks:
    """State of `count` blocks. Masks are numpy bool arrays of that length; callers change `taken` and `aside` only."""

    def __init__(self, count: int) -> None:
        self.open = np.ones(count, np.bool_)
        self.taken = np.zeros(count, np.uint8)
        self.aside = np.zeros(count, np.bool_)  # somebody else here is writing it
        self._status = np.zeros(count, np.uint8)
        self._corrupt = np.zeros(count, np.uint8)  # times

    def __len__(self) -> int:
        return len(self.open)

    @property
    def missing(self) -> Positions:
        """Not hits yet, given up or not."""
        return np.flatnonzero(_RANK[self._status] != _HIT)

    @property
    def takeable(self) -> Mask:
        """Open, and nobody reads or writes it."""
        takeable: Mask = self.open & ~self.aside & (self.taken == 0)
        return takeable

    @property
    def statuses(self) -> bytes:
        """One LoadStatus byte per block."""
        return self._status.tobytes()

    def count(self) -> dict[LoadStatus, int]:
        return {
            status: int(count)
            for status, count in zip(LoadStatus, np.bincount(self._status, minlength=len(LoadStatus)), strict=True)
        }

    def mask(self, positions: Iterable[int] | Positions) -> Mask:
        mask = np.zeros(len(self), np.bool_)
        mask[as_positions(positions)] = True
        return mask

    def hold(self, positions: Positions, status: LoadStatus) -> None:
        """They are here. A block that was here before keeps its status."""
        fresh = positions[_RANK[self._status[positions]] != _HIT]
        self._status[fresh] = status
        self.open[fresh] = False

    def worsen(self, where: Mask | Positions, status: LoadStatus) -> None:
        """Notes why they are not here, unless they are, or something more telling is known."""
        positions = np.flatnonzero(where) if where.dtype == np.bool_ else where
        weaker = positions[_RANK[self._status[positions]] < _RANK[status]]
        self._status[weaker] = status

    def corrupt(self, positions: Positions) -> Positions:
        """They failed verification. Returns those that may be tried once more; the others are given up."""
        self.worsen(positions, LoadStatus.CORRUPT)
        self._corrupt[positions] += 1
        again = self._corrupt[positions] == 1
        self.open[positions[~again]] = False
        retry: Positions = positions[again]
        return retry

    def give_up(self, positions: Positions) -> None:
        self.open[positions] = False


def as_positions(positions: Iterable[int] | Positions) -> Positions:
    if isinstance(positions, np.ndarray):
        return positions.astype(np.intp, copy=False)
    return np.fromiter(positions, np.intp)

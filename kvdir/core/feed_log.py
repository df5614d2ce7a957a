"""The log of a feed: encoded items under consecutive positions, shared by all watchers, bounded in bytes.

    positions   1 ... first-1      first ... head
                let go              kept, oldest first

Rules: an item is encoded once, when it is appended; the oldest go when there are more than `limit_bytes`, whoever still wants
them: a watcher that comes for one of those has *fallen off*, and is told. Every item knows the namespace it is about, so that
watchers of some namespaces skip the others. Pure: `now_s` comes with `clock`, and is only ever used for how long something
waited.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from kvdir.core.sight import Digests

ENTRY_BYTES = 160
"""What an item costs in the log beside its bytes."""

EVERY: frozenset[bytes] = frozenset()
"""No filter."""

_COMPACT = 4_096
_LOOKED_AT = 16_384  # in one go: whoever skips most of the log must not hold the others up


class _Entry(NamedTuple):
    """since_s: the log's clock when it was appended, so it is no younger. digest: None, whoever watches."""

    since_s: float
    digest: bytes | None
    data: bytes


class Taken(NamedTuple):
    """data: items, concatenated, which lead from the position asked for to this one."""

    position: int
    data: bytes


class FeedLog:
    """See the module docstring. bytes: kept now. now_s: its clock."""

    def __init__(self, *, limit_bytes: int, now_s: float) -> None:
        self.bytes = 0
        self._limit_bytes = limit_bytes
        self.now_s = now_s
        self._entries: list[_Entry] = []
        self._start = 0
        """Of _entries; those before it were let go already."""
        self._first = 1
        self._last_take: tuple[tuple[int, int, int, Digests], Taken] | None = None

    @property
    def head(self) -> int:
        """Position of the newest item; 0: none yet."""
        return self._first + len(self._entries) - self._start - 1

    def clock(self, now_s: float) -> None:
        """Time has passed; call it often."""
        self.now_s = now_s

    def append(self, data: bytes, digest: bytes | None = None, *, since_s: float | None = None) -> None:
        """An encoded item, about a namespace or about everything. since_s: when it began to wait, if that is not now."""
        self._entries.append(_Entry(self.now_s if since_s is None else since_s, digest, data))
        self.bytes += len(data) + ENTRY_BYTES
        while self.bytes > self._limit_bytes and self._first < self.head:
            self.bytes -= len(self._entries[self._start].data) + ENTRY_BYTES
            self._start += 1
            self._first += 1
            if self._start >= _COMPACT and self._start * 2 >= len(self._entries):
                del self._entries[: self._start]
                self._start = 0

    def reaches(self, position: int) -> bool:
        """Whether what follows `position` is all here."""
        return self._first - 1 <= position <= self.head

    def waited_s(self, position: int, now_s: float) -> float:
        """How long at most the item after `position` has been here; 0 if there is none, infinite if it was let go."""
        if position >= self.head:
            return 0.0
        if not self.reaches(position):
            return math.inf
        return max(0.0, now_s - self._entries[self._start + position + 1 - self._first].since_s)

    def take(self, position: int, max_bytes: int, digests: Digests = EVERY) -> Taken | None:
        """What follows `position`, as far as it fits, but at least one item, however large; None: fallen off.

        digests: only items about these namespaces, and those about none. Watchers that keep up ask for the same thing one after
        the other, so the last answer is kept.
        """
        if not self.reaches(position):
            return None
        head = self.head
        key = (position, max_bytes, head, digests)
        if self._last_take is not None and self._last_take[0] == key:
            return self._last_take[1]
        parts: list[bytes] = []
        size = 0
        at = position
        first = self._start + position + 1 - self._first
        for number in range(first, min(len(self._entries), first + _LOOKED_AT)):
            entry = self._entries[number]
            if entry.digest is None or not digests or entry.digest in digests:
                size += len(entry.data)
                if size > max_bytes and parts:
                    break
                parts.append(entry.data)
            at += 1
        taken = Taken(at, b"".join(parts))
        self._last_take = (key, taken)
        return taken

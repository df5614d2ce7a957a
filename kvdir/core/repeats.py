"""Which of many equal log lines are written: the first few, then one an interval that says how many were not.

Rules: what was not seen lately is written, always, also when the table is full; so is what comes after a quiet interval. Of
what is held back the newest is kept and written at the end of its interval, with the number of those before it, so nothing
disappears without a count. Pure: time comes in, items go out; at most MAX_KEYS of them are held.

Does not: say what makes two lines equal (kvdir/obs/logs.py).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")

FIRST = 5
INTERVAL_S = 10.0
MAX_KEYS = 1024


@dataclass(slots=True)
class _Seen(Generic[ItemT]):
    """Of one key in the interval that began at since_s: what was written of it, and what was held back (the newest is kept)."""

    since_s: float
    written: int
    held: int = 0
    newest: ItemT | None = None


class Repeats(Generic[ItemT]):
    """first: written in one interval before anything is held back. suppressed: items that were never written."""

    def __init__(self, *, first: int = FIRST, interval_s: float = INTERVAL_S, max_keys: int = MAX_KEYS) -> None:
        self.suppressed = 0
        self._first = first
        self._interval_s = interval_s
        self._max_keys = max_keys
        self._seen: dict[Hashable, _Seen[ItemT]] = {}  # by since_s, oldest first

    def __len__(self) -> int:
        return len(self._seen)

    def offer(self, key: Hashable, item: ItemT, now_s: float) -> list[tuple[ItemT, int]]:
        """What to write now: (item, how many of its kind before it were not written)."""
        seen = self._seen.get(key)
        if seen is not None and now_s - seen.since_s < self._interval_s:
            return self._within(seen, item)
        out = self._make_room() if seen is None else []
        held = seen.held if seen is not None else 0
        self._seen.pop(key, None)
        # What was held back goes on being rare; what had been quiet may speak up again.
        self._seen[key] = _Seen(now_s, self._first if held else 1)
        self.suppressed += held
        out.append((item, held))
        return out

    def due(self, now_s: float) -> list[tuple[ItemT, int]]:
        """Newest items whose interval is over. Forgets what has been quiet."""
        over = []
        for key, seen in self._seen.items():
            if now_s - seen.since_s < self._interval_s:
                break
            over.append((key, seen))
        out: list[tuple[ItemT, int]] = []
        for key, seen in over:
            del self._seen[key]
            if seen.held:
                out += self._last(seen)
                self._seen[key] = _Seen(now_s, self._first)
        return out

    def rest(self) -> list[tuple[ItemT, int]]:
        """Everything held back, at the end."""
        seen, self._seen = self._seen, {}
        return [pair for item in seen.values() for pair in self._last(item)]

    def _within(self, seen: _Seen[ItemT], item: ItemT) -> list[tuple[ItemT, int]]:
        if seen.written < self._first:
            seen.written += 1
            return [(item, 0)]
        seen.held += 1
        seen.newest = item
        return []

    def _make_room(self) -> list[tuple[ItemT, int]]:
        if len(self._seen) < self._max_keys:
            return []
        return self._last(self._seen.pop(next(iter(self._seen))))

    def _last(self, seen: _Seen[ItemT]) -> list[tuple[ItemT, int]]:
        if seen.newest is None:
            return []
        self.suppressed += seen.held - 1
        return [(seen.newest, seen.held - 1)]

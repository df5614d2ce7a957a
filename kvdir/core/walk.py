"""The snapshot for one watcher: the roster, then the index page by page, while the directory goes on.

Why the copy is exact. The watcher applies everything in the order in which it was said. A page is read from the index only
when the watcher was sent the whole log so far (watcher.py sees to that), and is sent before anything that comes after. So,
for any block and holder: before its page, the watcher believes what the last item about both said, or nothing; that is true,
or a holder is missing, since whoever stored it before the watch began was never told. The page, being the truth of its
moment, adds exactly what was missing. What happens behind it comes as items. A block that appears behind the walk comes as an
item only, one that goes ahead of it is in no page; one that is paged twice is paged the truth twice. The roster is the truth
of the moment when the watch began, and everything behind that is in the log. So after the last page the copy equals the
directory as of the position then.

Pages have the order of keys, which is that of the table: open the copy's index with room for all of them (checkpoint.py says
why).
"""

from __future__ import annotations

from array import array
from itertools import compress
from typing import TYPE_CHECKING

from kvdir.core.feed import Feed
from kvdir.core.feed_items import Item, Page, SnapshotEnd
from kvdir.core.sight import Digests

if TYPE_CHECKING:
    from kvdir.index import BlockIndex

PAGE_BLOCKS = 4_096
_BLOCK_BYTES = 16  # key, age, set


class Walk:
    """Of one watcher. digests: only these namespaces; empty: all. `done` when the end was given."""

    def __init__(
        self, feed: Feed, index: BlockIndex, digests: Digests, *, now_s: float, page_blocks: int = PAGE_BLOCKS
    ) -> None:
        self._feed = feed
        self._index = index
        self._digests = digests
        self._page_blocks = page_blocks
        self._roster = feed.roster(digests, now_s)
        self._roster.reverse()
        self._cursor = 0
        self._blocks = 0
        self._paged = False
        self.done = False

    @property
    def has_roster(self) -> bool:
        """Whether some of the roster is still to be sent; nothing else may go before it."""
        return bool(self._roster)

    def roster(self, max_bytes: int) -> bytes:
        """The next of it, encoded; a little more than max_bytes at most."""
        parts, size = [], 0
        while self._roster and size < max_bytes:
            parts.append(self._feed.encode(self._roster.pop()))
            size += len(parts[-1])
        return b"".join(parts)

    def page(self, max_bytes: int, *, now_s: float) -> Item | None:
        """The next page, or the end; None: not even a small one fits. Only for a watcher that was sent everything else."""
        if self._paged:
            self.done = True
            return SnapshotEnd(self._blocks)
        blocks = min(self._page_blocks, max_bytes // _BLOCK_BYTES)
        while blocks >= 1:
            following, keys, numbers, sets = self._index.dump(self._cursor, blocks)
            if blocks == 1 or len(keys) * 2 + sum(map(len, sets)) <= max_bytes:
                self._cursor, self._paged = following, following == 0
                return self._page(keys, numbers, sets, now_s)
            blocks //= 2
        return None

    def _page(self, keys: bytes, numbers: bytes, sets: list[bytes], now_s: float) -> Page:
        ages = array("I", [max(0, int(now_s) - then_s) for then_s in memoryview(self._index.key_access(keys)).cast("I")])
        if self._digests:
            wanted = self._feed.holders(self._digests)
            sets = [array("I", [n for n in memoryview(packed).cast("I") if n in wanted]).tobytes() for packed in sets]
            if not all(sets):
                keep = [bool(sets[number]) for number in memoryview(numbers).cast("I")]
                keys, numbers, ages = _kept(keys, "Q", keep), _kept(numbers, "I", keep), array("I", compress(ages, keep))
        self._blocks += len(keys) // 8
        return Page(keys, ages.tobytes(), numbers, tuple(sets), self._blocks)


def _kept(packed: bytes, kind: str, keep: list[bool]) -> bytes:
    return array(kind, compress(memoryview(packed).cast(kind), keep)).tobytes()  # type: ignore[call-overload]

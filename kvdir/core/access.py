"""How long ago blocks were last asked for: a sample of the index, taken page by page.

Last access is a convergent figure: newer overwrites older, so it may be used although events were lost. The index keeps its
blocks in the order of keys, and keys are a keyed bijection of fingerprints (kvdir/index/csrc/mix.hpp), so any stretch of
that order is an unbiased sample of all blocks: there is no need to see every block to know which age parts the oldest tenth
from the rest. The sample goes on where the last one ended, so that everything is seen in time.

Does not: decide anything; say which blocks are old (owners know that better than we do).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvdir.index import BlockIndex

Ages = Mapping[int, Counter[int]]
"""Holder number -> age in seconds -> how many sampled blocks."""


class AccessSample:
    """Ages of blocks under certain holders; `step` until `done`. want: this many of them are enough."""

    def __init__(self, holders: Iterable[int], cursor: int, *, want: int) -> None:
        self.ages: dict[int, Counter[int]] = {number: Counter() for number in holders}
        self.cursor = cursor
        self.done = False
        self._want = want
        self._found = 0
        self._started_at = cursor
        self._wrapped = False

    def step(self, index: BlockIndex, max_blocks: int, *, now_s: float) -> None:
        """Looks at up to max_blocks more blocks of the index."""
        following, keys, numbers, sets = index.dump(self.cursor, max_blocks)
        access = memoryview(index.key_access(keys)).cast("I")
        members = [[number for number in memoryview(packed).cast("I") if number in self.ages] for packed in sets]
        for (number, then_s), count in Counter(zip(memoryview(numbers).cast("I"), access, strict=True)).items():
            for holder in members[number]:
                self.ages[holder][max(0, int(now_s) - then_s)] += count
                self._found += count
        if following == 0 and self._started_at and not self._wrapped:
            self._wrapped = True
        elif following == 0 or (self._wrapped and following >= self._started_at):
            self.done = True
        self.cursor = following
        self.done = self.done or self._found >= self._want


def cutoff_age_s(ages: Ages, weights: Mapping[int, float], share: float) -> int:
    """The largest age A such that blocks at least A seconds old make up `share` or more of the weight; 0 without a sample.

    weights: what one sampled block of a holder stands for, say its bytes.
    """
    total: Counter[int] = Counter()
    for holder, counts in ages.items():
        for age_s, count in counts.items():
            total[age_s] += count * weights.get(holder, 0)  # type: ignore[assignment]
    wanted, older = share * sum(total.values()), 0.0
    for age_s in sorted(total, reverse=True):
        older += total[age_s]
        if older >= wanted:
            return age_s
    return 0

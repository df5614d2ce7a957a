"""A histogram of took / predicted, cheap enough to be kept for every read. Read by the metrics (metrics.py)."""

from __future__ import annotations

from bisect import bisect_left

from kvdir.obs.definition import Buckets
from kvdir.obs.labels import RATIO_BUCKETS


class Ratios(Buckets):
    """counts: per bucket, one more than RATIO_BUCKETS. sum: of all ratios."""

    def __init__(self) -> None:
        super().__init__([0] * (len(RATIO_BUCKETS) + 1))

    def add(self, ratio: float) -> None:
        self.counts[bisect_left(RATIO_BUCKETS, ratio)] += 1
        self.sum += ratio

"""A histogram of took / predicted, cheap enough to be kept for every read. Read by the metrics (metrics.py)."""

from __future__ import annotations

from bisect import bisect_left

BOUNDS = (0.25, 0.5, 0.71, 0.87, 1.0, 1.15, 1.41, 2.0, 4.0, 8.0, 16.0)
"""Upper bounds of the buckets, about symmetric around a right prediction; the last bucket is open."""


class Ratios:
    """counts: per bucket, one more than BOUNDS. sum: of all ratios."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.sum = 0.0

    def add(self, ratio: float) -> None:
        self.counts[bisect_left(BOUNDS, ratio)] += 1
        self.sum += ratio

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, cumulated count), as Prometheus wants them."""
        out, total = [], 0
        for bound, count in zip((*map(str, BOUNDS), "+Inf"), self.counts, strict=True):
            total += count
            out.append((bound, float(total)))
        return out

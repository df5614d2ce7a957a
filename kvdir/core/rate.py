"""How many requests an identity may make: a token bucket. Pure; `now_s` comes in."""

from __future__ import annotations

BURST_S = 2.0
"""What was not used is good for so long."""


class TokenBucket:
    """per_s: requests a second; 2 s of them may come at once."""

    __slots__ = ("_full", "_left", "_per_s", "_since_s")

    def __init__(self, per_s: float, *, now_s: float) -> None:
        self._per_s = per_s
        self._full = max(1.0, per_s * BURST_S)
        self._left = self._full
        self._since_s = now_s

    def take(self, now_s: float) -> float:
        """0: one request was granted; otherwise none was, and in so many seconds one would be."""
        self._left = min(self._full, self._left + max(0.0, now_s - self._since_s) * self._per_s)
        self._since_s = max(self._since_s, now_s)
        if self._left >= 1.0:
            self._left -= 1.0
            return 0.0
        return (1.0 - self._left) / self._per_s

"""Whether to ask somebody who did not answer lately. Pure.

closed --limit failures in a row--> open for pause_s --> one try --answered--> closed
                                      ^                      | failed: the pause doubles, up to pause_max_s
                                      +----------------------+

Questions that were under way together fail together, and count as one: a hiccup is no outage, however many wait through it.
"""

from __future__ import annotations


class Breaker:
    """Times are monotonic seconds. opened: how often it went from closed to open."""

    def __init__(self, *, limit: int = 2, pause_s: float = 0.25, pause_max_s: float = 2.0) -> None:
        self._limit = limit
        self._pause_s = pause_s
        self._pause_max_s = pause_max_s
        self._failures = 0
        self._until_s = 0.0
        self._failed_s = float("-inf")
        self.opened = 0

    @property
    def open(self) -> bool:
        return self._failures >= self._limit

    def allows(self, now_s: float) -> bool:
        """Whether to ask now. While open it says so once per pause: that one finds out for all."""
        if not self.open:
            return True
        if now_s < self._until_s:
            return False
        self._until_s = now_s + self._pause()  # the others go on without, until this one has come back
        return True

    def answered(self) -> None:
        self._failures = 0

    def failed(self, now_s: float, *, asked_s: float) -> None:
        """The one that was asked at asked_s."""
        if asked_s < self._failed_s:
            return
        self._failed_s = now_s
        self._failures = min(self._failures + 1, self._limit + 16)
        self.opened += self._failures == self._limit
        if self.open:
            self._until_s = now_s + self._pause()

    def _pause(self) -> float:
        return min(self._pause_s * float(1 << max(0, self._failures - self._limit)), self._pause_max_s)

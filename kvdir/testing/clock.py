"""A clock that moves only when told, for everything that takes `now_s` or a `Callable[[], float]`."""

from __future__ import annotations


class ManualClock:
    """Monotonic seconds; call it to read it. ValueError on a step back, because the real one never does."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def __call__(self) -> float:
        return self._now_s

    @property
    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> float:
        """Moves on by `seconds` and returns the new time."""
        if seconds < 0:
            raise ValueError(f"a monotonic clock cannot go back by {-seconds} s")
        self._now_s += seconds
        return self._now_s

    def advance_to(self, at_s: float) -> float:
        """Moves on to `at_s` and returns it."""
        return self.advance(at_s - self._now_s)

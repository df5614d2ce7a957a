"""What happens when, in simulated time: a queue of actions and the clock that jumps from one to the next."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from kvdir.testing.clock import ManualClock

Action = Callable[[], object]


class Agenda:
    """Actions run in order of time, and of being added at one time. An action may add others."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self._due: list[tuple[float, int, Action]] = []
        self._ordinals = itertools.count()

    @property
    def now_s(self) -> float:
        return self._clock.now_s

    def later(self, after_s: float, action: Action) -> None:
        """Runs `action` once, `after_s` from now."""
        heapq.heappush(self._due, (self._clock.now_s + after_s, next(self._ordinals), action))

    def every(self, interval_s: float, action: Action, *, first_s: float | None = None) -> None:
        """Runs `action` again and again; ValueError without an interval, because time would stand still."""
        if interval_s <= 0:
            raise ValueError(f"an interval of {interval_s} s would never end")

        def again() -> None:
            action()
            self.later(interval_s, again)

        self.later(interval_s if first_s is None else first_s, again)

    def advance_to(self, to_s: float) -> None:
        """Runs everything that is due up to and including `to_s`."""
        while self._due and self._due[0][0] <= to_s:
            at_s, _, action = heapq.heappop(self._due)
            self._clock.advance_to(at_s)
            action()
        self._clock.advance_to(to_s)

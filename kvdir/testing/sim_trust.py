"""From when to when the figures of one simulated stream were not trusted; exact, not sampled."""

from __future__ import annotations

from kvdir.testing.sim_results import UntrustedTime


class TrustWatch:
    """Tell it after everything that may have changed the stream; equal news change nothing."""

    def __init__(self, node: str, *, now_s: float) -> None:
        self._node = node
        self._began_s = now_s
        self._since_s: float | None = None
        self._intervals = 0
        self._ended_s = 0.0
        self._longest_s = 0.0

    def see(self, trusted: bool, *, now_s: float) -> None:
        """This is how it stands now."""
        if trusted and self._since_s is not None:
            self._ended_s += now_s - self._since_s
            self._longest_s = max(self._longest_s, now_s - self._since_s)
            self._since_s = None
        elif not trusted and self._since_s is None:
            self._since_s = now_s
            self._intervals += 1

    def total(self, *, now_s: float) -> UntrustedTime:
        """Everything up to now, an interval that has not ended included."""
        open_s = 0.0 if self._since_s is None else now_s - self._since_s
        untrusted_s, watched_s = self._ended_s + open_s, now_s - self._began_s
        return UntrustedTime(
            node=self._node,
            intervals=self._intervals,
            total_s=round(untrusted_s, 3),
            longest_s=round(max(self._longest_s, open_s), 3),
            share=round(untrusted_s / watched_s, 4) if watched_s else 0.0,
        )

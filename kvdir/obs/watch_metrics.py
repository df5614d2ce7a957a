"""Metrics of the feed: who watches, how far behind they are, and what that costs. Names and rules: definitions.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from kvdir.obs.definition import Family
from kvdir.obs.definitions import value


@dataclass(slots=True)
class WatchFigures:
    """Since the start. resumed: calls that went on without a snapshot. cut_off: watchers that were too slow."""

    opened: int = 0
    snapshots: int = 0
    resumed: int = 0
    cut_off: int = 0
    refused: int = 0
    messages: int = 0
    sent_bytes: int = 0


class WatchMetrics:
    """`refresh` runs on the event loop, `families` on the scraper's thread."""

    def __init__(self) -> None:
        self.refresh(WatchFigures(), watchers=0, behind_s=0.0, log_bytes=0)

    def refresh(self, figures: WatchFigures, *, watchers: int, behind_s: float, log_bytes: int) -> None:
        """Puts aside what the next scrape shows."""
        self._values: dict[str, float] = {
            **{f"kvdir_watch_{name}_total": count for name, count in asdict(figures).items()},
            "kvdir_watchers": watchers,
            "kvdir_watch_behind_seconds": behind_s,
            "kvdir_watch_log_bytes": log_bytes,
        }

    def families(self) -> Iterator[Family]:
        """The metric families."""
        for name, amount in self._values.items():
            yield value(name, amount)

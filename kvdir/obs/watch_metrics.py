"""Metrics of the feed: who watches, how far behind they are, and what that costs. Names and rules: metrics.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric


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
        self._counts: dict[str, int] = {}
        self._gauges: dict[str, float] = {}

    def refresh(self, figures: WatchFigures, *, watchers: int, behind_s: float, log_bytes: int) -> None:
        """Puts aside what the next scrape shows."""
        self._counts = asdict(figures)
        self._gauges = {"watchers": watchers, "watch_behind_seconds": behind_s, "watch_log_bytes": log_bytes}

    def families(self) -> Iterator[Metric]:
        """The metric families."""
        for name, help in (
            ("opened", "Watch calls begun."),
            ("snapshots", "Watch calls that began with a snapshot."),
            ("resumed", "Watch calls that went on where an earlier one ended."),
            ("cut_off", "Watchers cut off because they were too slow."),
            ("refused", "Watchers refused because there were max_watchers."),
            ("messages", "Messages sent to watchers."),
            ("sent_bytes", "Bytes sent to watchers."),
        ):
            yield CounterMetricFamily(f"kvdir_watch_{name}", help, value=self._counts.get(name, 0))
        for name, help in (
            ("watchers", "Replicas that watch now."),
            ("watch_behind_seconds", "How long at most something has waited for the slowest watcher."),
            ("watch_log_bytes", "Changes kept for watchers; none are while nobody watches."),
        ):
            yield GaugeMetricFamily(f"kvdir_{name}", help, value=self._gauges.get(name, 0.0))

"""Metrics of a coordinator on a shared store: its calls and lookups as any coordinator's, its nodes, and how the store does.

Like metrics.py: `gather` on the event loop puts figures aside, `collect` runs on the scraper's thread and reads only those.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvdir.obs.call_figures import CallFigures
from kvdir.obs.definition import Family
from kvdir.obs.definitions import family, value
from kvdir.obs.metrics import COUNTERS
from kvdir.obs.stream_metrics import StreamRow, in_order, stream_families, view_row
from kvdir.obs.tally import Tally

if TYPE_CHECKING:
    from kvdir.server.shared.coordinator import SharedCoordinator


class StoreCoordinatorMetrics:
    """Collector of a coordinator that keeps no blocks. tally: for its parts."""

    def __init__(self) -> None:
        self.calls = CallFigures()
        self.loop_lag_s = 0.0
        self.tally = Tally("kvdir")
        self.tally.watch("loop_lag_seconds", lambda: self.loop_lag_s)
        self._values: dict[str, float] = {}
        self._retries: dict[str, int] = {}
        self._rejected: dict[str, int] = {}
        self._streams: tuple[StreamRow, ...] = ()
        self._store_calls = CallFigures()

    def gather(self, coordinator: SharedCoordinator) -> Iterator[None]:
        """Puts aside what the next scrape shows."""
        link, counters = coordinator.link, coordinator.counters
        views = link.fleet.views(coordinator.now_s())
        yield
        self._streams = in_order(map(view_row, views))
        self._retries, self._rejected = dict(link.store.figures.retries), dict(coordinator.rejected)
        self._store_calls = link.calls
        self._values = {
            **{f"kvdir_{name}_total": getattr(counters, name) for name in COUNTERS},
            "kvdir_warming": coordinator.questions.warming,
            "kvdir_namespaces": len(link.namespaces),
            "kvdir_sessions": len(coordinator.sessions),
            "kvdir_store_up": not link.away,
            "kvdir_store_breaker_open": link.breaker.open,
            "kvdir_store_used_bytes": link.health.used_bytes,
            "kvdir_store_max_bytes": link.health.max_bytes,
            "kvdir_store_evicts": link.health.evicts,
            "kvdir_store_unreadable_nodes": link.unreadable,
            "kvdir_store_evicted_total": link.evicted,
            "kvdir_store_lost_buckets_total": link.lost_buckets,
            "kvdir_store_swept_blocks_total": link.swept,
            "kvdir_store_breaker_opened_total": link.breaker.opened,
            "kvdir_lookups_without_store_total": coordinator.questions.without_store,
            "kvdir_events_applied_total": coordinator.events_applied,
        }

    def collect(self) -> Iterator[Family]:
        yield from self.calls.families("kvdir")
        yield from self._store_calls.families("kvdir_store")
        for name, amount in self._values.items():
            yield value(name, amount)
        for name, counts in (("kvdir_events_rejected_total", self._rejected), ("kvdir_store_retries_total", self._retries)):
            reasons = family(name)
            for reason, count in counts.items():
                reasons.add(count, reason)
            yield reasons
        yield from stream_families(self._streams)
        yield from self.tally.families()

"""Metrics of a coordinator on a shared store: its calls and lookups as any coordinator's, its nodes, and how the store does.

Like metrics.py: `refresh` on the event loop puts figures aside, `collect` runs on the scraper's thread and reads only those.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvdir.core.views import NodeView
from kvdir.obs.call_figures import CallFigures
from kvdir.obs.metrics import COUNTERS, MAX_NODES, node_families

if TYPE_CHECKING:
    from kvdir.server.shared.coordinator import SharedCoordinator

_GAUGES = {
    "warming": "1 while the store is away, or some node has not restated what it holds since the store is new.",
    "namespaces": "Namespaces announced.",
    "sessions": "Streams that publish to this coordinator.",
    "store_up": "1 if the store answered when last asked.",
    "store_breaker_open": "1 while lookups are answered without asking the store, because it has just not answered.",
    "store_used_bytes": "Memory of the store's servers.",
    "store_max_bytes": "Their bound; 0: none, somewhere.",
    "store_evicts": "1 if the store takes blocks away when it is full.",
    "store_unreadable_nodes": "Nodes saved by another release, left out here.",
}
_COUNTS = {
    "store_evicted": "Keys the store's servers evicted.",
    "store_lost_buckets": "Parts of the store found missing.",
    "store_swept_blocks": "Blocks of dropped holders freed by this coordinator.",
    "store_breaker_opened": "How often lookups stopped asking the store.",
    "lookups_without_store": "Lookups answered without hits because the store did not answer.",
    "events_applied": "Events taken by the store.",
}


class StoreCoordinatorMetrics:
    """prometheus_client collector of a coordinator that keeps no blocks."""

    def __init__(self) -> None:
        self.calls = CallFigures()
        self.loop_lag_s = 0.0
        self._counters: dict[str, int] = {}
        self._counts: dict[str, int] = {}
        self._gauges: dict[str, float] = {}
        self._retries: dict[str, int] = {}
        self._rejected: dict[str, int] = {}
        self._nodes: tuple[NodeView, ...] = ()
        self._store_calls = CallFigures()

    def refresh(self, coordinator: SharedCoordinator) -> None:
        """Puts aside what the next scrape shows."""
        link = coordinator.link
        self._counters = {name: getattr(coordinator.counters, name) for name in COUNTERS}
        self._nodes = link.fleet.views(coordinator.now_s())[:MAX_NODES]
        self._retries, self._rejected = dict(link.store.figures.retries), dict(coordinator.rejected)
        self._store_calls = link.calls
        self._gauges = {
            "warming": coordinator.questions.warming,
            "namespaces": len(link.namespaces),
            "sessions": len(coordinator.sessions),
            "store_up": not link.away,
            "store_breaker_open": link.breaker.open,
            "store_used_bytes": link.health.used_bytes,
            "store_max_bytes": link.health.max_bytes,
            "store_evicts": link.health.evicts,
            "store_unreadable_nodes": link.unreadable,
        }
        self._counts = {
            "store_evicted": link.health.evicted,
            "store_lost_buckets": link.lost_buckets,
            "store_swept_blocks": link.swept,
            "store_breaker_opened": link.breaker.opened,
            "lookups_without_store": coordinator.questions.without_store,
            "events_applied": coordinator.events_applied,
        }

    def collect(self) -> Iterable[Metric]:
        yield from self.calls.families("kvdir")
        yield from self._store_calls.families("kvdir_store")
        for name, help in COUNTERS.items():
            yield CounterMetricFamily(f"kvdir_{name}", help, value=self._counters.get(name, 0))
        for name, help in _COUNTS.items():
            yield CounterMetricFamily(f"kvdir_{name}", help, value=self._counts.get(name, 0))
        for name, help in _GAUGES.items():
            yield GaugeMetricFamily(f"kvdir_{name}", help, value=float(self._gauges.get(name, 0)))
        yield GaugeMetricFamily("kvdir_loop_lag_seconds", "How late the last tick was.", value=self.loop_lag_s)
        yield from self._labelled()
        yield from node_families(self._nodes)

    def _labelled(self) -> Iterator[Metric]:
        rejected = CounterMetricFamily("kvdir_events_rejected", "Events skipped, by reason.", labels=["reason"])
        for reason, count in self._rejected.items():
            rejected.add_metric([reason], count)
        retries = CounterMetricFamily("kvdir_store_retries", "Retries inside calls to the store, by reason.", labels=["reason"])
        for reason, count in self._retries.items():
            retries.add_metric([reason], count)
        yield from (rejected, retries)

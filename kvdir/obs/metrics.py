"""Every metric of the coordinator, in one place. Prefix kvdir_, base units, bounded labels; a help text is a definition.

Hot counters are plain ints of the core; a collector reads them when somebody scrapes. The scrape runs on the HTTP thread, which
has the event loop put the figures aside (`refresh`), and never reads the index or the directory themselves.
Labels: never a fingerprint, tenant or request; a node appears in a few gauges, capped at `MAX_NODES`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvdir.core.directory import Directory
from kvdir.core.inspect import node_views
from kvdir.core.views import NodeView
from kvdir.location import StreamState
from kvdir.obs.call_figures import CallFigures
from kvdir.obs.guard_metrics import GuardFigures
from kvdir.obs.process_figures import ProcessFigures
from kvdir.obs.trust_metrics import TrustFigures
from kvdir.obs.watch_metrics import WatchMetrics

MAX_NODES = 1024


COUNTERS = {
    "lookups": "Lists looked up.",
    "lookup_blocks": "Positions asked for in lookups.",
    "lookup_hits": "Positions for which some node was named.",
    "batches": "Batches received, duplicates included.",
    "stale_reports": "Reports that an owner did not hold what the directory named.",
    "stale_reports_ignored": "Of those, ignored: old epoch, unknown node, or older than a later store.",
    "stale_blocks": "Blocks that lookups named and their owners did not hold, as reported and believed; of lookup_hits.",
    "lookup_nodes_below_trust": "Nodes left out of answers because the caller asked for more trust.",
    "snapshots_applied": "Snapshots that replaced what was known.",
    "snapshots_refused": "Snapshots discarded because they contradicted themselves.",
    "fenced": "Epochs fenced, by a newer one or by goodbye.",
    "namespaces_refused": "Namespace announcements that could not be read or believed.",
}


class Workers(Protocol):
    """The lookup workers of a coordinator, as far as they are counted; lookups they answered are in the sums of all."""

    up: set[int]
    restarts: int
    kills: int

    def figures(self) -> list[ProcessFigures]: ...


class CoordinatorMetrics:
    """prometheus_client collector of a coordinator. `refresh` runs on the event loop, `collect` on the scraper's thread."""

    def __init__(self) -> None:
        self.calls = CallFigures()
        self.workers: Workers | None = None
        self.loop_lag_s = 0.0
        self._beside: list[ProcessFigures] = []
        self._counters: dict[str, int] = {}
        self._events: dict[str, int] = {}
        self._rejected: dict[str, int] = {}
        self._gauges: dict[str, float] = {}
        self._nodes: tuple[NodeView, ...] = ()
        self._trust = TrustFigures()
        self.guards = GuardFigures()
        self.watch = WatchMetrics()

    def beside(self) -> list[ProcessFigures]:
        """What lookup workers have counted, of those there are."""
        return self.workers.figures() if self.workers is not None else []

    def counted(self, directory: Directory, beside: Iterable[ProcessFigures]) -> dict[str, int]:
        """By the names of COUNTERS, in this process and beside it."""
        counters = directory.counters
        return {name: getattr(counters, name) + sum(item.counters.get(name, 0) for item in beside) for name in COUNTERS}

    def refresh(self, directory: Directory, *, now_s: float) -> None:
        """Puts aside what the next scrape shows."""
        stats, ingest = directory.index.stats(), directory.ingest
        self._beside = self.beside()
        self._counters = self.counted(directory, self._beside)
        self._events = {
            "events_applied": ingest.applied,
            "stored_blocks": ingest.stored_blocks,
            "removed_blocks": ingest.removed_blocks,
            "index_evicted_blocks": directory.room.evicted_blocks,
        }
        self._rejected = dict(ingest.rejected)
        self._trust.refresh(directory, now_s=now_s)
        self._nodes = node_views(directory, now_s=now_s)[:MAX_NODES]
        self._gauges = {
            "index_blocks": stats.blocks,
            "index_bytes": stats.bytes,
            "index_sets": stats.sets,
            "index_max_bytes": directory.limits.max_index_bytes,
            "partial_holders": directory.holders.partial,
            "holders": stats.holders,
            "namespaces": len(directory.namespaces),
            "warming": float(directory.warming),
        }

    def collect(self) -> Iterable[Metric]:
        yield from self.calls.families("kvdir", [item.methods for item in self._beside])
        if self.workers is not None:
            yield from self._worker_families(self.workers)
        for name, help in COUNTERS.items():
            yield CounterMetricFamily(f"kvdir_{name}", help, value=self._counters.get(name, 0))
        for name, help in (
            ("events_applied", "Events applied, in order or as hints."),
            ("stored_blocks", "Blocks that gained a holder."),
            ("removed_blocks", "Blocks that lost a holder."),
            (
                "index_evicted_blocks",
                "Pairs of block and holder that went for max_index_bytes; what they said is unknown since.",
            ),
        ):
            yield CounterMetricFamily(f"kvdir_{name}", help, value=self._events.get(name, 0))
        rejected = CounterMetricFamily("kvdir_events_rejected", "Events skipped, by reason.", labels=["reason"])
        for reason, count in self._rejected.items():
            rejected.add_metric([reason], count)
        yield rejected
        for name, help in (
            ("index_blocks", "Distinct blocks in the index."),
            ("index_bytes", "Resident bytes of the index."),
            ("index_sets", "Distinct holder sets."),
            ("index_max_bytes", "Bound of the index, 0 for none."),
            ("partial_holders", "Holders of which entries were evicted that their owners may still hold."),
            ("holders", "Holder numbers in use."),
            ("namespaces", "Namespaces announced."),
            ("warming", "1 while some node has not restated what it holds since the start."),
        ):
            yield GaugeMetricFamily(f"kvdir_{name}", help, value=self._gauges.get(name, 0.0))
        yield GaugeMetricFamily("kvdir_loop_lag_seconds", "How late the last tick was.", value=self.loop_lag_s)
        yield from self._trust.families()
        yield from self.guards.families()
        yield from self.watch.families()
        yield from node_families(self._nodes)

    def _worker_families(self, workers: Workers) -> Iterator[Metric]:
        passed_on = sum(item.counters.get("passed_on", 0) for item in self._beside)
        yield GaugeMetricFamily("kvdir_lookup_workers", "Lookup workers that serve.", value=len(workers.up))
        for name, help, value in (
            ("lookup_worker_restarts", "Lookup workers that ended and were replaced.", workers.restarts),
            ("lookup_worker_kills", "Of those, ended by us because they hung.", workers.kills),
            ("lookups_passed_on", "Lookups that a worker left to the main process, which counts them.", passed_on),
        ):
            yield CounterMetricFamily(f"kvdir_{name}", help, value=value)


def node_families(nodes: Iterable[NodeView]) -> Iterator[Metric]:
    """Streams by state, and the figures of every node."""
    nodes = tuple(nodes)
    states = GaugeMetricFamily("kvdir_streams", "Streams by state.", labels=["state"])
    for state in StreamState:
        states.add_metric([state.name.lower()], sum(view.trust.state is state for view in nodes))
    age = GaugeMetricFamily("kvdir_stream_age_seconds", "Since the node was last heard.", labels=["node"])
    lag = GaugeMetricFamily("kvdir_stream_lag_events", "Known sequence numbers not yet applied in order.", labels=["node"])
    missing = GaugeMetricFamily("kvdir_stream_missing_events", "Events known lost and not repaired.", labels=["node"])
    missed = CounterMetricFamily(
        "kvdir_stream_missed_events", "Events that were missing at some time in the current epoch.", labels=["node"]
    )
    confirmed = GaugeMetricFamily(
        "kvdir_stream_confirmed_ratio", "Share of the node's entries that it has confirmed in sum.", labels=["node"]
    )
    gaps = CounterMetricFamily("kvdir_stream_gaps", "Holes seen in the current epoch.", labels=["node"])
    repairs = CounterMetricFamily("kvdir_stream_repairs", "Repairs asked for in this epoch.", labels=["node", "kind"])
    untrusted = CounterMetricFamily(
        "kvdir_stream_untrusted_seconds", "Time for which the node's cumulative figures were untrusted.", labels=["node"]
    )
    for view in nodes:
        node = [view.trust.node]
        age.add_metric(node, view.trust.age_s)
        lag.add_metric(node, view.announced_seq - view.last_seq)
        missing.add_metric(node, view.trust.missing_events)
        missed.add_metric(node, view.missed_events)
        confirmed.add_metric(node, view.trust.confirmed)
        gaps.add_metric(node, view.gaps)
        repairs.add_metric([*node, "replay"], view.replays)
        repairs.add_metric([*node, "sketch"], view.sketches)
        repairs.add_metric([*node, "snapshot"], view.snapshots)
        untrusted.add_metric(node, view.untrusted_s)
    yield from (states, age, lag, missing, missed, confirmed, gaps, repairs, untrusted)

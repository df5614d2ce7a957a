"""The metrics of a coordinator with an index of its own. What there is, and what it means: definitions.py.

Hot counters are plain ints of the core; a collector reads them when somebody scrapes. The scrape runs on the HTTP thread, which
has the event loop put the figures aside, in slices (`gather`), and never reads the index or the directory itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import Protocol

from kvdir.core.admission import Counters
from kvdir.core.directory import Directory
from kvdir.obs.call_figures import CallFigures
from kvdir.obs.definition import Family
from kvdir.obs.definitions import family, value
from kvdir.obs.guard_metrics import GuardFigures
from kvdir.obs.process_figures import ProcessFigures
from kvdir.obs.stream_metrics import StreamRow, in_order, stream_families, stream_row
from kvdir.obs.tally import Tally
from kvdir.obs.trust_metrics import TrustFigures
from kvdir.obs.watch_metrics import WatchMetrics

COUNTERS = tuple(item.name for item in fields(Counters))


class Workers(Protocol):
    """The lookup workers of a coordinator, as far as they are counted; lookups they answered are in the sums of all."""

    up: set[int]
    restarts: int
    kills: int

    def figures(self) -> list[ProcessFigures]: ...


class CoordinatorMetrics:
    """Collector of a coordinator. `gather` runs on the event loop, `collect` on the scraper's thread. tally: for its parts."""

    def __init__(self) -> None:
        self.calls = CallFigures()
        self.workers: Workers | None = None
        self.loop_lag_s = 0.0
        self.tally = Tally("kvdir")
        self.tally.watch("loop_lag_seconds", lambda: self.loop_lag_s)
        self.guards = GuardFigures()
        self.watch = WatchMetrics()
        self._beside: list[ProcessFigures] = []
        self._values: dict[str, float] = {}
        self._rejected: dict[str, int] = {}
        self._streams: tuple[StreamRow, ...] = ()
        self._trust = TrustFigures()

    def beside(self) -> list[ProcessFigures]:
        """What lookup workers have counted, of those there are."""
        return self.workers.figures() if self.workers is not None else []

    def counted(self, directory: Directory, beside: Iterable[ProcessFigures]) -> dict[str, int]:
        """By the names of COUNTERS, in this process and beside it."""
        counters = directory.counters
        return {name: getattr(counters, name) + sum(item.counters.get(name, 0) for item in beside) for name in COUNTERS}

    def gather(self, directory: Directory, *, now_s: float) -> Iterator[None]:
        """Puts aside what the next scrape shows. Whoever drives it may do something else at every `yield`."""
        rows = []
        for node in tuple(directory.nodes.values()):
            if node.stream is not None:
                rows.append(stream_row(node.stream, now_s=now_s))
                yield
        yield from self._trust.gather(directory)
        stats, ingest = directory.index.stats(), directory.ingest
        self._beside = self.beside()
        self._streams = in_order(rows)
        self._rejected = dict(ingest.rejected)
        self._values = {
            **{f"kvdir_{name}_total": count for name, count in self.counted(directory, self._beside).items()},
            "kvdir_events_applied_total": ingest.applied,
            "kvdir_stored_blocks_total": ingest.stored_blocks,
            "kvdir_removed_blocks_total": ingest.removed_blocks,
            "kvdir_index_evicted_blocks_total": directory.room.evicted_blocks,
            "kvdir_index_blocks": stats.blocks,
            "kvdir_index_bytes": stats.bytes,
            "kvdir_index_sets": stats.sets,
            "kvdir_index_max_bytes": directory.limits.max_index_bytes,
            "kvdir_partial_holders": directory.holders.partial,
            "kvdir_holders": stats.holders,
            "kvdir_namespaces": len(directory.namespaces),
            "kvdir_warming": directory.warming,
        }

    def collect(self) -> Iterator[Family]:
        yield from self.calls.families("kvdir", [item.methods for item in self._beside])
        if self.workers is not None:
            yield from self._worker_families(self.workers)
        for name, amount in self._values.items():
            yield value(name, amount)
        rejected = family("kvdir_events_rejected_total")
        for reason, count in self._rejected.items():
            rejected.add(count, reason)
        yield rejected
        yield from self._trust.families()
        yield from self.guards.families()
        yield from self.watch.families()
        yield from stream_families(self._streams)
        yield from self.tally.families()

    def _worker_families(self, workers: Workers) -> Iterator[Family]:
        yield value("kvdir_lookup_workers", len(workers.up))
        yield value("kvdir_lookup_worker_restarts_total", workers.restarts)
        yield value("kvdir_lookup_worker_kills_total", workers.kills)
        yield value("kvdir_lookups_passed_on_total", sum(item.counters.get("passed_on", 0) for item in self._beside))

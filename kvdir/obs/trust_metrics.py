"""Metrics of trust and repair: what was lost, what repairs cost by kind, what sums may be acted upon. Read by metrics.py.

Like there: `refresh` on the event loop puts figures aside, `families` runs on the scraper's thread and reads only those.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvdir.core.directory import Directory
from kvdir.core.repair import RepairTally
from kvdir.core.totals import sums_view
from kvdir.core.views import ViewScope


class TrustFigures:
    """Of one directory, as of the last `refresh`."""

    def __init__(self) -> None:
        self._repairs: dict[str, RepairTally] = {}
        self._failures: dict[str, int] = {}
        self._counts: dict[str, int] = {}
        self._sums: Counter[tuple[ViewScope, bool]] = Counter()

    def refresh(self, directory: Directory, *, now_s: float) -> None:
        """Puts aside what the next scrape shows."""
        reconciler = directory.reconciler
        self._repairs = {ask.value: replace(tally) for ask, tally in directory.repairs.items()}
        self._failures = dict(reconciler.failures)
        self._counts = {
            "digest_proofs": reconciler.proofs,
            "digest_contradictions": reconciler.contradictions,
            "sketch_repaired_blocks": reconciler.repaired_blocks,
        }
        totals = sums_view(directory, now_s=now_s).totals
        self._sums = Counter((view.scope, view.blocks.trusted) for view in totals)

    def families(self) -> Iterator[Metric]:
        """The metric families."""
        yield from self._repair_families()
        failures = CounterMetricFamily("kvdir_sketch_failures", "Sketches that repaired nothing, by reason.", labels=["reason"])
        for reason, count in self._failures.items():
            failures.add_metric([reason], count)
        yield failures
        for name, help in (
            ("digest_proofs", "Comparisons that proved a stream equal to its owner's set."),
            ("digest_contradictions", "Comparisons that found a stream wrong although nothing was missing."),
            ("sketch_repaired_blocks", "Blocks by which streams differed from their owners when a sketch repaired them."),
        ):
            yield CounterMetricFamily(f"kvdir_{name}", help, value=self._counts.get(name, 0))
        sums = GaugeMetricFamily("kvdir_views", "Sums of blocks by scope and trust.", labels=["scope", "trusted"])
        for scope in ViewScope:
            for trusted in (True, False):
                sums.add_metric([scope.name.lower(), str(trusted).lower()], self._sums[scope, trusted])
        yield sums

    def _repair_families(self) -> Iterator[Metric]:
        repairs = CounterMetricFamily("kvdir_repairs", "Repairs by kind and outcome.", labels=["kind", "outcome"])
        size = CounterMetricFamily("kvdir_repair_bytes", "Bytes of content that came to repair streams.", labels=["kind"])
        time_s = CounterMetricFamily(
            "kvdir_repair_seconds", "From asking to being whole, of repairs that succeeded.", labels=["kind"]
        )
        for kind, tally in self._repairs.items():
            repairs.add_metric([kind, "asked"], tally.asked)
            repairs.add_metric([kind, "done"], tally.done)
            repairs.add_metric([kind, "failed"], tally.failed)
            size.add_metric([kind], tally.bytes)
            time_s.add_metric([kind], tally.seconds)
        yield from (repairs, size, time_s)

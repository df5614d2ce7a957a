"""Metrics of trust and repair: what was lost, what repairs cost by kind, what sums may be acted upon. Read by metrics.py.

Like there: `gather` runs in slices on the event loop, `families` on the scraper's thread and reads only what was put aside.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from kvdir.core.directory import Directory
from kvdir.core.repair import RepairTally
from kvdir.core.totals import SumsTrust
from kvdir.core.views import ViewScope
from kvdir.obs.definition import Family
from kvdir.obs.definitions import family, value

_COUNTS = ("gaps", "digest_proofs", "digest_contradictions", "sketch_repaired_blocks")


class TrustFigures:
    """Of one directory, as of the last `gather`."""

    def __init__(self) -> None:
        self._repairs: dict[str, RepairTally] = {}
        self._failures: dict[str, int] = {}
        self._counts: dict[str, int] = dict.fromkeys(_COUNTS, 0)
        self._sums: Counter[tuple[ViewScope, bool]] = Counter()

    def gather(self, directory: Directory) -> Iterator[None]:
        """Puts aside what the next scrape shows; may be interrupted at every `yield`."""
        sums = SumsTrust(directory)
        for node in tuple(directory.nodes.values()):
            if node.stream is not None and not node.stream.fenced:
                sums.add(node.stream)
                yield
        reconciler = directory.reconciler
        self._sums = sums.counts()
        self._repairs = {ask.value: replace(tally) for ask, tally in directory.repairs.items()}
        self._failures = dict(reconciler.failures)
        self._counts = {
            "gaps": directory.repairs.holes,
            "digest_proofs": reconciler.proofs,
            "digest_contradictions": reconciler.contradictions,
            "sketch_repaired_blocks": reconciler.repaired_blocks,
        }

    def families(self) -> Iterator[Family]:
        """The metric families."""
        yield from self._repair_families()
        failures = family("kvdir_sketch_failures_total")
        for reason, count in self._failures.items():
            failures.add(count, reason)
        yield failures
        for name, count in self._counts.items():
            yield value(f"kvdir_{name}_total", count)
        sums, ratio = family("kvdir_views"), family("kvdir_view_trusted_ratio")
        for scope in ViewScope:
            name, trusted, doubted = scope.name.lower(), self._sums[scope, True], self._sums[scope, False]
            sums.add(trusted, name, "true").add(doubted, name, "false")
            ratio.add(trusted / (trusted + doubted) if trusted + doubted else 1.0, name)
        yield from (sums, ratio)

    def _repair_families(self) -> Iterator[Family]:
        repairs, size = family("kvdir_repairs_total"), family("kvdir_repair_bytes_total")
        time_s = family("kvdir_repair_seconds_total")
        for kind, tally in self._repairs.items():
            repairs.add(tally.asked, kind, "asked").add(tally.done, kind, "done").add(tally.failed, kind, "failed")
            size.add(tally.bytes, kind)
            time_s.add(tally.seconds, kind)
        yield from (repairs, size, time_s)

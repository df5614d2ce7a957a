"""Metrics of what deletes and of what survives restarts: quotas, orphans, readiness, checkpoints. Read by metrics.py.

Like there: `refresh` on the event loop puts figures aside, `families` runs on the scraper's thread and reads only those.
Labels: subjects of quotas are configured, so they are few; a salt digest stands for a tenant, never its salt.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvdir.core.directory import Directory
from kvdir.core.quota_keeper import QuotaKeeper
from kvdir.core.quota_views import QuotaView, quotas_view

VERDICTS = ("within", "untrusted", "settling", "dry-run", "evicting")


class CheckpointSource(Protocol):
    """Figures of the checkpoint file (server/checkpoint.py)."""

    written: int
    failed: int
    bytes: int
    seconds: float
    restored_blocks: int
    refused: str


@dataclass(slots=True)
class GuardFigures:
    """As of the last `refresh`."""

    _quotas: tuple[QuotaView, ...] = ()
    _orphans: tuple[int, int] = (0, 0)
    _counts: dict[str, int] = field(default_factory=dict)
    _gauges: dict[str, float] = field(default_factory=dict)

    def refresh(self, directory: Directory, keeper: QuotaKeeper, checkpoints: CheckpointSource) -> None:
        """Puts aside what the next scrape shows."""
        orphanage = directory.orphans
        view = quotas_view(keeper, orphanage)
        self._quotas = view.quotas
        spared = sum(bool(orphan.spared) for orphan in view.orphans)
        self._orphans = (len(view.orphans) - spared, spared)
        self._counts = {
            "orphans_forgotten": orphanage.dropped_nodes,
            "orphan_blocks_forgotten": orphanage.dropped_blocks,
            "checkpoints_written": checkpoints.written,
            "checkpoints_failed": checkpoints.failed,
            "checkpoints_refused": int(bool(checkpoints.refused)),
        }
        restored = (stream for node in directory.nodes.values() if (stream := node.stream) is not None and stream.restored)
        self._gauges = {
            "partial": float(directory.partial),
            "checkpoint_bytes": checkpoints.bytes,
            "checkpoint_seconds": checkpoints.seconds,
            "checkpoint_restored_blocks": checkpoints.restored_blocks,
            "restored_blocks": sum(holder.blocks for stream in restored for holder in stream.holders.values()),
        }

    def families(self) -> Iterator[Metric]:
        """The metric families."""
        yield from self._quota_families()
        orphans = GaugeMetricFamily("kvdir_orphans", "Nodes gone for long, by what becomes of their entries.", labels=["fate"])
        orphans.add_metric(["forgotten"], self._orphans[0])
        orphans.add_metric(["spared"], self._orphans[1])
        yield orphans
        for name, help in (
            ("orphans_forgotten", "Nodes forgotten after long silence."),
            ("orphan_blocks_forgotten", "Entries forgotten with them."),
            ("checkpoints_written", "Checkpoint files written."),
            ("checkpoints_failed", "Checkpoint files that could not be written."),
            ("checkpoints_refused", "1 if the file at start was refused, and the coordinator began empty."),
        ):
            yield CounterMetricFamily(f"kvdir_{name}", help, value=self._counts.get(name, 0))
        for name, help in (
            ("partial", "1 while warming has ended and some live node has still not restated what it holds."),
            ("checkpoint_bytes", "Size of the last checkpoint written."),
            ("checkpoint_seconds", "Time that writing it took, beside other work."),
            ("checkpoint_restored_blocks", "Pairs of block and holder that came from the checkpoint at start."),
            ("restored_blocks", "Of those, hints that their nodes have not confirmed yet."),
        ):
            yield GaugeMetricFamily(f"kvdir_{name}", help, value=self._gauges.get(name, 0.0))

    def _quota_families(self) -> Iterator[Metric]:
        limit = GaugeMetricFamily("kvdir_quota_limit_bytes", "Quota, by subject.", labels=["subject"])
        used = GaugeMetricFamily("kvdir_quota_used_bytes", "What counts against it, trusted or not.", labels=["subject"])
        trusted = GaugeMetricFamily("kvdir_quota_trusted", "1 while that figure may be acted upon.", labels=["subject"])
        verdict = GaugeMetricFamily("kvdir_quota_verdict", "1 for how the quota stands.", labels=["subject", "verdict"])
        evicted = CounterMetricFamily(
            "kvdir_quota_evicted_blocks", "Blocks that agents evicted for the quota, as they said.", labels=["subject"]
        )
        refused = CounterMetricFamily(
            "kvdir_quota_refused", "Looks at the quota that ended because the figure was not trusted.", labels=["subject"]
        )
        for quota in self._quotas:
            subject = [quota.subject]
            limit.add_metric(subject, quota.limit_bytes)
            used.add_metric(subject, quota.used_bytes.value)
            trusted.add_metric(subject, float(quota.used_bytes.trusted))
            for name in VERDICTS:
                verdict.add_metric([*subject, name], float(quota.verdict == name))
            evicted.add_metric(subject, quota.evicted_blocks)
            refused.add_metric(subject, quota.refused)
        yield from (limit, used, trusted, verdict, evicted, refused)

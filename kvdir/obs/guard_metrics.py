"""Metrics of what deletes and of what survives restarts: quotas, orphans, readiness, checkpoints. Read by metrics.py.

Like there: `refresh` on the event loop puts figures aside, `families` runs on the scraper's thread and reads only those.
Labels: subjects of quotas are configured, so they are few; a salt digest stands for a tenant, never its salt.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from kvdir.core.directory import Directory
from kvdir.core.quota_keeper import QuotaKeeper
from kvdir.core.quota_views import QuotaView, quotas_view
from kvdir.obs.definition import Family
from kvdir.obs.definitions import family, value
from kvdir.obs.labels import VERDICT


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
    """As of the last `refresh`; there is none before a scrape."""

    _quotas: tuple[QuotaView, ...] = ()
    _orphans: tuple[int, int] = (0, 0)
    _values: dict[str, float] = field(default_factory=dict)

    def refresh(self, directory: Directory, keeper: QuotaKeeper, checkpoints: CheckpointSource) -> None:
        """Puts aside what the next scrape shows."""
        orphanage = directory.orphans
        view = quotas_view(keeper, orphanage)
        self._quotas = view.quotas
        spared = sum(bool(orphan.spared) for orphan in view.orphans)
        self._orphans = (len(view.orphans) - spared, spared)
        restored = (stream for node in directory.nodes.values() if (stream := node.stream) is not None and stream.restored)
        self._values = {
            "kvdir_orphans_forgotten_total": orphanage.dropped_nodes,
            "kvdir_orphan_blocks_forgotten_total": orphanage.dropped_blocks,
            "kvdir_checkpoints_written_total": checkpoints.written,
            "kvdir_checkpoints_failed_total": checkpoints.failed,
            "kvdir_checkpoints_refused_total": bool(checkpoints.refused),
            "kvdir_partial": directory.partial,
            "kvdir_checkpoint_bytes": checkpoints.bytes,
            "kvdir_checkpoint_seconds": checkpoints.seconds,
            "kvdir_checkpoint_restored_blocks": checkpoints.restored_blocks,
            "kvdir_restored_blocks": sum(holder.blocks for stream in restored for holder in stream.holders.values()),
        }

    def families(self) -> Iterator[Family]:
        """The metric families."""
        yield from self._quota_families()
        yield family("kvdir_orphans").add(self._orphans[0], "forgotten").add(self._orphans[1], "spared")
        for name, amount in self._values.items():
            yield value(name, amount)

    def _quota_families(self) -> Iterator[Family]:
        limit, used = family("kvdir_quota_limit_bytes"), family("kvdir_quota_used_bytes")
        trusted, verdict = family("kvdir_quota_trusted"), family("kvdir_quota_verdict")
        evicted, refused = family("kvdir_quota_evicted_blocks_total"), family("kvdir_quota_refused_total")
        for quota in self._quotas:
            limit.add(quota.limit_bytes, quota.subject)
            used.add(quota.used_bytes.value, quota.subject)
            trusted.add(quota.used_bytes.trusted, quota.subject)
            for name in VERDICT.values:
                verdict.add(quota.verdict == name, quota.subject, name)
            evicted.add(quota.evicted_blocks, quota.subject)
            refused.add(quota.refused, quota.subject)
        yield from (limit, used, trusted, verdict, evicted, refused)

"""Negative feedback: a reader was sent to a node, and its owner said "absent".

Rules: feedback of another epoch than the current one, or older than a store that was heard since, changes nothing. What is
accepted removes the hint at once, and puts the figure in doubt: the reader is not the owner. The doubt ends when the
owner's own figures agree with ours (reconcile.py); if they disagree, the owner is asked, and what was removed wrongly returns.
Of a holder that lost entries for want of memory the figure is not of what lookups name, so it stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvdir.core.node import RecentStores, Stream
from kvdir.fingerprint import Fingerprints

if TYPE_CHECKING:
    from kvdir.core.ingest import Ingest


@dataclass(frozen=True, slots=True)
class StaleReport:
    """owner_seq: the owner's last sequence number when it answered. fingerprints: what it did not hold."""

    node: str
    epoch: int
    owner_seq: int
    namespace_digest: bytes
    tier: int
    fingerprints: Fingerprints
    reporter: str = ""


@dataclass(frozen=True, slots=True)
class Feedback:
    """removed: blocks that the directory no longer names. ignored_reason: empty when accepted."""

    removed: int
    ignored_reason: str = ""


def combined(answers: Sequence[Feedback]) -> Feedback:
    """One report's answers of several coordinators, which need not hold the same: the one that did most. At least one."""
    return max(answers, key=lambda item: (item.removed, not item.ignored_reason))


def take_feedback(ingest: Ingest, stream: Stream | None, report: StaleReport, *, now_s: float) -> Feedback:
    """Applies one report to the current stream of its node."""
    if stream is None or stream.fenced:
        return Feedback(0, "unknown node")
    if stream.epoch != report.epoch:
        return Feedback(0, "old epoch")
    key = (report.namespace_digest, report.tier)
    holder = stream.holders.get(key)
    if holder is None:
        return Feedback(0, "")
    fingerprints = not_stored_since(stream.recent, stream.cursor.top_seq, report)
    if isinstance(fingerprints, Feedback):
        return fingerprints
    removed = ingest.retract(holder, fingerprints.packed, fingerprints.width, now_s)
    if removed and not holder.partial:
        holder.doubt_since_s = holder.doubt_since_s if holder.doubt else now_s
        holder.doubt = "blocks were removed on a reader's word, the owner's count is due"
        holder.doubt_seq = max(holder.doubt_seq, report.owner_seq)
    return Feedback(removed)


def not_stored_since(recent: RecentStores, top_seq: int, report: StaleReport) -> Fingerprints | Feedback:
    """The fingerprints of a report that no later `stored` contradicts; or why none is left. top_seq: highest number heard."""
    if top_seq <= report.owner_seq:
        return report.fingerprints
    newer = recent.newer_than(report.owner_seq, (report.namespace_digest, report.tier))
    if newer is None:
        return Feedback(0, "too old to tell from newer stores")
    fingerprints = report.fingerprints.select(at for at, item in enumerate(report.fingerprints) if item[:8] not in newer)
    return fingerprints if fingerprints.packed else Feedback(0, "a newer store was heard")

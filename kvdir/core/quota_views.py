"""What operators see of quotas and orphans. Values, made on demand."""

from __future__ import annotations

from dataclasses import dataclass

from kvdir.core.orphans import Orphan, Orphanage
from kvdir.core.quota_keeper import QuotaKeeper
from kvdir.core.trust import Cumulative


@dataclass(frozen=True, slots=True)
class ShareView:
    """What one node was, or would be, asked to evict."""

    node: str
    namespace_digest: bytes
    tier: int
    max_blocks: int


@dataclass(frozen=True, slots=True)
class QuotaView:
    """One quota. verdict: within, untrusted, settling, dry-run or evicting; words: why. shares, older_than_s: last decision."""

    subject: str
    limit_bytes: int
    used_bytes: Cumulative
    verdict: str
    words: str
    shares: tuple[ShareView, ...]
    older_than_s: float
    evicted_blocks: int
    refused: int


@dataclass(frozen=True, slots=True)
class QuotasView:
    """All that is watched. enforcing, orphans_enforcing: False is a dry run."""

    enforcing: bool
    quotas: tuple[QuotaView, ...]
    orphans_enforcing: bool
    orphans: tuple[Orphan, ...]


def quotas_view(keeper: QuotaKeeper, orphanage: Orphanage) -> QuotasView:
    quotas = tuple(
        QuotaView(
            subject=watched.quota.subject,
            limit_bytes=watched.quota.limit_bytes,
            used_bytes=watched.figure,
            verdict=watched.verdict,
            words=watched.words,
            shares=tuple(
                ShareView(
                    share.holding.stream.node,
                    share.holding.holder.namespace.digest,
                    share.holding.holder.tier,
                    share.max_blocks,
                )
                for share in watched.plan.shares
            ),
            older_than_s=watched.plan.older_than_s,
            evicted_blocks=watched.evicted_blocks,
            refused=watched.refused,
        )
        for watched in keeper.watched
    )
    return QuotasView(keeper.policy.enforce, quotas, orphanage.enforce, orphanage.found)

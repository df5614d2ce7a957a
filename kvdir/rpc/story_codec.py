"""kvdir.v1 stories, quotas and orphans <-> values. Times travel as ages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvdir.core.orphans import Orphan
from kvdir.core.quota_views import QuotasView, QuotaView, ShareView
from kvdir.core.story import StoryEntry
from kvdir.location import PROTOCOL_VERSION
from kvdir.rpc.admin_codec import decode_cumulative, encode_cumulative
from kvdir.v1 import admin_pb2


@dataclass(frozen=True, slots=True)
class StoryAnswer:
    """entries: oldest first. reaches_back_s: everything in the last so many seconds is known."""

    entries: tuple[StoryEntry, ...]
    reaches_back_s: float


def encode_story(entries: Iterable[StoryEntry], *, reaches_back_s: float, now_s: float) -> admin_pb2.StoryResponse:
    return admin_pb2.StoryResponse(
        protocol_version=PROTOCOL_VERSION,
        entries=[
            admin_pb2.StoryEntry(
                age_ms=max(0, int((now_s - entry.at_s) * 1000)),
                node=entry.node,
                epoch=entry.epoch,
                kind=entry.kind,
                seq=entry.seq,
                words=entry.words,
            )
            for entry in entries
        ],
        reaches_back_ms=int(reaches_back_s * 1000),
    )


def decode_story(response: admin_pb2.StoryResponse, *, now_s: float) -> StoryAnswer:
    entries = tuple(
        StoryEntry(now_s - entry.age_ms / 1000, entry.node, entry.epoch, entry.kind, entry.words, entry.seq)
        for entry in response.entries
    )
    return StoryAnswer(entries, response.reaches_back_ms / 1000)


def encode_quotas(view: QuotasView, *, now_s: float) -> admin_pb2.QuotasResponse:
    return admin_pb2.QuotasResponse(
        protocol_version=PROTOCOL_VERSION,
        enforcing=view.enforcing,
        quotas=[_encode_quota(quota, now_s=now_s) for quota in view.quotas],
        orphans=[
            admin_pb2.OrphanInfo(
                node=orphan.node,
                epoch=orphan.epoch,
                silent_ms=int(orphan.silent_s * 1000),
                blocks=orphan.blocks,
                spared=orphan.spared,
            )
            for orphan in view.orphans
        ],
        orphans_enforcing=view.orphans_enforcing,
    )


def _encode_quota(quota: QuotaView, *, now_s: float) -> admin_pb2.QuotaInfo:
    return admin_pb2.QuotaInfo(
        subject=quota.subject,
        limit_bytes=quota.limit_bytes,
        used_bytes=encode_cumulative(quota.used_bytes, now_s=now_s),
        verdict=quota.verdict,
        words=quota.words,
        shares=[
            admin_pb2.QuotaShare(
                node=share.node,
                namespace_digest=share.namespace_digest,
                tier=share.tier,  # type: ignore[arg-type]
                max_blocks=share.max_blocks,
            )
            for share in quota.shares
        ],
        older_than_ms=int(quota.older_than_s * 1000),
        evicted_blocks=quota.evicted_blocks,
        refused=quota.refused,
    )


def decode_quotas(response: admin_pb2.QuotasResponse, *, now_s: float) -> QuotasView:
    quotas = tuple(
        QuotaView(
            subject=quota.subject,
            limit_bytes=quota.limit_bytes,
            used_bytes=decode_cumulative(quota.used_bytes, now_s=now_s),
            verdict=quota.verdict,
            words=quota.words,
            shares=tuple(ShareView(share.node, share.namespace_digest, share.tier, share.max_blocks) for share in quota.shares),
            older_than_s=quota.older_than_ms / 1000,
            evicted_blocks=quota.evicted_blocks,
            refused=quota.refused,
        )
        for quota in response.quotas
    )
    orphans = tuple(
        Orphan(orphan.node, orphan.epoch, orphan.silent_ms / 1000, orphan.blocks, orphan.spared) for orphan in response.orphans
    )
    return QuotasView(response.enforcing, quotas, response.orphans_enforcing, orphans)

"""kvdir.v1 admin messages <-> views. Ages travel as milliseconds, because clocks of two machines have nothing in common."""

from __future__ import annotations

from kvdir.core.trust import Convergent, Cumulative
from kvdir.core.views import (
    DumpPart,
    HoldingView,
    LoadView,
    NamespaceView,
    NodeView,
    StatusView,
    SumsView,
    TotalView,
    ViewScope,
)
from kvdir.location import PROTOCOL_VERSION
from kvdir.rpc.event_codec import decode_reads, encode_reads
from kvdir.rpc.lookup_codec import decode_trust, encode_trust
from kvdir.v1 import admin_pb2, common_pb2


def encode_cumulative(figure: Cumulative, *, now_s: float) -> common_pb2.CumulativeFigure:
    since_s = figure.untrusted_since_s
    return common_pb2.CumulativeFigure(
        value=figure.value,
        trusted=figure.trusted,
        as_of_ms=_age_ms(figure.as_of_s, now_s),
        untrusted_since_ms=0 if since_s is None else _age_ms(since_s, now_s),
        reason=figure.reason,
    )


def decode_cumulative(figure: common_pb2.CumulativeFigure, *, now_s: float) -> Cumulative:
    return Cumulative(
        value=figure.value,
        trusted=figure.trusted,
        as_of_s=now_s - figure.as_of_ms / 1000,
        untrusted_since_s=None if figure.trusted else now_s - figure.untrusted_since_ms / 1000,
        reason=figure.reason,
    )


def encode_node(view: NodeView, *, now_s: float) -> admin_pb2.NodeInfo:
    return admin_pb2.NodeInfo(
        trust=encode_trust(view.trust),
        last_seq=view.last_seq,
        announced_seq=view.announced_seq,
        gaps=view.gaps,
        replays=view.replays,
        snapshots=view.snapshots,
        sketches=view.sketches,
        missed_events=view.missed_events,
        used_bytes=view.used_bytes.value,
        capacity_bytes=view.capacity_bytes.value,
        dropped_events=view.dropped_events,
        holdings=[
            admin_pb2.Holding(
                namespace_digest=holding.namespace_digest,
                tier=holding.tier,  # type: ignore[arg-type]
                blocks=encode_cumulative(holding.blocks, now_s=now_s),
                bytes=encode_cumulative(holding.bytes, now_s=now_s),
                owner_blocks=holding.owner_blocks,
                owner_at_seq=holding.owner_at_seq,
            )
            for holding in view.holdings
        ],
        untrusted_ms=int(view.untrusted_s * 1000),
        started_unix_ms=view.started_unix_ms,
        namespace_digests=view.namespaces,
        reads=encode_reads(view.reads) if view.reads is not None else None,
    )


def decode_node(info: admin_pb2.NodeInfo, *, now_s: float) -> NodeView:
    trust = decode_trust(info.trust)
    heard_s = now_s - trust.age_s
    return NodeView(
        trust=trust,
        last_seq=info.last_seq,
        announced_seq=info.announced_seq,
        gaps=info.gaps,
        replays=info.replays,
        snapshots=info.snapshots,
        sketches=info.sketches,
        missed_events=info.missed_events,
        namespaces=tuple(info.namespace_digests),
        used_bytes=Convergent(info.used_bytes, heard_s),
        capacity_bytes=Convergent(info.capacity_bytes, heard_s),
        dropped_events=info.dropped_events,
        holdings=tuple(
            HoldingView(
                holding.namespace_digest,
                holding.tier,
                decode_cumulative(holding.blocks, now_s=now_s),
                decode_cumulative(holding.bytes, now_s=now_s),
                holding.owner_blocks,
                holding.owner_at_seq,
            )
            for holding in info.holdings
        ),
        untrusted_s=info.untrusted_ms / 1000,
        started_unix_ms=info.started_unix_ms,
        reads=decode_reads(info.reads) if info.HasField("reads") else None,
    )


def encode_sums(view: SumsView, *, now_s: float) -> admin_pb2.ViewsResponse:
    return admin_pb2.ViewsResponse(
        protocol_version=PROTOCOL_VERSION,
        totals=[
            admin_pb2.TotalView(
                scope=int(item.scope),  # type: ignore[arg-type]
                subject=item.subject,
                blocks=encode_cumulative(item.blocks, now_s=now_s),
                bytes=encode_cumulative(item.bytes, now_s=now_s),
            )
            for item in view.totals
        ],
        loads=[
            admin_pb2.LoadView(
                node=item.node,
                used_bytes=_encode_convergent(item.used_bytes, now_s=now_s),
                capacity_bytes=_encode_convergent(item.capacity_bytes, now_s=now_s),
                oldest_use_ms=_encode_convergent(item.oldest_use_ms, now_s=now_s),
                read_bytes_per_s=_encode_convergent(item.read_bytes_per_s, now_s=now_s),
            )
            for item in view.loads
        ],
    )


def decode_sums(response: admin_pb2.ViewsResponse, *, now_s: float) -> SumsView:
    """Sums of a scope that this release does not know are left out."""
    return SumsView(
        totals=tuple(
            TotalView(
                ViewScope(item.scope),
                item.subject,
                decode_cumulative(item.blocks, now_s=now_s),
                decode_cumulative(item.bytes, now_s=now_s),
            )
            for item in response.totals
            if item.scope in _SCOPES
        ),
        loads=tuple(
            LoadView(
                item.node,
                _decode_convergent(item.used_bytes, now_s=now_s),
                _decode_convergent(item.capacity_bytes, now_s=now_s),
                _decode_convergent(item.oldest_use_ms, now_s=now_s),
                _decode_convergent(item.read_bytes_per_s, now_s=now_s),
            )
            for item in response.loads
        ),
    )


def _encode_convergent(figure: Convergent, *, now_s: float) -> common_pb2.ConvergentFigure:
    return common_pb2.ConvergentFigure(value=figure.value, as_of_ms=_age_ms(figure.as_of_s, now_s))


def _decode_convergent(figure: common_pb2.ConvergentFigure, *, now_s: float) -> Convergent:
    return Convergent(figure.value, now_s - figure.as_of_ms / 1000)


def encode_status(view: StatusView) -> admin_pb2.StatusResponse:
    return admin_pb2.StatusResponse(
        protocol_version=PROTOCOL_VERSION,
        version=view.version,
        coordinator=view.coordinator,
        uptime_ms=int(view.uptime_s * 1000),
        warming=view.warming,
        blocks=view.blocks,
        index_bytes=view.index_bytes,
        streams_synced=view.streams_synced,
        streams_total=view.streams_total,
        namespaces=[
            common_pb2.Namespace(
                digest=item.digest,
                canonical_json=item.canonical_json.encode(),
                block_bytes=item.block_bytes,
                block_tokens=item.block_tokens,
            )
            for item in view.namespaces
        ],
        lookups=view.lookups,
        lookup_blocks=view.lookup_blocks,
        lookup_hits=view.lookup_hits,
        events_applied=view.events_applied,
        events_rejected=dict(view.events_rejected),
        stale_reports=view.stale_reports,
        stale_reports_ignored=view.stale_reports_ignored,
        partial=view.partial,
        restored_blocks=view.restored_blocks,
        evicted_blocks=view.evicted_blocks,
        max_index_bytes=view.max_index_bytes,
        store=view.store,
        store_fault=view.store_fault,
    )


def decode_status(response: admin_pb2.StatusResponse) -> StatusView:
    return StatusView(
        version=response.version,
        coordinator=response.coordinator,
        uptime_s=response.uptime_ms / 1000,
        warming=response.warming,
        blocks=response.blocks,
        index_bytes=response.index_bytes,
        streams_synced=response.streams_synced,
        streams_total=response.streams_total,
        namespaces=tuple(
            NamespaceView(item.digest, item.canonical_json.decode(), item.block_bytes, item.block_tokens)
            for item in response.namespaces
        ),
        lookups=response.lookups,
        lookup_blocks=response.lookup_blocks,
        lookup_hits=response.lookup_hits,
        events_applied=response.events_applied,
        events_rejected=dict(response.events_rejected),
        stale_reports=response.stale_reports,
        stale_reports_ignored=response.stale_reports_ignored,
        partial=response.partial,
        restored_blocks=response.restored_blocks,
        evicted_blocks=response.evicted_blocks,
        max_index_bytes=response.max_index_bytes,
        store=response.store or "memory",
        store_fault=response.store_fault,
    )


def encode_part(part: DumpPart) -> admin_pb2.DumpChunk:
    return admin_pb2.DumpChunk(keys=part.keys, sets=part.sets, holder_sets=part.holder_sets, nodes=part.nodes)


def decode_part(chunk: admin_pb2.DumpChunk) -> DumpPart:
    return DumpPart(chunk.keys, chunk.sets, tuple(chunk.holder_sets), tuple(chunk.nodes))


def _age_ms(at_s: float, now_s: float) -> int:
    return max(0, int((now_s - at_s) * 1000))


_SCOPES = frozenset(int(scope) for scope in ViewScope)

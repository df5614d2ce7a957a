"""kvdir.v1 event messages <-> values. Total in the decoding direction: judging what it means is the core's work.

`decode_events` is on the hot path: one attribute access a field, nothing per block.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvdir.core.directory import Hello
from kvdir.core.effects import RequestSketch
from kvdir.core.event import (
    MAX_SOURCE_NAME,
    NO_DOUBT,
    READ_SOURCES,
    Batch,
    Doubt,
    Event,
    EvictRequest,
    EvictResult,
    Heartbeat,
    HeartbeatFigures,
    OwnerCount,
    ReadFigures,
    ReadSource,
    SnapshotChunk,
)
from kvdir.core.feedback import StaleReport
from kvdir.core.namespaces import Announced
from kvdir.core.policy import ANONYMOUS, Identity
from kvdir.core.sketches import SketchPart, SketchStatement
from kvdir.fingerprint import Fingerprints
from kvdir.location import PROTOCOL_VERSION
from kvdir.namespace import Namespace
from kvdir.v1 import common_pb2, events_pb2


def decode_events(events: Iterable[events_pb2.Event]) -> list[Event]:
    """In order; kinds, tiers and widths as they came."""
    out = []
    for event in events:
        fingerprints = event.fingerprints
        out.append(Event(event.kind, event.tier, event.namespace_digest, fingerprints.packed, fingerprints.width or 32))
    return out


def encode_event(event: Event) -> events_pb2.Event:
    return events_pb2.Event(
        kind=event.kind,  # type: ignore[arg-type]  # open enum: unknown numbers travel, too
        tier=event.tier,  # type: ignore[arg-type]
        namespace_digest=event.namespace_digest,
        fingerprints=common_pb2.Fingerprints(packed=event.packed, width=event.width) if event.packed else None,
    )


def encode_batch(epoch: int, batch: Batch) -> events_pb2.PublishRequest:
    return events_pb2.PublishRequest(
        batch=events_pb2.Batch(
            epoch=epoch,
            first_seq=batch.first_seq,
            events=[encode_event(event) for event in batch.events],
            replay=batch.replay,
        )
    )


def decode_chunk(chunk: events_pb2.SnapshotChunk) -> SnapshotChunk:
    return SnapshotChunk(
        snapshot_id=chunk.snapshot_id,
        at_seq=chunk.at_seq,
        index=chunk.index,
        entries=tuple(decode_events(chunk.entries)),
        last=chunk.last,
        total_blocks=chunk.total_blocks,
    )


def encode_chunk(epoch: int, chunk: SnapshotChunk) -> events_pb2.PublishRequest:
    return events_pb2.PublishRequest(
        snapshot=events_pb2.SnapshotChunk(
            epoch=epoch,
            snapshot_id=chunk.snapshot_id,
            at_seq=chunk.at_seq,
            index=chunk.index,
            entries=[encode_event(entry) for entry in chunk.entries],
            last=chunk.last,
            total_blocks=chunk.total_blocks,
        )
    )


def decode_heartbeat(heartbeat: events_pb2.Heartbeat) -> Heartbeat:
    counts = tuple(OwnerCount(count.namespace_digest, count.tier, count.blocks, count.digest) for count in heartbeat.counts)
    figures = HeartbeatFigures(
        heartbeat.used_bytes,
        heartbeat.capacity_bytes,
        counts if heartbeat.counted else None,
        heartbeat.oldest_use_ms,
        heartbeat.read_bytes_per_s,
        decode_reads(heartbeat.reads) if heartbeat.HasField("reads") else None,
    )
    return Heartbeat(heartbeat.last_seq, figures, heartbeat.dropped_events, _decode_doubt(heartbeat.doubt))


def encode_reads(reads: ReadFigures) -> events_pb2.ReadFigures:
    return events_pb2.ReadFigures(
        hit_local_blocks=reads.hit_local,
        hit_peer_blocks=reads.hit_peer,
        miss_blocks=reads.miss,
        stale_blocks=reads.stale,
        corrupt_blocks=reads.corrupt,
        late_blocks=reads.late,
        skipped_blocks=reads.skipped,
        read_bytes=reads.read_bytes,
        sources=[events_pb2.ReadSource(node=node, blocks=blocks, bytes=size) for node, blocks, size in reads.sources],
    )


def decode_reads(reads: events_pb2.ReadFigures) -> ReadFigures:
    return ReadFigures(
        hit_local=reads.hit_local_blocks,
        hit_peer=reads.hit_peer_blocks,
        miss=reads.miss_blocks,
        stale=reads.stale_blocks,
        corrupt=reads.corrupt_blocks,
        late=reads.late_blocks,
        skipped=reads.skipped_blocks,
        read_bytes=reads.read_bytes,
        sources=tuple(
            ReadSource(item.node, item.blocks, item.bytes)
            for item in reads.sources[:READ_SOURCES]
            if len(item.node) <= MAX_SOURCE_NAME
        ),
    )


def _decode_doubt(doubt: events_pb2.Doubt) -> Doubt:
    return Doubt(doubt.number, doubt.words, bool(doubt.words)) if doubt.number else NO_DOUBT


def _encode_doubt(doubt: Doubt) -> events_pb2.Doubt | None:
    return events_pb2.Doubt(number=doubt.number, words=doubt.words if doubt.lasts else "") if doubt.number else None


def encode_heartbeat(epoch: int, heartbeat: Heartbeat) -> events_pb2.PublishRequest:
    figures = heartbeat.figures
    return events_pb2.PublishRequest(
        heartbeat=events_pb2.Heartbeat(
            epoch=epoch,
            last_seq=heartbeat.last_seq,
            used_bytes=figures.used_bytes,
            capacity_bytes=figures.capacity_bytes,
            dropped_events=heartbeat.dropped_events,
            counts=[
                events_pb2.OwnerCount(
                    namespace_digest=count.namespace_digest,
                    tier=count.tier,  # type: ignore[arg-type]
                    blocks=count.blocks,
                    digest=count.digest,
                )
                for count in figures.counts or ()
            ],
            counted=figures.counts is not None,
            oldest_use_ms=figures.oldest_use_ms,
            read_bytes_per_s=figures.read_bytes_per_s,
            reads=encode_reads(figures.reads) if figures.reads is not None else None,
            doubt=_encode_doubt(heartbeat.doubt),
        )
    )


def decode_sketch(sketch: events_pb2.Sketch) -> SketchStatement:
    return SketchStatement(sketch.request_id, sketch.at_seq, tuple(map(decode_part, sketch.parts)))


def encode_sketch(epoch: int, statement: SketchStatement) -> events_pb2.PublishRequest:
    return events_pb2.PublishRequest(
        sketch=events_pb2.Sketch(
            epoch=epoch,
            request_id=statement.request_id,
            at_seq=statement.at_seq,
            parts=map(encode_part, statement.parts),
        )
    )


def encode_part(part: SketchPart) -> events_pb2.SketchPart:
    return events_pb2.SketchPart(
        namespace_digest=part.namespace_digest,
        tier=part.tier,  # type: ignore[arg-type]
        blocks=part.blocks,
        digest=part.digest,
        encoded=part.encoded,
    )


def decode_part(part: events_pb2.SketchPart) -> SketchPart:
    """Tiers as they came."""
    return SketchPart(part.namespace_digest, part.tier, part.blocks, part.digest, part.encoded)


def encode_sketch_request(effect: RequestSketch) -> events_pb2.PublishResponse:
    return events_pb2.PublishResponse(
        sketch_request=events_pb2.SketchRequest(
            request_id=effect.request_id,
            reason=effect.reason,
            cells=effect.cells,
            parts=[
                events_pb2.OwnerPart(namespace_digest=digest, tier=tier)  # type: ignore[arg-type]
                for digest, tier in effect.parts
            ],
        )
    )


def decode_hello(hello: events_pb2.Hello) -> Hello:
    return Hello(
        node=hello.node,
        epoch=hello.epoch,
        last_seq=hello.last_seq,
        peer_address=hello.peer_address,
        started_unix_ms=hello.started_unix_ms,
        namespaces=tuple(Announced(item.digest, item.canonical_json, item.block_bytes) for item in hello.namespaces),
        doubt=_decode_doubt(hello.doubt),
    )


def encode_hello(
    *,
    node: str,
    epoch: int,
    last_seq: int,
    peer_address: str,
    started_unix_ms: int,
    namespaces: Iterable[Namespace],
    agent_version: str,
    doubt: Doubt = NO_DOUBT,
) -> events_pb2.PublishRequest:
    return events_pb2.PublishRequest(
        hello=events_pb2.Hello(
            protocol_version=PROTOCOL_VERSION,
            node=node,
            epoch=epoch,
            last_seq=last_seq,
            peer_address=peer_address,
            started_unix_ms=started_unix_ms,
            namespaces=[encode_namespace(namespace) for namespace in namespaces],
            agent_version=agent_version,
            doubt=_encode_doubt(doubt),
        )
    )


def encode_namespace(namespace: Namespace) -> common_pb2.Namespace:
    return common_pb2.Namespace(
        digest=namespace.digest,
        canonical_json=namespace.canonical().encode(),
        block_bytes=namespace.block_bytes,
        block_tokens=namespace.block_tokens,
    )


def encode_evict_request(epoch: int, request: EvictRequest) -> events_pb2.PublishResponse:
    return events_pb2.PublishResponse(
        evict_request=events_pb2.EvictRequest(
            epoch=epoch,
            request_id=request.request_id,
            namespace_digest=request.namespace_digest,
            tier=request.tier,  # type: ignore[arg-type]
            max_blocks=request.max_blocks,
            keep_blocks=request.keep_blocks,
            older_than_ms=int(request.older_than_s * 1000),
        )
    )


def decode_evict_request(message: events_pb2.EvictRequest) -> EvictRequest:
    return EvictRequest(
        request_id=message.request_id,
        namespace_digest=message.namespace_digest,
        tier=message.tier,
        max_blocks=message.max_blocks,
        keep_blocks=message.keep_blocks,
        older_than_s=message.older_than_ms / 1000,
    )


def encode_evict_result(epoch: int, result: EvictResult) -> events_pb2.PublishRequest:
    return events_pb2.PublishRequest(
        evict_result=events_pb2.EvictResult(
            epoch=epoch,
            request_id=result.request_id,
            evicted_blocks=result.evicted_blocks,
            owner_seq=result.owner_seq,
            reason=result.reason,
        )
    )


def decode_evict_result(message: events_pb2.EvictResult) -> EvictResult:
    return EvictResult(message.request_id, message.evicted_blocks, message.owner_seq, message.reason)


def decode_stale_report(request: events_pb2.ReportStaleRequest, who: Identity = ANONYMOUS) -> StaleReport:
    """who: reports it. Raises InvalidInput for a wrong width or packing."""
    return StaleReport(
        node=request.node,
        epoch=request.epoch,
        owner_seq=request.owner_seq,
        namespace_digest=request.namespace_digest,
        tier=request.tier,
        fingerprints=Fingerprints(request.fingerprints.packed, request.fingerprints.width),
        reporter=who.signed(request.reporter),
    )


def encode_stale_report(report: StaleReport) -> events_pb2.ReportStaleRequest:
    return events_pb2.ReportStaleRequest(
        reporter=report.reporter,
        node=report.node,
        epoch=report.epoch,
        owner_seq=report.owner_seq,
        namespace_digest=report.namespace_digest,
        tier=report.tier,  # type: ignore[arg-type]
        fingerprints=common_pb2.Fingerprints(packed=report.fingerprints.packed, width=report.fingerprints.width),
    )

"""Makes the views operators see, the parts of a dump, and checks invariants. Reads only; costs O(what is asked for)."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from kvdir.core.directory import Directory
from kvdir.core.holders import Holder
from kvdir.core.lookup import translate
from kvdir.core.node import Stream
from kvdir.core.policy import ALL, Grant
from kvdir.core.trust import Convergent
from kvdir.core.views import DumpPart, HoldingView, NamespaceView, NodeView, StatusView
from kvdir.location import StreamState


def node_views(directory: Directory, *, now_s: float) -> tuple[NodeView, ...]:
    """Every node that is known, by name; those that left too, until they are forgotten."""
    streams = [node.stream for node in directory.nodes.values() if node.stream is not None]
    return tuple(node_view(stream, now_s=now_s) for stream in sorted(streams, key=lambda stream: stream.node))


def node_view(stream: Stream, *, now_s: float) -> NodeView:
    """One node."""
    cursor = stream.cursor
    trusted = cursor.state is StreamState.SYNCED
    return NodeView(
        trust=stream.trust(now_s),
        last_seq=cursor.applied_seq,
        announced_seq=cursor.top_seq,
        gaps=cursor.gaps,
        replays=cursor.replays,
        snapshots=cursor.snapshots,
        sketches=cursor.sketches,
        missed_events=cursor.missed_events,
        used_bytes=Convergent(stream.figures.used_bytes, stream.heartbeat_s),
        capacity_bytes=Convergent(stream.figures.capacity_bytes, stream.heartbeat_s),
        dropped_events=stream.dropped_events,
        holdings=tuple(_holding_view(stream, holder) for holder in stream.holders.values()),
        untrusted_s=cursor.untrusted_total_s + (0.0 if trusted else now_s - cursor.untrusted_since_s),
        started_unix_ms=stream.started_unix_ms,
        namespaces=tuple(sorted(stream.namespaces)),
        reads=stream.figures.reads,
    )


def _holding_view(stream: Stream, holder: Holder[Stream]) -> HoldingView:
    digest = holder.namespace.digest
    count = stream.owner_counts.get((digest, holder.tier))
    return HoldingView(
        namespace_digest=digest,
        tier=holder.tier,
        blocks=stream.blocks_figure(holder),
        bytes=stream.blocks_figure(holder, block_bytes=holder.namespace.counted_bytes),
        owner_blocks=count.blocks if count else 0,
        owner_at_seq=stream.owner_counts_seq,
    )


def status_view(directory: Directory, *, version: str, coordinator: str, now_s: float) -> StatusView:
    """The directory as a whole."""
    stats, counters = directory.index.stats(), directory.counters
    live = [node.stream for node in directory.nodes.values() if node.stream is not None and not node.stream.fenced]
    return StatusView(
        version=version,
        coordinator=coordinator,
        uptime_s=now_s - directory.started_s,
        warming=directory.warming,
        blocks=stats.blocks,
        index_bytes=stats.bytes,
        streams_synced=sum(stream.cursor.state is StreamState.SYNCED for stream in live),
        streams_total=len(live),
        namespaces=tuple(
            NamespaceView(known.digest, known.namespace.canonical(), known.block_bytes, known.namespace.block_tokens)
            for known in directory.namespaces
        ),
        lookups=counters.lookups,
        lookup_blocks=counters.lookup_blocks,
        lookup_hits=counters.lookup_hits,
        events_applied=directory.ingest.applied,
        events_rejected=dict(directory.ingest.rejected),
        stale_reports=counters.stale_reports,
        stale_reports_ignored=counters.stale_reports_ignored,
        partial=directory.partial,
        evicted_blocks=directory.room.evicted_blocks,
        max_index_bytes=directory.limits.max_index_bytes,
        restored_blocks=sum(holder.blocks for stream in live if stream.restored for holder in stream.holders.values()),
    )


def dump_part(
    directory: Directory, cursor: int, *, max_blocks: int, namespace_digest: bytes = b"", node: str = "", tenants: Grant = ALL
) -> tuple[int, DumpPart]:
    """(next cursor or 0 at the end, one part). Start with 0. Restricted to tenants, a namespace or a node where given."""
    cursor, keys, numbers, sets = directory.index.dump(cursor, max_blocks)

    def wanted(number: int) -> bool:
        holder = directory.holders.get(number)
        if holder is None or holder.namespace.namespace.tenant not in tenants:
            return False
        return namespace_digest in (b"", holder.namespace.digest) and node in ("", holder.owner.node)

    narrowed = tuple(
        array("I", [number for number in memoryview(packed).cast("I") if wanted(number)]).tobytes() for packed in sets
    )
    translation = translate(directory.holders, narrowed)
    nodes = tuple(stream.node for stream in translation.streams)
    if translation.renumber is None:
        return cursor, DumpPart(keys, numbers, translation.sets, nodes)
    kept_keys, kept_numbers = array("Q"), array("I")
    for key, number in zip(memoryview(keys).cast("Q"), memoryview(numbers).cast("I"), strict=True):
        if translation.renumber[number] >= 0:
            kept_keys.append(key)
            kept_numbers.append(translation.renumber[number])
    return cursor, DumpPart(kept_keys.tobytes(), kept_numbers.tobytes(), translation.sets, nodes)


def faults(directory: Directory) -> Iterator[str]:
    """Broken invariants, in words; nothing when all is well. For tests and `--validate`; costs O(holders x sets)."""
    owned: set[int] = set()
    for name, node in directory.nodes.items():
        stream = node.stream
        if stream is None:
            continue
        if stream.node != name:
            yield f"node {name} has a stream of {stream.node}"
        if stream.fenced and (stream.holders or stream.fresh):
            yield f"fenced {name} still has holders"
        if stream.fresh and stream.intake is None:
            yield f"{name} has fresh holders without a snapshot"
        for holders, visible in ((stream.holders, True), (stream.fresh, False)):
            for key, holder in holders.items():
                owned.add(holder.number)
                if holder.owner is not stream or key != (holder.namespace.digest, holder.tier):
                    yield f"holder {holder.number} is filed under the wrong stream or key"
                if holder.visible is not visible:
                    yield f"holder {holder.number} of {name} has the wrong visibility"
                if holder.blocks != directory.index.holder_blocks(holder.number):
                    yield f"holder {holder.number} of {name} counts {holder.blocks}, index has other"
                if not holder.partial and holder.sketch.count != holder.blocks and not stream.restored:
                    yield f"holder {holder.number} of {name} counts {holder.blocks}, sketch {holder.sketch.count}"
                if holder.partial and holder.blocks > holder.sketch.count and stream.exact:
                    yield f"partial holder {holder.number} of {name} counts {holder.blocks}, its owner {holder.sketch.count}"
        cursor = stream.cursor
        partial = sum(holder.partial for holder in directory.holders)
        if partial != directory.holders.partial:
            yield f"{partial} holders are partial, {directory.holders.partial} are counted"
        if cursor.state is StreamState.SYNCED and (cursor.missing_events or cursor.applied_seq != cursor.top_seq):
            yield f"{name} is synced with events missing"
    leaked = {holder.number for holder in directory.holders} - owned
    if leaked:
        yield f"holders without a stream: {sorted(leaked)}"

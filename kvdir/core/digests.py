"""Count and digest of what the directory believes of every stream, for comparing coordinators. Reads only; O(holders).

The digest is that of the sketch which the index keeps for a holder: of the set of blocks, independent of order, so two
coordinators that hold the same have the same digest, whatever way their sets came about.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvdir.core.directory import Directory
from kvdir.core.node import Stream
from kvdir.core.sketches import SketchPart
from kvdir.location import NodeTrust


@dataclass(frozen=True, slots=True)
class StreamDigest:
    """One (node, epoch) at one coordinator. announced_seq: highest number that it heard of.

    exact: the parts are of the state as of applied_seq and of nothing else, so two exact digests of one stream at one number
    must be equal; False while later events came early, a reader's feedback is unconfirmed, or the content is a checkpoint's.
    """

    trust: NodeTrust
    applied_seq: int
    announced_seq: int
    parts: tuple[SketchPart, ...]
    exact: bool


@dataclass(frozen=True, slots=True)
class DigestsView:
    """Every live stream of one coordinator, by node. coordinator: the name that it gives itself."""

    coordinator: str
    streams: tuple[StreamDigest, ...]


def stream_digests(directory: Directory, *, node: str = "", sketches: bool = False, now_s: float) -> tuple[StreamDigest, ...]:
    """Of all live streams, or of one node's. sketches: with the encoded sketches, 24 KiB for each part."""
    streams = (known.stream for known in directory.nodes.values() if node in ("", known.name))
    live = [stream for stream in streams if stream is not None and not stream.fenced]
    return tuple(_stream_digest(stream, sketches, now_s) for stream in sorted(live, key=lambda stream: stream.node))


def _stream_digest(stream: Stream, sketches: bool, now_s: float) -> StreamDigest:
    cursor = stream.cursor
    return StreamDigest(
        trust=stream.trust(now_s),
        applied_seq=cursor.applied_seq,
        announced_seq=cursor.top_seq,
        parts=tuple(_parts(stream, sketches)),
        exact=(
            not stream.restored
            and cursor.missing_events == cursor.top_seq - cursor.applied_seq
            and not any(holder.doubt or (holder.partial and not stream.exact) for holder in stream.holders.values())
        ),
    )


def _parts(stream: Stream, sketches: bool) -> Iterator[SketchPart]:
    for (digest, tier), holder in sorted(stream.holders.items()):
        if holder.claimed:
            encoded = holder.sketch.encode() if sketches else b""
            yield SketchPart(digest, tier, holder.claimed, holder.sketch.digest, encoded)

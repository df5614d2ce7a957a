"""Puts a checkpoint into an empty directory: hints, until the nodes say themselves what they hold.

Rules: a restored stream has the epoch it had and no sequence at all, so the same epoch is asked for an absolute statement when
it returns, and a newer one fences it at once; it is damaged in words, so none of its figures is trusted. A node that does not
return is stale, then left out, then an orphan, like any other. What does not fit our limits is left out and counted.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvdir.core.checkpoint import CheckpointRefused, Head, decode_blocks, decode_json
from kvdir.core.directory import Directory
from kvdir.core.holders import Holder
from kvdir.core.namespaces import Announced
from kvdir.core.node import Stream
from kvdir.core.story import Kind
from kvdir.core.stream import StreamCursor
from kvdir.location import Tier

_TIERS = frozenset(int(tier) for tier in Tier)
_LATEST_S = 2**32 - 1


@dataclass(slots=True)
class Restored:
    """What came of it. blocks: pairs of block and holder. left_out: nodes, namespaces and holders that did not fit."""

    nodes: int = 0
    blocks: int = 0
    left_out: int = 0


def restore(directory: Directory, head: Head, parsed: Iterable[tuple[bytes, bytes]], *, now_s: float, age_s: float) -> Restored:
    """Applies the frames after HEAD.

    age_s: since it was written. The directory must be empty and its index opened with head.seed. Raises CheckpointRefused,
    after which the directory is to be thrown away.
    """
    out = Restored()
    directory.room.expect(head.blocks)
    holders: dict[int, Holder[Stream] | None] = {}
    # Last access is on the writer's monotonic clock; ours may have started anew. What would be before its start is its start.
    shift_s = int(now_s - age_s) - head.now_s
    for kind, payload in parsed:
        try:
            if kind == b"NSPC":
                out.left_out += not _namespace(directory, decode_json(payload))
            elif kind == b"NODE":
                _node(directory, decode_json(payload), holders, out, now_s=now_s, age_s=age_s)
            elif kind == b"BLKS":
                _blocks(directory, payload, holders, out, shift_s=shift_s, now_s=now_s)
        except (KeyError, TypeError, ValueError, AttributeError, MemoryError) as error:
            raise CheckpointRefused(f"it is damaged: {type(error).__name__}: {error}") from error
    return out


def _namespace(directory: Directory, fields: Mapping[str, Any]) -> bool:
    announced = Announced(bytes.fromhex(fields["digest"]), fields["canonical"].encode(), int(fields["block_bytes"]))
    return not directory.namespaces.announce(announced)


def _node(
    directory: Directory,
    fields: Mapping[str, Any],
    holders: dict[int, Holder[Stream] | None],
    out: Restored,
    *,
    now_s: float,
    age_s: float,
) -> None:
    name, epoch = str(fields["node"]), int(fields["epoch"])
    if len(directory.nodes) >= directory.limits.max_streams or name in directory.nodes:
        out.left_out += 1
        holders.update({int(number): None for _, _, number in fields["holders"]})
        return
    cursor = StreamCursor(directory.limits.repair, now_s=now_s, tallies=directory.repairs)
    node = directory.add_node(name)
    stream = node.stream = Stream(
        name, epoch, cursor, str(fields["peer_address"]), int(fields["started_unix_ms"]), restored=True, slot=node.slot
    )
    known = {bytes.fromhex(digest) for digest in fields["namespaces"]}
    stream.namespaces = frozenset(digest for digest in known if directory.namespaces.get(digest) is not None)
    for old, newer in fields["fenced"]:
        node.remember_fence(int(old), int(newer))
    for hexadecimal, tier, number in fields["holders"]:
        digest = bytes.fromhex(hexadecimal)
        holder = None
        if digest in stream.namespaces and tier in _TIERS:
            holder = directory.holders.create(stream, directory.namespaces.require(digest), tier, visible=True)
        if holder is not None:
            stream.holders[digest, tier] = holder
        holders[int(number)] = holder
        out.left_out += holder is None
    cursor.damage(f"restored from a checkpoint {age_s:.0f} s old, not confirmed by the node yet", now_s=now_s)
    directory.story.note(now_s, name, epoch, Kind.RESTORED, f"from a checkpoint {age_s:.0f} s old")
    out.nodes += 1


def _blocks(
    directory: Directory,
    payload: bytes,
    holders: Mapping[int, Holder[Stream] | None],
    out: Restored,
    *,
    shift_s: int,
    now_s: float,
) -> None:
    blocks = decode_blocks(payload)
    times = memoryview(blocks.access).cast("I")
    access = array("I", [min(max(0, then_s + shift_s), _LATEST_S) for then_s in times]).tobytes()
    for number in blocks.ids:
        holder = holders[number]
        if holder is not None:
            out.blocks += directory.ingest.restore(holder, blocks.keys, access, now_s)

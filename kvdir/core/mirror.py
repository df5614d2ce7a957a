"""Mirrors: whoever has to know, at once and in order, when what lookups may answer changes.

Owns the contract, and the wrapper around the index through which every change of blocks passes, so that no path is forgotten.
There are two mirrors: the log of the feed (feed.py) and the roster of a region (region_roster.py). Usually there is none, which
costs a look at an empty list.

Rules for the core, on which every mirror relies:
- a namespace, a node and a holder are told before anything that names them, and told gone after everything that did;
- numbers of nodes (slots) and holders are used again only after they were told gone (`node_gone`, `dropped`);
- a stream that loses trust is told before, and one that wins trust behind, the changes of blocks that go with it;
- what a new snapshot of a node replaces is dropped after the new holders were made visible.
Rules for mirrors: be quick, never fail, never call back into the directory. Does not: say who reads.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from kvdir.core.namespaces import KnownNamespace
from kvdir.location import StreamState

if TYPE_CHECKING:
    from kvdir.core.holders import HolderTable
    from kvdir.core.node import Node, Stream
    from kvdir.index import BlockIndex, BlockSketch, IndexStats, Lookup, Packed


class Mirror(Protocol):
    """What is told, synchronously, in the order in which it happens. slot: stands for a node, below max_streams."""

    def namespace(self, known: KnownNamespace) -> None:
        """Known from now on."""

    def namespace_gone(self, digest: bytes) -> None:
        """No stream announces it any more."""

    def node(self, slot: int, stream: Stream, now_s: float) -> None:
        """A node's current stream is new, or something about its trust, age, address or `hidden` may have changed.

        Told at once when the epoch, the state or `hidden` changed; everything else by the next tick. Ask `stream.trust`.
        """

    def node_gone(self, slot: int) -> None:
        """Forgotten; the slot may name another node later."""

    def holder(self, number: int, slot: int, known: KnownNamespace, tier: int, visible: bool) -> None:
        """Created without any block, or made visible."""

    def stored(self, holder: int, packed: Packed, width: int, now_s: int) -> None:
        """The holder has these blocks of its namespace now; some of them it had before."""

    def removed(self, holder: int, packed: Packed, width: int) -> None:
        """And these no more; some of them it did not have."""

    def dropped(self, holder: int) -> None:
        """The holder is gone, with everything under it."""

    def restored(self, keys: bytes, access: bytes, holder: int) -> None:
        """As `stored`, from a checkpoint: keys (u64) of the index's seed and last access (u32 seconds)."""


class Mirrors:
    """All mirrors of a directory, and which news of a stream they get when."""

    def __init__(self) -> None:
        self.each: list[Mirror] = []

    def stream(self, stream: Stream, now_s: float) -> None:
        """It is new, or its trust may be another."""
        stream.told_state, stream.untold = stream.cursor.state, False
        stream.forget_trust()  # it may be some milliseconds old
        for mirror in self.each:
            mirror.node(stream.slot, stream, now_s)

    def state(self, stream: Stream, now_s: float) -> None:
        """Around every input of a stream: another state is told at once."""
        stream.untold = True
        if self.each and stream.told_state is not stream.cursor.state:
            self.stream(stream, now_s)

    def tick(self, nodes: Iterable[Node], now_s: float) -> None:
        """Whoever had an input since the last tick, and whoever is not synced, whose reason may be another."""
        if not self.each:
            return
        for node in nodes:
            stream = node.stream
            if stream is None:
                continue
            if stream.untold or stream.cursor.state is not StreamState.SYNCED:
                self.stream(stream, now_s)

    def node_gone(self, slot: int) -> None:
        for mirror in self.each:
            mirror.node_gone(slot)


def introduce(
    mirror: Mirror, namespaces: Iterable[KnownNamespace], nodes: Iterable[Node], holders: HolderTable[Stream], *, now_s: float
) -> None:
    """Tells what there is, except for blocks."""
    for known in namespaces:
        mirror.namespace(known)
    for node in nodes:
        if node.stream is not None:
            mirror.node(node.slot, node.stream, now_s)
    for holder in holders:
        mirror.holder(holder.number, holder.owner.slot, holder.namespace, holder.tier, holder.visible)


class MirroredIndex:
    """A BlockIndex that tells mirrors what changed. `mirrors` is the directory's own list and may grow."""

    def __init__(self, index: BlockIndex, mirrors: list[Mirror]) -> None:
        self._index = index
        self._mirrors = mirrors
        # What changes nothing goes straight through.
        self.lookup = index.lookup
        self.holder_blocks = index.holder_blocks
        self.last_access = index.last_access
        self.keys = index.keys
        self.key_access = index.key_access
        self.dump = index.dump
        self.heads = index.heads
        self.make_room = index.make_room  # what it evicts is told by whoever counts it (room.py)
        self.sweep = index.sweep
        self.stats = index.stats

    def store(
        self, fingerprints: Packed, width: int, *, scope: int, holder: int, now_s: int, sketch: BlockSketch | None = None
    ) -> int:
        try:
            added = self._index.store(fingerprints, width, scope=scope, holder=holder, now_s=now_s, sketch=sketch)
        except MemoryError:
            if self._mirrors:
                self._tell_stored(holder, self._fitted(fingerprints, width, scope, holder), width, now_s)
            raise
        if added and self._mirrors:
            self._tell_stored(holder, fingerprints, width, now_s)
        return added

    def remove(self, fingerprints: Packed, width: int, *, scope: int, holder: int, sketch: BlockSketch | None = None) -> int:
        lost = self._index.remove(fingerprints, width, scope=scope, holder=holder, sketch=sketch)
        if lost:
            for mirror in self._mirrors:
                mirror.removed(holder, fingerprints, width)
        return lost

    def drop(self, holder: int) -> int:
        lost = self._index.drop(holder)
        for mirror in self._mirrors:
            mirror.dropped(holder)
        return lost

    def restore(self, keys: Packed, access: Packed, *, holder: int) -> int:
        added = self._index.restore(keys, access, holder=holder)
        if added:
            for mirror in self._mirrors:
                mirror.restored(bytes(keys), bytes(access), holder)
        return added

    def _tell_stored(self, holder: int, packed: Packed, width: int, now_s: int) -> None:
        for mirror in self._mirrors:
            mirror.stored(holder, packed, width, now_s)

    def _fitted(self, packed: Packed, width: int, scope: int, holder: int) -> bytes:
        """Of a store that ran out of memory: the blocks in front that the holder has now."""
        found: Lookup = self._index.lookup(packed, width, scope=scope)
        end = 0
        runs = memoryview(found.runs).cast("I").tolist()
        for start, count, number in zip(runs[::3], runs[1::3], runs[2::3], strict=True):
            if start != end or holder not in array("I", found.sets[number]):
                break
            end = start + count
        return bytes(memoryview(packed)[: end * width])


if TYPE_CHECKING:

    def _fits(index: MirroredIndex) -> tuple[BlockIndex, IndexStats]:
        return index, index.stats()

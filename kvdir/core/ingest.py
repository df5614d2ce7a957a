"""Applies single events to the holders of a stream, and counts what cannot be applied.

Rules: one bad event never costs the batch: it is skipped and counted by reason. An event whose meaning for figures we
hold is unknown (unknown kind, broken fingerprints) is *damage*: the stream's figures stay untrusted until a snapshot. An
unknown tier or namespace is no damage, because no figure of ours is about it. Idempotent: the index says what changed; of
holders that lost entries for want of memory only what comes in its turn is believed (room.py).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvdir.core.event import Event, EventKind
from kvdir.core.holders import Holder, HolderTable
from kvdir.core.namespaces import NamespaceTable
from kvdir.core.node import HolderKey, Stream
from kvdir.core.room import Room
from kvdir.location import Tier

if TYPE_CHECKING:
    from kvdir.index import BlockIndex, BlockSketch

_STORED, _REMOVED, _CLEARED = int(EventKind.STORED), int(EventKind.REMOVED), int(EventKind.CLEARED)
_TIERS = frozenset(int(tier) for tier in Tier)


class Ingest:
    """applied: events. stored_blocks, removed_blocks: as the index saw them change. rejected: events, by reason.

    sweep_due: a holder was dropped, so the index may have slots to free.
    """

    def __init__(self, index: BlockIndex, holders: HolderTable[Stream], namespaces: NamespaceTable, room: Room) -> None:
        self._index = index
        self._room = room
        self._holders = holders
        self._namespaces = namespaces
        self.applied = 0
        self.stored_blocks = 0
        self.removed_blocks = 0
        self.sweep_due = False
        self.rejected: Counter[str] = Counter()

    def apply(self, stream: Stream, seq: int, event: Event, now_s: float) -> None:
        """One event of a stream, in order or as a hint."""
        kind, tier, digest, packed, width = event
        key = (digest, tier)
        if kind == _STORED:
            holder = stream.holders.get(key)
            if holder is None:
                if not self._known(stream, key):
                    return
                holder = self._new_holder(stream, key, now_s, visible=True)
                if holder is None:
                    return
                stream.holders[key] = holder
            before = holder.claimed
            if self._store(stream, holder, packed, width, now_s, seq=seq):
                stream.unconfirmed_blocks += max(0, holder.claimed - before)
                stream.recent.add(seq, key, packed, width)
                self.applied += 1
        elif kind == _REMOVED:
            self._remove(stream, key, packed, width, now_s, seq=seq)
        elif kind == _CLEARED:
            self._clear(stream, key)
        else:
            self._reject(stream, "unknown-kind", f"an event of unknown kind {kind} was skipped", now_s)

    def fill(self, stream: Stream, entry: Event, now_s: float) -> bool:
        """One entry of a snapshot, into the fresh holders that nobody sees yet. False: the snapshot cannot be kept.

        An entry of an unknown tier or namespace is skipped and counted; no figure of ours is about it.
        """
        key = (entry.namespace_digest, entry.tier)
        holder = stream.fresh.get(key)
        if holder is None:
            if not self._known(stream, key):
                return True
            holder = self._new_holder(stream, key, now_s, visible=False)
            if holder is None:
                return False
            stream.fresh[key] = holder
        return self._store(stream, holder, entry.packed, entry.width, now_s, seq=None)

    def correct(self, stream: Stream, key: HolderKey, extra: bytes, missing: bytes, now_s: float) -> bool:
        """Applies a difference, as packed 16-byte items. False: what is extra was not there, or there is no holder left."""
        holder = stream.holders.get(key)
        if holder is None:
            holder = self._new_holder(stream, key, now_s, visible=True)
            if holder is None:
                return False
            stream.holders[key] = holder
        lost = self._take(holder, extra, 16, fold=True, now_s=now_s)
        return (holder.partial or lost * 16 == len(extra)) and self._store(stream, holder, missing, 16, now_s, seq=None)

    def retract(self, holder: Holder[Stream], packed: bytes, width: int, now_s: float) -> int:
        """Takes hints back although their owner has not said so; returns how many. Of a partial holder, only from lookups."""
        return self._take(holder, packed, width, fold=False, now_s=now_s)

    def restore(self, holder: Holder[Stream], keys: bytes, access: bytes, now_s: float) -> int:
        """Blocks of a checkpoint, by key (u64) and last access (u32); returns how many the holder did not have."""
        kept, access = self._room.thinned(keys, access)
        if len(kept) < len(keys):
            self._room.missed(holder, (len(keys) - len(kept)) // 8, now_s)
        added = 0
        for piece, then in zip(self._room.pieces(kept, 8), self._room.pieces(access, 4), strict=True):
            self._room.make(len(piece) // 8, holder, now_s)
            found = self._index.restore(piece, then, holder=holder.number)
            holder.blocks += found
            added += found
            self._room.settle(holder, now_s)
        self.stored_blocks += added
        return added

    def new_sketch(self) -> BlockSketch:
        """An empty one, such as holders have."""
        return self._holders.new_sketch()

    def withdraw(self, stream: Stream, digests: frozenset[bytes]) -> bool:
        """Takes namespaces from a stream, with all it holds there. False: it had none of them."""
        gone = stream.namespaces & digests
        stream.namespaces -= gone
        for key in [key for key in stream.holders if key[0] in gone]:
            self.drop(stream.holders.pop(key))
        return bool(gone)

    def drop(self, holder: Holder[Stream]) -> None:
        """The holder and everything under it is gone."""
        self.removed_blocks += holder.blocks
        self._holders.drop(holder)
        self.sweep_due = True

    def _store(
        self, stream: Stream, holder: Holder[Stream], packed: bytes, width: int, now_s: float, *, seq: int | None
    ) -> bool:
        """seq: of the event; None for a part of an absolute statement. False: not all of it was taken in."""
        try:
            for piece in self._room.pieces(packed, width):
                self._room.make(len(piece) // width if width else 0, holder, now_s)
                if holder.partial and seq is not None and not stream.folds(seq):
                    self.rejected["early-while-partial"] += 1
                    return False
                self._store_piece(holder, piece, width, now_s)
        except ValueError as error:
            self._reject(stream, "bad-fingerprints", f"an event was skipped: {error}", now_s)
            return False
        except MemoryError:
            holder.blocks = self._index.holder_blocks(holder.number)
            self._room.settle(holder, now_s)
            self._reject(
                stream,
                "no-memory",
                "the coordinator had no memory left for an event; --max-index-bytes bounds its index",
                now_s,
            )
            return False
        return True

    def _store_piece(self, holder: Holder[Stream], packed: bytes, width: int, now_s: float) -> None:
        sketch = None if holder.partial else holder.sketch
        added = self._index.store(
            packed, width, scope=holder.namespace.scope, holder=holder.number, now_s=int(now_s), sketch=sketch
        )
        if holder.partial:
            holder.sketch.insert(packed, width)
        holder.blocks += added
        self.stored_blocks += added
        self._room.settle(holder, now_s)

    def _take(self, holder: Holder[Stream], packed: bytes, width: int, *, fold: bool, now_s: float) -> int:
        """Takes blocks from a holder; returns how many the index had. fold: also from the sketch of a partial one."""
        sketch = None if holder.partial else holder.sketch
        lost = self._index.remove(packed, width, scope=holder.namespace.scope, holder=holder.number, sketch=sketch)
        if holder.partial and fold:
            holder.sketch.remove(packed, width)
        holder.blocks -= lost
        self.removed_blocks += lost
        self._room.settle(holder, now_s)
        return lost

    def _remove(self, stream: Stream, key: HolderKey, packed: bytes, width: int, now_s: float, *, seq: int) -> None:
        holder = stream.holders.get(key)
        if holder is None:
            if self._known(stream, key):
                self.applied += 1
            return
        try:
            self._take(holder, packed, width, fold=stream.folds(seq), now_s=now_s)
        except ValueError as error:
            self._reject(stream, "bad-fingerprints", f"an event was skipped: {error}", now_s)
            return
        self.applied += 1

    def _clear(self, stream: Stream, key: HolderKey) -> None:
        digest, tier = key
        if tier not in _TIERS:
            self.rejected["unknown-tier"] += 1
            return
        gone = [held for held in stream.holders if held[1] == tier and (not digest or held[0] == digest)]
        for held in gone:
            self.drop(stream.holders.pop(held))
        self.applied += 1

    def _new_holder(self, stream: Stream, key: HolderKey, now_s: float, *, visible: bool) -> Holder[Stream] | None:
        holder = self._holders.create(stream, self._namespaces.require(key[0]), key[1], visible=visible)
        if holder is None:
            self._reject(stream, "no-holder", "the coordinator has no holder number left", now_s)
        return holder

    def _known(self, stream: Stream, key: HolderKey) -> bool:
        digest, tier = key
        if tier not in _TIERS:
            self.rejected["unknown-tier"] += 1
            return False
        if digest not in stream.namespaces:
            self.rejected["unknown-namespace"] += 1
            return False
        return True

    def _reject(self, stream: Stream, reason: str, words: str, now_s: float) -> None:
        self.rejected[reason] += 1
        stream.cursor.damage(words, now_s=now_s)

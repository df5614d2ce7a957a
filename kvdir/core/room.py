"""Keeps the index within its bound, and keeps the books of what goes for it.

An entry that is evicted is unknown from then on: its owner may hold the block or not. What must not become unknown is
everything else that is known of the owner's stream, so a holder that lost entries is *partial*, and from then on its sketch no
longer follows the index but the owner:

    whole     the sketch gets exactly the changes that the index made; so it is of what lookups name
    partial   the sketch gets every event of the owner, in its turn and once; so it is of what the owner holds as of the last
              one, and lookups name a part of that

Either way it is what counts and digests are compared with, so sequence, figures, proofs and repair by sketch go on as ever.
It takes owners whose events are exact changes, which is what stating digests promises (sketches.py); the figures of others
are untrusted as long as they are partial. Rules for a partial holder:
- an event that is early (beyond a hole), or of a stream that is damaged, adds nothing: it comes again, or a statement covers
  it. One that removes takes entries out of lookups at once, but leaves the sketch alone;
- to become partial while the stream misses something, or blocks are in doubt, is damage: the sketch is not of what the owner
  said, and nobody knows by how much;
- an absolute statement (snapshot, sketch) is taken in as ever, and what does not fit of it is evicted again: nothing loops,
  because what is compared afterwards is the sketch;
- it is whole again when its sketch and the index count the same, because the one is a part of the other.

Does not: choose what goes (the index does, kvdir/index/csrc/evict.hpp).
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvdir.core.holders import Holder, HolderTable
from kvdir.core.node import Stream

if TYPE_CHECKING:
    from kvdir.core.mirror import Mirror
    from kvdir.index import BlockIndex, Evicted

_PIECE_BLOCKS = 1024  # so many always fit at once (BlockIndex.make_room)
_PIECE_BYTES = 128
_RESTORED_LOAD = 0.75  # of the index's slots; it allows 0.8


class Room:
    """evicted_blocks: pairs of block and holder, since the start. max_bytes: 0 for no bound; then nothing here does a thing."""

    def __init__(
        self, index: BlockIndex, holders: HolderTable[Stream], *, max_bytes: int = 0, mirrors: Sequence[Mirror] = ()
    ) -> None:
        self.max_bytes = max_bytes
        self.evicted_blocks = 0
        self._index = index
        self._holders = holders
        self._mirrors = mirrors
        self._share = 1.0
        self._piece_blocks = min(_PIECE_BLOCKS, max(1, max_bytes // _PIECE_BYTES))

    def pieces(self, packed: bytes, width: int) -> Sequence[bytes]:
        """A batch, in parts that there can be room for."""
        step = self._piece_blocks * width
        if not self.max_bytes or len(packed) <= step or step <= 0:
            return (packed,)
        return [packed[at : at + step] for at in range(0, len(packed), step)]

    def expect(self, blocks: int) -> None:
        """So many blocks come in the order of keys: `thinned` leaves an even part of them that fits.

        Evicting on the way would not do: the index is laid out by key, and all that came so far stands at its lower end.
        """
        if self.max_bytes and blocks:
            self._share = min(1.0, _RESTORED_LOAD * self._index.stats().capacity / blocks)

    def thinned(self, keys: bytes, access: bytes) -> tuple[bytes, bytes]:
        """Of keys (u64) and last access (u32), the part that `expect` has room for."""
        if self._share >= 1.0:
            return keys, access
        named, times, limit = memoryview(keys).cast("Q"), memoryview(access).cast("I"), int(self._share * 2**32)
        kept = [at for at, key in enumerate(named) if key & 0xFFFF_FFFF < limit]
        return array("Q", (named[at] for at in kept)).tobytes(), array("I", (times[at] for at in kept)).tobytes()

    def make(self, blocks: int, holder: Holder[Stream], now_s: float) -> None:
        """Before the holder gets that many blocks more. The holder itself may become partial by it."""
        if self.max_bytes:
            evicted = self._index.make_room(blocks, holder=holder.number)
            if evicted is not None:
                self._evicted(evicted, now_s)

    def settle(self, holder: Holder[Stream], now_s: float) -> None:
        """After every change of a holder's blocks: memory for a set may have been short. Ends what is partial without need."""
        if not self.max_bytes:
            return
        self.make(0, holder, now_s)
        if holder.partial and holder.blocks == holder.sketch.count and holder.owner.exact:
            self._holders.set_partial(holder, False, now_s)

    def _evicted(self, evicted: Evicted, now_s: float) -> None:
        members = [memoryview(packed).cast("I") for packed in evicted.sets]
        lost: Counter[int] = Counter()
        for number, count in Counter(memoryview(evicted.numbers).cast("I")).items():
            lost.update(dict.fromkeys(members[number], count))
        if self._mirrors:
            self._tell(evicted, members)
        for number, count in lost.items():
            holder = self._holders.get(number)
            assert holder is not None, f"the index evicted from holder {number}, which was dropped"
            holder.blocks -= count
            self.missed(holder, count, now_s)

    def missed(self, holder: Holder[Stream], blocks: int, now_s: float) -> None:
        """The index has so many blocks of the holder no more, or never had room for them."""
        self.evicted_blocks += blocks
        if not holder.partial:
            self._holders.set_partial(holder, True, now_s)
            holder.owner.evicted_from(holder, now_s=now_s)

    def _tell(self, evicted: Evicted, members: list[memoryview]) -> None:
        keys: dict[int, array[int]] = {}
        for key, number in zip(memoryview(evicted.keys).cast("Q"), memoryview(evicted.numbers).cast("I"), strict=True):
            for holder in members[number]:
                keys.setdefault(holder, array("Q")).append(key)
        for holder, gone in keys.items():
            known = self._holders.get(holder)
            if known is None:
                continue
            heads = self._index.heads(gone.tobytes(), scope=known.namespace.scope)
            for mirror in self._mirrors:
                mirror.removed(holder, heads, 8)

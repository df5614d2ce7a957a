"""Holders: the numbers under which the index keeps one stream's blocks of one namespace in one tier.

Rules: a holder belongs to exactly one (node, epoch, namespace, tier); its number returns to the free list only after the
index has dropped it. A holder that is not `visible` (a snapshot being filled) is never answered. `generation` moves
whenever what a lookup may return changes, so that cached translations of holder sets are never used beyond it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from kvdir.core.namespaces import KnownNamespace

if TYPE_CHECKING:
    from kvdir.core.mirror import Mirror
    from kvdir.index import BlockIndex, BlockSketch


class Owner(Protocol):
    """slot: the number of the owner's node."""

    @property
    def slot(self) -> int: ...


OwnerT = TypeVar("OwnerT", bound=Owner)
HOLDER_LIMIT = 2**24


class Holder(Generic[OwnerT]):
    """blocks: how many the index has under `number`; kept here because asking the index costs O(sets).

    doubt: why `blocks` may differ from the owner's truth although its stream is whole (feedback by a third party);
    cleared by a matching count of the owner at or after doubt_seq. partial: entries were evicted, since partial_since_s; then
    the sketch is of what the owner holds, and the index has a part of it (room.py).
    """

    __slots__ = (
        "blocks",
        "doubt",
        "doubt_seq",
        "doubt_since_s",
        "namespace",
        "number",
        "owner",
        "partial",
        "partial_since_s",
        "sketch",
        "tier",
        "visible",
    )

    def __init__(
        self, number: int, owner: OwnerT, namespace: KnownNamespace, tier: int, sketch: BlockSketch, visible: bool
    ) -> None:
        self.number = number
        self.owner = owner
        self.namespace = namespace
        self.tier = tier
        self.sketch = sketch
        self.visible = visible
        self.blocks = 0
        self.doubt = ""
        self.doubt_seq = 0
        self.doubt_since_s = 0.0
        self.partial = False
        self.partial_since_s = 0.0

    @property
    def claimed(self) -> int:
        """How many blocks the owner is believed to hold; `blocks` of them can be looked up."""
        return max(self.blocks, self.sketch.count) if self.partial else self.blocks


class HolderTable(Generic[OwnerT]):
    """Gives out holder numbers and takes them back."""

    def __init__(self, index: BlockIndex, new_sketch: Callable[[], BlockSketch], *, mirrors: Sequence[Mirror] = ()) -> None:
        self._index = index
        self._mirrors = mirrors
        self.new_sketch = new_sketch
        self._by_number: list[Holder[OwnerT] | None] = []
        self._free: list[int] = []
        self.generation = 0
        self.partial = 0
        """How many holders are. If any is, what lookups do not name is unknown, not absent."""

    def __iter__(self) -> Iterator[Holder[OwnerT]]:
        return (holder for holder in tuple(self._by_number) if holder is not None)

    def get(self, number: int) -> Holder[OwnerT] | None:
        return self._by_number[number] if number < len(self._by_number) else None

    def create(self, owner: OwnerT, namespace: KnownNamespace, tier: int, *, visible: bool) -> Holder[OwnerT] | None:
        """None when every number is taken: the caller skips the event and counts it."""
        if self._free:
            number = self._free.pop()
        elif len(self._by_number) < HOLDER_LIMIT:
            number = len(self._by_number)
            self._by_number.append(None)
        else:
            return None
        holder = Holder(number, owner, namespace, tier, self.new_sketch(), visible)
        self._by_number[number] = holder
        self._tell(holder)
        self.touch()
        return holder

    def show(self, holder: Holder[OwnerT]) -> None:
        """Makes it visible."""
        holder.visible = True
        self._tell(holder)
        self.touch()

    def set_partial(self, holder: Holder[OwnerT], partial: bool, now_s: float) -> None:
        """Entries of it were evicted, or it is whole again."""
        self.partial += partial - holder.partial
        holder.partial, holder.partial_since_s = partial, now_s

    def drop(self, holder: Holder[OwnerT]) -> int:
        """The holder is gone everywhere; O(sets). Returns how many blocks lost it."""
        self.partial -= holder.partial
        lost = self._index.drop(holder.number)
        self._by_number[holder.number] = None
        self._free.append(holder.number)
        self.touch()
        return lost

    def touch(self) -> None:
        """What lookups may return has changed."""
        self.generation += 1

    def _tell(self, holder: Holder[OwnerT]) -> None:
        for mirror in self._mirrors:
            mirror.holder(holder.number, holder.owner.slot, holder.namespace, holder.tier, holder.visible)

"""A copy of a coordinator's directory, made from its feed: what is applied, how old it is, and when it is whole. Pure.

Rules:
- everything is applied in the order in which it was said; what makes no sense (a holder that was not told, a page out of order,
  lengths that do not fit) is a FeedFault: the call is over, the copy is begun anew, and what there is loses its trust at once;
- the copy claims to hold what was so at `as_of_s`, by its own clock: the moment when it sent the credit that the newest beat
  echoes, less what the coordinator said it was behind. That is a bound, not a guess, and compares no clocks;
- a node was last heard its age before `as_of_s`, at the latest: so ages, and lag, are never flattered, and grow by themselves
  when nothing comes any more;
- a region that cannot hold everything lets go of what was used least lately, and is `incomplete`: what is not found is unknown.
Does not: connect, or choose coordinators (client/replica.py), or say to readers what they may believe (roster.py).
"""

from __future__ import annotations

import struct
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kvdir.core.feed_items import (
    BLOCK_BYTES,
    Beat,
    Dropped,
    Heard,
    HolderItem,
    Item,
    NamespaceGone,
    NamespaceItem,
    NodeGone,
    NodeItem,
    Page,
    Removed,
    SnapshotEnd,
    Stored,
    Welcome,
)
from kvdir.core.region_roster import RegionRoster
from kvdir.core.roster import NamespaceRecord
from kvdir.errors import KvdirError, NamespaceError
from kvdir.location import StreamState
from kvdir.namespace import Namespace

if TYPE_CHECKING:
    from kvdir.index import BlockIndex

_HEARD = struct.Struct("<II")
_SWEEP_BLOCKS = 65_536
_U32 = 2**32 - 1
_FILLED = 0.75
_PIECE_BLOCKS = 1_024
"""For so many, an index with a bound always has room."""


class FeedFault(KvdirError):
    """What the coordinator said makes no sense here; the message says why. The copy begins anew."""

    code = "feed"


class CreditLine:
    """The bytes that one call may send, and when which total was granted. window_bytes: so many under way at most."""

    def __init__(self, window_bytes: int, *, now_s: float) -> None:
        self.received_bytes = 0
        self._window_bytes = window_bytes
        self._total_bytes = window_bytes
        self._granted: deque[tuple[int, float]] = deque([(window_bytes, now_s)])

    def received(self, size_bytes: int) -> None:
        self.received_bytes += size_bytes

    @property
    def due(self) -> bool:
        """Whether half of the window is used up."""
        return self._total_bytes - self.received_bytes <= self._window_bytes // 2

    def grant(self, *, now_s: float) -> int:
        """A new total, to be sent now."""
        self._total_bytes = max(self._total_bytes + 1, self.received_bytes + self._window_bytes)
        self._granted.append((self._total_bytes, now_s))
        return self._total_bytes

    def sent_s(self, total_bytes: int) -> float:
        """When the total that the coordinator echoes was granted; the one before it, if it is none of ours."""
        while len(self._granted) > 1 and self._granted[1][0] <= total_bytes:
            self._granted.popleft()
        return self._granted[0][1]


@dataclass(frozen=True, slots=True)
class _Holder:
    slot: int
    digest: bytes
    tier: int
    scope: int


class ReplicaState:
    """One copy of one life of one coordinator's log, in an empty index opened with the seed of `welcome` and `expected_blocks`.

    position: everything of the log up to here was applied. complete: the snapshot was, so the copy may be served.
    """

    def __init__(self, index: BlockIndex, roster: RegionRoster, welcome: Welcome, *, started_s: float) -> None:
        self.welcome = welcome
        self.position = 0
        self.complete = False
        self.as_of_s = started_s
        self.warming = True
        self.incomplete = False
        self.blocks_applied = 0
        self.blocks_lost = 0
        self._full = False
        self._keep = _share(index.stats().capacity, welcome.blocks)
        self._index = index
        self._roster = roster
        self._nodes: dict[int, tuple[NodeItem, float]] = {}
        self._holders: dict[int, _Holder] = {}
        self._namespaces: set[bytes] = set()
        self._paged = 0
        self._last_key = 0
        self._sweep_due = False
        self._apply: dict[type[Any], Callable[[Any, float], None]] = {
            Stored: self._stored,
            Removed: self._removed,
            Dropped: self._dropped,
            HolderItem: self._holder,
            NodeItem: self._node,
            NodeGone: self._node_gone,
            Heard: self._heard,
            Page: self._page,
            SnapshotEnd: self._snapshot_end,
            NamespaceItem: self._namespace,
            NamespaceGone: self._namespace_gone,
        }

    @property
    def nodes(self) -> int:
        return len(self._nodes)

    def lag_s(self, now_s: float) -> float:
        """The copy may be so far behind; grows while nothing comes."""
        return max(0.0, now_s - self.as_of_s)

    # -- what is said ----------------------------------------------------------------------------------------------------

    def apply(self, item: Item, now_s: float) -> None:
        """One item. Raises FeedFault."""
        try:
            self._apply[type(item)](item, now_s)
        except (ValueError, KeyError, TypeError, struct.error) as error:
            raise FeedFault(f"{type(item).__name__} cannot be applied: {error}") from error

    def reached(self, position: int) -> None:
        """Everything of the log up to here was said. Raises FeedFault when that goes back."""
        if position < self.position:
            raise FeedFault(f"position went back from {self.position} to {position}")
        self.position = position

    def beat(self, beat: Beat, credit: CreditLine) -> None:
        """A sign of life, behind everything that was said before it."""
        self.as_of_s = max(self.as_of_s, credit.sent_s(beat.credit_bytes) - beat.behind_s)
        self.warming = beat.warming
        self.incomplete = self._full or beat.incomplete

    def doubt(self, reason: str) -> None:
        """Nobody knows any more what is true of this copy: no node is trusted until it is replaced."""
        for slot, (item, heard_s) in self._nodes.items():
            if item.trust.state is StreamState.SYNCED:
                trust = replace(item.trust, state=StreamState.GAP, reason=f"replica in doubt: {reason}")
                self._roster.put_node(slot, trust, heard_s=heard_s, hidden=item.hidden)

    def tick(self) -> None:
        """Clean-up, a bounded piece of it."""
        if self._sweep_due:
            self._sweep_due = self._index.sweep(_SWEEP_BLOCKS) > 0

    # -- blocks ----------------------------------------------------------------------------------------------------------

    def _stored(self, item: Stored, now_s: float) -> None:
        holder = self._known(item.holder)
        self.blocks_applied += len(item.packed) // BLOCK_BYTES
        for at in range(0, len(item.packed), _PIECE_BLOCKS * BLOCK_BYTES):
            packed = item.packed[at : at + _PIECE_BLOCKS * BLOCK_BYTES]
            add = partial(self._index.store, packed, BLOCK_BYTES, scope=holder.scope, holder=item.holder, now_s=int(now_s))
            self._add(len(packed) // BLOCK_BYTES, item.holder, add)

    def _removed(self, item: Removed, now_s: float) -> None:
        holder = self._known(item.holder)
        self.blocks_applied += len(item.packed) // BLOCK_BYTES
        self._index.remove(item.packed, BLOCK_BYTES, scope=holder.scope, holder=item.holder)

    def _dropped(self, item: Dropped, now_s: float) -> None:
        self._known(item.holder)
        del self._holders[item.holder]
        self._roster.dropped(item.holder)
        self._index.drop(item.holder)
        self._sweep_due = True

    def _page(self, page: Page, now_s: float) -> None:
        keys, ages, sets = (memoryview(page.keys).cast("Q"), memoryview(page.ages).cast("I"), memoryview(page.sets).cast("I"))
        if not len(keys) == len(ages) == len(sets):
            raise FeedFault(f"a page of {len(keys)} keys, {len(ages)} ages and {len(sets)} sets")
        if page.done:
            self._follow(keys, page.done)
        grouped: dict[int, tuple[array[int], array[int]]] = {}
        for key, age_s, number in zip(keys, ages, sets, strict=True):
            if key & _U32 > self._keep:
                continue
            group = grouped.get(number)
            if group is None:
                group = grouped[number] = (array("Q"), array("I"))
            group[0].append(key)
            group[1].append(max(0, int(now_s) - age_s))
        self._lost(len(keys) - sum(len(group_keys) for group_keys, _ in grouped.values()))
        for number, (group_keys, access) in grouped.items():
            for holder in memoryview(page.holder_sets[self._listed(number, page)]).cast("I"):
                self._restore(holder, group_keys.tobytes(), access.tobytes())

    def _follow(self, keys: memoryview[int], done: int) -> None:
        """Pages of a snapshot come in the order of keys, each whole."""
        if self.complete:
            raise FeedFault("a page behind the end of the snapshot")
        if len(keys):
            if keys[0] <= self._last_key and self._paged:
                raise FeedFault("a page out of order")
            self._last_key = keys[-1]
        self._paged += len(keys)
        if self._paged != done:
            raise FeedFault(f"pages with {self._paged} blocks where {done} were sent")

    def _restore(self, holder: int, keys: bytes, access: bytes) -> None:
        self._known(holder)
        self.blocks_applied += len(keys) // 8
        for at in range(0, len(keys) // 8, _PIECE_BLOCKS):
            piece = keys[8 * at : 8 * (at + _PIECE_BLOCKS)]
            times = access[4 * at : 4 * (at + _PIECE_BLOCKS)]
            self._add(len(piece) // 8, holder, partial(self._index.restore, piece, times, holder=holder))

    def _listed(self, number: int, page: Page) -> int:
        if number >= len(page.holder_sets):
            raise FeedFault(f"a page names set {number} of {len(page.holder_sets)}")
        return number

    def _snapshot_end(self, item: SnapshotEnd, now_s: float) -> None:
        if self.complete or item.blocks != self._paged:
            raise FeedFault(f"the snapshot ends with {item.blocks} blocks where {self._paged} came")
        self.complete = True

    def _add(self, blocks: int, holder: int, add: Callable[[], int]) -> None:
        """Makes room for so many blocks, and adds them; what has to go for them, or cannot be had, is counted."""
        lost = 0
        try:
            evicted = self._index.make_room(blocks, holder=holder)
            lost = len(evicted.keys) // 8 if evicted is not None else 0
            add()
        except MemoryError:
            lost += blocks
        self._lost(lost)

    def _lost(self, blocks: int) -> None:
        if blocks:
            self.blocks_lost += blocks
            self._full = self.incomplete = True

    # -- who they are ----------------------------------------------------------------------------------------------------

    def _known(self, number: int) -> _Holder:
        holder = self._holders.get(number)
        if holder is None:
            raise FeedFault(f"blocks of holder {number}, who was not told")
        return holder

    def _holder(self, item: HolderItem, now_s: float) -> None:
        if item.slot not in self._nodes:
            raise FeedFault(f"holder {item.number} of node slot {item.slot}, which was not told")
        if item.digest not in self._namespaces:
            raise FeedFault(f"holder {item.number} of a namespace that was not told")
        holder = _Holder(item.slot, item.digest, item.tier, int.from_bytes(item.digest[:8], "little"))
        if self._holders.setdefault(item.number, holder) != holder:
            raise FeedFault(f"holder {item.number} is somebody else without having been dropped")
        self._roster.put_holder(item.number, item.slot, item.tier, visible=item.visible)

    def _node(self, item: NodeItem, now_s: float) -> None:
        heard_s = self.as_of_s - item.trust.age_s
        known = self._nodes.get(item.slot)
        if known is not None and known[0].trust.epoch == item.trust.epoch:
            heard_s = max(heard_s, known[1])
        self._roster.put_node(item.slot, item.trust, heard_s=heard_s, hidden=item.hidden)
        self._nodes[item.slot] = (item, heard_s)  # behind what may refuse it: `doubt` writes all of these

    def _node_gone(self, item: NodeGone, now_s: float) -> None:
        if any(holder.slot == item.slot for holder in self._holders.values()):
            raise FeedFault(f"node slot {item.slot} is gone, and still has holders")
        del self._nodes[item.slot]
        self._roster.node_gone(item.slot)

    def _heard(self, item: Heard, now_s: float) -> None:
        for slot, age_ms in _HEARD.iter_unpack(item.packed):
            node, before_s = self._nodes[slot]
            heard_s = max(before_s, self.as_of_s - age_ms / 1000)
            self._nodes[slot] = (node, heard_s)
            self._roster.heard(slot, heard_s)

    def _namespace(self, item: NamespaceItem, now_s: float) -> None:
        announced = item.announced
        if len(announced.digest) != 32:
            raise FeedFault("a namespace digest that is not of 32 bytes")
        self._namespaces.add(announced.digest)
        try:
            namespace = Namespace.from_canonical(announced.canonical)
            name, tokens = namespace.short, namespace.block_tokens
        except NamespaceError:  # of a newer release; its blocks are as good as any
            name, tokens = announced.digest.hex()[:16], 0
        self._roster.put_namespace(NamespaceRecord(announced.digest, name, announced.block_bytes, tokens))

    def _namespace_gone(self, item: NamespaceGone, now_s: float) -> None:
        if any(holder.digest == item.digest for holder in self._holders.values()):
            raise FeedFault("a namespace is gone, and still has holders")
        self._namespaces.remove(item.digest)
        self._roster.namespace_gone(item.digest)


def expected_blocks(welcome: Welcome) -> int:
    """To open a copy's index with."""
    return welcome.blocks + welcome.blocks // 8


def _share(capacity: int, blocks: int) -> int:
    """Keys of a snapshot whose lower half is at most this are kept, of a snapshot of so many blocks.

    All of them if there is room. Otherwise a share that fits, drawn from everywhere: pages come in the order of the table, and
    an index too small for them would get all of them at its lower end, one long cluster, and keep that part of the keys only.
    """
    room = int(capacity * _FILLED)
    return _U32 if blocks <= room else _U32 * room // blocks

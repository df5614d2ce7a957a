"""A node and its streams, as the directory remembers them.

Rules: a node has at most one live stream; epochs that were fenced are remembered (a bounded number of them), so that a
late hello of an old one is refused. Order between epochs is by registration here, never by anybody's clock.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from kvdir.core.event import HeartbeatFigures, OwnerCount
from kvdir.core.holders import Holder
from kvdir.core.snapshot import SnapshotIntake
from kvdir.core.stream import StreamCursor
from kvdir.core.trust import Cumulative
from kvdir.location import NodeTrust, StreamState

HolderKey = tuple[bytes, int]
"""(namespace digest, tier)"""

REMEMBERED_FENCES = 64
REMEMBERED_STORES = 64
_TRUST_REUSE_S = 0.01
_EVICTED = "entries were evicted for max_index_bytes, and the owner states no digests that would make up for them"


class RecentStores:
    """The last few `stored` events of a stream, so that feedback older than one of them does not undo it. Bounded."""

    __slots__ = ("_items", "_reaches")

    def __init__(self) -> None:
        self._items: deque[tuple[int, HolderKey, bytes, int]] = deque()
        self._reaches = 0

    def add(self, seq: int, key: HolderKey, packed: bytes, width: int) -> None:
        if len(self._items) >= REMEMBERED_STORES:
            self._reaches = max(self._reaches, self._items.popleft()[0])
        self._items.append((seq, key, packed, width))

    def forget(self, seq: int) -> None:
        """What came up to seq is no longer known one by one."""
        self._items.clear()
        self._reaches = max(self._reaches, seq)

    def newer_than(self, seq: int, key: HolderKey) -> set[bytes] | None:
        """First 8 bytes of every block stored under `key` after seq; None when the memory does not reach back so far."""
        if seq < self._reaches:
            return None
        return {
            packed[at : at + 8]
            for stored_seq, stored_key, packed, width in self._items
            if stored_seq > seq and stored_key == key
            for at in range(0, len(packed), width)
        }


@dataclass(slots=True, eq=False)
class Stream:
    """One (node, epoch). fresh, intake: a snapshot being filled beside `holders`. hidden: silent for so long that lookups
    leave it out. reported: the state that was last said in an effect. connection: which call speaks for it now, since opened_s;
    compared: it has stated figures of its own. suspects: where those differed at the last comparison. sketchable: it states
    digests. sketch_*: of the last request. unconfirmed_blocks: stored since the owner's sum was last equal to ours.
    met_s: when a reader last met its owner. restored: its holders come from a checkpoint and are hints. slot: of its node.
    told_state: what mirrors were told last. untold: something else may have changed since; they hear of it with the tick.
    hinted: what is being applied now may have been applied before, as a hint.
    """

    node: str
    epoch: int
    cursor: StreamCursor
    peer_address: str = ""
    started_unix_ms: int = 0
    connection: int = 0
    holders: dict[HolderKey, Holder[Stream]] = field(default_factory=dict)
    fresh: dict[HolderKey, Holder[Stream]] = field(default_factory=dict)
    intake: SnapshotIntake | None = None
    namespaces: frozenset[bytes] = frozenset()
    figures: HeartbeatFigures = field(default_factory=HeartbeatFigures)
    owner_counts: dict[HolderKey, OwnerCount] = field(default_factory=dict)
    owner_counts_seq: int = 0
    heartbeat_s: float = 0.0
    opened_s: float = 0.0
    compared: bool = False
    sketchable: bool = False
    suspects: frozenset[HolderKey] = frozenset()
    sketch_id: int = 0
    sketch_cells: int = 0
    unconfirmed_blocks: int = 0
    dropped_events: int = 0
    hidden: bool = False
    met_s: float = float("-inf")
    restored: bool = False
    slot: int = 0
    hinted: bool = False
    told_state: StreamState | None = None
    untold: bool = True
    reported: StreamState | None = None
    recent: RecentStores = field(default_factory=RecentStores)
    _trust: NodeTrust | None = None
    _trust_at_s: float = 0.0

    @property
    def state(self) -> StreamState:
        return self.cursor.state

    @property
    def fenced(self) -> bool:
        return self.cursor.state is StreamState.FENCED

    @property
    def exact(self) -> bool:
        """It states digests and nothing of it is in doubt: the sketch of a partial holder is of what the owner holds."""
        return self.sketchable and not self.cursor.damaged

    def folds(self, seq: int) -> bool:
        """Whether event `seq`, which is being applied, comes in its turn and onto something that is not in doubt."""
        return seq < self.cursor.next_seq and not self.cursor.damaged

    def evicted_from(self, holder: Holder[Stream], *, now_s: float) -> None:
        """A holder has just become partial. While something is missing, nobody knows how much of that its sketch has; and what
        was removed on a reader's word is missing from it.
        """
        followed = self.cursor.complete and not self.hinted and not holder.doubt
        if holder.visible and not self.cursor.damaged and not followed:
            why = "blocks were in doubt" if holder.doubt else "events were missing"
            self.cursor.damage(f"entries were evicted while {why}", now_s=now_s)

    def trust(self, now_s: float) -> NodeTrust:
        """For an answer. Reused for 10 ms while the state stays: an age needs no more, and a busy lookup builds none."""
        trust, cursor = self._trust, self.cursor
        if trust is not None and trust.state is cursor.state and 0 <= now_s - self._trust_at_s < _TRUST_REUSE_S:
            return trust
        self._trust_at_s = now_s
        self._trust = NodeTrust(
            self.node,
            self.epoch,
            cursor.state,
            cursor.reason,
            max(0.0, now_s - cursor.last_heard_s),
            cursor.missing_events,
            self.peer_address,
            self._confirmed(),
        )
        return self._trust

    def forget_trust(self) -> None:
        """The next `trust` is made anew."""
        self._trust = None

    def _confirmed(self) -> float:
        blocks = sum(holder.claimed for holder in self.holders.values())
        if not self.cursor.restated or not blocks:
            return float(self.cursor.restated)
        return 1.0 - min(self.unconfirmed_blocks, blocks) / blocks

    def blocks_figure(self, holder: Holder[Stream], *, block_bytes: int = 1) -> Cumulative:
        """Blocks (or bytes) under a holder, with the trust that its stream and its own history allow."""
        figure = self.figure(holder.claimed * block_bytes)
        if figure.trusted and holder.doubt:
            return Cumulative(figure.value, False, self.cursor.last_event_s, holder.doubt_since_s, holder.doubt)
        if figure.trusted and holder.partial and not self.sketchable:
            return Cumulative(figure.value, False, self.cursor.last_event_s, holder.partial_since_s, _EVICTED)
        return figure

    def figure(self, value: int) -> Cumulative:
        """A number folded from this stream's events, with the trust that the stream allows."""
        cursor = self.cursor
        if cursor.state is not StreamState.SYNCED:
            return Cumulative(value, False, cursor.last_event_s, cursor.untrusted_since_s, cursor.reason)
        return Cumulative(value, True, cursor.last_heard_s)


@dataclass(slots=True, eq=False)
class Node:
    """stream: the current one, or None before the first. fenced: epochs that may not publish, with the epoch that took over.

    slot: a small number that stands for the node as long as it is known.
    """

    name: str
    slot: int
    stream: Stream | None = None
    fenced: OrderedDict[int, int] = field(default_factory=OrderedDict)

    def remember_fence(self, epoch: int, newer_epoch: int) -> None:
        self.fenced[epoch] = newer_epoch
        while len(self.fenced) > REMEMBERED_FENCES:
            self.fenced.popitem(last=False)


def need(node: Node) -> tuple[int, float]:
    """Who is served first when not all can be: the most blocks, by the owner's own count; then whoever spoke last."""
    stream = node.stream
    if stream is None:
        return (0, 0.0)
    return (sum(count.blocks for count in stream.owner_counts.values()), stream.cursor.last_event_s)

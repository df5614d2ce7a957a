"""Keeps a region's roster: who the nodes, holders and namespaces are that its blocks name, and how current all of it is.

RegionRoster is a mirror of the directory whose index lies in that region (lookup workers); a replica, which knows nodes from
its feed and not from streams, calls the `put_` methods instead. Blocks are not its business: the index has them.

Rules: what it is told comes in the order that kvdir/core/mirror.py promises. A record is written only when it says something
new: a node that was merely heard again, once in HEARD_EVERY_S, and of what is confirmed, every CONFIRMED_STEP. The holders of a
hidden node are invisible in the region, so that readers pay nothing for them. Ages are kept as moments of the monotonic clock.
What the memory refuses is not remembered. No clock here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from kvdir.core.namespaces import KnownNamespace
from kvdir.core.roster import Beat, NamespaceRecord, NodeRecord, encode_namespaces
from kvdir.location import NodeTrust

if TYPE_CHECKING:
    from kvdir.core.node import Stream
    from kvdir.index import Packed

HEARD_EVERY_S = 0.25
CONFIRMED_STEP = 0.01


class RosterMemory(Protocol):
    """The part of a region that holds the roster; `kvdir.index.RegionIndex` has it."""

    def set_holder(self, number: int, *, node: int, tier: int, visible: bool = True) -> None: ...
    def clear_holder(self, number: int) -> None: ...
    def set_node(self, slot: int, record: bytes) -> None: ...
    def clear_node(self, slot: int) -> None: ...
    def set_namespaces(self, records: bytes) -> None: ...
    def beat(self, record: bytes) -> None: ...


class RegionRoster:
    """See the module docstring. Implements kvdir.core.mirror.Mirror."""

    def __init__(self, memory: RosterMemory) -> None:
        self._memory = memory
        self._nodes: dict[int, NodeRecord] = {}
        self._holders: dict[int, tuple[int, int, bool]] = {}
        """number -> (slot, tier, visible as far as the holder itself goes)"""
        self._numbers: dict[int, set[int]] = {}
        self._namespaces: dict[bytes, NamespaceRecord] = {}
        memory.set_namespaces(encode_namespaces(()))

    # what a replica calls

    def put_node(self, slot: int, trust: NodeTrust, *, heard_s: float, hidden: bool) -> None:
        """A node is new, or something about it changed. heard_s: when it was last heard; trust.age_s is ignored."""
        record = NodeRecord(replace(trust, age_s=0.0), round(heard_s * 1e9), hidden)
        known = self._nodes.get(slot)
        if known is not None and _says_the_same(known, record):
            return
        self._memory.set_node(slot, record.encode())
        self._nodes[slot] = record
        if known is not None and known.hidden != hidden:
            for number in self._numbers.get(slot, ()):
                self._write_holder(number, *self._holders[number])

    def heard(self, slot: int, heard_s: float) -> None:
        """A known node was heard again, and nothing else; others are passed over."""
        known = self._nodes.get(slot)
        if known is not None:
            self.put_node(slot, known.trust, heard_s=heard_s, hidden=known.hidden)

    def put_holder(self, number: int, slot: int, tier: int, *, visible: bool) -> None:
        """Created, or made visible."""
        self._write_holder(number, slot, tier, visible)
        self._forget_holder(number)
        self._holders[number] = (slot, tier, visible)
        self._numbers.setdefault(slot, set()).add(number)

    def put_namespace(self, record: NamespaceRecord) -> None:
        if self._namespaces.get(record.digest) != record:
            self._namespaces[record.digest] = record
            self._write_namespaces()

    def beat(self, beat: Beat) -> None:
        """Says how current the region is; regularly, or readers take the writer for dead."""
        self._memory.beat(beat.encode())

    # Mirror

    def namespace(self, known: KnownNamespace) -> None:
        namespace = known.namespace
        self.put_namespace(
            NamespaceRecord(known.digest, namespace.short, known.block_bytes, namespace.block_tokens, namespace.tenant)
        )

    def namespace_gone(self, digest: bytes) -> None:
        if self._namespaces.pop(digest, None) is not None:
            self._write_namespaces()

    def node(self, slot: int, stream: Stream, now_s: float) -> None:
        self.put_node(slot, stream.trust(now_s), heard_s=stream.cursor.last_heard_s, hidden=stream.hidden)

    def node_gone(self, slot: int) -> None:
        if self._nodes.pop(slot, None) is not None:
            self._memory.clear_node(slot)

    def holder(self, number: int, slot: int, known: KnownNamespace, tier: int, visible: bool) -> None:
        self.put_holder(number, slot, tier, visible=visible)

    def dropped(self, holder: int) -> None:
        self._forget_holder(holder)
        self._memory.clear_holder(holder)

    def stored(self, holder: int, packed: Packed, width: int, now_s: int) -> None: ...

    def removed(self, holder: int, packed: Packed, width: int) -> None: ...

    def restored(self, keys: bytes, access: bytes, holder: int) -> None: ...

    # inside

    def _forget_holder(self, number: int) -> None:
        known = self._holders.pop(number, None)
        if known is not None:
            numbers = self._numbers[known[0]]
            numbers.discard(number)
            if not numbers:
                del self._numbers[known[0]]

    def _write_holder(self, number: int, slot: int, tier: int, visible: bool) -> None:
        node = self._nodes.get(slot)
        shown = visible and not (node is not None and node.hidden)
        self._memory.set_holder(number, node=slot, tier=tier, visible=shown)

    def _write_namespaces(self) -> None:
        self._memory.set_namespaces(encode_namespaces(self._namespaces.values()))


def _says_the_same(known: NodeRecord, record: NodeRecord) -> bool:
    """But for a moment of hearing, and a share that is confirmed, which are too near to be worth a write."""
    was, now = known.trust.confirmed, record.trust.confirmed
    near = was == now or (abs(was - now) < CONFIRMED_STEP and 0 < was < 1 and 0 < now < 1)
    heard = 0 <= record.heard_ns - known.heard_ns < HEARD_EVERY_S * 1e9
    return near and heard and known.hidden == record.hidden and known.trust == replace(record.trust, confirmed=was)

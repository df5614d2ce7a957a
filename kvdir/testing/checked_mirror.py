"""A mirror that holds the core to its word: every rule of kvdir/core/mirror.py, and that the copy it makes is exact."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvdir.core.directory import Directory
from kvdir.core.namespaces import KnownNamespace
from kvdir.core.node import Stream
from kvdir.location import StreamState

if TYPE_CHECKING:
    from kvdir.index import Packed


@dataclass(slots=True)
class HolderCopy:
    """What was told of one holder; blocks by their first 8 bytes."""

    slot: int
    digest: bytes
    tier: int
    visible: bool
    blocks: set[bytes] = field(default_factory=set)


class CheckedMirror:
    """Raises AssertionError where a rule is broken. For directories that are empty when it is added."""

    def __init__(self) -> None:
        self.namespaces: dict[bytes, KnownNamespace] = {}
        self.nodes: dict[int, tuple[str, int, StreamState, bool]] = {}
        self.holders: dict[int, HolderCopy] = {}

    def namespace(self, known: KnownNamespace) -> None:
        assert known.digest not in self.namespaces
        self.namespaces[known.digest] = known

    def namespace_gone(self, digest: bytes) -> None:
        del self.namespaces[digest]
        assert all(copy.digest != digest for copy in self.holders.values()), "a holder outlived its namespace"

    def node(self, slot: int, stream: Stream, now_s: float) -> None:
        assert stream.slot == slot
        trust = stream.trust(now_s)
        self.nodes[slot] = (trust.node, trust.epoch, trust.state, stream.hidden)

    def node_gone(self, slot: int) -> None:
        del self.nodes[slot]
        assert all(copy.slot != slot for copy in self.holders.values()), "a holder outlived its node"

    def holder(self, number: int, slot: int, known: KnownNamespace, tier: int, visible: bool) -> None:
        assert slot in self.nodes, "a holder of a node that was not told"
        assert known.digest in self.namespaces, "a holder of a namespace that was not told"
        copy = self.holders.get(number)
        if copy is None:
            self.holders[number] = HolderCopy(slot, known.digest, tier, visible)
            return
        assert (copy.slot, copy.digest, copy.tier) == (slot, known.digest, tier), (
            "a number was used again before it was dropped"
        )
        assert visible, "what is visible does not hide"
        copy.visible = True

    def stored(self, holder: int, packed: Packed, width: int, now_s: int) -> None:
        self.holders[holder].blocks |= _blocks(packed, width)

    def removed(self, holder: int, packed: Packed, width: int) -> None:
        self.holders[holder].blocks -= _blocks(packed, width)

    def dropped(self, holder: int) -> None:
        del self.holders[holder]

    def restored(self, keys: bytes, access: bytes, holder: int) -> None:
        raise AssertionError("a checkpoint is restored before anybody watches")

    def faults(self, directory: Directory) -> list[str]:
        """Where the copy differs from the directory now."""
        out = []
        holders = {holder.number: holder for holder in directory.holders}
        if holders.keys() != self.holders.keys():
            out.append(f"holders {sorted(holders)} copied as {sorted(self.holders)}")
        for number, holder in holders.items():
            copy = self.holders.get(number)
            if copy is None or copy.visible is not holder.visible or len(copy.blocks) != holder.blocks:
                out.append(f"holder {number} has {holder.blocks} blocks, visible {holder.visible}, copied as {copy}")
        for node in directory.nodes.values():
            stream = node.stream
            if stream is None:
                continue
            said = (stream.node, stream.epoch, stream.cursor.state, stream.hidden)
            if self.nodes.get(node.slot) != said:
                out.append(f"node {said} copied as {self.nodes.get(node.slot)}")
        return out


def _blocks(packed: Packed, width: int) -> set[bytes]:
    data = bytes(packed)
    return {data[at : at + 8] for at in range(0, len(data), width)}

"""A region in plain memory, both ends of it: for tests of whoever writes or reads one, without a file.

FakeRegion is the writer: a roster beside a block index; FakeReader is what `RegionReader` is. `torn` makes lookups say that the
writer was at it; they find nothing then.
"""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass

from kvdir.index import BlockIndex, IndexStats, Packed, RegionLookup, open_index

_RUN = struct.Struct("<III")


@dataclass(slots=True)
class _Node:
    """life: how often the slot was cleared. version: 0 when nobody has it."""

    life: int = 0
    version: int = 0
    record: bytes = b""


class FakeRegion:
    """The writer's end. writes: of nodes and holders."""

    def __init__(self, *, seed: int = 0, index: BlockIndex | None = None) -> None:
        self.index = index or open_index(seed=seed)
        self.places: dict[int, tuple[int, int, bool]] = {}
        self.slots: dict[int, _Node] = {}
        self.namespaces: tuple[int, bytes] = (0, b"")
        self.beat_record = b""
        self.retired = False
        self.torn = False
        self.writes = 0

    def set_holder(self, number: int, *, node: int, tier: int, visible: bool = True) -> None:
        self.writes += 1
        self.places[number] = (node, tier, visible)

    def clear_holder(self, number: int) -> None:
        self.places.pop(number, None)

    def set_node(self, slot: int, record: bytes) -> None:
        self.writes += 1
        node = self.slots.setdefault(slot, _Node())
        node.record, node.version = record, node.version + 2

    def clear_node(self, slot: int) -> None:
        node = self.slots.setdefault(slot, _Node())
        node.version, node.record, node.life = 0, b"", node.life + 1

    def set_namespaces(self, records: bytes) -> None:
        self.namespaces = (self.namespaces[0] + 2, records)

    def beat(self, record: bytes) -> None:
        self.beat_record = record

    def retire(self) -> None:
        self.retired = True


class FakeReader:
    """A reader's end. Implements kvdir.index.BlockReader."""

    def __init__(self, region: FakeRegion) -> None:
        self._region = region

    @property
    def stale(self) -> bool:
        return self._region.retired

    @property
    def generation(self) -> int:
        return 1

    @property
    def writer_pid(self) -> int:
        return 0

    def beat(self) -> bytes:
        return self._region.beat_record

    def namespaces(self) -> tuple[int, bytes]:
        return self._region.namespaces

    def node(self, node: int, /) -> tuple[int, bytes]:
        known = self._region.slots.get(node & 0xFFFF)
        if known is None or known.life & 0xFFFF != node >> 16:
            return 0, b""
        return known.version, known.record

    def nodes(self) -> bytes:
        return array("I", [self._id(slot) for slot, node in sorted(self._region.slots.items()) if node.version]).tobytes()

    def stats(self) -> IndexStats:
        return self._region.index.stats()

    def close(self) -> None: ...

    def lookup(self, fingerprints: Packed, width: int, *, scope: int, prefix: bool = False) -> RegionLookup:
        if self._region.torn:
            return RegionLookup(b"", (), b"", 0, True)
        found = self._region.index.lookup(fingerprints, width, scope=scope, prefix=prefix)
        nodes: dict[int, int] = {}
        sets: list[bytes] = []
        runs: list[list[int]] = []
        for start, count, number in _RUN.iter_unpack(found.runs):
            members = self._members(found.sets[number], nodes)
            if not members:
                if prefix:
                    break
                continue
            if members not in sets:
                sets.append(members)
            if runs and sum(runs[-1][:2]) == start and sets[runs[-1][2]] == members:
                runs[-1][1] += count
            else:
                runs.append([start, count, sets.index(members)])
        ids = array("I", [self._id(slot) for slot in nodes]).tobytes()
        packed_runs = b"".join(_RUN.pack(*run) for run in runs)
        return RegionLookup(packed_runs, tuple(sets), ids, sum(run[1] for run in runs), False)

    def _id(self, slot: int) -> int:
        return slot | self._region.slots[slot].life % (1 << 16) << 16

    def _members(self, packed: bytes, nodes: dict[int, int]) -> bytes:
        members: set[int] = set()
        for number in memoryview(packed).cast("I"):
            slot, tier, visible = self._region.places.get(number, (0, 0, False))
            node = self._region.slots.get(slot)
            if visible and node is not None and node.version:
                members.add(nodes.setdefault(slot, len(nodes)) << 8 | tier)
        return array("I", sorted(members)).tobytes()

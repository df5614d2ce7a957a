"""A region in plain memory, both ends of it: for tests of whoever writes or reads one, without a file.

FakeRegion is the writer, a block index with a roster; FakeReader is what `RegionReader` is. They pass the same contract as the
native pair (kvdir/testing/check_region.py). `torn` makes lookups say that the writer was at it; they find nothing then.
"""

from __future__ import annotations

import struct
from array import array

from kvdir.core.region_lookup import Found
from kvdir.index import BlockIndex, open_index

_RUN = struct.Struct("<III")


class FakeRegion:
    """The writer's end. Everything of BlockIndex is in `index`."""

    def __init__(self, *, expected_blocks: int = 0, seed: int = 0, index: BlockIndex | None = None) -> None:
        self.index = index or open_index(expected_blocks=expected_blocks, seed=seed)
        self.holders: dict[int, tuple[int, int, bool]] = {}
        self.nodes: dict[int, tuple[int, bytes]] = {}
        self.namespaces: tuple[int, bytes] = (0, b"")
        self.beat_record = b""
        self.retired = False
        self.torn = False
        self.writes = 0

    def set_holder(self, number: int, *, node: int, tier: int, visible: bool) -> None:
        self.writes += 1
        self.holders[number] = (node, tier, visible)

    def clear_holder(self, number: int) -> None:
        self.holders.pop(number, None)

    def set_node(self, slot: int, record: bytes) -> None:
        self.writes += 1
        self.nodes[slot] = (self._version(slot) + 2, record)

    def clear_node(self, slot: int) -> None:
        self.nodes[slot] = (self._version(slot) + 2, b"")

    def set_namespaces(self, records: bytes) -> None:
        self.namespaces = (self.namespaces[0] + 2, records)

    def beat(self, record: bytes) -> None:
        self.beat_record = record

    def retire(self) -> None:
        self.retired = True

    def _version(self, slot: int) -> int:
        return self.nodes.get(slot, (0, b""))[0]


class FakeReader:
    """A reader's end."""

    def __init__(self, region: FakeRegion) -> None:
        self._region = region

    @property
    def stale(self) -> bool:
        return self._region.retired

    def beat(self) -> bytes:
        return self._region.beat_record

    def namespaces(self) -> tuple[int, bytes]:
        return self._region.namespaces

    def node(self, slot: int) -> tuple[int, bytes]:
        return self._region.nodes.get(slot, (0, b""))

    def close(self) -> None: ...

    def lookup(self, fingerprints: bytes, width: int, *, scope: int, prefix: bool = False) -> Found:
        if self._region.torn:
            return b"", [], b"", 0, True
        found = self._region.index.lookup(fingerprints, width, scope=scope, prefix=prefix)
        nodes: dict[int, int] = {}
        sets: list[bytes] = []
        runs, hits = bytearray(), 0
        for start, count, number in _RUN.iter_unpack(found.runs):
            members = self._members(found.sets[number], nodes)
            if not members:
                if prefix:
                    break
                continue
            if members not in sets:
                sets.append(members)
            runs += _RUN.pack(start, count, sets.index(members))
            hits += count
        return bytes(runs), sets, array("I", nodes).tobytes(), hits, False

    def _members(self, packed: bytes, nodes: dict[int, int]) -> bytes:
        members: set[int] = set()
        for number in memoryview(packed).cast("I"):
            slot, tier, visible = self._region.holders.get(number, (0, 0, False))
            if visible:
                members.add(nodes.setdefault(slot, len(nodes)) << 8 | tier)
        return array("I", sorted(members)).tobytes()

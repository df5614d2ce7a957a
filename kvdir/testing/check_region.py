"""Contract suite of a region and its reader: run it against any pair that passes for `create_region` and `RegionReader`.

Owns what a reader must answer while the writer stands still; what happens beside a busy or dead writer, and on disk, is in
tests/fault and tests/native. The index half of a region is checked by `check_index`. `CHECKS` as there.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvdir.index import NODE_RECORD_BYTES, BlockIndex, BlockReader, Packed, RegionLookup
from kvdir.testing.index_fixture import fingerprints

__all__ = ["CHECKS", "OpenRegion", "RosterWriter", "check_region"]


class RosterWriter(Protocol):
    """The roster's half of a region, as its writer sees it."""

    def set_holder(self, number: int, *, node: int, tier: int, visible: bool = True) -> None: ...
    def clear_holder(self, number: int) -> None: ...
    def set_node(self, slot: int, record: bytes) -> None: ...
    def clear_node(self, slot: int) -> None: ...
    def set_namespaces(self, records: bytes) -> None: ...
    def beat(self, record: bytes) -> None: ...
    def retire(self) -> None: ...


@dataclass(frozen=True, slots=True)
class OpenRegion:
    """One fresh region: its index, its roster, and a reader of it."""

    index: BlockIndex
    roster: RosterWriter
    reader: BlockReader


def check_region(open_region: Callable[[], OpenRegion]) -> None:
    for check in CHECKS:
        check(open_region())


def named(answer: RegionLookup) -> list[tuple[int, int, tuple[tuple[int, int], ...]]]:
    """(start, count, ((node, tier), ...)) of each run."""
    nodes = struct.unpack(f"<{len(answer.nodes) // 4}I", answer.nodes)
    sets = [tuple((nodes[value >> 8], value & 0xFF) for (value,) in struct.iter_unpack("<I", packed)) for packed in answer.sets]
    return [(start, count, sets[number]) for start, count, number in struct.iter_unpack("<III", answer.runs)]


def _store(region: OpenRegion, holder: int, blocks: range) -> None:
    region.index.store(fingerprints(blocks), 16, scope=0, holder=holder, now_s=1)


def _lookup(region: OpenRegion, blocks: range, *, prefix: bool = False, width: int = 16) -> RegionLookup:
    return region.reader.lookup(fingerprints(blocks, width), width, scope=0, prefix=prefix)


def an_empty_region_answers_misses(region: OpenRegion) -> None:
    for prefix in (False, True):
        assert _lookup(region, range(600), prefix=prefix) == RegionLookup(b"", (), b"", 0, False)
        assert _lookup(region, range(0), prefix=prefix).hits == 0
    assert (region.reader.beat(), region.reader.namespaces(), region.reader.nodes()) == (b"", (0, b""), b"")
    assert region.reader.node(0) == (0, b"")
    assert not region.reader.stale
    assert region.reader.generation


def answers_name_nodes_and_tiers_for_holders(region: OpenRegion) -> None:
    region.roster.set_node(3, b"three")
    region.roster.set_node(7, b"seven")
    region.roster.set_holder(10, node=3, tier=1)
    region.roster.set_holder(11, node=7, tier=2)
    region.roster.set_holder(12, node=3, tier=2)
    _store(region, 10, range(500))
    _store(region, 11, range(100, 200))
    _store(region, 12, range(150, 700))
    expected = [(0, 100, {(3, 1)}), (100, 50, {(3, 1), (7, 2)}), (150, 50, {(3, 1), (3, 2), (7, 2)})]
    expected += [(200, 300, {(3, 1), (3, 2)}), (500, 200, {(3, 2)})]
    for width in (8, 16, 32):
        answer = _lookup(region, range(750), width=width)
        assert [(start, count, set(members)) for start, count, members in named(answer)] == expected
        assert (answer.hits, answer.torn) == (700, False)
        for packed in answer.sets:
            values = struct.unpack(f"<{len(packed) // 4}I", packed)
            assert list(values) == sorted(set(values)), "sets ascend"
    assert region.reader.lookup(fingerprints(range(9)), 16, scope=1).hits == 0
    assert [region.reader.node(node)[1] for (node,) in struct.iter_unpack("<I", answer.nodes)] == [b"three", b"seven"]


def who_is_not_visible_or_not_known_is_left_out_and_equal_neighbours_are_one_run(region: OpenRegion) -> None:
    for node in (0, 1):
        region.roster.set_node(node, b"node")
    region.roster.set_holder(1, node=0, tier=2)
    region.roster.set_holder(2, node=1, tier=2, visible=False)
    region.roster.set_holder(3, node=9, tier=2)  # there is no node 9
    _store(region, 1, range(300))
    for holder in (2, 3, 4):  # nobody said whose number 4 is
        _store(region, holder, range(50 * holder, 400))
    answer = _lookup(region, range(400))
    assert named(answer) == [(0, 300, ((0, 2),))]
    assert len(answer.sets) == 1
    region.roster.set_holder(2, node=1, tier=2)
    assert named(_lookup(region, range(400))) == [(0, 100, ((0, 2),)), (100, 200, ((0, 2), (1, 2))), (300, 100, ((1, 2),))]
    region.roster.clear_holder(1)
    assert named(_lookup(region, range(400))) == [(100, 300, ((1, 2),))]
    region.roster.clear_node(1)
    assert _lookup(region, range(400)).hits == 0


def a_prefix_ends_where_nobody_visible_goes_on(region: OpenRegion) -> None:
    region.roster.set_node(0, b"node")
    region.roster.set_holder(1, node=0, tier=2)
    region.roster.set_holder(2, node=0, tier=1, visible=False)
    chain = range(3000)
    assert _lookup(region, chain, prefix=True).hits == 0
    _store(region, 2, range(2500))
    assert _lookup(region, chain, prefix=True).hits == 0
    for held in (1, 63, 64, 65, 1000, 1001):
        _store(region, 1, range(held))
        for asked in (1, 64, 65, 66, 3000):
            assert _lookup(region, range(asked), prefix=True).hits == min(held, asked)
    region.roster.set_holder(2, node=0, tier=1)
    assert named(_lookup(region, chain, prefix=True)) == [(0, 1001, ((0, 1), (0, 2))), (1001, 1499, ((0, 1),))]
    _store(region, 1, range(2600, 3000))
    assert _lookup(region, chain, prefix=True).hits == 2500
    assert _lookup(region, chain).hits == 2900


def a_slot_that_is_used_again_is_another_node(region: OpenRegion) -> None:
    region.roster.set_node(5, b"first")
    region.roster.set_holder(1, node=5, tier=2)
    _store(region, 1, range(10))
    (before,) = struct.unpack("<I", _lookup(region, range(10)).nodes)
    version = region.reader.node(before)[0]
    region.roster.set_node(5, b"first, changed")
    assert region.reader.node(before)[0] != version
    assert region.reader.node(before)[1] == b"first, changed"
    region.roster.clear_node(5)
    assert region.reader.node(before) == (0, b"")
    assert _lookup(region, range(10)).hits == 0
    region.roster.set_node(5, b"second")
    assert region.reader.node(before) == (0, b"")
    (after,) = struct.unpack("<I", _lookup(region, range(10)).nodes)
    assert region.reader.node(after)[1] == b"second"
    assert region.reader.nodes() == struct.pack("<I", after)


def records_are_read_as_written(region: OpenRegion) -> None:
    for size in (0, 1, 7, 8, NODE_RECORD_BYTES):
        region.roster.set_node(2, b"n" * size)
        assert region.reader.node(2)[1] == b"n" * size
    versions = set()
    for size in (0, 3, 100_000, 5):
        region.roster.set_namespaces(b"s" * size)
        version, records = region.reader.namespaces()
        versions.add(version)
        assert records == b"s" * size
    assert len(versions) == 4
    assert 0 not in versions
    for beat in (b"one", b"another", b"x" * 4000):
        region.roster.beat(beat)
        assert region.reader.beat() == beat


def drops_are_seen(region: OpenRegion) -> None:
    region.roster.set_node(0, b"node")
    for holder, tier in ((1, 1), (2, 2)):
        region.roster.set_holder(holder, node=0, tier=tier, visible=holder == 1)
        _store(region, holder, range(100 * holder))
    assert (region.reader.stats().blocks, region.reader.stats().sets) == (200, 2)
    region.index.drop(1)
    assert _lookup(region, range(200)).hits == 0
    region.roster.set_holder(2, node=0, tier=2)
    assert named(_lookup(region, range(200))) == [(0, 200, ((0, 2),))]
    assert region.reader.stats().blocks == 200


def a_reader_is_told_when_its_region_retires(region: OpenRegion) -> None:
    region.roster.set_node(0, b"node")
    region.roster.set_holder(1, node=0, tier=2)
    _store(region, 1, range(10))
    region.roster.retire()
    assert region.reader.stale
    assert _lookup(region, range(10)).hits == 10, "it answers until it is closed"


def bad_questions_are_refused(region: OpenRegion) -> None:
    bad: tuple[tuple[Packed, int, int], ...] = (
        (b"1234567", 8, 0),
        (b"12345678", 7, 0),
        (b"12345678", 8, -1),
        (b"12345678", 8, 2**64),
    )
    for packed, width, scope in bad:
        try:
            region.reader.lookup(packed, width, scope=scope)
        except ValueError:
            continue
        raise AssertionError(f"bad input was accepted: {packed!r}, {width}, {scope}")


CHECKS: tuple[Callable[[OpenRegion], None], ...] = (
    an_empty_region_answers_misses,
    answers_name_nodes_and_tiers_for_holders,
    who_is_not_visible_or_not_known_is_left_out_and_equal_neighbours_are_one_run,
    a_prefix_ends_where_nobody_visible_goes_on,
    a_slot_that_is_used_again_is_another_node,
    records_are_read_as_written,
    drops_are_seen,
    a_reader_is_told_when_its_region_retires,
    bad_questions_are_refused,
)

"""Ranking of nominees, and the packed answer they come from."""

from __future__ import annotations

import struct

import pytest

from kvdir.core.answer import Lookup
from kvdir.core.ranking import rank
from kvdir.location import NodeTrust, StreamState, Tier

SYNCED = StreamState.SYNCED


def answer(holdings: dict[str, list[tuple[int, int, Tier]]], **states: StreamState) -> Lookup:
    """holdings: node -> [(start, count, tier)]; one run per entry, runs of different nodes must not overlap."""
    names = list(holdings)
    runs = sorted((start, count, name, tier) for name, entries in holdings.items() for start, count, tier in entries)
    sets = [struct.pack("<I", names.index(name) << 8 | tier) for _, _, name, tier in runs]
    packed = b"".join(struct.pack("<III", start, count, number) for number, (start, count, _, _) in enumerate(runs))
    nodes = tuple(NodeTrust(name, 1, states.get(name, SYNCED), "", 0.0, 0, f"{name}:1") for name in names)
    hits = sum(count for _, count, _, _ in runs)
    return Lookup(packed, tuple(sets), nodes, hits, 100)


def names(found: Lookup, **options: object) -> list[str]:
    return [nominee.trust.node for nominee in rank(found, salt=b"s", **options)]  # type: ignore[arg-type]


def test_most_coverage_comes_first() -> None:
    found = answer({"a": [(0, 3, Tier.CPU)], "b": [(10, 8, Tier.CPU)]})
    assert names(found) == ["b", "a"]
    assert found.coverage() == {0: 3, 1: 8}


def test_coverage_counts_only_what_remains_when_some_is_there_already() -> None:
    found = answer({"a": [(0, 3, Tier.CPU)], "b": [(10, 8, Tier.CPU)]})
    assert names(found, remaining=[0, 1, 2, 10]) == ["a", "b"]
    assert names(found, remaining=range(10, 18)) == ["b"]


def test_synced_comes_before_gap_when_coverage_is_equal() -> None:
    found = answer({"a": [(0, 4, Tier.CPU)], "b": [(10, 4, Tier.CPU)]}, a=StreamState.GAP)
    assert names(found) == ["b", "a"]


def test_gap_comes_first_when_it_covers_much_more() -> None:
    found = answer({"a": [(0, 40, Tier.CPU)], "b": [(50, 4, Tier.CPU)]}, a=StreamState.GAP)
    assert names(found) == ["a", "b"]


def test_faster_tier_comes_first_when_the_rest_is_equal() -> None:
    assert names(answer({"a": [(0, 4, Tier.DISK)], "b": [(10, 4, Tier.GPU)]})) == ["b", "a"]


def test_fenced_and_excluded_nodes_are_never_nominated() -> None:
    found = answer({"a": [(0, 4, Tier.CPU)], "b": [(10, 4, Tier.CPU)], "c": [(20, 4, Tier.CPU)]}, a=StreamState.FENCED)
    assert names(found, without=["b"]) == ["c"]


def test_equal_nodes_are_spread_over_callers_but_stable_for_one() -> None:
    found = answer({name: [(10 * at, 4, Tier.CPU)] for at, name in enumerate("abcd")})
    firsts = {rank(found, salt=bytes([salt]))[0].trust.node for salt in range(40)}
    assert firsts == set("abcd")
    assert rank(found, salt=b"x") == rank(found, salt=b"x")


@pytest.mark.parametrize(
    ("runs", "sets"),
    [
        (b"short", ()),
        (struct.pack("<III", 0, 5, 1), (struct.pack("<I", 2),)),
        (struct.pack("<III", 98, 5, 0), (struct.pack("<I", 2),)),
        (struct.pack("<IIIIII", 0, 5, 0, 4, 1, 0), (struct.pack("<I", 2),)),
        (struct.pack("<III", 0, 5, 0), (struct.pack("<I", 1 << 8 | 2),)),
        (struct.pack("<III", 0, 5, 0), (b"odd",)),
    ],
)
def test_fault_is_named_when_an_answer_does_not_fit_together(runs: bytes, sets: tuple[bytes, ...]) -> None:
    assert Lookup(runs, sets, (NodeTrust("a", 1, SYNCED, "", 0.0, 0, ""),), 5, 100).fault()


def test_tier_is_left_out_when_this_release_does_not_know_it() -> None:
    packed = struct.pack("<II", 9, Tier.CPU)
    found = Lookup(struct.pack("<III", 0, 1, 0), (packed,), (NodeTrust("a", 1, SYNCED, "", 0.0, 0, ""),), 1, 1)
    assert [run.holders for run in found] == [((0, Tier.CPU),)]

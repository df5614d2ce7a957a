"""Holder sets become (node, tier) sets: few of them and many alike, as counted one by one."""

from __future__ import annotations

import random
from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from kvdir.core import lookup, recode
from kvdir.core.holders import HolderTable
from kvdir.core.lookup import Answers, translate
from kvdir.core.node import Stream
from kvdir.location import MinTrust, StreamState, Tier


class Holders(HolderTable[Stream]):
    """Holders by number, without an index."""

    def __init__(self, by_number: dict[int, Any]) -> None:
        self._by = by_number
        self.generation = 1
        self.partial = 0

    def get(self, number: int) -> Any:
        return self._by.get(number)


def _cursor() -> Any:
    return SimpleNamespace(state=StreamState.SYNCED)


def holders(rng: random.Random) -> Holders:
    streams = [Stream(f"n{number}", 1, _cursor()) for number in range(20)]
    for stream in streams:
        stream.hidden = rng.random() < 0.2
        if rng.random() < 0.3:
            stream.cursor.state = StreamState.STALE
    return Holders(
        {
            number: SimpleNamespace(visible=rng.random() < 0.8, owner=rng.choice(streams), tier=rng.choice(list(Tier)))
            for number in range(60)
            if rng.random() < 0.9
        }
    )


def counted(table: Holders, sets: tuple[bytes, ...], min_trust: MinTrust) -> list[set[tuple[str, int]]]:
    out = []
    for packed in sets:
        known = [table.get(number) for number in array("I", packed)]
        shown = [item for item in known if item is not None and item.visible and not item.owner.hidden]
        out.append({(item.owner.node, int(item.tier)) for item in shown if min_trust.admits(item.owner.cursor.state)})
    return out


@pytest.mark.parametrize("many_bytes", [0, 2**40])
@pytest.mark.parametrize("min_trust", list(MinTrust))
def test_sets_name_who_can_be_seen_when_some_cannot(
    many_bytes: int, min_trust: MinTrust, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recode, "_MANY_BYTES", many_bytes)
    rng = random.Random(3)
    for _ in range(50):
        table = holders(rng)
        sets = tuple(
            array("I", sorted(rng.sample(range(62), rng.randrange(1, 8)))).tobytes() for _ in range(rng.randrange(1, 9))
        )
        got = translate(table, sets, min_trust=min_trust)
        nodes = [stream.node for stream in got.streams]
        named = [{(nodes[value >> 8], value & 0xFF) for value in array("I", packed)} for packed in got.sets]
        renumber = got.renumber or tuple(range(len(sets)))
        assert [named[at] if at >= 0 else set() for at in renumber] == counted(table, sets, min_trust)
        assert all(list(array("I", packed)) == sorted(set(array("I", packed))) for packed in got.sets)
        assert len(set(nodes)) == len(nodes)
        assert set(nodes) == {node for item in named for node, _ in item}


def test_translations_are_let_go_when_they_take_too_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "_CACHED_BYTES", 1000)
    answers = Answers(holders(random.Random(3)))
    for number in range(200):
        answers._translate((array("I", [number % 60] * 20).tobytes(),))
        assert sum(len(packed) for sets in answers._cache for packed in sets) <= 1200

"""Lookups in the region of this host: what is wrong with the region is an answer, and it is found again when it comes back."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from kvdir.client import replica_reader
from kvdir.client.replica_reader import OPEN_EVERY_S, ReplicaReader, find_region
from kvdir.core.answer import LookupMode
from kvdir.core.region_roster import RegionRoster
from kvdir.core.roster import Beat, NamespaceRecord
from kvdir.fingerprint import Fingerprints
from kvdir.location import MinTrust, NodeTrust, StreamState, Tier
from kvdir.testing.fake_node import EXAMPLE_NAMESPACE, some_fingerprints
from kvdir.testing.fake_region import FakeReader, FakeRegion

DIGEST = EXAMPLE_NAMESPACE.digest
NAMESPACE = NamespaceRecord(DIGEST, "example", EXAMPLE_NAMESPACE.block_bytes, EXAMPLE_NAMESPACE.block_tokens)
BLOCKS = some_fingerprints(8)
TRUST = NodeTrust("n1", 7, StreamState.SYNCED, "", 0.0, 0, "n1:1", 1.0)
S = 10**9


class World:
    """A region with one node, a clock, and a reader that finds the region as long as `there`."""

    def __init__(self, **terms: float) -> None:
        self.now_ns = 1000 * S
        self.there = True
        self.opened = 0
        self.region = self.new_region()
        self.reader = ReplicaReader("/r", open_region=self._open, clock_ns=lambda: self.now_ns, **terms)

    def new_region(self) -> FakeRegion:
        region = FakeRegion(seed=1)
        self.roster = RegionRoster(region)
        self.roster.put_namespace(NAMESPACE)
        self.roster.put_node(0, TRUST, heard_s=self.now_ns / 1e9, hidden=False)
        self.roster.put_holder(0, 0, Tier.CPU, visible=True)
        region.index.store(BLOCKS.packed, BLOCKS.width, scope=NAMESPACE.scope, holder=0, now_s=1)
        self.region = region
        self.beat()
        return region

    def beat(self, *, behind_s: float = 0.0, **fields: object) -> None:
        beat = Beat(
            beat_ns=self.now_ns, as_of_ns=self.now_ns - round(behind_s * S), pid=4, source="c:1", stale_after_s=3.0,
            expire_after_s=9.0,
        )  # fmt: skip
        self.roster.beat(replace(beat, **fields))  # type: ignore[arg-type]

    def _open(self, path: str) -> FakeReader:
        assert path == "/r"
        self.opened += 1
        if not self.there:
            raise FileNotFoundError(f"{path} is not there: start the agent")
        return FakeReader(self.region)


def test_answer_says_who_holds_and_how_old_it_is() -> None:
    world = World()
    world.now_ns += S // 2
    answer = world.reader.lookup(DIGEST, BLOCKS)
    assert (answer.hits, answer.asked, answer.source, answer.lag_s) == (8, 8, "replica", 0.5)
    assert answer.nodes == (replace(TRUST, age_s=0.5),)
    assert [(run.start, run.count, run.holders) for run in answer] == [(0, 8, ((0, Tier.CPU),))]
    assert not answer.fault()
    assert world.reader.status().usable
    missing = world.reader.lookup(DIGEST, Fingerprints(bytes(64), 32))
    assert (missing.hits, missing.asked, missing.source) == (0, 2, "replica")


def test_nodes_grow_stale_and_vanish_when_the_feed_is_silent() -> None:
    world = World(dead_after_s=1e6)
    states = []
    for _ in range(11):
        world.now_ns += S
        world.beat(behind_s=(world.now_ns - 1000 * S) / S)  # the writer lives, and hears nothing
        answer = world.reader.lookup(DIGEST, BLOCKS)
        states.append((answer.hits, answer.nodes[0].state if answer.nodes else None))
        assert answer.lag_s == pytest.approx((world.now_ns - 1000 * S) / S)
    synced, stale = (8, StreamState.SYNCED), (8, StreamState.STALE)
    assert states == [synced] * 3 + [stale] * 6 + [(0, None)] * 2
    assert world.reader.lookup(DIGEST, BLOCKS, min_trust=MinTrust.NOT_STALE).below_trust == 0  # left out, not below


def test_nodes_below_the_wanted_trust_are_left_out_and_counted() -> None:
    world = World()
    world.roster.put_node(1, replace(TRUST, node="n2", state=StreamState.GAP), heard_s=world.now_ns / 1e9, hidden=False)
    world.roster.put_holder(1, 1, Tier.GPU, visible=True)
    world.region.index.store(BLOCKS.packed, BLOCKS.width, scope=NAMESPACE.scope, holder=1, now_s=1)
    both = world.reader.lookup(DIGEST, BLOCKS, mode=LookupMode.PREFIX)
    assert {node.node for node in both.nodes} == {"n1", "n2"}
    one = world.reader.lookup(DIGEST, BLOCKS, mode=LookupMode.PREFIX, min_trust=MinTrust.SYNCED)
    assert ([node.node for node in one.nodes], one.hits, one.below_trust) == (["n1"], 8, 1)
    assert not one.fault()


def test_hidden_nodes_are_left_out_and_come_back() -> None:
    world = World()
    for hidden, hits in ((True, 0), (False, 8)):
        world.roster.put_node(0, TRUST, heard_s=world.now_ns / 1e9, hidden=hidden)
        world.now_ns += S // 10
        assert world.reader.lookup(DIGEST, BLOCKS).hits == hits


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda world: setattr(world, "now_ns", world.now_ns + 3 * S), "process 4.*has not been heard for 3.0 s"),
        (lambda world: world.beat(behind_s=5.0), "may be 5.0 s behind"),
        (lambda world: setattr(world.region, "beat_record", b""), "has not said yet"),
        (lambda world: world.roster.namespace_gone(DIGEST), "is not in it"),
        (lambda world: setattr(world, "there", False), "start the agent"),
    ],
    ids=["dead", "behind", "no-beat", "no-namespace", "none"],
)
def test_nobody_answers_and_the_reason_is_said_when_the_region_is_of_no_use(spoil: object, reason: str) -> None:
    world = World(max_lag_s=4.0)
    spoil(world)  # type: ignore[operator]
    answer = world.reader.lookup(DIGEST, BLOCKS)
    assert (answer.source, answer.hits, answer.asked, answer.nodes) == ("none", 0, 8, ())
    assert re.search(reason, answer.reason), answer.reason


def test_answer_says_that_it_is_not_whole_when_the_writer_was_at_it() -> None:
    world = World()
    world.region.torn = True
    answer = world.reader.lookup(DIGEST, BLOCKS)
    assert (answer.source, answer.hits, answer.incomplete) == ("replica", 0, True)
    assert "changing some of these entries" in answer.reason


def test_namespace_is_known_on_when_its_records_are_just_being_written() -> None:
    world = World()
    assert world.reader.lookup(DIGEST, BLOCKS).hits == 8
    world.region.namespaces = (0, b"")  # what a reader gets meanwhile
    world.now_ns += S // 10
    assert world.reader.lookup(DIGEST, BLOCKS).hits == 8


def test_region_is_looked_for_now_and_then_only_while_there_is_none() -> None:
    world = World()
    world.there = False
    for _ in range(100):
        assert world.reader.lookup(DIGEST, BLOCKS).source == "none"
    assert world.opened == 1
    world.there = True
    assert world.reader.lookup(DIGEST, BLOCKS).source == "none"
    world.now_ns += round(OPEN_EVERY_S * S)
    world.beat()
    assert world.reader.lookup(DIGEST, BLOCKS).source == "replica"
    assert world.opened == 2


def test_new_region_is_found_when_the_old_one_was_retired_or_its_writer_died() -> None:
    world = World()
    assert world.reader.lookup(DIGEST, BLOCKS).source == "replica"
    world.region.retire()
    world.now_ns += S
    world.new_region()
    assert world.reader.lookup(DIGEST, BLOCKS).source == "replica"
    world.now_ns += 5 * S  # killed: nobody retires what it left
    assert world.reader.lookup(DIGEST, BLOCKS).source == "none"
    world.now_ns += S
    world.new_region()
    assert world.reader.lookup(DIGEST, BLOCKS).source == "replica"


def test_region_of_the_old_path_is_left_when_the_path_moves_while_it_is_opened() -> None:
    world = World()
    opened: list[str] = []

    def open_slowly(path: str) -> FakeReader:
        opened.append(path)
        reader.move("/new")  # another thread
        return FakeReader(world.region)

    reader = ReplicaReader("/old", open_region=open_slowly, clock_ns=lambda: world.now_ns)
    reader.lookup(DIGEST, BLOCKS)
    world.now_ns += round(OPEN_EVERY_S * S)
    reader.lookup(DIGEST, BLOCKS)
    assert opened == ["/old", "/new"]


def test_looking_for_a_region_names_what_there_is_when_it_is_not_exactly_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_reader, "DEFAULT_PLACE", str(tmp_path / "kvdir-*.replica"))
    with pytest.raises(FileNotFoundError, match="an agent that keeps a replica"):
        find_region()
    (tmp_path / "kvdir-a.replica").touch()
    (tmp_path / "kvdir-a.replica.lock").touch()
    assert find_region() == str(tmp_path / "kvdir-a.replica")
    (tmp_path / "kvdir-b.replica").touch()
    with pytest.raises(FileNotFoundError, match=r"name one .*kvdir-a.replica, .*kvdir-b.replica"):
        find_region()

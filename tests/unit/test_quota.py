"""Quotas: what counts, when nothing may be evicted, and never more than the excess."""

from __future__ import annotations

import pytest

from kvdir.core.access import AccessSample, cutoff_age_s
from kvdir.core.directory import Directory, Hello, Limits, Welcomed
from kvdir.core.effects import AskEvict
from kvdir.core.event import NO_DOUBT, Event, EvictResult, Heartbeat, HeartbeatFigures, OwnerCount
from kvdir.core.inspect import node_views
from kvdir.core.namespaces import Announced
from kvdir.core.node import Stream
from kvdir.core.quota import Quota, parse_quota
from kvdir.core.quota_keeper import QuotaKeeper, QuotaPolicy
from kvdir.fingerprint import Fingerprints
from kvdir.index import Sketch, open_index
from kvdir.location import Tier
from kvdir.namespace import Namespace
from kvdir.testing.fake_node import EXAMPLE_NAMESPACE, some_fingerprints

DIGEST = EXAMPLE_NAMESPACE.digest
BLOCK = EXAMPLE_NAMESPACE.block_bytes
ANNOUNCED = Announced(DIGEST, EXAMPLE_NAMESPACE.canonical().encode(), BLOCK)


class Fleet:
    """A directory that some nodes publish to, a keeper, and a clock."""

    def __init__(self, limit_blocks: int, *, enforce: bool = True, max_blocks: int = 1000) -> None:
        self.now_s = 0.0
        self.directory = Directory(open_index(seed=1), Sketch, Limits(warm_up_s=0.0), now_s=0.0)
        quotas = (Quota("none", limit_blocks * BLOCK),)
        self.keeper = QuotaKeeper(QuotaPolicy(quotas=quotas, enforce=enforce, interval_s=1.0, max_blocks=max_blocks))
        self.seqs: dict[str, int] = {}
        self.held: dict[str, set[bytes]] = {}

    def join(self, node: str) -> Stream:
        outcome = self.directory.hello(Hello(node, 1, 0, "h:1", 0, (ANNOUNCED,)), now_s=self.now_s)
        assert isinstance(outcome, Welcomed)
        self.seqs[node], self.held[node] = 0, set()
        return outcome.stream

    def stream(self, node: str) -> Stream:
        stream = self.directory.nodes[node].stream
        assert stream is not None
        return stream

    def store(self, node: str, blocks: Fingerprints, *, lost: bool = False) -> None:
        self.held[node] |= set(blocks)
        self._event(node, Event.stored(Tier.CPU, DIGEST, blocks), lost=lost)

    def remove(self, node: str, blocks: Fingerprints, *, lost: bool = False) -> None:
        self.held[node] -= set(blocks)
        self._event(node, Event.removed(Tier.CPU, DIGEST, blocks), lost=lost)

    def _event(self, node: str, event: Event, *, lost: bool) -> None:
        self.seqs[node] += 1
        if not lost:
            self.directory.batch(self.stream(node), self.seqs[node], [event], now_s=self.now_s)

    def run(self, seconds: float, *, silent: tuple[str, ...] = ()) -> list[AskEvict]:
        """Time passes, a heartbeat of every node each half second. Returns what was asked."""
        out = []
        for _ in range(int(seconds * 4)):
            self.now_s += 0.25
            for node, seq in self.seqs.items():
                if node not in silent and self.now_s % 0.5 == 0:
                    counts = (OwnerCount(DIGEST, Tier.CPU, len(self.held[node])),)
                    figures = HeartbeatFigures(counts=counts)
                    self.directory.heartbeat(self.stream(node), Heartbeat(seq, figures), now_s=self.now_s)
            self.directory.tick(now_s=self.now_s)
            out += self.keeper.tick(self.directory, now_s=self.now_s)
        return out

    def obey(self, ask: AskEvict) -> int:
        """As an owner does: the oldest first (here: any), never below the floor."""
        held = sorted(self.held[ask.node])
        gone = held[: max(0, min(ask.request.max_blocks, len(held) - ask.request.keep_blocks))]
        if gone:
            self.remove(ask.node, Fingerprints.of(gone))
        result = EvictResult(ask.request.request_id, len(gone), self.seqs[ask.node])
        self.keeper.answered(self.stream(ask.node), result)
        return len(gone)

    @property
    def verdict(self) -> str:
        return self.keeper.watched[0].verdict


def blocks_of(asks: list[AskEvict]) -> int:
    return sum(ask.request.max_blocks for ask in asks)


def test_nothing_is_asked_when_within_the_quota() -> None:
    fleet = Fleet(100)
    fleet.join("a")
    fleet.store("a", some_fingerprints(100))
    assert fleet.run(5) == []
    assert fleet.verdict == "within"


def test_exactly_the_excess_goes_when_the_quota_is_exceeded() -> None:
    fleet = Fleet(100)
    for number, node in enumerate("abc"):
        fleet.join(node)
        fleet.store(node, some_fingerprints(50, seed=number))
    asks = fleet.run(3)
    assert blocks_of(asks) == 50
    assert {ask.node: ask.request.keep_blocks + ask.request.max_blocks for ask in asks} == {"a": 50, "b": 50, "c": 50}
    assert fleet.run(3) == []  # what was asked for counts as gone, though nobody has answered
    assert sum(fleet.obey(ask) for ask in asks) == 50
    assert fleet.run(5) == []
    assert (fleet.verdict, fleet.keeper.watched[0].evicted_blocks) == ("within", 50)


def test_oldest_blocks_of_the_fleet_go_first_when_ages_differ() -> None:
    fleet = Fleet(100)
    fleet.join("old")
    fleet.join("new")
    fleet.store("old", some_fingerprints(100, seed=1))
    fleet.run(2)
    fleet.now_s += 1.0
    fleet.keeper.watched[0].due_s = 1000.0
    fleet.run(60)
    fleet.store("new", some_fingerprints(50, seed=2))
    fleet.keeper.watched[0].due_s = 0.0
    asks = fleet.run(4)
    assert [(ask.node, ask.request.max_blocks, ask.request.keep_blocks) for ask in asks] == [("old", 50, 50)]
    assert 60 <= asks[0].request.older_than_s <= 66


def test_dry_run_says_what_would_go_and_asks_nothing() -> None:
    fleet = Fleet(60, enforce=False)
    fleet.join("a")
    fleet.store("a", some_fingerprints(100))
    assert fleet.run(5) == []
    watched = fleet.keeper.watched[0]
    assert (watched.verdict, watched.plan.blocks) == ("dry-run", 40)
    assert "would evict 40 blocks" in watched.words


def test_lost_removal_deletes_nothing_when_the_total_only_seems_to_exceed_the_quota() -> None:
    """The class of bug of LMCache #4291: a removal gets lost, the sum drifts up, and the cache of a tenant is deleted."""
    fleet = Fleet(100)
    fleet.join("a")
    fleet.join("b")
    for number in range(50):
        gone = some_fingerprints(2, seed=number)
        fleet.store("a", gone)
        fleet.remove("a", gone, lost=True)  # the truth is 0 blocks; the directory counts 100
    fleet.store("b", some_fingerprints(50, seed=99))
    fleet.stream("a").cursor.close(now_s=fleet.now_s)  # nobody can be asked for repair
    assert fleet.run(4) == []
    watched = fleet.keeper.watched[0]
    assert watched.verdict == "untrusted"
    assert watched.refused > 0
    assert watched.figure.value > watched.quota.limit_bytes
    assert len(fleet.held["b"]) == 50


def test_loss_of_the_last_event_deletes_nothing_when_no_heartbeat_has_shown_it_yet() -> None:
    fleet = Fleet(100)
    fleet.join("a")
    blocks = some_fingerprints(150)
    fleet.store("a", blocks)
    fleet.run(0.5, silent=("a",))
    fleet.remove("a", blocks.slice(0, 60), lost=True)  # within the quota now, and nobody knows
    assert fleet.run(3, silent=("a",)) == []
    assert fleet.verdict == "settling"
    assert fleet.run(3) == []
    assert fleet.verdict == "untrusted"


def test_eviction_goes_on_when_the_loss_was_repaired() -> None:
    fleet = Fleet(10)
    fleet.join("a")
    fleet.store("a", some_fingerprints(20), lost=True)
    fleet.store("a", some_fingerprints(20, seed=1))
    assert fleet.run(3) == []
    for seq, seed in ((1, 0), (2, 1)):  # the owner goes back and sends both again
        event = Event.stored(Tier.CPU, DIGEST, some_fingerprints(20, seed=seed))
        fleet.directory.batch(fleet.stream("a"), seq, [event], now_s=fleet.now_s)
    assert blocks_of(fleet.run(4)) == 30


def test_silent_stream_without_blocks_blocks_nothing_but_a_gap_in_it_does() -> None:
    fleet = Fleet(10)
    fleet.join("a")
    fleet.join("empty")
    fleet.store("a", some_fingerprints(20))
    fleet.store("empty", some_fingerprints(5, seed=5), lost=True)
    assert fleet.run(4) == []
    assert (fleet.verdict, "empty" in fleet.keeper.watched[0].words) == ("untrusted", True)


def test_engine_that_announces_blocks_is_neither_counted_nor_asked_nor_in_the_way_when_it_is_in_doubt() -> None:
    fleet, told = Fleet(10), Namespace.announced(model="m", block_tokens=16, hash_scheme="opaque", hash_seed="builtin")
    fleet.join("a")
    fleet.store("a", some_fingerprints(30))
    announced = Announced(told.digest, told.canonical().encode(), told.block_bytes)
    doubt = NO_DOUBT.begun("the engine lost events")
    engine = fleet.directory.hello(Hello("a/vllm-0", 2, 0, "", 0, (announced,), doubt), now_s=0.0)
    assert isinstance(engine, Welcomed)
    fleet.directory.batch(engine.stream, 1, [Event.stored(Tier.GPU, told.digest, some_fingerprints(999))], now_s=0.0)
    asks = fleet.run(4)
    assert ({ask.node for ask in asks}, blocks_of(asks)) == ({"a"}, 20)
    (view,) = [view for view in node_views(fleet.directory, now_s=fleet.now_s) if view.trust.node == "a/vllm-0"]
    assert [(holding.blocks.value, holding.bytes.value) for holding in view.holdings] == [(999, 0)]


def test_request_is_forgotten_when_its_connection_ends() -> None:
    fleet = Fleet(10)
    stream = fleet.join("a")
    fleet.store("a", some_fingerprints(20))
    (first,) = fleet.run(3)
    fleet.directory.disconnected(stream, stream.connection, now_s=fleet.now_s)
    fleet.directory.hello(Hello("a", 1, fleet.seqs["a"], "h:1", 0, (ANNOUNCED,)), now_s=fleet.now_s)
    (second,) = fleet.run(4)
    assert second.request.keep_blocks == first.request.keep_blocks  # so doing both takes no more than doing one
    fleet.obey(first)  # an answer of the old call: not waited for
    assert fleet.keeper.watched[0].evicted_blocks == 0
    assert fleet.obey(second) == 0
    assert len(fleet.held["a"]) == 10


def test_overlapping_quotas_do_not_evict_twice_for_one_excess() -> None:
    fleet = Fleet(100)
    both = (Quota("none", 100 * BLOCK), Quota(f"namespace:{DIGEST.hex()}", 100 * BLOCK))
    fleet.keeper = QuotaKeeper(QuotaPolicy(quotas=both, enforce=True, interval_s=1.0))
    for number, node in enumerate("abc"):
        fleet.join(node)
        fleet.store(node, some_fingerprints(50, seed=number))
    asks = fleet.run(4)
    assert blocks_of(asks) == 50
    for ask in asks:
        fleet.obey(ask)
    assert fleet.run(4) == []
    assert [watched.verdict for watched in fleet.keeper.watched] == ["within", "within"]


def test_rate_is_bounded_when_the_excess_is_large() -> None:
    fleet = Fleet(0, max_blocks=8)
    fleet.join("a")
    fleet.store("a", some_fingerprints(100))
    asks = fleet.run(3)
    assert blocks_of(asks) == 8
    fleet.obey(asks[0])
    assert blocks_of(fleet.run(3)) == 8


def test_younger_blocks_are_asked_for_when_owners_find_too_few_old_ones() -> None:
    fleet = Fleet(10)
    fleet.join("a")
    fleet.store("a", some_fingerprints(20))
    fleet.keeper.watched[0].due_s = 40.0
    ages = []
    for _ in range(3):
        (ask,) = fleet.run(50)[:1]
        ages.append(ask.request.older_than_s)
        fleet.keeper.answered(fleet.stream("a"), EvictResult(ask.request.request_id, 0, fleet.seqs["a"]))
    assert ages[1] < 0.75 * (ages[0] + 50)
    assert fleet.keeper.watched[0].patience < 0.5


def test_warming_coordinator_evicts_nothing() -> None:
    fleet = Fleet(10)
    fleet.join("a")
    fleet.store("a", some_fingerprints(20))
    fleet.directory.warming = True
    fleet.directory.started_s = 1e9
    assert fleet.run(4) == []
    assert "restated" in fleet.keeper.watched[0].words


@pytest.mark.parametrize("text", ["none", "=5", "tenant=5", "namespace:3f=5", "none=many", "namespace:xyzxyzxyz=5"])
def test_bad_quota_says_how_to_write_one(text: str) -> None:
    with pytest.raises(ValueError, match="write"):
        parse_quota(text)


def test_quota_of_a_namespace_covers_only_it() -> None:
    fleet = Fleet(1)
    fleet.join("a")
    (known,) = fleet.directory.namespaces
    assert parse_quota(f"namespace:{DIGEST.hex()[:12]}=1GiB").covers(known)
    assert not parse_quota("namespace:0000000000=1GiB").covers(known)
    assert parse_quota("none=1GiB") == Quota("none", 2**30)


@pytest.mark.parametrize("start", [0, 1, 1 << 63])
def test_sample_sees_every_block_once_when_it_wants_all(start: int) -> None:
    index = open_index(seed=3)
    index.store(some_fingerprints(1000).packed, 32, scope=1, holder=7, now_s=10)
    index.store(some_fingerprints(500, seed=1).packed, 32, scope=1, holder=8, now_s=70)
    sample = AccessSample([7], start, want=10**6)
    for _ in range(100):
        sample.step(index, 64, now_s=100.0)
        if sample.done:
            break
    assert sample.done
    assert set(sample.ages[7]) == {90}
    assert 1000 <= sample.ages[7].total() < 1000 + 64


def test_cutoff_parts_the_oldest_share_of_the_weight() -> None:
    from collections import Counter

    ages = {1: Counter({10: 50, 20: 50}), 2: Counter({30: 10})}
    assert cutoff_age_s(ages, {1: 1.0, 2: 1.0}, 0.05) == 30
    assert cutoff_age_s(ages, {1: 1.0, 2: 1.0}, 0.5) == 20
    assert cutoff_age_s(ages, {1: 1.0, 2: 1.0}, 1.0) == 10
    assert cutoff_age_s({}, {}, 0.5) == 0

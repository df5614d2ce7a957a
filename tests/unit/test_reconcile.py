"""Sums held against sums: proof by digest, repair by sketch, its cost, and what a wrong or silent owner cannot do."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvdir.core.directory import Directory, Hello, Limits, Welcomed
from kvdir.core.effects import RequestReplay, RequestSketch, RequestSnapshot, SketchApplied
from kvdir.core.event import Event, HeartbeatFigures, OwnerCount
from kvdir.core.inspect import faults
from kvdir.core.namespaces import Announced
from kvdir.core.node import Stream
from kvdir.core.outbox import OwnerOutbox
from kvdir.core.repair import Ask, RepairPolicy
from kvdir.core.sender import StreamSender
from kvdir.core.sketches import OwnerSketches, SketchStatement
from kvdir.fingerprint import Fingerprints
from kvdir.index import Sketch, open_index
from kvdir.location import StreamState, Tier
from kvdir.testing.fake_node import EXAMPLE_NAMESPACE

DIGEST = EXAMPLE_NAMESPACE.digest
ANNOUNCED = Announced(DIGEST, EXAMPLE_NAMESPACE.canonical().encode(), EXAMPLE_NAMESPACE.block_bytes)
KEY = (DIGEST, int(Tier.CPU))
LIMITS = Limits(repair=RepairPolicy(idle_s=1.0, spacing_s=0.0, max_fruitless=1))


def blocks(first: int, count: int, width: int = 16) -> Fingerprints:
    return Fingerprints(b"".join(random.Random(number).randbytes(width) for number in range(first, first + count)), width)


class Pair:
    """One owner with sketches, one directory; `say` loses what it is told to lose."""

    def __init__(self, held: Fingerprints | None = None, *, sketches: bool = True) -> None:
        self.directory = Directory(open_index(seed=1), Sketch, LIMITS, now_s=0.0)
        self.outbox = OwnerOutbox(max_events=4, sketches=OwnerSketches(Sketch) if sketches else None)
        self.sender = StreamSender(self.outbox)
        outcome = self.directory.hello(Hello("n", 7, 0, namespaces=(ANNOUNCED,)), now_s=0.0)
        assert isinstance(outcome, Welcomed)
        self.stream: Stream = outcome.stream
        self.sender.opened(resume_seq=0, hello_seq=0, credit=10_000)
        if held is not None:
            self.say(Event.stored(Tier.CPU, DIGEST, held))
        self.beat(0.0)

    def say(self, event: Event, *, lost: bool = False) -> None:
        self.outbox.append(event)
        batch = self.sender.next_batch()
        if batch is not None and not lost:
            self.directory.batch(self.stream, batch.first_seq, batch.events, now_s=0.0)

    def beat(self, now_s: float) -> None:
        self.directory.heartbeat(self.stream, self.sender.heartbeat(HeartbeatFigures()), now_s=now_s)

    def asked(self, now_s: float) -> RequestSketch:
        effects = self.directory.tick(now_s=now_s)
        (request,) = [effect for effect in effects if isinstance(effect, RequestSketch)]
        return request

    def answer(self, request: RequestSketch) -> SketchStatement:
        statement = self.sender.sketch(request.request_id, cells=request.cells, parts=request.parts)
        assert statement is not None
        return statement

    def corrupt(self, gone: Fingerprints, more: Fingerprints) -> None:
        """The directory changes for no reason at all."""
        assert self.directory.ingest.correct(self.stream, KEY, gone.packed, more.packed, 0.0)

    @property
    def state(self) -> StreamState:
        return self.stream.cursor.state


@pytest.mark.parametrize("width", [8, 16, 32])
def test_difference_is_applied_when_the_ring_is_too_short(width: int) -> None:
    pair = Pair(blocks(0, 100, width))
    pair.say(Event.removed(Tier.CPU, DIGEST, blocks(0, 10, width)), lost=True)
    pair.say(Event.stored(Tier.CPU, DIGEST, blocks(200, 5, width)), lost=True)
    pair.say(Event.cleared(Tier.DISK), lost=True)
    pair.say(Event.stored(Tier.DISK, DIGEST, blocks(300, 2, width)), lost=True)
    pair.say(Event.stored(Tier.CPU, DIGEST, blocks(400, 3, width)))
    pair.beat(1.0)
    assert (pair.state, pair.stream.cursor.missed_events) == (StreamState.GAP, 4)
    (replay,) = [effect for effect in pair.directory.tick(now_s=1.0) if isinstance(effect, RequestReplay)]
    assert not pair.sender.replay(replay.first_seq)
    pair.directory.replay_unavailable(pair.stream, now_s=1.0)
    request = pair.asked(1.1)
    assert (request.cells, set(request.parts)) == (128, {KEY, (DIGEST, int(Tier.DISK))})
    pair.directory.sketch(pair.stream, pair.answer(request), now_s=1.2)
    assert (pair.state, pair.stream.cursor.applied_seq) == (StreamState.SYNCED, pair.outbox.last_seq)
    assert [holder.blocks for holder in pair.stream.holders.values()] == [98, 2]
    assert pair.directory.lookup(DIGEST, blocks(200, 5, width), now_s=1.2).hits == 5
    assert pair.directory.lookup(DIGEST, blocks(0, 10, width), now_s=1.2).hits == 0
    assert not list(faults(pair.directory))
    assert [effect.blocks for effect in pair.directory.take_effects() if isinstance(effect, SketchApplied)] == [17]


def test_hole_is_proved_harmless_when_the_digests_are_equal() -> None:
    pair = Pair(blocks(0, 9))
    pair.say(Event.stored(Tier.CPU, DIGEST, blocks(50, 1)), lost=True)
    pair.say(Event.removed(Tier.CPU, DIGEST, blocks(50, 1)), lost=True)
    pair.beat(1.0)
    assert pair.state is StreamState.SYNCED
    assert pair.directory.repairs[Ask.REPLAY].asked == 0
    assert pair.stream.cursor.gaps == 1


@pytest.mark.parametrize(("differences", "most_bytes"), [(2, 3_300), (40, 3_300), (600, 25 * 1024)])
def test_silently_wrong_entries_cost_in_proportion_when_a_heartbeat_finds_them(differences: int, most_bytes: int) -> None:
    pair = Pair(blocks(0, 2_000))
    half = differences // 2
    pair.corrupt(blocks(0, half), blocks(5_000, half))
    assert pair.state is StreamState.SYNCED
    pair.beat(1.0)
    assert pair.state is StreamState.GAP
    assert "but others" in pair.stream.cursor.reason
    for now_s in (1.1, 1.2):
        if pair.state is not StreamState.SYNCED:
            pair.directory.sketch(pair.stream, pair.answer(pair.asked(now_s)), now_s=now_s)
    assert pair.state is StreamState.SYNCED
    assert pair.directory.reconciler.repaired_blocks == differences
    tally = pair.directory.repairs[Ask.SKETCH]
    assert tally.bytes <= most_bytes + (3_300 if differences > 100 else 0)  # the first, folded one was too small
    assert pair.directory.repairs[Ask.SNAPSHOT].asked == 0
    pair.beat(2.0)
    assert pair.stream.unconfirmed_blocks == 0


def test_snapshot_is_asked_at_once_when_the_counts_are_too_far_apart() -> None:
    pair = Pair(blocks(0, 10))
    pair.corrupt(blocks(0, 0), blocks(100, 800))
    pair.beat(1.0)
    effects = pair.directory.tick(now_s=1.1)
    assert [type(effect) for effect in effects if isinstance(effect, RequestSketch | RequestSnapshot)] == [RequestSnapshot]


def test_snapshot_is_asked_when_the_owner_keeps_no_sketches() -> None:
    pair = Pair(blocks(0, 10), sketches=False)
    figures = HeartbeatFigures(counts=OwnerSketches(Sketch).counts())
    pair.directory.heartbeat(pair.stream, replace(pair.sender.heartbeat(HeartbeatFigures()), figures=figures), now_s=1.0)
    effects = pair.directory.tick(now_s=1.1)
    assert [type(effect) for effect in effects if isinstance(effect, RequestSketch | RequestSnapshot)] == [RequestSnapshot]


def lies(statement: SketchStatement) -> dict[str, SketchStatement]:
    (part,) = statement.parts

    def with_part(**changes: object) -> SketchStatement:
        return replace(statement, parts=(replace(part, **changes),))  # type: ignore[arg-type]

    return {
        "not-a-sketch": with_part(encoded=part.encoded[:40] + b"\xff" + part.encoded[41:]),
        "part-missing": with_part(encoded=b""),
        "bad-digest": with_part(digest=b"short"),
        "contradiction": with_part(blocks=part.blocks + 1),
        "part-twice": replace(statement, parts=(part, part)),
        "older-than-events": replace(statement, at_seq=statement.at_seq - 1),
        "unasked": replace(statement, request_id=statement.request_id + 1),
    }


@pytest.mark.parametrize(
    "reason",
    ["not-a-sketch", "part-missing", "bad-digest", "contradiction", "part-twice", "older-than-events", "unasked"],
)
def test_nothing_changes_when_a_sketch_is_bad(reason: str) -> None:
    pair = Pair(blocks(0, 50))
    pair.corrupt(blocks(0, 1), blocks(90, 1))
    pair.beat(1.0)
    before = pair.stream.holders[KEY].sketch.encode()
    pair.directory.sketch(pair.stream, lies(pair.answer(pair.asked(1.1)))[reason], now_s=1.2)
    assert pair.directory.reconciler.failures == {reason: 1}
    assert pair.stream.holders[KEY].sketch.encode() == before
    assert pair.state is not StreamState.SYNCED


def test_snapshot_follows_when_sketches_fail_or_nobody_answers() -> None:
    pair = Pair(blocks(0, 50))
    pair.corrupt(blocks(0, 1), blocks(90, 1))
    pair.beat(1.0)
    first = pair.asked(1.1)
    pair.beat(2.0)
    second = pair.asked(2.2)  # the first ran into its deadline
    assert (first.cells, len(first.parts), second.cells, second.parts) == (128, 1, 1024, ())
    pair.directory.sketch(pair.stream, replace(pair.answer(second), parts=pair.answer(second).parts * 2), now_s=2.3)
    (request,) = [effect for effect in pair.directory.tick(now_s=2.4) if isinstance(effect, RequestSnapshot)]
    assert request.snapshot_id


def test_owner_is_asked_ever_less_often_when_its_figures_disagree_with_its_own_statements() -> None:
    pair = Pair(blocks(0, 50))
    policy = RepairPolicy(idle_s=0.5, spacing_s=0.2, retry_max_s=5.0)
    pair.stream.cursor._repair._policy = policy
    asked = 0
    for tenth in range(1, 300):
        now_s = tenth / 10
        said = pair.sender.heartbeat(HeartbeatFigures())
        assert said.figures.counts
        lie = tuple(replace(count, digest=bytes(16)) for count in said.figures.counts)
        pair.directory.heartbeat(pair.stream, replace(said, figures=HeartbeatFigures(counts=lie)), now_s=now_s)
        for effect in pair.directory.tick(now_s=now_s):
            if isinstance(effect, RequestSketch):
                asked += 1
                pair.directory.sketch(pair.stream, pair.answer(effect), now_s=now_s)
    assert 5 <= asked <= 15


def test_sketches_wait_when_as_many_are_under_way_as_may_be() -> None:
    pair = Pair(blocks(0, 50))
    pair.directory.limits = replace(LIMITS, max_sketches=0)
    pair.corrupt(blocks(0, 1), blocks(90, 1))
    pair.beat(1.0)
    assert not [e for e in pair.directory.tick(now_s=1.1) if isinstance(e, RequestSketch | RequestSnapshot)]
    pair.directory.limits = LIMITS
    assert pair.asked(1.2)


def test_owner_states_nothing_when_it_does_not_know_what_it_lost() -> None:
    pair = Pair(blocks(0, 3))
    sketches = pair.outbox.sketches
    assert sketches is not None
    pair.outbox.lose(40)
    assert sketches.counts() is None
    assert pair.sender.next_batch() is None
    assert pair.sender.heartbeat(HeartbeatFigures()).figures.counts is None
    assert pair.sender.sketch(1, cells=128, parts=()) is None
    pair.beat(1.0)
    assert (pair.stream.trust(1.0).missing_events, pair.stream.cursor.missed_events) == (40, 40)
    sketches.restate([Event.stored(Tier.CPU, DIGEST, blocks(1, 2))])
    pair.beat(2.0)
    assert pair.stream.suspects == {KEY}


def test_owner_says_its_own_count_when_its_sketch_has_another() -> None:
    """A fault of the owner's sketches must show, not be believed."""
    pair = Pair(blocks(0, 3))
    said = pair.sender.heartbeat(HeartbeatFigures(counts=()))
    assert [count.blocks for count in said.figures.counts or ()] == [3]
    counts = tuple(replace(count, blocks=4) for count in said.figures.counts or ())
    assert pair.sender.heartbeat(HeartbeatFigures(counts=counts)).figures.counts == counts


def test_streams_with_the_most_blocks_go_first_when_all_need_a_snapshot() -> None:
    directory = Directory(open_index(seed=1), Sketch, replace(LIMITS, max_snapshots=2), now_s=0.0)
    for number, held in enumerate([5, 900, 20, 700]):
        outcome = directory.hello(Hello(f"n{number}", 7, 10, namespaces=(ANNOUNCED,)), now_s=0.0)
        assert isinstance(outcome, Welcomed)
        sketches = OwnerSketches(Sketch)
        sketches.restate([Event.stored(Tier.CPU, DIGEST, blocks(0, held))])
        outbox = OwnerOutbox(sketches=sketches)
        outbox.lose(10)
        sketches.known = True
        sender = StreamSender(outbox)
        sender.opened(resume_seq=0, hello_seq=10, credit=100)
        directory.heartbeat(outcome.stream, sender.heartbeat(HeartbeatFigures()), now_s=0.0)
    asked = [effect.node for effect in directory.tick(now_s=0.1) if isinstance(effect, RequestSnapshot)]
    assert asked == ["n1", "n3"]


def test_memory_is_bounded_when_a_heartbeat_names_namespaces_nobody_knows() -> None:
    pair = Pair(blocks(0, 3))
    said = pair.sender.heartbeat(HeartbeatFigures())
    unknown = tuple(OwnerCount(number.to_bytes(32, "big"), 2, 1, bytes(16)) for number in range(10_000))
    odd = (OwnerCount(DIGEST, 99, 1, bytes(16)),)
    counts = (*(said.figures.counts or ()), *unknown, *odd)
    pair.directory.heartbeat(pair.stream, replace(said, figures=HeartbeatFigures(counts=counts)), now_s=1.0)
    assert pair.stream.owner_counts.keys() == {KEY}
    assert pair.stream.figures.counts is None
    assert pair.state is StreamState.SYNCED
    assert pair.stream.trust(1.0).confirmed == 1.0


def test_prefix_collision_ends_in_a_snapshot_when_two_blocks_share_their_first_eight_bytes() -> None:
    """The index keeps 8 bytes: of two such blocks it holds one, and no sketch can say otherwise."""
    twins = Fingerprints(b"".join(bytes(8) + bytes([number]) * 8 for number in (1, 2)), 16)
    pair = Pair(twins)
    pair.beat(1.0)
    asked = []
    for step in range(2, 12):
        for effect in pair.directory.tick(now_s=float(step)):
            asked.append(type(effect))
            if isinstance(effect, RequestSketch):
                pair.directory.sketch(pair.stream, pair.answer(effect), now_s=float(step))
        pair.beat(step + 0.5)
    assert RequestSnapshot in asked
    assert pair.state is not StreamState.SYNCED  # flagged for good, asked for ever less often, others unaffected
    assert pair.directory.lookup(DIGEST, twins, now_s=12.0).hits == 2

"""A directory whose index has a bound: what is evicted is unknown, and everything that is known of a stream stays exact."""

from __future__ import annotations

from typing import Any

import pytest

from kvdir.core.directory import Directory, Hello, Limits, Welcomed
from kvdir.core.effects import RequestSketch, RequestSnapshot
from kvdir.core.event import Event, Heartbeat, HeartbeatFigures, OwnerCount
from kvdir.core.feedback import StaleReport
from kvdir.core.inspect import faults, node_views, status_view
from kvdir.core.namespaces import Announced
from kvdir.core.node import Stream
from kvdir.core.outbox import OwnerOutbox
from kvdir.core.sender import StreamSender
from kvdir.core.sketches import OwnerSketches
from kvdir.core.snapshot import snapshot_chunks
from kvdir.errors import UntrustedView
from kvdir.fingerprint import Fingerprints
from kvdir.index import Sketch, open_index
from kvdir.index.reference import ReferenceIndex, ReferenceSketch
from kvdir.location import StreamState, Tier
from kvdir.testing.checked_mirror import CheckedMirror
from kvdir.testing.fake_node import EXAMPLE_NAMESPACE, some_fingerprints

DIGEST = EXAMPLE_NAMESPACE.digest
ANNOUNCED = Announced(DIGEST, EXAMPLE_NAMESPACE.canonical().encode(), EXAMPLE_NAMESPACE.block_bytes)
BLOCKS = some_fingerprints(64, width=16)
BOUND = 16


class Owner:
    """A node with the real outbox, sender and sketches, connected to one directory."""

    def __init__(self, directory: Directory, name: str, *, sketches: bool = True, epoch: int = 1) -> None:
        self.directory = directory
        self.name = name
        self.held: set[bytes] = set()
        self.outbox = OwnerOutbox(max_events=8, sketches=OwnerSketches(new_sketch) if sketches else None)
        self.sender = StreamSender(self.outbox)
        welcomed = directory.hello(Hello(name, epoch, 0, f"{name}:1", 0, (ANNOUNCED,)), now_s=0.0)
        assert isinstance(welcomed, Welcomed)
        self.stream: Stream = welcomed.stream
        self.sender.opened(resume_seq=welcomed.resume_seq, hello_seq=0, credit=2**40)

    def store(self, blocks: Fingerprints, *, now_s: float = 1.0, lost: bool = False) -> None:
        self.held |= set(blocks)
        self._say(Event.stored(Tier.CPU, DIGEST, blocks), now_s, lost)

    def remove(self, blocks: Fingerprints, *, now_s: float = 1.0, lost: bool = False) -> None:
        self.held -= set(blocks)
        self._say(Event.removed(Tier.CPU, DIGEST, blocks), now_s, lost)

    def beat(self, *, now_s: float = 2.0) -> None:
        counts = (OwnerCount(DIGEST, Tier.CPU, len(self.held)),) if self.held else ()
        self.directory.heartbeat(self.stream, self.sender.heartbeat(HeartbeatFigures(counts=counts)), now_s=now_s)

    def answer(self, *, now_s: float) -> list[str]:
        """Ticks, and answers what is asked of it; returns what that was."""
        asked = []
        for effect in self.directory.tick(now_s=now_s):
            if getattr(effect, "node", "") != self.name:
                continue
            match effect:
                case RequestSketch(request_id=number, cells=cells, parts=parts):
                    asked.append("sketch")
                    statement = self.sender.sketch(number, cells=cells, parts=parts)
                    assert statement is not None
                    self.directory.sketch(self.stream, statement, now_s=now_s)
                case RequestSnapshot(snapshot_id=number):
                    asked.append("snapshot")
                    entries = [Event.stored(Tier.CPU, DIGEST, Fingerprints.of(sorted(self.held)))] if self.held else []
                    self.sender.snapshot_taken(self.outbox.last_seq)
                    for chunk in snapshot_chunks(number, self.outbox.last_seq, entries, max_blocks=5):
                        self.directory.snapshot_chunk(self.stream, chunk, now_s=now_s)
        return asked

    def found(self) -> int:
        """How many of its blocks lookups name; none that it does not hold."""
        answer = self.directory.lookup(DIGEST, BLOCKS, now_s=2.0)
        named = {
            BLOCKS[at]
            for run in answer
            for number, _ in run.holders
            if answer.nodes[number].node == self.name
            for at in range(run.start, run.start + run.count)
        }
        assert named <= self.held
        return len(named)

    def figure(self) -> int:
        (view,) = [view for view in node_views(self.directory, now_s=2.0) if view.trust.node == self.name]
        (holding,) = view.holdings
        return holding.blocks.require_trusted()

    def _say(self, event: Event, now_s: float, lost: bool) -> None:
        self.outbox.append(event)
        batch = self.sender.next_batch()
        assert batch is not None
        if not lost:
            self.directory.batch(self.stream, batch.first_seq, batch.events, now_s=now_s)


def new_sketch() -> Any:
    return ReferenceSketch(64)


def bounded() -> Directory:
    index: Any = ReferenceIndex(seed=1, max_blocks=BOUND)
    limits = Limits(max_index_bytes=BOUND * 128, sketch_cells=64, warm_up_s=0.0)
    return Directory(index, new_sketch, limits, now_s=0.0)


def sound(directory: Directory) -> None:
    assert not list(faults(directory))
    assert directory.index.stats().blocks <= BOUND


def test_figures_stay_exact_and_trusted_when_entries_were_evicted() -> None:
    directory = bounded()
    old, new = Owner(directory, "old"), Owner(directory, "new")
    old.store(BLOCKS.slice(0, 12), now_s=1.0)
    assert not directory.lookup(DIGEST, BLOCKS, now_s=1.0).incomplete
    new.store(BLOCKS.slice(12, 12), now_s=3.0)
    old.beat()
    assert (old.found(), new.found()) == (4, 12)
    assert (old.figure(), new.figure()) == (12, 12)
    assert directory.lookup(DIGEST, BLOCKS, now_s=1.0).incomplete
    assert directory.lookup(DIGEST, BLOCKS.slice(0, 1), now_s=1.0).incomplete, "a miss is unknown, not absent"
    old.remove(BLOCKS.slice(0, 2))  # evicted long ago
    old.store(BLOCKS.slice(30, 3), now_s=4.0)
    old.beat()
    assert old.figure() == 13
    assert directory.reconciler.proofs >= 2
    assert directory.reconciler.contradictions == 0
    status = status_view(directory, version="", coordinator="", now_s=5.0)
    assert (status.evicted_blocks, status.max_index_bytes) == (directory.room.evicted_blocks, BOUND * 128)
    assert status.evicted_blocks >= 8
    sound(directory)


def test_nothing_is_incomplete_any_more_when_owners_removed_what_was_evicted() -> None:
    directory = bounded()
    old, new = Owner(directory, "old"), Owner(directory, "new")
    old.store(BLOCKS.slice(0, 12), now_s=1.0)
    old.beat()
    new.store(BLOCKS.slice(12, 8), now_s=3.0)
    assert directory.holders.partial == 1
    gone = [block for block in BLOCKS.slice(0, 12) if directory.lookup(DIGEST, Fingerprints.of([block]), now_s=3.0).hits == 0]
    old.remove(Fingerprints.of(gone))
    assert directory.holders.partial == 0
    assert not directory.lookup(DIGEST, BLOCKS, now_s=3.0).incomplete
    assert old.found() == len(old.held)
    sound(directory)


def test_event_beyond_a_hole_adds_nothing_when_its_holder_is_partial() -> None:
    directory = bounded()
    owner, other = Owner(directory, "owner"), Owner(directory, "other")
    owner.store(BLOCKS.slice(0, 8), now_s=1.0)
    other.store(BLOCKS.slice(8, 16), now_s=3.0)
    owner.beat()
    owner.store(BLOCKS.slice(40, 1), lost=True)
    owner.store(BLOCKS.slice(41, 1), now_s=4.0)
    assert owner.found() == 0
    assert directory.ingest.rejected["early-while-partial"] == 1
    with pytest.raises(UntrustedView):
        owner.figure()
    assert owner.sender.replay(2)
    while (batch := owner.sender.next_batch()) is not None:
        directory.batch(owner.stream, batch.first_seq, batch.events, now_s=5.0)
    owner.beat(now_s=5.0)
    assert (owner.found(), owner.figure()) == (2, 10)
    sound(directory)


def test_stream_is_repaired_by_a_sketch_when_it_lost_entries_in_the_middle_of_a_hole() -> None:
    directory = bounded()
    owner, other = Owner(directory, "owner"), Owner(directory, "other")
    owner.store(BLOCKS.slice(0, 8), now_s=1.0)
    owner.beat()
    owner.remove(BLOCKS.slice(0, 1), lost=True)
    owner.store(BLOCKS.slice(40, 2), now_s=1.0)
    other.store(BLOCKS.slice(8, 16), now_s=3.0)
    assert "evicted while events were missing" in owner.stream.cursor.reason
    owner.store(BLOCKS.slice(42, 1), now_s=3.0)
    owner.beat(now_s=3.0)
    assert owner.answer(now_s=3.1) == ["sketch"]
    assert owner.stream.cursor.state is StreamState.SYNCED
    assert owner.figure() == len(owner.held) == 10
    assert owner.found() >= 1
    owner.beat(now_s=3.2)
    assert owner.answer(now_s=3.3) == []
    sound(directory)


def test_nothing_is_asked_again_when_a_snapshot_is_larger_than_the_bound() -> None:
    directory = bounded()
    owner = Owner(directory, "owner")
    owner.store(BLOCKS.slice(0, 40), now_s=1.0)
    directory.want_snapshot("owner")
    assert owner.answer(now_s=2.0) == ["snapshot"]
    for beat in range(10):
        owner.beat(now_s=3.0 + beat)
        assert owner.answer(now_s=3.1 + beat) == []
    assert (owner.figure(), owner.found()) == (40, BOUND)
    sound(directory)


def test_figures_are_untrusted_and_nobody_is_asked_when_the_owner_states_no_digests() -> None:
    directory = bounded()
    owner, other = Owner(directory, "owner", sketches=False), Owner(directory, "other")
    owner.store(BLOCKS.slice(0, 8), now_s=1.0)
    owner.beat()
    other.store(BLOCKS.slice(8, 12), now_s=3.0)
    for beat in range(5):
        owner.beat(now_s=3.0 + beat)
        assert owner.answer(now_s=3.1 + beat) == []
    assert owner.stream.cursor.state is StreamState.SYNCED
    with pytest.raises(UntrustedView, match="states no digests"):
        owner.figure()
    directory.want_snapshot("owner")
    assert owner.answer(now_s=9.0) == ["snapshot"]
    assert owner.figure() == 8, "whole again: the snapshot fitted, others had to go"
    sound(directory)


def test_owner_is_asked_for_a_snapshot_when_it_contradicts_itself_and_is_partial() -> None:
    directory = bounded()
    owner, other = Owner(directory, "owner"), Owner(directory, "other")
    owner.store(BLOCKS.slice(0, 8), now_s=1.0)
    owner.beat()
    other.store(BLOCKS.slice(8, 16), now_s=3.0)
    owner.held -= set(BLOCKS.slice(0, 2))
    assert owner.outbox.sketches is not None
    owner.outbox.sketches.restate([Event.stored(Tier.CPU, DIGEST, Fingerprints.of(sorted(owner.held)))])
    owner.beat(now_s=4.0)
    assert owner.stream.cursor.state is not StreamState.SYNCED
    assert owner.answer(now_s=6.0) == ["snapshot"]
    assert owner.figure() == 6
    sound(directory)


def test_a_readers_word_takes_a_hint_and_no_more_when_the_holder_is_partial() -> None:
    directory = bounded()
    owner, other = Owner(directory, "owner"), Owner(directory, "other")
    owner.store(BLOCKS.slice(0, 12), now_s=1.0)
    other.store(BLOCKS.slice(12, 8), now_s=3.0)
    owner.beat()
    found = owner.found()
    report = StaleReport("owner", 1, 1, DIGEST, Tier.CPU, BLOCKS.slice(0, 12))
    assert directory.report_stale(report, now_s=4.0).removed == found
    assert (owner.found(), owner.figure()) == (0, 12)
    sound(directory)


def test_a_readers_wrong_word_is_repaired_when_entries_go_before_the_owner_has_spoken() -> None:
    directory = bounded()
    owner, other = Owner(directory, "owner"), Owner(directory, "other")
    owner.store(BLOCKS.slice(0, 8), now_s=1.0)
    owner.beat()
    assert directory.report_stale(StaleReport("owner", 1, 1, DIGEST, Tier.CPU, BLOCKS.slice(0, 3)), now_s=2.0).removed == 3
    other.store(BLOCKS.slice(8, 12), now_s=3.0)
    assert "evicted while blocks were in doubt" in owner.stream.cursor.reason
    owner.remove(BLOCKS.slice(0, 2), now_s=3.0)
    owner.beat(now_s=3.0)
    assert owner.answer(now_s=3.5) == ["sketch"]
    assert (owner.figure(), owner.stream.cursor.state) == (6, StreamState.SYNCED)
    assert owner.found() > 0
    sound(directory)


def test_mirrors_are_told_block_by_block_when_entries_are_evicted() -> None:
    directory, mirror = bounded(), CheckedMirror()
    directory.add_mirror(mirror, now_s=0.0)
    owners = [Owner(directory, f"n{number}") for number in range(3)]
    for turn in range(20):
        owner = owners[turn % 3]
        owner.store(BLOCKS.slice(turn * 3, 5), now_s=float(turn))
        if turn % 4 == 3:
            owner.remove(Fingerprints.of(sorted(owner.held)[:2]), now_s=float(turn))
        assert not mirror.faults(directory)
    assert directory.room.evicted_blocks > 20
    sound(directory)


def test_heartbeat_closes_a_hole_when_digests_are_equal_and_entries_were_evicted() -> None:
    directory = bounded()
    owner, other = Owner(directory, "owner"), Owner(directory, "other")
    owner.store(BLOCKS.slice(0, 8), now_s=1.0)
    owner.beat()
    other.store(BLOCKS.slice(8, 16), now_s=3.0)
    owner.store(BLOCKS.slice(40, 1), lost=True)
    owner.remove(BLOCKS.slice(40, 1), lost=True)  # as if nothing had happened
    directory.heartbeat(owner.stream, Heartbeat(3, HeartbeatFigures()), now_s=4.0)
    assert owner.stream.cursor.missing_events == 2
    owner.beat(now_s=4.0)
    assert owner.stream.cursor.state is StreamState.SYNCED
    assert owner.figure() == 8
    sound(directory)


@pytest.mark.parametrize("width", [0, 7, 2**40])
@pytest.mark.parametrize("bound", [0, BOUND])
def test_event_is_refused_as_damage_when_its_width_makes_no_sense(width: int, bound: int) -> None:
    directory = bounded() if bound else Directory(open_index(seed=1), Sketch, Limits(), now_s=0.0)
    owner = Owner(directory, "owner")
    directory.batch(owner.stream, 1, [Event(1, Tier.CPU, DIGEST, bytes(64), width)], now_s=1.0)
    assert directory.ingest.rejected["bad-fingerprints"] == 1
    assert owner.stream.cursor.state is not StreamState.SYNCED
    assert not list(faults(directory))

"""A stream whose blocks lie in a shared store: what is written, what counts as taken, where another coordinator may resume."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from kvdir.core.event import NO_DOUBT, Batch, Event, EventKind, Heartbeat, HeartbeatFigures, OwnerCount, SnapshotChunk
from kvdir.core.feedback import Feedback, StaleReport
from kvdir.core.fleet import SavedNode
from kvdir.core.namespaces import Announced, NamespaceTable
from kvdir.core.repair import Ask, RepairPolicy
from kvdir.core.shared_stream import RECOUNT_S, TRAIL_S, SharedStream
from kvdir.core.snapshot import Intake
from kvdir.core.store_steps import Clear, Held, Write, rounds
from kvdir.core.stream import StreamCursor
from kvdir.fingerprint import Fingerprints
from kvdir.location import StreamState, Tier
from kvdir.rpc.saved_codec import decode_saved, encode_saved
from kvdir.testing.fake_node import EXAMPLE_NAMESPACE, some_fingerprints

DIGEST = EXAMPLE_NAMESPACE.digest
KEY = (DIGEST, int(Tier.CPU))


def _known():
    table = NamespaceTable(limit=4)
    canonical = EXAMPLE_NAMESPACE.canonical().encode()
    assert table.announce(Announced(DIGEST, canonical, EXAMPLE_NAMESPACE.block_bytes)) == ""
    return table.require(DIGEST)


def _stream(*, last_seq: int = 0, position: int | None = None) -> SharedStream:
    stream = SharedStream("n", 7, StreamCursor(RepairPolicy(), now_s=0.0), Counter())
    stream.namespaces[DIGEST] = _known()
    stream.open(last_seq, position=position, now_s=0.0)
    return stream


def _stored(count: int, seed: int = 0) -> Event:
    return Event.stored(Tier.CPU, DIGEST, some_fingerprints(count, seed=seed))


def _removed(count: int, seed: int = 0) -> Event:
    return Event.removed(Tier.CPU, DIGEST, some_fingerprints(count, seed=seed))


def _heartbeat(last_seq: int, blocks: int) -> Heartbeat:
    return Heartbeat(last_seq, HeartbeatFigures(counts=(OwnerCount(DIGEST, int(Tier.CPU), blocks),)))


def _hold(stream: SharedStream, blocks: int, number: int = 1) -> Held:
    held = stream.holders[KEY] = Held(number, stream.namespaces[DIGEST], int(Tier.CPU), blocks)
    return held


def test_cursor_stays_where_it_is_when_a_write_was_only_planned():
    stream = _stream()
    batches = [Batch(1, (_stored(3), _stored(2, seed=1)))]
    steps = stream.plan(batches, now_s=1.0)
    assert [(step.stored, len(step.packed) // step.width) for step in steps if isinstance(step, Write)] == [(True, 5)]
    assert (stream.cursor.applied_seq, stream.cursor.top_seq) == (0, 0)
    assert stream.plan(batches, now_s=1.0) == steps  # what failed is planned again, the same
    stream.commit(batches, now_s=1.0)
    assert (stream.cursor.applied_seq, stream.cursor.state) == (2, StreamState.SYNCED)


def test_order_is_kept_and_only_neighbours_are_joined_when_kinds_differ():
    stream = _stream()
    steps = stream.plan([Batch(1, (_stored(2), _removed(1), _removed(1, seed=2), _stored(1)))], now_s=1.0)
    assert [step.stored for step in steps if isinstance(step, Write)] == [True, False, True]


def test_duplicates_are_left_out_when_a_replay_overlaps():
    stream = _stream()
    stream.commit([Batch(1, (_stored(1), _stored(1, seed=1)))], now_s=1.0)
    (step,) = stream.plan([Batch(1, (_stored(1), _stored(1, seed=1), _stored(4, seed=2)), replay=True)], now_s=2.0)
    assert isinstance(step, Write)
    assert step.packed == _stored(4, seed=2).packed


def test_events_beyond_a_hole_are_written_at_once_and_again_when_their_turn_comes():
    stream = _stream()
    early = [Batch(2, (_stored(1, seed=1),))]
    assert stream.plan(early, now_s=1.0)
    stream.commit(early, now_s=1.0)
    assert stream.cursor.state is StreamState.GAP
    assert stream.tick(now_s=1.1, stale_after_s=5, may_snapshot=True) is Ask.REPLAY
    replay = [Batch(1, (_stored(1), _stored(1, seed=1)), replay=True)]
    (step,) = stream.plan(replay, now_s=1.2)
    assert isinstance(step, Write)
    assert len(step.packed) == 32
    stream.commit(replay, now_s=1.2)
    assert (stream.cursor.state, stream.cursor.applied_seq) == (StreamState.SYNCED, 2)


def test_bad_events_are_skipped_and_damage_only_what_they_could_be_about():
    stream = _stream()
    bad = (
        Event(99, int(Tier.CPU), DIGEST, b"x" * 16, 16),
        Event(int(EventKind.STORED), 42, DIGEST, b"x" * 16, 16),
        Event(int(EventKind.STORED), int(Tier.CPU), b"other", b"x" * 16, 16),
    )
    assert stream.plan([Batch(1, (*bad, _stored(1)))], now_s=1.0) == [Write(True, KEY, _stored(1).packed, 16)]
    assert stream.rejected == {"unknown-kind": 1, "unknown-tier": 1, "unknown-namespace": 1}
    assert not stream.cursor.exact
    assert "unknown kind 99" in stream.cursor.reason


def test_clear_names_every_part_it_is_about_when_no_namespace_is_given():
    stream = _stream()
    _hold(stream, 3, number=9)
    steps = stream.plan([Batch(1, (_stored(1), Event.cleared(Tier.CPU), _stored(2)))], now_s=1.0)
    assert [type(step) for step in steps] == [Write, Clear, Write]
    assert isinstance(steps[1], Clear)
    stream.cleared(steps[1].keys)
    assert (stream.doomed, stream.holders) == ([9], {})


@pytest.mark.parametrize(("in_store", "state"), [(5, StreamState.SYNCED), (4, StreamState.GAP)])
def test_owners_word_is_held_against_the_store_when_it_differs_from_ours(in_store: int, state: StreamState):
    stream = _stream()
    stream.commit([Batch(1, (_stored(5),))], now_s=1.0)
    _hold(stream, 4)  # a reader's feedback, or our own bookkeeping, went wrong
    assert stream.heartbeat(_heartbeat(1, blocks=5), now_s=1.0)
    assert stream.cursor.state is StreamState.SYNCED  # nothing is concluded before the store was asked
    stream.counted({1: in_store}, now_s=1.1)
    assert stream.cursor.state is state
    assert ("the owner counts 5 blocks where the store has 4" in stream.cursor.reason) is (state is StreamState.GAP)


def test_store_is_asked_now_and_then_when_counts_agree():
    stream = _stream()
    stream.commit([Batch(1, (_stored(5),))], now_s=1.0)
    _hold(stream, 5)
    assert stream.heartbeat(_heartbeat(1, blocks=5), now_s=1.0)
    stream.counted({1: 5}, now_s=1.0)
    assert not stream.heartbeat(_heartbeat(1, blocks=5), now_s=2.0)
    assert stream.heartbeat(_heartbeat(1, blocks=5), now_s=1.0 + RECOUNT_S)


def test_view_can_be_saved_when_more_is_removed_than_was_counted():
    stream = _stream()
    held = _hold(stream, 0)  # 5 were stored by an attempt that failed, so nobody counted them
    stream.changed(Write(False, KEY, b"", 32), held, 5)
    stream.retracted(KEY, 1)
    saved = SavedNode(view=stream.view(1.0), beat=1, coordinator="a", exact=False, resumable=False)
    assert decode_saved(encode_saved(saved, now_s=1.0)) is not None


def test_store_is_asked_again_when_it_was_away():
    stream = _stream()
    stream.commit([Batch(1, (_stored(5),))], now_s=1.0)
    _hold(stream, 5)
    stream.counted({1: 5}, now_s=1.0)
    stream.store_away("it is down")
    assert not stream.heartbeat(_heartbeat(1, blocks=5), now_s=2.0)
    stream.store_away("")
    assert stream.heartbeat(_heartbeat(1, blocks=5), now_s=3.0)


@pytest.mark.parametrize(
    ("shown", "doomed", "state"),
    [
        ({1: True}, [], StreamState.SYNCED),
        ({1: True, 2: True}, [2], StreamState.SYNCED),  # dropped, and back: it answered for us
        ({2: False}, [2], StreamState.GAP),  # made, and forgotten: writes to it were seen by nobody
        ({1: False}, [], StreamState.GAP),  # shown, and hidden again
    ],
)
def test_what_a_failover_did_to_the_roster_is_found_when_the_store_is_asked(
    shown: dict[int, bool], doomed: list[int], state: StreamState
):
    stream = _stream()
    stream.commit([Batch(1, (_stored(5),))], now_s=1.0)
    _hold(stream, 5)
    stream.listed(shown, now_s=2.0)
    stream.listed(shown, now_s=2.0)  # what is doomed is so once
    assert (stream.doomed, stream.cursor.state) == (doomed, state)


def test_counts_say_nothing_when_events_are_missing():
    stream = _stream()
    _hold(stream, 1)
    assert not stream.heartbeat(_heartbeat(3, blocks=5), now_s=1.0)
    assert stream.cursor.missing_events == 3


def test_position_trails_so_that_what_a_failover_lost_is_sent_again():
    stream = _stream()
    assert stream.position(now_s=0.0) == 0
    stream.commit([Batch(1, (_stored(1),))], now_s=1.0)
    assert stream.position(now_s=1.0) == 0
    stream.commit([Batch(2, (_stored(1, seed=1),))], now_s=2.0)
    assert stream.position(now_s=2.0) == 0
    assert stream.position(now_s=1.0 + TRAIL_S) == 1
    assert stream.position(now_s=2.0 + TRAIL_S) == 2


def test_nobody_may_resume_for_a_while_when_the_stream_was_restated():
    stream = _stream()
    stream.commit([Batch(1, (_stored(1),))], now_s=1.0)
    assert stream.position(now_s=1.0 + TRAIL_S) == 0
    assert stream.position(now_s=1.0 + 2 * TRAIL_S) == 1
    stream.cursor.want_snapshot()
    assert stream.tick(now_s=9.0, stale_after_s=60, may_snapshot=True) is Ask.SNAPSHOT
    chunk = SnapshotChunk(stream.snapshot_id, 1, 0, (_stored(1),), last=True, total_blocks=1)
    assert stream.chunk(chunk, now_s=9.0) is Intake.COMPLETE
    stream.swapped(now_s=9.0)
    assert stream.position(now_s=9.0) is None
    assert stream.position(now_s=9.0 + TRAIL_S) == 1


def test_nobody_may_resume_when_the_stream_is_damaged():
    stream = _stream()
    stream.commit([Batch(1, (_stored(1),))], now_s=1.0)
    stream.store_full("the store is full", now_s=1.0)
    assert stream.position(now_s=9.0) is None
    assert stream.tick(now_s=9.0, stale_after_s=60, may_snapshot=True) is Ask.SNAPSHOT


def test_stream_goes_on_in_order_when_another_coordinator_resumes_it():
    stream = _stream(last_seq=12, position=10)
    assert (stream.cursor.applied_seq, stream.cursor.missing_events) == (10, 2)
    stream.commit([Batch(11, (_stored(1), _stored(1)))], now_s=1.0)
    assert stream.cursor.state is StreamState.SYNCED


def test_owner_is_asked_for_everything_when_nobody_knows_what_the_store_holds():
    stream = _stream(last_seq=12)
    assert not stream.cursor.exact
    assert stream.tick(now_s=0.1, stale_after_s=5, may_snapshot=True) is Ask.SNAPSHOT


def test_report_is_refused_when_a_store_was_heard_since():
    stream = _stream()
    stream.commit([Batch(1, (_stored(2),)), Batch(2, (_stored(1, seed=1),))], now_s=1.0)

    def report(seed: int, **fields: int) -> StaleReport:
        fields = {"epoch": 7, "owner_seq": 1, **fields}
        return StaleReport("n", fields["epoch"], fields["owner_seq"], DIGEST, int(Tier.CPU), some_fingerprints(1, seed=seed))

    assert isinstance(stream.not_newer(report(seed=0)), Fingerprints)
    assert stream.not_newer(report(seed=1)) == Feedback(0, "a newer store was heard")
    assert stream.not_newer(report(seed=0, epoch=8)) == Feedback(0, "old epoch")
    resumed = _stream(last_seq=5, position=5)
    assert resumed.not_newer(report(seed=0)) == Feedback(0, "too old to tell from newer stores")


def test_long_writes_are_cut_into_rounds_in_order():
    held = Held(1, _known(), int(Tier.CPU))
    writes = [Write(True, KEY, bytes(16 * 5), 16), Write(False, KEY, b"x" * 32, 16), Write(True, KEY, bytes(8), 8)]
    cut = [
        [(write.stored, len(write.packed) // write.width) for write, _ in part]
        for part in rounds([(write, held) for write in writes], max_blocks=3)
    ]
    assert cut == [[(True, 3)], [(True, 2), (False, 1)], [(False, 1), (True, 1)]]


def test_stream_is_not_synced_while_the_store_does_not_take_what_came():
    stream = _stream()
    assert stream.trust(0.0).state is StreamState.SYNCED
    stream.stalled = "it is down"
    trust = stream.trust(0.0)
    assert (trust.state, trust.reason) == (StreamState.GAP, "the store is away: it is down")
    assert not stream.view(0.0).holdings


def test_stream_is_untrusted_and_compared_all_the_same_when_its_owner_is_in_doubt():
    stream = _stream()
    doubt = NO_DOUBT.begun("the engine lost events")
    batches = [Batch(1, (_stored(3),))]
    stream.commit(batches, now_s=0.0)
    _hold(stream, 3)
    assert stream.heartbeat(replace(_heartbeat(1, blocks=3), doubt=doubt), now_s=40.0)  # the store is asked as ever
    assert (stream.state, stream.view(40.0).trust.reason) == (StreamState.GAP, doubt.words)
    assert not stream.view(40.0).holdings[0].blocks.trusted
    assert stream.tick(now_s=41.0, stale_after_s=9.0, may_snapshot=True) is None
    stream.heartbeat(replace(_heartbeat(1, blocks=3), doubt=doubt.ended()), now_s=42.0)
    assert stream.state is StreamState.SYNCED

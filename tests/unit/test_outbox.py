"""The owner's outbox and its senders: numbers, bounds, visible holes, going back, credit; and snapshots cut into chunks."""

from __future__ import annotations

import pytest

from kvdir.core.event import EVENT_OVERHEAD_BYTES, Event, EventKind, HeartbeatFigures, OwnerCount, SnapshotChunk
from kvdir.core.outbox import OwnerOutbox
from kvdir.core.sender import StreamSender
from kvdir.core.snapshot import Intake, SnapshotIntake, snapshot_chunks
from kvdir.fingerprint import Fingerprints
from kvdir.location import Tier

DIGEST = bytes(32)


def event(blocks: int = 1) -> Event:
    return Event.stored(Tier.CPU, DIGEST, Fingerprints(bytes(8 * blocks), 8))


def filled(count: int, **limits: int) -> OwnerOutbox:
    outbox = OwnerOutbox(**limits)
    for _ in range(count):
        outbox.append(event())
    return outbox


def opened(outbox: OwnerOutbox, **options: int) -> StreamSender:
    sender = StreamSender(outbox, **options)
    sender.opened(resume_seq=0, hello_seq=0, credit=1000)
    return sender


def numbers(sender: StreamSender) -> list[tuple[int, int, bool]]:
    out = []
    while (batch := sender.next_batch()) is not None:
        out.append((batch.first_seq, batch.last_seq, batch.replay))
    return out


def test_numbers_begin_at_one_when_events_are_appended() -> None:
    outbox = OwnerOutbox()
    assert (outbox.last_seq, outbox.oldest_seq) == (0, 1)
    assert [outbox.append(event()) for _ in range(3)] == [1, 2, 3]


@pytest.mark.parametrize("limits", [{"max_events": 4}, {"max_bytes": 4 * (8 + EVENT_OVERHEAD_BYTES)}])
def test_oldest_go_when_the_outbox_is_full(limits: dict[str, int]) -> None:
    outbox = filled(10, **limits)
    assert (outbox.oldest_seq, outbox.last_seq, len(outbox)) == (7, 10, 4)
    batch = outbox.read(1, max_events=100, max_bytes=10**6)
    assert batch is not None
    assert (batch.first_seq, batch.last_seq) == (7, 10)


def test_memory_is_bounded_when_it_runs_for_long() -> None:
    outbox = filled(20_000, max_events=100)
    assert len(outbox._log) <= 2200
    assert outbox.held_bytes == 100 * (8 + EVENT_OVERHEAD_BYTES)


def test_number_is_consumed_when_an_event_does_not_fit() -> None:
    outbox = OwnerOutbox(max_bytes=500)
    outbox.append(event())
    assert outbox.append(event(blocks=1000)) == 2
    outbox.append(event())
    assert (outbox.dropped_events, outbox.replayable_from) == (1, 3)
    assert numbers(opened(outbox)) == [(1, 1, False), (3, 3, False)]


def test_hole_is_visible_when_the_engine_lost_many_events() -> None:
    outbox = filled(3, max_events=10)
    assert outbox.lose(1000) == 1003
    outbox.append(event())
    assert (outbox.last_seq, outbox.dropped_events, len(outbox)) == (1004, 1000, 10)
    assert numbers(opened(outbox)) == [(1004, 1004, False)]


def test_batches_are_bounded_when_events_wait() -> None:
    sender = opened(filled(5), max_batch_events=2)
    assert numbers(sender) == [(1, 2, False), (3, 4, False), (5, 5, False)]
    sender = opened(filled(5), max_batch_bytes=2 * (8 + EVENT_OVERHEAD_BYTES))
    assert numbers(sender) == [(1, 2, False), (3, 4, False), (5, 5, False)]


def test_one_event_is_sent_when_it_is_larger_than_a_batch() -> None:
    outbox = OwnerOutbox()
    outbox.append(event(blocks=100))
    assert numbers(opened(outbox, max_batch_bytes=10)) == [(1, 1, False)]


def test_sending_goes_on_from_there_when_it_goes_back() -> None:
    sender = opened(filled(6), max_batch_events=2)
    numbers(sender)
    assert sender.replay(3)
    assert numbers(sender) == [(3, 4, True), (5, 6, True)]


def test_going_back_is_refused_when_the_outbox_does_not_reach() -> None:
    outbox = filled(10, max_events=4)
    sender = opened(outbox)
    assert not sender.replay(6)
    assert sender.replay(7)


def test_position_never_jumps_forward_when_a_late_request_asks_for_what_is_unsent() -> None:
    outbox = filled(5)
    sender = opened(outbox)
    assert sender.replay(4)
    assert numbers(sender) == [(1, 5, False)]


def test_events_are_skipped_and_counted_when_sending_is_too_slow() -> None:
    outbox = filled(2, max_events=3)
    sender = opened(outbox)
    numbers(sender)
    for _ in range(5):
        outbox.append(event())
    assert numbers(sender) == [(5, 7, False)]
    assert sender.skipped_events == 2


def test_sending_goes_on_when_more_events_were_lost_than_there_is_credit() -> None:
    outbox = OwnerOutbox()
    sender = StreamSender(outbox)
    sender.opened(resume_seq=0, hello_seq=0, credit=3)
    outbox.append(event(1))
    assert sender.next_batch() is not None
    sender.ack(1)
    outbox.lose(10)
    assert sender.next_batch() is None
    assert sender.heartbeat(HeartbeatFigures()).last_seq == 11
    sender.ack(11)
    outbox.append(event(2))
    batch = sender.next_batch()
    assert batch is not None
    assert (batch.first_seq, batch.replay) == (12, False)


def test_sending_stops_when_credit_is_used_up() -> None:
    outbox = filled(10)
    sender = StreamSender(outbox)
    sender.opened(resume_seq=0, hello_seq=0, credit=4)
    assert numbers(sender) == [(1, 4, False)]
    sender.ack(2)
    assert numbers(sender) == [(5, 6, False)]
    sender.ack(99)  # more than was ever sent: taken for all that was
    assert numbers(sender) == [(7, 10, False)]


@pytest.mark.parametrize(("resume_seq", "able", "first"), [(0, True, None), (8, True, 9), (3, False, 7)])
def test_sender_goes_on_after_what_is_known_when_a_call_begins(resume_seq: int, able: bool, first: int | None) -> None:
    outbox = filled(10, max_events=4)
    sender = StreamSender(outbox)
    assert sender.opened(resume_seq=resume_seq, hello_seq=10, credit=100) is able
    batch = sender.next_batch()
    assert (batch.first_seq if batch else None) == first


def test_counts_go_along_only_when_every_event_was_sent() -> None:
    outbox = filled(2)
    sender = opened(outbox)
    figures = HeartbeatFigures(counts=(OwnerCount(DIGEST, Tier.CPU, 2),))
    assert sender.heartbeat(figures).figures.counts is None
    numbers(sender)
    heartbeat = sender.heartbeat(figures)
    assert (heartbeat.last_seq, heartbeat.figures.counts) == (2, figures.counts)


def test_events_up_to_a_snapshot_are_not_sent_when_it_was_taken() -> None:
    outbox = filled(5)
    sender = opened(outbox)
    sender.snapshot_taken(5)
    outbox.append(event())
    assert numbers(sender) == [(6, 6, False)]


# -- snapshots -----------------------------------------------------------------------------------------------------------


def chunks(*blocks: int, max_blocks: int = 4) -> list[SnapshotChunk]:
    return list(snapshot_chunks(1, 9, [event(count) for count in blocks], max_blocks=max_blocks))


@pytest.mark.parametrize("blocks", [(), (1,), (4,), (5,), (3, 3, 3), (4, 4), (17, 1)])
def test_chunks_hold_everything_when_cut(blocks: tuple[int, ...]) -> None:
    made = chunks(*blocks)
    assert [chunk.index for chunk in made] == list(range(len(made)))
    assert [chunk.last for chunk in made] == [False] * (len(made) - 1) + [True]
    assert all(sum(entry.blocks for entry in chunk.entries) <= 4 for chunk in made)
    assert sum(entry.blocks for chunk in made for entry in chunk.entries) == sum(blocks) == made[-1].total_blocks


def test_snapshot_is_whole_when_every_chunk_came_in_order() -> None:
    intake = SnapshotIntake(1)
    assert [intake.take(chunk) for chunk in chunks(6, 3)] == [Intake.FILL, Intake.FILL, Intake.COMPLETE]
    assert (intake.blocks, intake.at_seq) == (9, 9)


def test_snapshot_is_refused_when_it_contradicts_itself() -> None:
    first, second = chunks(8)
    for liar in (
        second,  # the first chunk is missing
        SnapshotChunk(1, 9, 1, second.entries, last=True, total_blocks=4),  # it is missing, and the total hides it
        SnapshotChunk(1, 9, 0, (Event(EventKind.REMOVED, Tier.CPU, DIGEST, bytes(8), 8),)),
        SnapshotChunk(1, 9, 0, (Event(EventKind.STORED, Tier.CPU, DIGEST, bytes(9), 8),)),
        SnapshotChunk(1, 9, 0, (Event(EventKind.STORED, Tier.CPU, DIGEST, bytes(9), 9),)),
        SnapshotChunk(1, 9, 0, first.entries, last=True, total_blocks=5),
    ):
        intake = SnapshotIntake(1)
        assert intake.take(liar) is Intake.REFUSE, liar
        assert intake.fault
    intake = SnapshotIntake(1)
    intake.take(first)
    assert intake.take(SnapshotChunk(1, 10, 1, (), last=True, total_blocks=4)) is Intake.REFUSE


def test_chunk_is_ignored_when_it_belongs_to_another_snapshot() -> None:
    assert SnapshotIntake(2).take(chunks(1)[0]) is Intake.IGNORE

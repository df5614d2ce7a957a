"""How long repair waits for an answer: as long as the owner takes, within bounds; and that silence alone asks for nothing."""

from __future__ import annotations

import pytest

from kvdir.core.repair import Ask, RepairPolicy
from kvdir.core.stream import StreamCursor
from kvdir.location import StreamState

POLICY = RepairPolicy(idle_s=1.0, idle_max_s=8.0, total_s=100.0, max_fruitless=1, retry_base_s=0.0, spacing_s=0.0)


def tick(cursor: StreamCursor, now_s: float) -> Ask | None:
    return cursor.tick(now_s=now_s, stale_after_s=1000.0, may_snapshot=True)


def with_gap() -> StreamCursor:
    """Nothing applied, 1 missing, 2 came early; a replay is asked for at 0 s."""
    cursor = StreamCursor(POLICY, now_s=0.0)
    cursor.open(0, now_s=0.0)
    cursor.batch(2, 1, now_s=0.0)
    assert tick(cursor, 0.0) is Ask.REPLAY
    return cursor


def patience(cursor: StreamCursor, began_s: float) -> float:
    """How long the request that began then goes unanswered before the next one is asked for, to a tenth of a second."""
    waited = 1
    while tick(cursor, began_s + waited / 10) is None:
        waited += 1
    return waited / 10


def snapshot_asked(cursor: StreamCursor, number: int, now_s: float) -> None:
    assert tick(cursor, now_s) is Ask.SNAPSHOT
    cursor.asked(Ask.SNAPSHOT, number, now_s=now_s)


def test_request_fails_after_the_idle_limit_when_nothing_was_ever_answered() -> None:
    assert patience(with_gap(), 0.0) == 1.0


@pytest.mark.parametrize(("took_s", "expected_s"), [(0.1, 1.0), (2.0, 4.0), (60.0, 8.0)])
def test_late_answer_teaches_how_long_to_wait_within_bounds(took_s: float, expected_s: float) -> None:
    cursor = with_gap()
    snapshot_asked(cursor, 7, 1.0)
    cursor.answered(Ask.SNAPSHOT, 7, now_s=1.0 + took_s)
    cursor.snapshot_refused(now_s=100.0)
    snapshot_asked(cursor, 8, 100.0)
    assert patience(cursor, 100.0) == expected_s


def test_answer_is_measured_once_and_only_if_it_was_asked_for() -> None:
    cursor = with_gap()
    snapshot_asked(cursor, 7, 1.0)
    cursor.answered(Ask.SNAPSHOT, 7, now_s=1.1)
    cursor.answered(Ask.SNAPSHOT, 7, now_s=6.0)  # a later chunk, or a lie
    cursor.answered(Ask.SKETCH, 7, now_s=6.0)
    cursor.snapshot_refused(now_s=100.0)
    snapshot_asked(cursor, 8, 100.0)
    assert patience(cursor, 100.0) == 1.0


def test_answered_replay_teaches_but_not_the_one_after_a_lost_one() -> None:
    policy = RepairPolicy(idle_s=1.0, idle_max_s=8.0, max_fruitless=9)
    cursor = StreamCursor(policy, now_s=0.0)
    cursor.open(0, now_s=0.0)
    cursor.batch(3, 1, now_s=0.0)
    assert tick(cursor, 0.0) is Ask.REPLAY
    cursor.batch(1, 1, now_s=0.9)  # answered within the limit: the next limit is 1.8 s
    assert patience(cursor, 0.9) == 1.8
    cursor.batch(2, 2, now_s=2.8)  # of the replay at 0 s or of that at 2.7 s? nobody knows
    cursor.batch(5, 1, now_s=3.0)
    assert tick(cursor, 3.0) is Ask.REPLAY
    assert patience(cursor, 3.0) == 1.8


def test_remembered_requests_are_bounded() -> None:
    cursor = with_gap()
    for number in range(100):
        cursor.asked(Ask.SNAPSHOT, number, now_s=0.0)
    cursor.answered(Ask.SNAPSHOT, 3, now_s=4.0)  # forgotten
    snapshot_asked(cursor, 100, 1.0)
    assert patience(cursor, 1.0) == 1.0


def test_stale_stream_asks_for_nothing_when_nothing_is_missing() -> None:
    cursor = StreamCursor(POLICY, now_s=0.0)
    cursor.open(0, now_s=0.0)
    cursor.batch(1, 1, now_s=0.0)
    assert cursor.tick(now_s=6.0, stale_after_s=5.0, may_snapshot=True) is None
    assert (cursor.state, cursor.replays) == (StreamState.STALE, 0)
    cursor.heartbeat(1, now_s=7.0)
    assert (cursor.state, cursor.replays) == (StreamState.SYNCED, 0)

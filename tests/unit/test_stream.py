"""The stream cursor, its holes and its repair: what is counted in, when trust is lost and won, what is asked for when."""

from __future__ import annotations

import pytest

from kvdir.core.holes import Holes
from kvdir.core.repair import Ask, RepairPolicy
from kvdir.core.stream import StreamCursor
from kvdir.location import StreamState

POLICY = RepairPolicy(idle_s=1.0, total_s=10.0, max_fruitless=2, retry_base_s=0.5, retry_max_s=2.0, spacing_s=0.0)


def opened(last_seq: int = 0) -> StreamCursor:
    cursor = StreamCursor(POLICY, now_s=0.0)
    cursor.open(last_seq, now_s=0.0)
    return cursor


def tick(cursor: StreamCursor, now_s: float, *, may_snapshot: bool = True) -> Ask | None:
    return cursor.tick(now_s=now_s, stale_after_s=5.0, may_snapshot=may_snapshot)


def with_gap() -> StreamCursor:
    """1 and 2 applied, 3 and 4 missing, 5 applied as a hint."""
    cursor = opened()
    cursor.batch(1, 2, now_s=1.0)
    cursor.batch(5, 1, now_s=1.0)
    return cursor


def test_holes_merge_when_there_are_too_many() -> None:
    holes = Holes(limit=2)
    for first in (1, 11, 21):
        holes.append(first, first + 1)
    assert holes.ranges == ((1, 2), (11, 22))
    assert holes.missing == 14


def test_holes_shrink_when_filled_across_several() -> None:
    holes = Holes()
    holes.append(1, 3)
    holes.append(6, 9)
    holes.fill(3, 7)
    assert holes.ranges == ((1, 2), (8, 9))
    holes.fill(1, 100)
    assert not holes


def test_hole_is_split_only_when_there_is_room() -> None:
    holes = Holes(limit=1)
    holes.append(1, 9)
    holes.fill(4, 5)
    assert holes.missing == 9  # too high is allowed, too low is not


def test_stream_is_synced_when_its_epoch_begins_empty() -> None:
    assert opened().state is StreamState.SYNCED


def test_stream_needs_a_snapshot_when_it_had_a_life_before_us() -> None:
    cursor = StreamCursor(POLICY, now_s=0.0)
    assert cursor.open(40, now_s=0.0) == 0
    assert (cursor.state, cursor.gaps) == (StreamState.GAP, 0)
    assert tick(cursor, 0.0) is Ask.SNAPSHOT
    cursor.snapshot_done(40, now_s=1.0)
    assert (cursor.state, cursor.applied_seq) == (StreamState.SYNCED, 40)


def test_duplicates_are_skipped_when_a_batch_overlaps() -> None:
    cursor = opened()
    assert cursor.batch(1, 4, now_s=1.0) == 0
    assert cursor.batch(1, 4, now_s=1.0) == 4
    assert cursor.batch(3, 4, now_s=1.0) == 2
    assert (cursor.applied_seq, cursor.duplicates, cursor.state) == (6, 6, StreamState.SYNCED)


def test_gap_is_known_and_untrusted_when_a_number_is_skipped() -> None:
    cursor = with_gap()
    assert (cursor.state, cursor.missing_events, cursor.gaps, cursor.applied_seq) == (StreamState.GAP, 2, 1, 2)
    assert "2 events missing from 3 to 4" in cursor.reason


def test_loss_of_the_last_event_shows_when_a_heartbeat_comes() -> None:
    cursor = opened()
    cursor.batch(1, 1, now_s=1.0)
    cursor.heartbeat(2, now_s=1.0)
    assert (cursor.state, cursor.missing_events) == (StreamState.GAP, 1)


def test_stream_stays_untrusted_when_only_the_hole_is_filled() -> None:
    """What came after the hole was applied before it: its turn has not come yet."""
    cursor = with_gap()
    cursor.batch(3, 2, now_s=2.0)
    assert (cursor.missing_events, cursor.state) == (0, StreamState.GAP)
    assert "out of order" in cursor.reason
    assert cursor.batch(5, 1, now_s=2.0) == 0  # not a duplicate: applied again, in order
    assert cursor.state is StreamState.SYNCED


def test_replay_is_asked_first_when_there_is_a_gap() -> None:
    cursor = with_gap()
    assert tick(cursor, 1.0) is Ask.REPLAY
    assert cursor.state is StreamState.REPAIRING
    assert tick(cursor, 1.5) is None
    cursor.batch(3, 3, now_s=1.6)
    assert (cursor.state, cursor.replays, cursor.snapshots) == (StreamState.SYNCED, 1, 0)
    assert cursor.untrusted_total_s == pytest.approx(0.6)


def test_snapshot_follows_when_replays_bring_nothing() -> None:
    cursor = with_gap()
    assert [tick(cursor, now) for now in (1.0, 2.0, 3.0)] == [Ask.REPLAY, Ask.REPLAY, Ask.SNAPSHOT]


def test_snapshot_follows_at_once_when_the_owner_cannot_go_back() -> None:
    cursor = with_gap()
    tick(cursor, 1.0)
    cursor.replay_unavailable(now_s=1.1)
    assert tick(cursor, 1.1, may_snapshot=False) is None
    assert tick(cursor, 1.2) is Ask.SNAPSHOT


def test_replay_is_asked_again_at_once_when_it_lost_something_too() -> None:
    cursor = with_gap()
    tick(cursor, 1.0)
    cursor.batch(3, 1, now_s=1.1)
    cursor.batch(5, 1, now_s=1.1)
    assert tick(cursor, 1.1) is Ask.REPLAY


def test_what_was_under_way_does_not_repeat_the_request_when_the_owner_has_not_gone_back_yet() -> None:
    cursor = with_gap()
    tick(cursor, 1.0)
    cursor.batch(6, 1, now_s=1.1)
    cursor.batch(7, 1, now_s=1.1)
    assert tick(cursor, 1.2) is None


def test_interval_grows_when_snapshots_fail() -> None:
    cursor = opened(5)
    assert tick(cursor, 0.0) is Ask.SNAPSHOT
    cursor.snapshot_refused(now_s=0.0)
    cursor.heartbeat(5, now_s=0.4)
    assert [tick(cursor, now) for now in (0.4, 0.5)] == [None, Ask.SNAPSHOT]
    cursor.snapshot_refused(now_s=0.5)
    assert [tick(cursor, now) for now in (1.4, 1.5)] == [None, Ask.SNAPSHOT]


def test_snapshot_is_given_up_when_it_makes_no_progress() -> None:
    cursor = opened(5)
    tick(cursor, 0.0)
    for now_s in (0.9, 1.8):
        cursor.snapshot_progress(now_s=now_s)
        assert tick(cursor, now_s) is None
    assert cursor.repairing_snapshot
    tick(cursor, 2.8)
    assert not cursor.repairing_snapshot


def test_snapshot_is_given_up_when_it_takes_too_long_in_all() -> None:
    cursor = opened(5)
    tick(cursor, 0.0)
    for tenths in range(1, 100):
        cursor.snapshot_progress(now_s=tenths / 10)
        tick(cursor, tenths / 10)
    assert cursor.repairing_snapshot
    cursor.snapshot_progress(now_s=10.0)
    tick(cursor, 10.0)
    assert not cursor.repairing_snapshot


def test_position_goes_back_when_a_snapshot_is_older_than_what_was_applied() -> None:
    cursor = opened()
    cursor.batch(1, 9, now_s=1.0)
    cursor.want_snapshot()
    tick(cursor, 1.0)
    cursor.snapshot_done(7, now_s=1.1)
    assert (cursor.applied_seq, cursor.state) == (7, StreamState.GAP)


def test_later_events_are_asked_again_when_a_snapshot_stands_before_them() -> None:
    cursor = with_gap()
    cursor.batch(6, 4, now_s=1.0)
    tick(cursor, 1.0)
    cursor.replay_unavailable(now_s=1.0)
    tick(cursor, 1.0)
    cursor.snapshot_done(7, now_s=1.1)
    assert (cursor.applied_seq, cursor.top_seq, cursor.missing_events) == (7, 9, 0)
    assert cursor.state is not StreamState.SYNCED  # 8 and 9 went with the holders that the snapshot replaced
    assert tick(cursor, 1.1) is Ask.REPLAY
    cursor.batch(8, 2, now_s=1.2)
    assert cursor.state is StreamState.SYNCED


def test_trust_comes_back_only_by_a_statement_when_a_stream_was_silent() -> None:
    cursor = opened()
    cursor.batch(1, 1, now_s=1.0)
    tick(cursor, 6.5)
    assert cursor.state is StreamState.STALE
    tick(cursor, 600.0)
    assert cursor.state is StreamState.STALE
    cursor.heartbeat(2, now_s=601.0)
    assert cursor.state is StreamState.GAP
    cursor.batch(2, 1, now_s=602.0)
    assert cursor.state is StreamState.SYNCED


def test_nothing_is_asked_when_nobody_is_connected() -> None:
    cursor = with_gap()
    cursor.close(now_s=1.0)
    assert tick(cursor, 2.0) is None


def test_owner_goes_back_unasked_when_it_reconnects() -> None:
    cursor = with_gap()
    cursor.close(now_s=2.0)
    assert cursor.open(9, now_s=3.0) == 2
    assert cursor.state is StreamState.REPAIRING
    assert tick(cursor, 3.1) is None
    cursor.batch(3, 7, now_s=3.2)
    assert cursor.state is StreamState.SYNCED


def test_everything_is_a_hint_when_one_epoch_counts_backwards() -> None:
    cursor = opened()
    cursor.batch(1, 9, now_s=1.0)
    assert cursor.open(4, now_s=2.0) == 0
    assert "went back" in cursor.reason
    assert tick(cursor, 2.0) is Ask.SNAPSHOT


def test_damage_needs_a_snapshot_when_nothing_is_missing() -> None:
    cursor = opened()
    cursor.batch(1, 1, now_s=1.0)
    cursor.damage("an event was not understood", now_s=1.0)
    assert (cursor.state, cursor.reason) == (StreamState.GAP, "an event was not understood")
    assert tick(cursor, 1.0) is Ask.SNAPSHOT


def test_stream_stays_trusted_when_a_snapshot_is_only_wanted() -> None:
    cursor = opened()
    cursor.want_snapshot()
    assert tick(cursor, 1.0) is Ask.SNAPSHOT
    cursor.heartbeat(0, now_s=1.1)
    assert (cursor.state, cursor.repairing_snapshot) == (StreamState.SYNCED, True)
    cursor.snapshot_done(0, now_s=1.2)
    assert tick(cursor, 1.3) is None


def test_fence_is_final_when_the_epoch_speaks_again() -> None:
    cursor = opened()
    cursor.fence("replaced", now_s=1.0)
    cursor.heartbeat(1, now_s=2.0)
    assert (cursor.state, cursor.reason) == (StreamState.FENCED, "replaced")
    assert tick(cursor, 3.0) is None

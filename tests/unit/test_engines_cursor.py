"""The cursor's rules one by one; the model test has the histories."""

from __future__ import annotations

from kvdir.engines import END_SEQ, AskReplay, Deliver, Doubt, EngineCursor, Lost, NewLife


def asked(effects: list[object]) -> AskReplay:
    return next(effect for effect in effects if isinstance(effect, AskReplay))


def joined(*, batches: int = 3) -> EngineCursor:
    """With a replay socket, and batches 0 .. batches - 1 delivered."""
    cursor = EngineCursor(replay=True)
    request = asked(cursor.start(0.0)).request_id
    for seq in range(batches):
        cursor.replayed(request, seq, b"%d" % seq, 0.0)
    cursor.replayed(request, END_SEQ, b"", 0.0)
    assert not cursor.doubt
    return cursor


def test_a_hole_is_asked_for_from_the_anchor_when_numbers_jump() -> None:
    cursor = joined()
    effects = cursor.live(5, b"5", 1.0)
    request = asked(effects)
    assert request.first_seq == 2
    assert cursor.doubt
    out = [
        *cursor.replayed(request.request_id, 2, b"2", 1.0),
        *cursor.replayed(request.request_id, 3, b"3", 1.0),
        *cursor.replayed(request.request_id, 4, b"4", 1.0),
        *cursor.replayed(request.request_id, END_SEQ, b"", 1.0),
    ]
    assert [effect.seq for effect in out if isinstance(effect, Deliver)] == [3, 4, 5]
    assert not cursor.doubt


def test_a_restart_is_found_when_the_anchor_has_other_content() -> None:
    cursor = joined()
    request = asked(cursor.live(5, b"five of the new life", 1.0))
    effects = cursor.replayed(request.request_id, 2, b"two of the new life", 1.0)
    assert any(isinstance(effect, NewLife) for effect in effects)
    assert asked(effects).first_seq == 0


def test_a_restart_is_found_when_numbers_begin_again() -> None:
    cursor = joined()
    cursor.live(3, b"3", 1.0)
    effects = cursor.live(0, b"0 again", 2.0)
    assert [type(effect) for effect in effects] == [NewLife, Deliver]
    assert cursor.lives == 2


def test_a_batch_is_taken_once_when_live_and_replay_bring_it() -> None:
    cursor = joined()
    assert cursor.live(1, b"1", 1.0) == []
    assert cursor.live(2, b"2", 1.0) == []
    assert cursor.live(2, b"2", 1.0) == []
    assert cursor.duplicates == 3


def test_another_life_is_seen_when_a_late_live_batch_differs_from_the_replayed() -> None:
    cursor = joined()
    effects = cursor.live(1, b"other", 1.0)
    assert isinstance(effects[0], NewLife)


def test_what_the_ring_has_forgotten_is_lost_when_joining_late() -> None:
    cursor = EngineCursor(replay=True)
    request = asked(cursor.start(0.0)).request_id
    effects = cursor.replayed(request, 900, b"900", 0.0)
    assert Lost(0, 899) in effects
    assert "900" in cursor.doubt
    cursor.replayed(request, END_SEQ, b"", 0.0)
    assert cursor.doubt
    assert cursor.cleared(900) == [Doubt("")]


def test_a_hole_inside_the_replay_is_asked_for_again_when_it_was_dropped() -> None:
    cursor = joined()
    request = asked(cursor.live(9, b"9", 1.0)).request_id
    for seq in (2, 3, 6, 7, 8):
        cursor.replayed(request, seq, b"%d" % seq, 1.0)
    again = asked(cursor.replayed(request, END_SEQ, b"", 1.0))
    assert again.first_seq == 3
    for seq in range(3, 9):
        cursor.replayed(again.request_id, seq, b"%d" % seq, 1.0)
    assert cursor.next_seq == 10
    assert not cursor.doubt


def test_a_hole_is_given_up_when_replays_never_bring_it() -> None:
    cursor = joined()
    effects: list[object] = list(cursor.live(9, b"9", 1.0))
    while (requests := [effect for effect in effects if isinstance(effect, AskReplay)]) and not cursor.lost_batches:
        effects = [
            *cursor.replayed(requests[-1].request_id, 2, b"2", 1.0),
            *cursor.replayed(requests[-1].request_id, END_SEQ, b"", 1.0),
        ]
    assert Lost(3, 8) in effects
    assert cursor.next_seq == 10
    assert "3 to 8" in cursor.doubt


def test_a_lost_end_is_found_when_the_stream_is_idle() -> None:
    cursor = joined()
    assert cursor.wake_s is not None
    request = asked(cursor.tick(cursor.wake_s))
    assert request.first_seq == 2
    cursor.replayed(request.request_id, 2, b"2", 6.0)
    assert Deliver(3, b"3") in cursor.replayed(request.request_id, 3, b"3", 6.0)


def test_live_batches_go_on_when_a_probe_is_under_way() -> None:
    cursor = joined()
    request = asked(cursor.tick(5.0))
    assert Deliver(3, b"3") in cursor.live(3, b"3", 5.1)
    assert cursor.replayed(request.request_id, 2, b"2", 5.2) == []
    assert not cursor.doubt


def test_silence_of_the_replay_socket_is_a_doubt_when_it_lasts() -> None:
    cursor = joined()
    now_s = 0.0
    for _ in range(3):
        assert not cursor.doubt
        now_s += 5.0
        cursor.tick(now_s)
        now_s += 2.0
        cursor.tick(now_s)
    assert "did not answer" in cursor.doubt
    request = asked(cursor.tick(now_s + 5.0))
    cursor.replayed(request.request_id, 2, b"2", now_s + 5.0)
    assert not cursor.doubt


def test_an_empty_replay_is_a_doubt_when_the_engine_has_spoken() -> None:
    cursor = EngineCursor(replay=True)
    cursor.replayed(asked(cursor.start(0.0)).request_id, END_SEQ, b"", 0.0)
    cursor.live(0, b"0", 0.0)
    effects: list[object] = list(cursor.tick(5.0))
    while requests := [effect for effect in effects if isinstance(effect, AskReplay)]:
        effects = list(cursor.replayed(requests[0].request_id, END_SEQ, b"", 5.0))
    assert "buffer_steps" in cursor.doubt


def test_everything_is_known_when_a_life_without_replay_is_followed_from_its_start() -> None:
    cursor = EngineCursor(replay=False)
    assert cursor.start(0.0) == [Doubt(cursor.doubt)]
    assert cursor.live(0, b"0", 0.0) == [Deliver(0, b"0"), Doubt("")]
    assert cursor.live(1, b"1", 0.0) == [Deliver(1, b"1")]
    assert cursor.wake_s is None


def test_only_what_was_lost_before_is_forgiven_when_the_engine_clears() -> None:
    cursor = EngineCursor(replay=False)
    cursor.start(0.0)
    cursor.live(0, b"0", 0.0)
    cursor.live(4, b"4", 0.0)
    assert cursor.doubt
    cursor.cleared(0)
    assert cursor.doubt
    cursor.cleared(4)
    assert not cursor.doubt
    cursor.uncertain(5, "batch 5 could not be read")
    assert cursor.doubt == "batch 5 could not be read"


def test_waiting_batches_are_bounded_when_a_hole_lasts() -> None:
    cursor = EngineCursor(replay=True, max_held_batches=8, max_held_bytes=100)
    cursor.start(0.0)
    for seq in range(1, 1000):
        cursor.live(seq, b"x" * 20, 0.0)
    assert cursor.held_batches == 5


def test_two_engines_are_suspected_when_lives_begin_again_and_again() -> None:
    cursor = EngineCursor(replay=False)
    cursor.start(0.0)
    for seq in range(5):
        for engine in (b"a", b"b"):
            cursor.live(seq, engine, 1.0)
    assert "two engines" in cursor.doubt
    assert cursor.wake_s == 11.0
    cursor.tick(11.0)
    assert "two engines" not in cursor.doubt


def test_an_impossible_number_is_a_doubt_when_it_comes() -> None:
    cursor = joined()
    cursor.live(END_SEQ, b"", 1.0)
    assert "no engine reaches" in cursor.doubt
    assert Deliver(3, b"3") in cursor.live(3, b"3", 1.0)

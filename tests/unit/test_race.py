"""Which coordinator is asked when: spreading, staying, hedging, and what a slow one costs. No network, no clock."""

from __future__ import annotations

from collections import Counter

import pytest

from kvdir.client.addresses import Addresses
from kvdir.client.race import PATIENCE_S, Race, RaceCounters
from kvdir.errors import DeadlineExceeded, InvalidInput, Unavailable, UnknownNamespace

THREE = ("a:1", "b:1", "c:1")
REFUSED, UNKNOWN = Unavailable("refused"), UnknownNamespace("never heard of")


def race(addresses: Addresses, *, now_s: float = 0.0, deadline_s: float = 3.0, hedged: bool = True) -> Race:
    return Race(addresses, RaceCounters(), now_s=now_s, end_s=now_s + deadline_s, hedged=hedged)


def test_clients_spread_and_move_only_from_the_one_that_went_when_names_differ() -> None:
    names = [f"node-{number}" for number in range(300)]
    clients = {name: Addresses(THREE, name=name) for name in names}
    before = {name: item.order(now_s=0.0)[0] for name, item in clients.items()}
    assert all(count > 60 for count in Counter(before.values()).values())
    for item in clients.values():
        item.replace(("a:1", "c:1"))
    after = {name: item.order(now_s=0.0)[0] for name, item in clients.items()}
    assert all(after[name] == before[name] for name in names if before[name] != "b:1")
    assert len({after[name] for name in names if before[name] == "b:1"}) == 2, "its clients spread over the others"


def test_what_is_known_of_those_that_stay_is_kept_when_the_list_changes() -> None:
    addresses = Addresses(THREE)
    addresses.failed("a:1", now_s=0.0)
    addresses.replace(("d:1", "a:1"))
    assert addresses.order(now_s=0.1) == ["d:1", "a:1"]
    with pytest.raises(InvalidInput):
        addresses.replace(())
    assert len(addresses) == 2


def test_many_questions_that_fail_together_count_once() -> None:
    addresses = Addresses(THREE)
    for _ in range(50):
        addresses.failed("a:1", now_s=0.0)
    assert addresses.order(now_s=0.4) == ["b:1", "c:1", "a:1"]
    assert addresses.order(now_s=0.6) == ["a:1", "b:1", "c:1"]


def test_second_is_asked_beside_a_slow_first_which_is_asked_later_from_then_on() -> None:
    addresses = Addresses(THREE)
    one = race(addresses)
    assert one.begin(0.0) == ("a:1", 1.0)
    assert one.wait_s(0.0) == PATIENCE_S
    assert not one.hedge_due(PATIENCE_S / 2)
    assert one.hedge_due(PATIENCE_S)
    assert one.begin(PATIENCE_S)[0] == "b:1"  # type: ignore[index]
    assert one.wait_s(PATIENCE_S) is None, "one extra question, no more"
    assert not one.hedge_due(1.0)
    one.won("b:1", PATIENCE_S + 0.002)
    assert addresses.order(now_s=0.1) == ["b:1", "c:1", "a:1"]
    assert addresses.order(now_s=5.0) == ["a:1", "b:1", "c:1"]


def test_first_stays_first_when_the_second_was_no_faster() -> None:
    addresses = Addresses(THREE)
    one = race(addresses)
    one.begin(0.0)
    one.begin(PATIENCE_S)
    one.won("b:1", PATIENCE_S * 2)  # 50 ms against more than 100: not far slower
    assert addresses.order(now_s=0.2) == ["a:1", "b:1", "c:1"]


@pytest.mark.parametrize("answers_between", [False, True])
def test_first_is_asked_later_when_it_was_outpaced_twice_running(answers_between: bool) -> None:
    addresses = Addresses(THREE)
    for now_s in (0.0, 1.0):
        one = race(addresses, now_s=now_s)
        one.begin(now_s)
        one.begin(now_s + PATIENCE_S)
        one.won("b:1", now_s + PATIENCE_S * 2)
        if answers_between:
            addresses.answered("a:1")
    assert (addresses.order(now_s=1.2)[0] == "a:1") is answers_between


def test_patience_is_a_share_of_a_short_deadline() -> None:
    assert race(Addresses(THREE), deadline_s=0.02).wait_s(0.0) is None  # nobody is under way yet
    one = race(Addresses(THREE), deadline_s=0.02)
    one.begin(0.0)
    assert one.wait_s(0.0) == pytest.approx(0.005)


def test_next_is_asked_at_once_when_one_refuses() -> None:
    addresses, counters = Addresses(THREE), RaceCounters()
    one = Race(addresses, counters, now_s=0.0, end_s=3.0, hedged=False)
    assert one.begin(0.0) == ("a:1", 1.0)
    assert one.wait_s(0.0) is None
    one.lost("a:1", 0.001, REFUSED)
    turn = one.begin(0.001)
    assert turn is not None
    assert turn[0] == "b:1"
    assert (counters.moved_on, counters.hedges) == (1, 0)
    one.lost("b:1", 2.0, REFUSED)
    assert one.begin(2.0) == ("c:1", 3.0)
    one.lost("c:1", 3.0, REFUSED)
    assert one.begin(3.0) is None


def test_shares_leave_time_for_the_others_when_one_hangs() -> None:
    one = race(Addresses(THREE), deadline_s=9.0, hedged=False)
    assert one.begin(0.0) == ("a:1", 3.0)
    one.lost("a:1", 3.0, REFUSED)
    assert one.begin(3.0) == ("b:1", 6.0)
    one.lost("b:1", 3.5, REFUSED)  # refused early: the time is for the next
    assert one.begin(3.5) == ("c:1", 9.0)
    late = race(Addresses(THREE), deadline_s=0.0, hedged=False)
    assert late.begin(1.0) is not None, "the first is always tried"
    late.lost("a:1", 1.0, REFUSED)
    assert late.begin(1.0) is None


def test_hedges_are_a_tenth_of_the_questions_when_every_coordinator_is_slow() -> None:
    addresses, hedges = Addresses(("a:1", "b:1")), 0
    for number in range(1000):
        one = race(addresses, now_s=float(number))
        one.begin(float(number))
        if one.hedge_due(number + PATIENCE_S):
            hedges += 1
            one.begin(number + PATIENCE_S)
        one.won("a:1", number + 0.2)
    assert 100 <= hedges <= 105


def test_hedges_are_paid_for_when_every_coordinator_was_put_off() -> None:
    addresses, hedges = Addresses(("a:1", "b:1")), 0
    for _ in range(100):
        for address in ("a:1", "b:1"):
            addresses.failed(address, now_s=0.0)
        one = race(addresses)
        one.begin(0.0)
        hedges += one.hedge_due(PATIENCE_S)
    assert hedges <= 15


def test_one_that_warms_is_asked_later_and_one_that_knows_nothing_is_passed_over() -> None:
    addresses = Addresses(THREE)
    one = race(addresses)
    one.begin(0.0)
    one.knew_nothing("a:1", UNKNOWN)
    assert one.begin(0.001)[0] == "b:1"  # type: ignore[index]
    one.won("b:1", 0.002, warming=True)
    assert addresses.order(now_s=0.01) == ["a:1", "c:1", "b:1"]


def test_waiting_questions_move_without_paying_when_another_has_found_the_first_to_be_slow() -> None:
    addresses = Addresses(("a:1", "b:1"))
    crowd = [race(addresses) for _ in range(100)]
    for one in crowd:
        one.begin(0.0)
    moved = 0
    for one in crowd:
        if one.hedge_due(PATIENCE_S):
            moved += 1
            one.begin(PATIENCE_S)
            one.won("b:1", PATIENCE_S + 0.001)
    assert moved == 100


@pytest.mark.parametrize("unknown_first", [True, False])
def test_unknown_is_the_answer_only_if_all_say_so(unknown_first: bool) -> None:
    one = race(Addresses(("a:1", "b:1")), hedged=False)
    assert isinstance(one.failure, DeadlineExceeded), "nobody was asked yet"
    for address, unknown in (("a:1", unknown_first), ("b:1", not unknown_first)):
        one.begin(0.0)
        if unknown:
            one.knew_nothing(address, UNKNOWN)
        else:
            one.lost(address, 0.0, REFUSED)
    assert one.failure is REFUSED
    both = race(Addresses(("a:1", "b:1")), hedged=False)
    for address in ("a:1", "b:1"):
        both.begin(0.0)
        both.knew_nothing(address, UNKNOWN)
    assert both.failure is UNKNOWN


def test_second_has_its_patience_too_when_the_first_refuses_late() -> None:
    one = race(Addresses(THREE))
    one.begin(0.0)
    one.lost("a:1", PATIENCE_S * 0.9, REFUSED)
    one.begin(PATIENCE_S * 0.9)
    assert not one.hedge_due(PATIENCE_S)
    assert one.hedge_due(PATIENCE_S * 1.9)


def test_one_that_failed_comes_first_again_only_when_a_hedge_beside_it_is_affordable() -> None:
    """Or a client that asks seldom would wait for its share of the deadline, at one that hangs, time and again."""
    addresses, waited = Addresses(("a:1", "b:1")), []
    for number in range(200):
        now_s = 60.0 * number  # every pause is over
        one = race(addresses, now_s=now_s)
        turn = one.begin(now_s)
        assert turn is not None
        if turn[0] == "a:1":  # which hangs
            waited.append(number)
            assert one.hedge_due(now_s + PATIENCE_S)
            one.begin(now_s + PATIENCE_S)
        one.won("b:1", now_s + PATIENCE_S + 0.001)
    assert 15 <= len(waited) <= 25, "a burst, and then a tenth of the questions"

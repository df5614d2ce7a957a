"""Which read may fly now."""

from __future__ import annotations

import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from peer_agent.core.schedule import Priority, Schedule
from peer_agent.server.turns import Turns

LOAD, PREFETCH, REPLICATION = Priority


class Desk:
    """A schedule with the arguments that most tests do not care about. Tickets count from 0."""

    def __init__(self, *, peer_bytes: int = 100, total_bytes: int = 1000, background_bytes: int = 40) -> None:
        self.schedule = Schedule(peer_bytes=peer_bytes, total_bytes=total_bytes, background_bytes=background_bytes, aging_s=1.0)
        self.tickets = 0

    def ask(
        self, size_bytes: int, *, peer: str = "p", request: int = 0, priority: Priority = LOAD, now_s: float = 0.0
    ) -> tuple[int, ...]:
        ticket, self.tickets = self.tickets, self.tickets + 1
        return self.schedule.ask(ticket, peer=peer, request=request, priority=priority, size_bytes=size_bytes, now_s=now_s)

    def done(self, ticket: int, now_s: float = 0.0) -> tuple[int, ...]:
        return self.schedule.give_back(ticket, now_s=now_s)


def test_admits_until_the_peers_window_is_full():
    desk = Desk()
    assert desk.ask(60) == (0,)
    assert desk.ask(60) == ()
    assert desk.ask(10) == (), "must not pass the one that waits"
    assert desk.done(0) == (1, 2)
    assert desk.schedule.in_flight_bytes == desk.schedule.flying_bytes("p") == 70


def test_flies_alone_when_a_chunk_is_larger_than_the_window():
    desk = Desk()
    assert desk.ask(500) == (0,)
    assert desk.ask(1) == ()
    assert desk.done(0) == (1,)


def test_leaves_the_queue_when_the_caller_gives_up():
    desk = Desk(peer_bytes=10)
    assert desk.ask(10) == (0,)
    assert desk.ask(10) == ()
    assert desk.ask(10) == ()
    assert desk.done(1) == ()
    assert desk.done(0) == (2,)
    assert desk.done(2) == ()
    assert desk.done(2) == (), "twice is once"
    assert desk.schedule.in_flight_bytes == 0
    assert sum(desk.schedule.waiting().values()) == 0


def test_a_full_window_at_one_peer_holds_up_nobody_at_another():
    desk = Desk()
    for _ in range(10):
        desk.ask(100, peer="slow")
    assert desk.ask(100, peer="fast") == (10,)


def test_slow_peers_leave_room_when_the_sum_is_bounded():
    desk = Desk(peer_bytes=1000, total_bytes=1000)
    for name in "abc":
        while desk.ask(10, peer=name):
            pass
    assert desk.schedule.in_flight_bytes < 1000
    assert desk.ask(10, peer="d")


def test_a_large_chunk_is_next_when_small_ones_have_passed_it_for_long():
    desk = Desk(peer_bytes=1000, total_bytes=100)
    assert desk.ask(30, peer="a") == (0,)
    assert desk.ask(90, peer="large") == ()
    assert desk.ask(30, peer="b") == (2,), "there is room for small ones meanwhile"
    assert desk.ask(30, peer="c", now_s=2.0) == ()
    assert desk.done(0, now_s=2.0) == ()
    assert desk.done(2, now_s=2.0) == (1,)
    assert desk.done(1, now_s=2.0) == (3,)


def test_requests_share_by_bytes_when_one_asks_for_larger_chunks():
    desk = Desk(peer_bytes=40)
    desk.ask(40, request=9)  # keeps the window full while the queues build up
    owner = {desk.tickets + at: request for at, request in enumerate((1,) * 20 + (2,) * 80)}
    for request, size_bytes, times in ((1, 40, 20), (2, 10, 80)):
        for _ in range(times):
            desk.ask(size_bytes, request=request)
    flying, served = [0], {1: 0, 2: 0}
    while served[1] + served[2] < 800:
        for ticket in desk.done(flying.pop(0)):
            flying.append(ticket)
            served[owner[ticket]] += 40 if owner[ticket] == 1 else 10
        assert abs(served[1] - served[2]) <= 50, "further apart than one chunk of each"


def test_a_request_that_asks_one_chunk_at_a_time_gets_no_more_than_its_share():
    desk = Desk(peer_bytes=10)
    desk.ask(10, request=9)
    for _ in range(40):
        desk.ask(10, request=1)
    single = desk.tickets
    desk.ask(10, request=2)
    flying, served = [0], {1: 0, 2: 0}
    for _ in range(30):
        for ticket in desk.done(flying.pop(0)):
            flying.append(ticket)
            if ticket == single:
                served[2] += 1
                single = desk.tickets
                desk.ask(10, request=2)
            else:
                served[1] += 1
    assert abs(served[1] - served[2]) <= 1


def test_a_load_goes_before_a_prefetch_and_a_prefetch_before_replication():
    desk = Desk(peer_bytes=10)
    desk.ask(10)
    desk.ask(10, priority=REPLICATION)
    desk.ask(10, priority=PREFETCH)
    desk.ask(10)
    assert desk.schedule.waiting() == {LOAD: 1, PREFETCH: 1, REPLICATION: 1}
    assert [desk.done(ticket) for ticket in (0, 3, 2)] == [(3,), (2,), (1,)]


def test_background_keeps_its_own_bound_and_starts_nothing_beside_a_load():
    desk = Desk()
    assert [desk.ask(20, priority=PREFETCH) for _ in range(3)] == [(0,), (1,), ()]
    assert desk.ask(50) == (3,)
    assert desk.done(0) == ()
    assert desk.done(1) == ()
    assert desk.done(3) == (2,)


def test_a_prefetch_moves_on_when_loads_never_end():
    desk = Desk(peer_bytes=10)
    desk.ask(10)
    desk.ask(10, priority=PREFETCH)
    flying, at_s = 0, 0.0
    for _ in range(8):
        at_s += 0.25
        desk.ask(10, now_s=at_s)
        (flying,) = desk.done(flying, now_s=at_s)
        if flying == 1:
            break
    assert (flying, at_s) == (1, 1.0)
    desk.ask(10, priority=PREFETCH, now_s=at_s)
    assert desk.done(1, now_s=at_s) != (), "only one in aging_s"


def test_background_begins_nowhere_while_a_load_is_being_brought():
    desk = Desk()
    assert desk.ask(30, priority=PREFETCH) == (0,)
    desk.schedule.load_began()
    assert desk.ask(30, peer="q", priority=PREFETCH) == ()
    assert desk.done(0) == ()
    assert desk.ask(10) == (2,), "the load itself"
    assert desk.done(2) == ()
    desk.schedule.load_began()
    assert desk.schedule.load_ended(now_s=0.5) == ()
    assert desk.schedule.load_ended(now_s=0.5) == (1,)


def test_a_prefetch_moves_on_when_loads_follow_each_other_without_a_gap():
    desk = Desk()
    desk.schedule.load_began()
    assert desk.ask(10, priority=PREFETCH) == ()
    desk.schedule.load_began()
    assert desk.schedule.load_ended(now_s=0.9) == ()
    desk.schedule.load_began()
    assert desk.schedule.load_ended(now_s=1.0) == (0,)


def test_a_prefetch_moves_on_when_one_load_takes_for_ever():
    desk = Desk()
    desk.schedule.load_began()
    assert desk.ask(10, priority=PREFETCH) == ()
    assert desk.schedule.look("p", now_s=0.9) == ()
    assert desk.schedule.look("p", now_s=1.0) == (0,)


async def test_a_turn_comes_when_one_load_takes_for_ever():
    turns = Turns(Schedule(peer_bytes=100, total_bytes=100, aging_s=0.02), clock=time.monotonic)
    with turns.bringing(LOAD):
        until_s = time.monotonic() + 10.0
        async with turns.turn(peer="p", request=1, priority=PREFETCH, size_bytes=10, until_s=until_s) as mine:
            assert mine
            assert time.monotonic() < until_s
    assert turns.in_flight_bytes == 0


def test_queued_bytes_are_those_of_others():
    desk = Desk(peer_bytes=10)
    desk.ask(10, request=1)
    desk.ask(10, request=2)
    desk.ask(10, request=2)
    assert desk.schedule.queued_bytes("p", besides=2) == 10
    assert desk.schedule.queued_bytes("p", besides=1) == 20
    assert desk.schedule.queued_bytes("nobody", besides=1) == 0


def test_bounds_must_be_positive():
    with pytest.raises(ValueError, match="must be positive"):
        Schedule(peer_bytes=0, total_bytes=1)


class ScheduleMachine(RuleBasedStateMachine):
    """Against what a caller may rely on: bounds hold, nothing is admitted twice or lost, and everything flies in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.schedule = Schedule(peer_bytes=100, total_bytes=250, background_bytes=40, aging_s=1.0)
        self.now_s = 0.0
        self.sizes: dict[int, tuple[str, Priority, int]] = {}
        self.waiting: set[int] = set()
        self.flying: set[int] = set()
        self.loads = 0

    def admit(self, tickets: tuple[int, ...]) -> None:
        assert len(set(tickets)) == len(tickets)
        assert set(tickets) <= self.waiting
        self.waiting -= set(tickets)
        self.flying |= set(tickets)

    @rule(
        peer=st.sampled_from("abc"),
        request=st.integers(0, 3),
        priority=st.sampled_from(Priority),
        size_bytes=st.sampled_from([1, 20, 60, 150, 400]),
    )
    def ask(self, peer: str, request: int, priority: Priority, size_bytes: int) -> None:
        ticket = len(self.sizes)
        self.sizes[ticket] = peer, priority, size_bytes
        self.waiting.add(ticket)
        self.admit(
            self.schedule.ask(ticket, peer=peer, request=request, priority=priority, size_bytes=size_bytes, now_s=self.now_s)
        )

    @precondition(lambda self: self.flying or self.waiting)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.flying | self.waiting)))
        self.flying.discard(ticket)
        self.waiting.discard(ticket)
        self.admit(self.schedule.give_back(ticket, now_s=self.now_s))

    @rule()
    def load_began(self) -> None:
        self.schedule.load_began()
        self.loads += 1

    @precondition(lambda self: self.loads)
    @rule()
    def load_ended(self) -> None:
        self.loads -= 1
        self.admit(self.schedule.load_ended(now_s=self.now_s))

    @rule(seconds=st.sampled_from([0.1, 1.5]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @invariant()
    def bounds_hold(self) -> None:
        sizes = [self.sizes[ticket] for ticket in self.flying]
        assert self.schedule.in_flight_bytes == sum(size for _, _, size in sizes)
        assert len(sizes) == 1 or self.schedule.in_flight_bytes <= 250
        for peer in "abc":
            here = [(priority, size) for owner, priority, size in sizes if owner == peer]
            assert len(here) <= 1 or sum(size for _, size in here) <= 100
        assert sum(self.schedule.waiting().values()) == len(self.waiting)
        held_back = self.loads and all(self.sizes[ticket][1] is not LOAD for ticket in self.waiting)
        assert self.flying or not self.waiting or held_back, "all wait and nothing flies"

    def teardown(self) -> None:
        while self.loads:
            self.load_ended()
        for _ in range(len(self.sizes)):
            if not self.flying:
                break
            ticket = min(self.flying)
            self.flying.remove(ticket)
            self.admit(self.schedule.give_back(ticket, now_s=self.now_s))
        assert not self.waiting, "somebody starves"


TestScheduleMachine = ScheduleMachine.TestCase
TestScheduleMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)

"""Loads over peers that exist only as numbers: the planner, its figures and the schedule with a clock that jumps.

Each peer is one link that serves reads first come first served: `latency_s`, then `bytes_per_s`. It can refuse, fall silent,
come back, break, and lie about blocks. Nothing waits, so a test runs hours of it in milliseconds, and every run is the same.

Does what peer_agent/server/reader.py does with the plan, without slots, sockets and tasks. Checks on the way that bytes in
flight keep their bound, that no block is read when it is here, and that only hedges read one that is under way.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from kvdir.location import NodeTrust, StreamState
from peer_agent.core.cost import UNKNOWN_PRICE, Recompute
from peer_agent.core.effects import LoadStatus
from peer_agent.core.figures import Figures
from peer_agent.core.nominees import Claim, PeerFigures
from peer_agent.core.orders import BACKGROUND_LIMITS, Ask, Fetch, Limits, Outcome, Terms
from peer_agent.core.plan import ReadPlan
from peer_agent.core.schedule import Priority, Schedule

PLANE = "tcp"


@dataclass(slots=True, kw_only=True)
class SimulatedPeer:
    """One owner. claims: what the directory says it holds; holds: the truth. Positions of whatever list is loaded.

    silent: (from, until) when nothing comes from it, as under SIGSTOP. lost_at_s: connections break, and nothing is answered
    any more. spoiled: outcomes of reads of some positions, instead of HERE.
    """

    name: str
    claims: Collection[int]
    holds: Collection[int]
    bytes_per_s: float = 1e9
    latency_s: float = 2e-4
    round_trip_s: float = 5e-4
    state: StreamState = StreamState.SYNCED
    silent: tuple[float, float] = (math.inf, math.inf)
    lost_at_s: float = math.inf
    spoiled: Mapping[int, Outcome] = field(default_factory=dict)
    free_s: float = 0.0

    @property
    def trust(self) -> NodeTrust:
        return NodeTrust(
            node=self.name, epoch=1, state=self.state, reason="", age_s=0.0, missing_events=0, peer_address=f"{self.name}:1"
        )

    def through(self, began_s: float, takes_s: float) -> float:
        """When something that takes so long is through, its silence included."""
        ends_s, (from_s, until_s) = began_s + takes_s, self.silent
        if ends_s < from_s or began_s >= until_s:
            return ends_s
        return until_s + ends_s - max(from_s, began_s)


@dataclass(slots=True)
class SimulatedLoad:
    """One load or prefetch and what became of it."""

    number: int
    plan: ReadPlan
    terms: Terms
    priority: Priority
    asks: set[Ask] = field(default_factory=set)
    fetches: dict[int, Fetch] = field(default_factory=dict)  # by ticket
    flying: Counter[int] = field(default_factory=Counter)  # reads under way, by position
    reads: list[tuple[float, Fetch]] = field(default_factory=list)  # when begun
    woken_s: float = math.inf
    ended_s: float | None = None

    @property
    def took_s(self) -> float:
        assert self.ended_s is not None, "it still runs"
        return self.ended_s - self.terms.began_s

    @property
    def statuses(self) -> Counter[LoadStatus]:
        return Counter(LoadStatus(status) for status in self.plan.results)


@dataclass(slots=True)
class _Flight:
    """began_s: when it was let fly; None: it waits for its turn."""

    load: SimulatedLoad
    fetch: Fetch
    began_s: float | None = None
    beside_bytes: int = 0


class SimulatedPeers:
    """A reader's world. `load` any number, then `run`."""

    def __init__(
        self,
        peers: Iterable[SimulatedPeer],
        *,
        peer_bytes: int = 64 << 20,
        total_bytes: int = 256 << 20,
        figures: Figures | None = None,
    ) -> None:
        self.peers = {peer.name: peer for peer in peers}
        self.figures = figures or Figures()
        self.schedule = Schedule(peer_bytes=peer_bytes, total_bytes=total_bytes)
        self.now_s = 0.0
        self.peak_bytes = 0
        self._peer_bytes, self._total_bytes = peer_bytes, total_bytes
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = self._tickets = 0
        self._loads: list[SimulatedLoad] = []
        self._flying: dict[int, _Flight] = {}  # by ticket
        self._met: set[str] = set()

    def load(
        self,
        count: int,
        *,
        block_bytes: int,
        timeout_s: float = 10.0,
        at_s: float | None = None,
        priority: Priority = Priority.LOAD,
        recompute: Recompute = UNKNOWN_PRICE,
        limits: Limits | None = None,
    ) -> SimulatedLoad:
        """A load of `count` blocks that begins at at_s (default: now)."""
        began_s = self.now_s if at_s is None else at_s
        if limits is None:
            limits = replace(Limits() if priority is Priority.LOAD else BACKGROUND_LIMITS, max_read_bytes=8 << 30)
        terms = Terms(
            block_bytes=block_bytes, began_s=began_s, deadline_s=began_s + timeout_s, recompute=recompute, limits=limits
        )
        load = SimulatedLoad(len(self._loads), ReadPlan(count, terms), terms, priority)
        self._loads.append(load)
        self._at(began_s, lambda: self._begin(load, count))
        self._at(terms.deadline_s, lambda: self._out_of_time(load))
        return load

    def run(self) -> None:
        """Until every load has ended."""
        while any(load.ended_s is None for load in self._loads):
            self.now_s, _, event = heapq.heappop(self._events)
            event()

    # events

    def _at(self, when_s: float, event: Callable[[], None]) -> None:
        if when_s < math.inf:
            self._order += 1
            heapq.heappush(self._events, (when_s, self._order, event))

    def _begin(self, load: SimulatedLoad, count: int) -> None:
        found = [Claim.of(peer.trust, [at for at in peer.claims if at < count]) for peer in self.peers.values()]
        load.plan.nominate(found, me="me", figures=lambda name: self._known(load, name))
        self._step(load)

    def _known(self, load: SimulatedLoad, name: str) -> PeerFigures:
        return PeerFigures(
            path=self.figures.estimate(name, PLANE, now_s=self.now_s),
            plane=PLANE,
            connected=name in self._met,
            queued_bytes=self.schedule.queued_bytes(name, besides=load.number),
        )

    def _step(self, load: SimulatedLoad) -> None:
        if load.ended_s is not None:
            return
        overdue = load.plan.overdue(self.now_s)
        for ticket in [ticket for ticket, fetch in load.fetches.items() if fetch in overdue]:
            self._observe(ticket, complete=False)
        for ask in load.plan.next_asks(self.now_s):
            load.asks.add(ask)
            self._lock(load, ask)
        for fetch in load.plan.next_fetches(self.now_s):
            self._submit(load, fetch)
        if load.plan.over(self.now_s):
            load.ended_s = self.now_s
            self._drop(load)
            return
        wake_s = load.plan.next_wake_s(self.now_s)
        if wake_s != load.woken_s:
            load.woken_s = wake_s
            self._at(wake_s, lambda: self._step(load))

    def _lock(self, load: SimulatedLoad, ask: Ask) -> None:
        peer = self.peers[ask.node.node]
        round_trips = 1 if peer.name in self._met else 4
        answers_s = peer.through(self.now_s, peer.round_trip_s * round_trips)
        began_s = self.now_s

        def answer() -> None:
            if load.ended_s is not None or ask not in load.asks:
                return
            load.asks.remove(ask)
            self._met.add(peer.name)
            self.figures.observe_lock(peer.name, took_s=(self.now_s - began_s) / round_trips, now_s=self.now_s)
            wanted = set(ask.positions)
            load.plan.answered(ask, [at for at in sorted(peer.holds) if at in wanted], now_s=self.now_s)
            self._step(load)

        def fail(late: bool) -> None:
            if load.ended_s is None and ask in load.asks:
                load.asks.remove(ask)
                load.plan.unreachable(ask, late=late, now_s=self.now_s)
                self._step(load)

        if answers_s < peer.lost_at_s:
            self._at(answers_s, answer)
        else:
            self._at(max(self.now_s + peer.round_trip_s, peer.lost_at_s), lambda: fail(False))
        self._at(ask.until_s, lambda: fail(True))

    def _submit(self, load: SimulatedLoad, fetch: Fetch) -> None:
        ticket, self._tickets = self._tickets, self._tickets + 1
        for at in fetch.positions:
            assert not LoadStatus(load.plan.results[at]).hit, f"block {at} is here and is read again"
            assert load.flying[at] == (fetch.hedges is not None), f"{load.flying[at]} reads of block {at} are under way"
        load.flying.update(fetch.positions)
        load.reads.append((self.now_s, fetch))
        load.fetches[ticket] = fetch
        name = fetch.ask.node.node
        self._flying[ticket] = _Flight(load, fetch)
        self._admit(
            self.schedule.ask(
                ticket,
                peer=name,
                request=load.number,
                priority=load.priority,
                size_bytes=fetch.size_bytes,
                now_s=self.now_s,
            )
        )

    def _admit(self, tickets: Iterable[int]) -> None:
        for ticket in tickets:
            flight = self._flying[ticket]
            peer, size_bytes = self.peers[flight.fetch.ask.node.node], flight.fetch.size_bytes
            flight.began_s, flight.beside_bytes = self.now_s, self.schedule.flying_bytes(peer.name) - size_bytes
            peer.free_s = peer.through(max(self.now_s, peer.free_s), size_bytes / peer.bytes_per_s)
            arrives_s = peer.free_s + peer.latency_s
            lost = arrives_s >= peer.lost_at_s
            self._at(max(self.now_s, peer.lost_at_s) if lost else arrives_s, partial(self._landed, ticket, lost))
        self.peak_bytes = max(self.peak_bytes, self.schedule.in_flight_bytes)
        assert self.schedule.in_flight_bytes <= self._total_bytes, "more in flight than allowed"

    def _landed(self, ticket: int, lost: bool) -> None:
        if ticket not in self._flying:
            return
        load, fetch = self._flying[ticket].load, self._flying[ticket].fetch
        peer = self.peers[fetch.ask.node.node]
        if not lost:
            self._observe(ticket, complete=True)
        codes = [Outcome.LOST if lost else peer.spoiled.get(at, Outcome.HERE) for at in fetch.positions]
        self._report(ticket, codes)
        self._step(load)

    def _observe(self, ticket: int, *, complete: bool) -> None:
        flight = self._flying[ticket]
        if flight.began_s is None:
            return
        name, size_bytes = flight.fetch.ask.node.node, flight.fetch.size_bytes
        self.figures.observe(
            name,
            PLANE,
            size_bytes=size_bytes,
            took_s=self.now_s - flight.began_s,
            queued_bytes=(flight.beside_bytes + self.schedule.flying_bytes(name) - size_bytes) // 2,
            now_s=self.now_s,
            complete=complete,
        )

    def _report(self, ticket: int, codes: list[Outcome]) -> None:
        load, fetch = self._flying[ticket].load, self._flying.pop(ticket).fetch
        del load.fetches[ticket]
        load.flying.subtract(fetch.positions)
        needless = load.plan.fetched(fetch, bytes(codes), now_s=self.now_s)
        self._admit(self.schedule.give_back(ticket, now_s=self.now_s))
        for other in [number for number, known in load.fetches.items() if known in needless]:
            if other in load.fetches:
                self._report(other, [Outcome.UNREAD] * len(load.fetches[other].positions))

    def _out_of_time(self, load: SimulatedLoad) -> None:
        if load.ended_s is not None:
            return
        for ask in load.asks:
            load.plan.unreachable(ask, late=True, now_s=self.now_s)
        load.asks.clear()
        self._drop(load)
        load.plan.out_of_time()
        load.ended_s = self.now_s

    def _drop(self, load: SimulatedLoad) -> None:
        for ticket in list(load.fetches):
            if ticket in load.fetches:
                self._report(ticket, [Outcome.LATE] * len(load.fetches[ticket].positions))

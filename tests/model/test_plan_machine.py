"""The plan against a model that knows only its contract, with answers and outcomes in every order, true and false."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvdir.location import NodeTrust, StreamState
from peer_agent.core.cost import Recompute
from peer_agent.core.effects import LoadStatus
from peer_agent.core.figures import PathFigures
from peer_agent.core.nominees import Claim, PeerFigures
from peer_agent.core.orders import Ask, Fetch, Limits, Outcome, Terms
from peer_agent.core.plan import ReadPlan

BLOCKS, BLOCK = 8, 1 << 20
LIMITS = Limits(
    max_asks=4, parallel_asks=2, min_chunk_bytes=BLOCK, max_chunk_bytes=2 * BLOCK, max_read_bytes=6 * BLOCK, hedge_share=0.25
)
HEDGE_BYTES = LIMITS.fetches_per_source * LIMITS.max_chunk_bytes
DEADLINE_S = 5.0
EVERYTHING = frozenset(range(BLOCKS))
few = st.frozensets(st.integers(0, BLOCKS - 1), max_size=3)
most = few.map(lambda left_out: EVERYTHING - left_out)


class PlanMachine(RuleBasedStateMachine):
    """asks, fetches: outstanding. present: what each source has said it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.asks: dict[int, Ask] = {}
        self.fetches: dict[int, Fetch] = {}
        self.asked: list[str] = []
        self.due: dict[int, float] = {}  # by ask: when it stops counting
        self.present: dict[int, frozenset[int]] = {}
        self.gone: set[int] = set()
        self.hits: set[int] = set()
        self.aside: set[int] = set()
        self.no_room: set[int] = set()
        self.corrupt: Counter[int] = Counter()
        self.doubled: Counter[int] = Counter()
        self.needless: set[int] = set()
        self.arrived = 0
        self.hedged = 0

    @initialize(
        claims=st.lists(most | few, min_size=1, max_size=6),
        states=st.lists(st.sampled_from(StreamState), min_size=6, max_size=6),
        speeds=st.lists(st.sampled_from([1e7, 1e9]), min_size=6, max_size=6),
        open_breakers=st.frozensets(st.integers(0, 5), max_size=1),
        prefill=st.sampled_from([0.0, 0.0, 1e3, 1e5]),
        local=few,
    )
    def begin(
        self,
        claims: list[frozenset[int]],
        states: list[StreamState],
        speeds: list[float],
        open_breakers: frozenset[int],
        prefill: float,
        local: frozenset[int],
    ) -> None:
        price = Recompute(block_tokens=16, prefill_tokens_per_s=prefill)
        terms = Terms(block_bytes=BLOCK, began_s=0.0, deadline_s=DEADLINE_S, recompute=price, limits=LIMITS)
        self.breakers = {str(number) for number in open_breakers}
        self.plan = ReadPlan(BLOCKS, terms)
        self.plan.hold(local, LoadStatus.HIT_LOCAL)
        self.hits |= local
        found = [
            Claim.of(NodeTrust(str(number), 1, state, "", 0.0, 0, "there:1"), claim)
            for number, (claim, state) in enumerate(zip(claims, states, strict=False))
        ]
        self.plan.nominate(found, me="me", figures=lambda name: self.figures(name, speeds[int(name)]))
        self.step()

    def figures(self, name: str, bytes_per_s: float) -> PeerFigures:
        path = PathFigures(latency_s=1e-3, bytes_per_s=bytes_per_s, reads=1.0)
        return PeerFigures(path=path, connected=True, skip_until_s=1.0 if name in self.breakers else 0.0)

    # the shell's part

    def step(self) -> None:
        self.plan.overdue(self.now_s)
        for ask in self.plan.next_asks(self.now_s):
            assert ask.node.node not in self.asked, "asked twice"
            assert ask.node.node not in self.breakers or self.now_s >= 1.0, "asked though its breaker is open"
            assert set(ask.positions) == set(range(BLOCKS)) - self.hits, "not asked for everything that is missing"
            assert ask.until_s <= DEADLINE_S
            self.asked.append(ask.node.node)
            self.asks[ask.number] = ask
        for fetch in self.plan.next_fetches(self.now_s):
            self.begun(fetch)
        assert len(self.asked) <= LIMITS.max_asks

    def begun(self, fetch: Fetch) -> None:
        source = fetch.ask.number
        assert source not in self.gone, "read from a source that is gone"
        assert set(fetch.positions) <= self.present[source], "read what the owner does not have"
        assert not set(fetch.positions) & (self.hits | self.aside), "read what is here, or being written here"
        assert fetch.positions == tuple(sorted(set(fetch.positions)))
        assert 0 < fetch.size_bytes == len(fetch.positions) * BLOCK <= LIMITS.max_chunk_bytes
        under_way = Counter(at for other in self.fetches.values() for at in other.positions)
        if fetch.hedges is None:
            assert not any(under_way[at] for at in fetch.positions), "read twice without a reason"
        else:
            original = self.fetches[fetch.hedges]
            self.doubled[fetch.hedges] += 1
            self.hedged += fetch.size_bytes
            assert self.doubled[fetch.hedges] == 1, "hedged twice"
            assert original.ask.number != source, "hedged at the same source"
            assert set(fetch.positions) <= set(original.positions)
            assert self.hedged <= HEDGE_BYTES
        self.fetches[fetch.number] = fetch
        at_source = [other for other in self.fetches.values() if other.ask.number == source]
        assert len(at_source) <= LIMITS.fetches_per_source
        first = sum(other.size_bytes for other in self.fetches.values() if other.hedges is None)
        assert self.arrived * BLOCK + first <= LIMITS.max_read_bytes + self.hedged

    # the world's part

    @rule(seconds=st.sampled_from([0.0005, 0.01, 0.3, 1.5]))
    def time_passes(self, seconds: float) -> None:
        self.now_s = min(self.now_s + seconds, DEADLINE_S - 0.5)
        self.step()

    @precondition(lambda self: self.asks)
    @rule(data=st.data(), held=most | few, wrong=st.just(frozenset()) | few)
    def answer(self, data: st.DataObject, held: frozenset[int], wrong: frozenset[int]) -> None:
        ask = self.asks.pop(data.draw(st.sampled_from(sorted(self.asks))))
        held = (held & set(ask.positions)) - wrong
        stale = self.plan.answered(ask, held, now_s=self.now_s, refused=wrong)
        assert not set(stale) & (held | wrong)
        self.present[ask.number] = held
        self.step()

    @precondition(lambda self: self.asks)
    @rule(data=st.data(), late=st.booleans())
    def no_answer(self, data: st.DataObject, late: bool) -> None:
        ask = self.asks.pop(data.draw(st.sampled_from(sorted(self.asks))))
        self.plan.unreachable(ask, late=late, now_s=self.now_s)
        self.step()

    @precondition(lambda self: self.fetches)
    @rule(data=st.data())
    def ended(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.fetches)))
        count = len(self.fetches[number].positions)
        one = st.sampled_from(Outcome).map(lambda code: [code] * count)
        self.report(number, data.draw(one | st.lists(st.sampled_from(Outcome), min_size=count, max_size=count)))
        self.step()

    def report(self, number: int, codes: list[Outcome]) -> None:
        fetch = self.fetches.pop(number)
        for at, code in zip(fetch.positions, codes, strict=True):
            self.arrived += code is Outcome.HERE and at not in self.hits
            self.corrupt[at] += code is Outcome.CORRUPT
            if code is Outcome.HERE:
                self.hits.add(at)
            elif code is Outcome.BUSY and at not in self.hits:
                self.aside.add(at)
            elif code is Outcome.NO_ROOM:
                self.no_room.add(at)
            elif code is Outcome.LOST:
                self.gone.add(fetch.ask.number)
        needless = self.plan.fetched(fetch, bytes(codes), now_s=self.now_s)
        self.needless = {other.number for other in needless}
        assert self.needless == {number for number, other in self.fetches.items() if not self.worth_waiting(other)}, (
            "whoever brings nothing new is named, and nobody else"
        )

    def worth_waiting(self, fetch: Fetch) -> bool:
        """Whether one of its blocks is neither here nor given up."""
        return any(at not in self.hits and at not in self.given_up for at in fetch.positions)

    @property
    def given_up(self) -> set[int]:
        """Not here, and not to be tried again."""
        return {at for at in range(BLOCKS) if at in self.no_room or self.corrupt[at] >= 2} - self.hits

    @precondition(lambda self: self.present)
    @rule(data=st.data())
    def breaks(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.present)))
        asks = {fetch.ask.number: fetch.ask for fetch in self.fetches.values()}
        if number in asks:
            self.plan.lost(asks[number])
            self.gone.add(number)
            self.step()

    @precondition(lambda self: self.aside)
    @rule()
    def released(self) -> None:
        self.plan.released(self.aside)
        self.aside.clear()
        self.step()

    @rule(here=few)
    def somebody_else_brought(self, here: frozenset[int]) -> None:
        self.plan.hold(here, LoadStatus.HIT_PEER)
        self.hits |= here
        self.aside -= here

    # what holds at all times

    @invariant()
    def hits_are_final_and_the_rest_is_not_here(self) -> None:
        if not hasattr(self, "plan"):
            return
        found = {at for at, status in enumerate(self.plan.results) if LoadStatus(status).hit}
        assert found == self.hits
        assert set(self.plan.remaining) == set(range(BLOCKS)) - self.hits
        assert set(self.plan.set_aside) == self.aside - self.given_up
        assert self.plan.idle == (not self.asks and not self.fetches)
        assert self.now_s < self.plan.next_wake_s(self.now_s) <= DEADLINE_S
        assert max(self.corrupt.values(), default=0) <= 3, "tried again and again"

    def teardown(self) -> None:
        """Whatever has happened: once all answer and deliver, the load comes to its end."""
        if not hasattr(self, "plan"):
            return
        for _ in range(200):
            self.now_s = min(self.now_s + 0.01, DEADLINE_S - 0.5)
            self.plan.released(self.aside)
            self.aside.clear()
            for number in list(self.asks):
                ask = self.asks.pop(number)
                self.plan.answered(ask, ask.positions, now_s=self.now_s)
                self.present[number] = frozenset(ask.positions)
            for number in list(self.fetches):
                self.report(number, [Outcome.HERE] * len(self.fetches[number].positions))
            self.step()
            if self.plan.over(self.now_s):
                story = self.plan.explain()
                assert {nominee.node for nominee in story.nominees if nominee.asked_s is not None} == set(self.asked)
                assert sum(story.blocks.values()) == BLOCKS
                return
        raise AssertionError(f"never over: {self.plan.explain()}")


TestPlanMachine = PlanMachine.TestCase
TestPlanMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)

"""Leases and quarantine under random interleavings of many actors: deeper than test_leases_exhaustive.py can go.

Hypothesis starts engines, fetches, readers, evictions and restarts over three slots and five blocks, and moves any of them by
one step at a time, with time passing in between; it shrinks what it finds to the fewest steps.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from peer_agent.testing.lease_actors import Actor, Evictor, Fetcher, Reader, Restart, Writer
from peer_agent.testing.lease_world import World

BLOCKS = st.lists(st.integers(1, 5), min_size=1, max_size=3, unique=True).map(tuple)
LEASES = st.sampled_from([1.0, 3.0])
MOST_AT_ONCE = 8


class LeaseMachine(RuleBasedStateMachine):
    """The World, moved by Hypothesis."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(slots=3)

    @property
    def moving(self) -> list[Actor]:
        return [actor for actor in self.world.actors if not actor.done]

    def is_roomy(self) -> bool:
        return len(self.moving) < MOST_AT_ONCE

    @precondition(is_roomy)
    @rule(blocks=BLOCKS, lease_s=LEASES, vanishes=st.booleans(), gives_up=st.booleans())
    def engine_stores(self, blocks: tuple[int, ...], lease_s: float, vanishes: bool, gives_up: bool) -> None:
        self.world.add(Writer(blocks=blocks, lease_s=lease_s, vanishes=vanishes, gives_up=gives_up))

    @precondition(is_roomy)
    @rule(blocks=BLOCKS, late=st.booleans(), hedged=st.booleans(), data=st.data())
    def agent_fetches(self, blocks: tuple[int, ...], late: bool, hedged: bool, data: st.DataObject) -> None:
        firsts = [actor for actor in self.moving if isinstance(actor, Fetcher) and actor.reservation]
        first = data.draw(st.sampled_from(firsts)) if hedged and firsts else None
        if first is None:
            self.world.add(Fetcher(blocks=blocks, late=late))
        else:
            self.world.add(Fetcher(blocks=first.blocks, late=late, hedges=first.number))

    @precondition(is_roomy)
    @rule(blocks=BLOCKS, lease_s=LEASES, plane=st.sampled_from(["tcp", "shm", "engine"]))
    def somebody_reads(self, blocks: tuple[int, ...], lease_s: float, plane: str) -> None:
        self.world.add(Reader(blocks=blocks, lease_s=lease_s, plane=plane))

    @rule(discards=st.one_of(st.just(()), BLOCKS))
    def blocks_go(self, discards: tuple[int, ...]) -> None:
        self.world.add(Evictor(discards=discards))

    @rule(seconds=st.sampled_from([0.5, 1.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.tick(seconds)

    @rule(often=st.integers(0, 9))
    def agent_restarts(self, often: int) -> None:
        if often == 0:
            self.world.add(Restart())

    @rule(choices=st.lists(st.integers(0, MOST_AT_ONCE - 1), min_size=1, max_size=8))
    def they_move(self, choices: list[int]) -> None:
        for choice in choices:
            if moving := self.moving:
                self.world.step(moving[choice % len(moving)])

    @invariant()
    def owner_agrees_with_itself(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        self.world.finish()


LeaseMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=60, deadline=None)
TestLeases = LeaseMachine.TestCase

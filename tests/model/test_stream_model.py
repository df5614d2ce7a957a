"""Outbox -> lossy network -> directory, against the owner's truth (design 04).

The network loses, duplicates, and delivers what an old connection still had under way after the new one has begun; owners
restart under new epochs and keep or lose their blocks; zombies of fenced epochs return; coordinators restart; readers report
stale hints, honestly and not. After every step: a trusted figure equals the owner's truth at the sequence it stands at, no
fenced epoch is returned, the directory's invariants hold. At the end the network heals, and within a bounded number of
heartbeats every stream is synced and equal to the truth.

Two drivers over one World: Hypothesis, which shrinks what it finds, and long seeded random walks, which reach deeper states.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvdir.location import Tier
from kvdir.testing.stream_owner import TIERS, UNIVERSE
from kvdir.testing.stream_world import KINDS, MISHAPS, NODES, World

CHANGE = st.tuples(
    st.sampled_from(KINDS), st.sampled_from(TIERS), st.frozensets(st.sampled_from(UNIVERSE), min_size=1, max_size=2)
)


class StreamModel(RuleBasedStateMachine):
    """The World, moved by Hypothesis."""

    @initialize(ring_events=st.sampled_from([3, 8, 100]), sketches=st.booleans())
    def begin(self, ring_events: int, sketches: bool) -> None:
        self.world = World(ring_events, sketches=sketches)

    @rule(
        node=st.sampled_from(NODES),
        changes=st.lists(CHANGE, max_size=6),
        lost=st.lists(st.booleans(), max_size=6),
        count=st.integers(0, 20),
        twice=st.booleans(),
        heartbeat=st.booleans(),
        counted=st.booleans(),
    )
    def live(
        self, node: str, changes: list[Any], lost: list[bool], count: int, twice: bool, heartbeat: bool, counted: bool
    ) -> None:
        for kind, tier, picks in changes:
            self.world.owners[node].change(kind, tier, picks)
        self.world.send(node, lost, heartbeat=heartbeat, counted=counted)
        self.world.deliver(node, count, twice=twice)

    @rule(seconds=st.sampled_from([0.05, 0.6]), lose_requests=st.booleans())
    def tick(self, seconds: float, lose_requests: bool) -> None:
        self.world.tick(seconds, lose_requests=lose_requests)

    @rule(node=st.sampled_from(NODES), tier=st.sampled_from(TIERS), pick=st.sampled_from(UNIVERSE), lies=st.booleans())
    def read(self, node: str, tier: Tier, pick: bytes, lies: bool) -> None:
        self.world.reader_finds_nothing(node, tier, pick, lies=lies, later=False)

    @rule(kind=st.sampled_from(MISHAPS), node=st.sampled_from(NODES), pick=st.integers(0, 5))
    def mishap(self, kind: str, node: str, pick: int) -> None:
        self.world.mishap(kind, node, pick)

    @invariant()
    def holds(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.heal()


StreamModel.TestCase.settings = settings(
    max_examples=50, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestStreamModel = StreamModel.TestCase


@pytest.mark.parametrize("seed", range(30))
def test_trusted_equals_truth_when_the_network_is_random(seed: int) -> None:
    rng = random.Random(seed)
    world = World(rng.choice([3, 8, 100]), sketches=rng.random() < 0.7)
    share_lost, calm = rng.choice([0.0, 0.1, 0.4]), rng.choice([0.7, 0.95])
    for _ in range(120):
        node = rng.choice(NODES)
        for _ in range(rng.randrange(4)):
            picks = frozenset(rng.sample(UNIVERSE, rng.randint(1, 2)))
            world.owners[node].change(rng.choice(KINDS[: 6 if calm > 0.9 else 7]), rng.choice(TIERS), picks)
        lost = [rng.random() < share_lost for _ in range(rng.randrange(6))]
        world.send(node, lost, heartbeat=rng.random() < 0.5, counted=rng.random() < 0.3)
        world.deliver(node, rng.choice([1, 3, 100]), twice=rng.random() < 0.1)
        world.check()
        if rng.random() < 0.3:
            lies = rng.random() < 0.3
            world.reader_finds_nothing(node, rng.choice(TIERS), rng.choice(UNIVERSE), lies=lies, later=rng.random() < 0.5)
        if rng.random() < 0.1:
            world.late_report()
        if rng.random() > calm:
            world.mishap(rng.choice(MISHAPS), rng.choice(NODES), rng.randrange(10))
        world.tick(rng.choice([0.05, 0.05, 0.6]), lose_requests=rng.random() < 0.1)
        world.check()
    world.heal()

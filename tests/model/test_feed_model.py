"""Whatever happens to a directory, a replica fed by its log holds the same, and never claims more: see FeedWorld.

Two drivers, as for the streams: Hypothesis, which shrinks what it finds, and seeded random walks, which reach deeper states.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvdir.testing.feed_world import FeedWorld, random_move
from kvdir.testing.stream_owner import TIERS, UNIVERSE
from kvdir.testing.stream_world import KINDS, MISHAPS, NODES

CHANGE = st.tuples(
    st.sampled_from(KINDS), st.sampled_from(TIERS), st.frozensets(st.sampled_from(UNIVERSE), min_size=1, max_size=2)
)


class FeedModel(RuleBasedStateMachine):
    """The FeedWorld, moved by Hypothesis."""

    @initialize(ring_events=st.sampled_from([3, 100]), log_bytes=st.sampled_from([2_000, 10**7]))
    def begin(self, ring_events: int, log_bytes: int) -> None:
        self.world = FeedWorld(ring_events, log_bytes=log_bytes)

    @rule(node=st.sampled_from(NODES), changes=st.lists(CHANGE, max_size=4), lost=st.lists(st.booleans(), max_size=4))
    def live(self, node: str, changes: list[Any], lost: list[bool]) -> None:
        for kind, tier, picks in changes:
            self.world.owners[node].change(kind, tier, picks)
        self.world.send(node, lost, heartbeat=True)
        self.world.deliver(node, 20)

    @rule(seconds=st.sampled_from([0.05, 0.6, 30.0]))
    def tick(self, seconds: float) -> None:
        self.world.tick(seconds)

    @rule(kind=st.sampled_from(MISHAPS), node=st.sampled_from(NODES), pick=st.integers(0, 5))
    def mishap(self, kind: str, node: str, pick: int) -> None:
        self.world.mishap(kind, node, pick)

    @rule(anew=st.booleans())
    def call(self, anew: bool) -> None:
        self.world.call(anew=anew)

    @rule()
    def hang_up(self) -> None:
        self.world.hang_up()

    @rule(said=st.integers(0, 3), heard=st.integers(0, 3), credits_heard=st.integers(0, 2))
    def pass_on(self, said: int, heard: int, credits_heard: int) -> None:
        for _ in range(said):
            self.world.say()
        self.world.hear(heard)
        for _ in range(credits_heard):
            self.world.hear_credit()

    @rule()
    def compare(self) -> None:
        self.world.catch_up()
        self.world.same()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.catch_up()
            self.world.same()


FeedModel.TestCase.settings = settings(
    max_examples=80, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestFeedModel = FeedModel.TestCase


@pytest.mark.parametrize("seed", range(40))
def test_replica_answers_like_the_directory_when_it_caught_up_after_a_random_course(seed: int) -> None:
    rng = random.Random(seed)
    world = FeedWorld(rng.choice([3, 8, 100]), log_bytes=rng.choice([2_000, 20_000, 10**7]), sketches=rng.random() < 0.8)
    for _ in range(80):
        random_move(world, rng)
        match rng.randrange(12):
            case 0:
                world.call(anew=rng.random() < 0.2)
            case 1:
                world.hang_up()
            case 2 | 3 | 4:
                world.say()
            case 5 | 6 | 7:
                world.hear(rng.randrange(1, 4))
            case 8 | 9:
                world.hear_credit()
            case 10:
                world.catch_up()
                world.same()
        world.check()
    world.heal()
    world.catch_up()
    world.same()


def test_random_courses_cut_off_resume_and_begin_anew() -> None:
    ends = resumes = snapshots = 0
    for seed in range(25):
        rng = random.Random(seed)
        world = FeedWorld(8, log_bytes=1_600)
        for _ in range(60):
            random_move(world, rng)
            [world.call, world.hang_up, world.say, world.say, world.hear, world.catch_up][rng.randrange(6)]()
        ends, resumes, snapshots = ends + world.cut_offs, resumes + world.resumes, snapshots + world.snapshots
    assert min(ends, resumes, snapshots) > 10, f"{ends} cut off, {resumes} resumed, {snapshots} anew: the model tests nothing"

"""Whatever happens to a directory, a replica fed by its log holds the same, and never claims more: see FeedWorld."""

from __future__ import annotations

import random

import pytest

from kvdir.testing.feed_world import FeedWorld, random_move


@pytest.mark.parametrize("seed", range(60))
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

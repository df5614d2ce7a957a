"""Whatever happens to a directory, its mirrors are told, by the rules of kvdir/core/mirror.py: copies stay exact."""

from __future__ import annotations

import random

import pytest

from kvdir.core.directory import Directory
from kvdir.location import Tier
from kvdir.testing.checked_mirror import CheckedMirror
from kvdir.testing.stream_owner import TIERS, UNIVERSE
from kvdir.testing.stream_world import KINDS, MISHAPS, NODES, World


class MirroredWorld(World):
    """Every directory of the world has a mirror from its beginning."""

    def _new_directory(self) -> Directory:
        directory = super()._new_directory()
        self.mirror = CheckedMirror()
        directory.add_mirror(self.mirror, now_s=self.now_s)
        return directory

    def check(self) -> None:
        super().check()
        assert not self.mirror.faults(self.directory)


@pytest.mark.parametrize("seed", range(40))
def test_copy_is_exact_at_every_step_when_streams_lose_repair_restart_and_are_forgotten(seed: int) -> None:
    rng = random.Random(seed)
    world = MirroredWorld(rng.choice([3, 8, 100]), sketches=rng.random() < 0.8)
    for _ in range(120):
        node = rng.choice(NODES)
        match rng.randrange(6):
            case 0:
                world.mishap(rng.choice(MISHAPS), node, rng.randrange(6))
            case 1:
                world.tick(rng.choice([0.05, 0.6, 30.0]), lose_requests=rng.random() < 0.2)
            case 2:
                pick = rng.choice(UNIVERSE)
                world.reader_finds_nothing(node, rng.choice(TIERS), pick, lies=rng.random() < 0.2, later=False)
            case _:
                for _ in range(rng.randrange(5)):
                    picks = frozenset(rng.sample(UNIVERSE, rng.randrange(1, 3)))
                    world.owners[node].change(rng.choice(KINDS), rng.choice(TIERS), picks)
                lost = [rng.random() < 0.3 for _ in range(rng.randrange(6))]
                world.send(node, lost, heartbeat=rng.random() < 0.5)
                world.deliver(node, rng.randrange(20), twice=rng.random() < 0.1)
        world.check()
    world.heal()


def test_mirror_is_told_what_there_is_when_it_comes_late() -> None:
    world = MirroredWorld(8)
    world.owners["a"].change("stored", Tier.CPU, frozenset(UNIVERSE[:2]))
    world.send("a", [False] * 4, heartbeat=True)
    world.deliver("a", 10)
    late = CheckedMirror()
    world.directory.add_mirror(late, now_s=world.now_s)
    assert late.namespaces.keys() == world.mirror.namespaces.keys()
    assert late.nodes == world.mirror.nodes
    assert late.holders.keys() == world.mirror.holders.keys()
    world.directory.remove_mirror(late)
    world.owners["a"].change("cleared", Tier.CPU, frozenset())
    world.send("a", [False], heartbeat=False)
    world.deliver("a", 10)
    assert late.holders.keys() != world.mirror.holders.keys()

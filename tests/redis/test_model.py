"""Random histories of stores, removals, swaps, drops, take-overs and sweeps against a dict of sets, on a real server."""

import random
from collections.abc import Iterator

import pytest

from kvdir.store import make_store
from kvdir.store.base import BlockStore, Change, Fenced, Writer
from kvdir.testing.check_directory_store import D, held, holder_of, remove, store, taken
from kvdir.testing.index_fixture import fingerprints
from kvdir.testing.redis_servers import Server, redis_server

pytestmark = pytest.mark.redis
UNIVERSE = 6000
STEPS = 120


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with redis_server() as running:
        yield running


class World:
    """Two coordinators and the truth: per listed holder, the blocks it has."""

    def __init__(self, stores: tuple[BlockStore, BlockStore], rng: random.Random) -> None:
        self.stores, self.rng = stores, rng
        self.writer: Writer
        self.held: dict[int, set[int]] = {}
        self.dropped: list[int] = []

    @property
    def any_store(self) -> BlockStore:
        return self.rng.choice(self.stores)

    def blocks(self) -> list[int]:
        """Stretches, as prompts have them, or single blocks."""
        start = self.rng.randrange(UNIVERSE)
        if self.rng.random() < 0.7:
            return list(range(start, min(UNIVERSE, start + self.rng.choice((1, 30, 300, 2500)))))
        return [self.rng.randrange(UNIVERSE) for _ in range(self.rng.randrange(40))]

    async def write(self) -> None:
        changes, expected = list[Change](), []
        for _ in range(self.rng.randrange(1, 6)):
            holder, numbers = self.rng.choice(sorted(self.held)), self.blocks()
            mine, before = self.held[holder], len(self.held[holder])
            if self.rng.random() < 0.65:
                changes.append(store(holder, numbers))
                mine.update(numbers)
            else:
                changes.append(remove(holder, numbers))
                mine.difference_update(numbers)
            expected.append(abs(len(mine) - before))
        assert await self.any_store.write(self.writer, changes, deadline_s=D) == tuple(expected)

    async def retract(self) -> None:
        holder, numbers = self.rng.choice(sorted(self.held)), self.blocks()
        lost = len(self.held[holder] & set(numbers))
        self.held[holder].difference_update(numbers)
        assert await self.any_store.retract(holder, fingerprints(numbers), 16, scope=1, deadline_s=D) == lost

    async def swap(self) -> None:
        """A snapshot: a fresh holder is filled and takes the place of another one."""
        over = self.any_store
        fresh, numbers = await holder_of(over, self.writer, visible=False), self.blocks()
        await over.write(self.writer, [store(fresh, numbers)], deadline_s=D)
        old = self.rng.choice(sorted(self.held)) if len(self.held) > 18 else 0
        await over.swap(self.writer, show=[fresh], drop=[old] if old else [], deadline_s=D)
        self.held[fresh] = set(numbers)
        if old:
            del self.held[old]
            self.dropped.append(old)

    async def take_over(self) -> None:
        late, self.writer = self.writer, await taken(self.any_store)
        with pytest.raises(Fenced):
            await self.any_store.write(late, [remove(min(self.held), range(UNIVERSE))], deadline_s=D)

    async def sweep(self) -> None:
        await self.any_store.sweep(self.rng.choice((1, 5, 50)), deadline_s=D)

    async def check(self) -> None:
        numbers = self.blocks()
        truth = [tuple(sorted(holder for holder, blocks in self.held.items() if number in blocks)) for number in numbers]
        found: dict[int, tuple[int, ...]] = dict.fromkeys(range(len(numbers)), ())
        for start, count, holders in await held(self.any_store, numbers):
            found |= dict.fromkeys(range(start, start + count), holders)
        assert list(found.values()) == truth
        counts = (await self.any_store.counts(sorted(self.held), deadline_s=D)).blocks
        assert counts == {holder: len(blocks) for holder, blocks in self.held.items()}


@pytest.mark.parametrize("seed", range(3))
async def test_random_histories_agree_with_the_truth(server: Server, seed: int) -> None:
    url = f"{server.url}?prefix=model{seed}&shards=3"
    stores = make_store(url), make_store(url)
    for each in stores:
        await each.open(deadline_s=D)
    try:
        world = World(stores, random.Random(seed))
        world.writer = await taken(stores[0])
        world.held = {await holder_of(stores[0], world.writer): set() for _ in range(3)}
        steps = (world.write, world.retract, world.swap, world.take_over, world.sweep, world.check)
        for step in world.rng.choices(steps, (8, 2, 3, 1, 3, 6), k=STEPS):
            await step()
        await world.check()
        while await stores[0].sweep(3, deadline_s=D):
            pass
        left = (await stores[0].counts(world.dropped, deadline_s=D)).blocks
        assert not any(left.values()), "sweeping ends with nothing left of what was dropped"
        await world.check()
    finally:
        for each in stores:
            await each.close()

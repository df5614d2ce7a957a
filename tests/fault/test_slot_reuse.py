"""Few slots, many blocks: stores, loads, discards, evictions and prefetches overlap in random orders, and every hit is checked.

The orders are exhaustive in tests/model/test_leases_exhaustive.py, over a made memory; here memory, sockets and copies are
real.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvdir.testing.wait import eventually
from peer_agent.client import aio
from peer_agent.core.effects import LoadStatus
from peer_agent.testing import LocalCluster, local_cluster, sample_namespace

pytestmark = pytest.mark.slow

BLOCK_BYTES = 32 << 10
SLOTS = 12
BLOCKS = 30
STEPS = 120


@pytest.fixture
def directory() -> Iterator[Path]:
    """Short, because socket paths end at 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="kvdir-") as path:
        yield Path(path)


class User:
    """Does one thing after the other, at random; whatever a load calls a hit has the right bytes."""

    def __init__(self, cluster: LocalCluster, node: str, engine: aio.Engine, seed: int) -> None:
        self.cluster = cluster
        self.store = cluster.agents[node].store
        self.engine = engine
        self.random = random.Random(seed)
        self.all = cluster.blocks.chain(BLOCKS)
        self.hits = {LoadStatus.HIT_LOCAL: 0, LoadStatus.HIT_PEER: 0}

    async def run(self) -> None:
        deeds = (self.load, self.load, self.load, self.write, self.write, self.discard, self.evict, self.prefetch, self.give_up)
        for _ in range(STEPS):
            await self.random.choice(deeds)()

    def some(self):
        return self.all.slice(self.random.randrange(BLOCKS - 6), self.random.randrange(1, 6))

    async def load(self) -> None:
        blocks, chosen = self.cluster.blocks, self.some()
        into = blocks.room(chosen)
        result = await self.engine.load(chosen, into=into, deadline_s=1.0)
        blocks.check(chosen, into, result)
        assert result.count(LoadStatus.CORRUPT) == 0
        for status in self.hits:
            self.hits[status] += result.count(status)

    async def write(self) -> None:
        chosen = self.some()
        data = self.cluster.blocks.data(chosen)
        await self.engine.store(chosen, data, deadline_s=1.0)
        data[:] = 0  # the caller's memory is its own again: nothing may be read from it now

    async def give_up(self) -> None:
        """A load whose caller goes away in the middle."""
        chosen = self.some()
        load = asyncio.ensure_future(self.engine.load(chosen, into=self.cluster.blocks.room(chosen), deadline_s=1.0))
        await asyncio.wait({load}, timeout=self.random.random() / 500)
        load.cancel()
        await asyncio.wait({load})

    async def discard(self) -> None:
        self.store.discard(self.cluster.namespace.digest, self.some())

    async def evict(self) -> None:
        self.store.evict(self.cluster.namespace.digest, max_blocks=self.random.randrange(4), keep_blocks=0, older_than_s=0.0)

    async def prefetch(self) -> None:
        await self.engine.prefetch(self.some(), deadline_s=0.5)


@pytest.mark.parametrize("transports", [("shm",), ("tcp",)], ids=["shm", "tcp"])
async def test_every_hit_is_right_when_slots_are_written_read_and_reused_all_the_time(
    directory: Path, transports: tuple[str, ...]
):
    namespace = sample_namespace(block_bytes=BLOCK_BYTES)
    settings = {"transports": transports, "arena_bytes": 4096 + SLOTS * (BLOCK_BYTES + 128), "max_chunk_bytes": 2 * BLOCK_BYTES}
    async with local_cluster(directory, "a", "b", namespace=namespace, **settings) as cluster:
        engines = [(node, await cluster.engine(node)) for node in ("a", "b")]
        users = [User(cluster, node, engine, seed) for seed, (node, engine) in enumerate(engines * 3)]
        async with asyncio.TaskGroup() as group:
            for user in users:
                group.create_task(user.run())
        assert sum(user.hits[LoadStatus.HIT_LOCAL] for user in users) > 0
        assert sum(user.hits[LoadStatus.HIT_PEER] for user in users) > 0
        for node, engine in engines:
            await engine.load(cluster.blocks.chain(1), into=cluster.blocks.room(cluster.blocks.chain(1)), local_only=True)
            store = cluster.agents[node].store

            def held(store=store) -> tuple[int, ...]:
                slots = store.occupancy()[0]
                return slots.reserved, slots.quarantined, slots.retired

            await eventually(lambda held=held: held() == (0, 0, 0), within_s=5, what="slots came back")
            store._inventory.check()

"""Device memory a thousand times over: what fails, is late or goes away leaves nothing behind, in the agent or its mover."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from peer_agent.client.device import DeviceBlocks
from peer_agent.memory.device_fake import FakeDevice
from peer_agent.testing import LocalCluster, local_cluster
from peer_agent.testing.leaks import expect_no_leak

BLOCKS = 4


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvdir-") as path:
        yield Path(path)


@pytest.fixture
async def cluster(directory: Path) -> AsyncIterator[LocalCluster]:
    async with local_cluster(directory, "a", coordinator=False, arena_bytes=64 << 10, devices=("fake",)) as cluster:
        yield cluster


def held_by(cluster: LocalCluster) -> dict[str, int]:
    agent = cluster.agents["a"]
    item = agent.store.occupancy()[0]
    pid = agent.stager._movers.pids().get("fake:0", 0)
    return {
        "slots": item.reserved + item.quarantined,
        "locks": item.locked,
        "stagings": agent.stager.pools.stagings,
        "pools": len(agent.stager.pools),
        "tables": sum(".pool" in name for name in os.listdir(cluster.directory)),
        "mover's descriptors": len(os.listdir(f"/proc/{pid}/fd")) if pid else 0,
        "mover's mappings": Path(f"/proc/{pid}/maps").read_text().count("\n") // 8 if pid else 0,
    }


async def test_nothing_is_left_after_a_thousand_late_and_failed_copies(cluster: LocalCluster):
    with FakeDevice(seed=0) as device:
        engine = await cluster.engine("a", device=device)
        pool = device.allocate(slots=16, segment_bytes=[4096])
        stream, fingerprints = device.stream(), cluster.blocks.chain(BLOCKS)
        await engine.store(fingerprints, cluster.blocks.data(fingerprints))

        async def act(number: int) -> None:
            blocks = DeviceBlocks(pool, range(BLOCKS), ready=stream.record())
            assert blocks.ready.wait(5)
            if number % 2:
                device.hold()
                await engine.load(fingerprints, into=blocks, deadline_s=0.003)
                device.resume()
                assert blocks.wait_idle(5)
            else:
                await engine.store(cluster.blocks.chain(1, root=str(number)), DeviceBlocks(pool, [5], ready=blocks.ready))
            await engine.lookup(fingerprints)

        await expect_no_leak(act, times=1000, warm_up=20, also=lambda: held_by(cluster))
        assert device.faults == []


async def test_nothing_is_left_after_hundreds_of_pools(cluster: LocalCluster):
    """Registered, published from, staged, overwritten, withdrawn or not, unregistered or left to the end of the session."""
    with FakeDevice(seed=0) as device:
        fingerprints = cluster.blocks.chain(BLOCKS)
        data, store = cluster.blocks.data(fingerprints), cluster.agents["a"].store

        async def act(number: int) -> None:
            engine = await cluster.engine("a", device=device)
            memory = device.allocate(slots=8, segment_bytes=[4096])
            pool, stream = await engine.register_pool(memory), device.stream()
            filled = device.fill(memory, range(BLOCKS), data, stream=stream)
            assert await pool.publish(fingerprints, DeviceBlocks(memory, range(BLOCKS), ready=filled)) == ""
            if number % 3:
                pool._table.make_odd([0])
            await engine.load(fingerprints, into=cluster.blocks.room(fingerprints), local_only=True)
            store.discard(cluster.namespace.digest, fingerprints)
            if number % 2:
                await pool.unregister()
            await engine.close()
            device.close_pool(memory)

        await expect_no_leak(act, times=200, warm_up=10, also=lambda: held_by(cluster))

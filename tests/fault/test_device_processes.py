"""An engine process with device memory that is killed: what it had published goes, and nothing of it is believed any more."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kvdir.testing.wait import eventually
from peer_agent.core.effects import LoadStatus
from peer_agent.server.writers import GRACE_S
from peer_agent.testing import LocalCluster, local_cluster

BLOCKS = 6

ENGINE = """
import asyncio, json, sys
from kvdir.namespace import Namespace
from peer_agent.client import aio
from peer_agent.client.device import DeviceBlocks
from peer_agent.memory.device_fake import FakeDevice
from peer_agent.testing import Blocks
async def main():
    namespace = Namespace.create(**json.loads(open(sys.argv[1]).read()))
    blocks, device = Blocks(namespace), FakeDevice(seed=0, directory=sys.argv[4])
    engine = await aio.connect(sys.argv[2], namespace=namespace, engine="doomed", device=device)
    memory = device.allocate(slots=16, segment_bytes=[namespace.block_bytes])
    stream, published = device.stream(), blocks.chain(6)
    ready = device.fill(memory, range(6), blocks.data(published), stream=stream)
    pool = await engine.register_pool(memory)
    assert await pool.publish(published, DeviceBlocks(memory, range(6), ready=ready)) == ""
    if sys.argv[3] == "storing":
        stored = blocks.chain(4, root="stored")
        ready = device.fill(memory, range(6, 10), blocks.data(stored), stream=stream)
        assert ready.wait(5)
        device.hold()
        print("ready", flush=True)
        await engine.store(stored, DeviceBlocks(memory, range(6, 10), ready=ready), deadline_s=60)
    print("ready", flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvdir-") as path:
        yield Path(path)


@pytest.fixture
async def cluster(directory: Path) -> AsyncIterator[LocalCluster]:
    async with local_cluster(directory, "a", "b", arena_bytes=64 << 10, devices=("fake",)) as cluster:
        yield cluster


@contextlib.asynccontextmanager
async def doomed(cluster: LocalCluster, *, doing: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """An engine process that has published six blocks, and then does what it is told; killed in the end at the latest."""
    file = cluster.directory / f"{cluster.namespace.model}.json"
    arguments = [str(file), cluster.agents["a"].ready.engine, doing, str(cluster.directory)]
    engine = await asyncio.create_subprocess_exec(sys.executable, "-c", ENGINE, *arguments, stdout=asyncio.subprocess.PIPE)
    try:
        assert engine.stdout is not None
        assert await engine.stdout.readline() == b"ready\n"
        yield engine
    finally:
        with contextlib.suppress(ProcessLookupError):  # the test has killed it
            engine.kill()
        await engine.wait()


async def test_published_blocks_are_withdrawn_and_absent_when_their_engine_is_killed(cluster: LocalCluster):
    fingerprints, owner = cluster.blocks.chain(BLOCKS), cluster.agents["a"]
    reader = await cluster.engine("b")
    async with doomed(cluster, doing="nothing") as engine:
        await eventually(lambda: cluster.known_blocks("a") == BLOCKS, what="published")
        into = cluster.blocks.room(fingerprints)
        assert (await reader.load(fingerprints.slice(0, 2), into=into[:2], deadline_s=5)).hits == 2
        engine.send_signal(signal.SIGKILL)
        await eventually(lambda: cluster.known_blocks("a") == 2, what="withdrawn; what was staged stays, in tier cpu")
        result = await reader.load(fingerprints, into=into, deadline_s=2)
        cluster.blocks.check(fingerprints, into, result)
        assert result.recompute == (2, 3, 4, 5)
    assert len(owner.stager.pools) == 0
    await eventually(lambda: not owner.stager._open, what="tables are gone")
    assert owner.store.occupancy()[0].reserved == 0


async def test_stopped_engine_does_not_keep_its_blocks_from_being_served(cluster: LocalCluster):
    """Its memory is there, its generations say that they are right: the mover needs nothing from the engine."""
    fingerprints = cluster.blocks.chain(BLOCKS)
    reader = await cluster.engine("b")
    async with doomed(cluster, doing="nothing") as engine:
        await eventually(lambda: cluster.known_blocks("a") == BLOCKS, what="published")
        engine.send_signal(signal.SIGSTOP)
        into = cluster.blocks.room(fingerprints)
        result = await reader.load(fingerprints, into=into, deadline_s=5)
        cluster.blocks.check(fingerprints, into, result)
        assert result.count(LoadStatus.HIT_PEER) == BLOCKS


async def test_slots_that_a_killed_engines_device_was_writing_rest_for_a_while(cluster: LocalCluster):
    owner = cluster.agents["a"]
    async with doomed(cluster, doing="storing") as engine:
        await eventually(lambda: owner.store.occupancy()[0].reserved == 4, what="the store is under way")
        engine.send_signal(signal.SIGKILL)
        await eventually(lambda: owner.store.occupancy()[0].quarantined == 4, what="quarantined")
        began_s = asyncio.get_running_loop().time()
        await eventually(lambda: owner.store.occupancy()[0].quarantined == 0, what="and free again")
        assert asyncio.get_running_loop().time() - began_s > GRACE_S / 2

"""Blocks that lie in an engine's device memory only: published, found, staged by the mover process, served over every plane.

The device is a fake one; the mover is a real process that opens its memory by handle.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import peer_agent
from kvdir.errors import InvalidInput, KvdirError, Unavailable
from kvdir.fingerprint import Fingerprints
from kvdir.testing.wait import eventually
from peer_agent import _native
from peer_agent.client import aio
from peer_agent.client.device import DeviceBlocks
from peer_agent.client.registered import AsyncRegisteredPool
from peer_agent.core.effects import LoadStatus
from peer_agent.core.records import BLOCK_RECORD
from peer_agent.memory.arena import Arena
from peer_agent.memory.device import DevicePool
from peer_agent.memory.device_fake import FakeDevice
from peer_agent.memory.layout import SizeClass
from peer_agent.testing import LocalCluster, local_cluster

SLOTS = 32
BLOCKS = 6


@dataclass
class Bench:
    """Agents a and b and a coordinator; an engine at a with a registered pool, and one at b without a device."""

    cluster: LocalCluster
    device: FakeDevice
    memory: DevicePool
    engine: aio.Engine
    pool: AsyncRegisteredPool
    reader: aio.Engine

    def __post_init__(self) -> None:
        self.stream = self.device.stream()

    @property
    def owner(self):
        return self.cluster.agents["a"]

    @property
    def mover_pid(self) -> int:
        return self.owner.stager._movers.pids()["fake:3"]

    def fill(self, fingerprints: Fingerprints, slots: range) -> DeviceBlocks:
        data = self.cluster.blocks.data(fingerprints)
        return DeviceBlocks(self.memory, slots, ready=self.device.fill(self.memory, slots, data, stream=self.stream))

    async def publish(self, fingerprints: Fingerprints, slots: range) -> None:
        assert await self.pool.publish(fingerprints, self.fill(fingerprints, slots)) == ""

    async def load(self, engine: aio.Engine, fingerprints: Fingerprints, **options):
        """A load whose hits are checked byte by byte."""
        into = self.cluster.blocks.room(fingerprints)
        result = await engine.load(fingerprints, into=into, **({"deadline_s": 5} | options))
        self.cluster.blocks.check(fingerprints, into, result)
        return result

    async def known(self, blocks: int) -> None:
        await eventually(lambda: self.cluster.known_blocks("a") == blocks, what=f"the coordinator knows {blocks} blocks")


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvdir-") as path:
        yield Path(path)


@pytest.fixture
async def bench(directory: Path) -> AsyncIterator[Bench]:
    with FakeDevice(seed=3) as device:
        memory = device.allocate(slots=SLOTS, segment_bytes=[1536, 2560])
        async with local_cluster(directory, "a", "b", arena_bytes=64 << 10, devices=("fake",)) as cluster:
            engine, reader = await cluster.engine("a", device=device), await cluster.engine("b")
            pool = await engine.register_pool(memory)
            yield Bench(cluster, device, memory, engine, pool, reader)
            device.resume()
        assert [name for name in os.listdir(directory) if "pool" in name] == []
        assert device.faults == []


def test_all_of_an_agent_that_served_a_device_ends(directory: Path):
    """Guards the fixture above: it must not pass because nothing was started."""

    async def run() -> int:
        async with local_cluster(directory, "a", devices=("fake",)) as cluster:
            with FakeDevice(seed=3) as device:
                engine = await cluster.engine("a", device=device)
                await engine.register_pool(device.allocate(slots=4, segment_bytes=[4096]))
                return cluster.agents["a"].stager._movers.pids()["fake:3"]

    pid = asyncio.run(run())
    assert pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_peer_gets_blocks_that_only_the_owners_device_has(bench: Bench):
    fingerprints = bench.cluster.blocks.chain(BLOCKS)
    await bench.publish(fingerprints, range(BLOCKS))
    await bench.known(BLOCKS)
    assert bench.owner.store.occupancy()[0].committed == 0
    result = await bench.load(bench.reader, fingerprints)
    assert result.count(LoadStatus.HIT_PEER) == BLOCKS
    assert bench.owner.stager.counters.staged == BLOCKS
    await bench.known(2 * BLOCKS)  # now in both tiers


async def test_another_engine_of_the_host_gets_them_without_a_peer(bench: Bench):
    fingerprints = bench.cluster.blocks.chain(BLOCKS)
    await bench.publish(fingerprints, range(10, 10 + BLOCKS))
    other = await bench.cluster.engine("a")
    assert (await other.lookup(fingerprints)).local == b"\1" * BLOCKS
    result = await bench.load(other, fingerprints, local_only=True)
    assert result.count(LoadStatus.HIT_LOCAL) == BLOCKS


async def test_blocking_engine_publishes_and_withdraws(bench: Bench):
    fingerprints = bench.cluster.blocks.chain(BLOCKS)

    def work() -> None:
        with peer_agent.connect(bench.owner.ready.engine, namespace=bench.cluster.namespace, device=bench.device) as engine:
            pool = engine.register_pool(bench.memory)
            assert pool.publish(fingerprints, bench.fill(fingerprints, range(BLOCKS))) == ""
            assert bench.owner.stager.present(bench.cluster.namespace.digest, fingerprints) == b"\1" * BLOCKS
            assert pool.withdraw(range(3), deadline_s=1) == 0
            assert bench.owner.stager.present(bench.cluster.namespace.digest, fingerprints) == b"\0\0\0\1\1\1"
            pool.unregister()
            assert bench.owner.stager.present(bench.cluster.namespace.digest, fingerprints) == bytes(BLOCKS)

    await asyncio.to_thread(work)


async def test_nothing_is_published_before_its_event(bench: Bench):
    fingerprints = bench.cluster.blocks.chain(BLOCKS)
    bench.device.hold()
    reason = await bench.pool.publish(fingerprints, bench.fill(fingerprints, range(BLOCKS)), deadline_s=0.05)
    assert "ready" in reason
    assert (await bench.load(bench.engine, fingerprints)).hits == 0
    assert len(bench.owner.stager.pools.held(bench.cluster.namespace.digest)) == 0


async def test_withdrawn_blocks_are_gone_everywhere(bench: Bench):
    fingerprints = bench.cluster.blocks.chain(BLOCKS)
    await bench.publish(fingerprints, range(BLOCKS))
    await bench.known(BLOCKS)
    assert await bench.pool.withdraw(range(2)) == 0
    await bench.known(BLOCKS - 2)
    assert (await bench.load(bench.reader, fingerprints)).recompute == (0, 1)


async def test_overwritten_slots_are_absent_and_never_wrong_when_the_withdrawal_got_lost(bench: Bench):
    """The engine only made the headers odd; the agent still believes in the blocks."""
    fingerprints = bench.cluster.blocks.chain(BLOCKS)
    await bench.publish(fingerprints, range(BLOCKS))
    await bench.known(BLOCKS)
    bench.pool._table.make_odd(range(2))
    bench.fill(bench.cluster.blocks.chain(2, root="others"), range(2))
    assert (await bench.load(bench.reader, fingerprints)).recompute == (0, 1)
    await bench.known(2 * (BLOCKS - 2))
    assert bench.owner.stager.counters.overwritten == 2


async def test_no_wrong_byte_when_an_engine_overwrites_as_fast_as_it_can(bench: Bench):
    """Slots change hands all the time, with and without telling the agent, while two readers load: every hit is checked."""
    chains = [bench.cluster.blocks.chain(BLOCKS, root=str(number)) for number in range(12)]
    hits, counters = 0, bench.owner.stager.counters

    async def overwrite() -> None:
        for number in range(1000):
            if number > 40 and hits > 20 and counters.overwritten:
                return
            slots = range(BLOCKS) if number % 2 else range(3, 3 + BLOCKS)
            if number % 3:
                await bench.pool.withdraw(slots)
            else:
                bench.pool._table.make_odd(slots)
            await bench.publish(chains[number % len(chains)], slots)
            if number % 50 == 49:  # on a machine so busy that readers always come too late
                before = hits
                await eventually(lambda before=before: hits > before, what="what is left alone is read")

    async def read(engine: aio.Engine) -> None:
        nonlocal hits
        number = 0
        while not writing.done():
            number += 1
            result = await bench.load(engine, chains[number % len(chains)], deadline_s=0.5)
            hits += result.hits  # in one step: `hits += await ...` would forget what the other reader found meanwhile

    writing = asyncio.ensure_future(overwrite())
    await asyncio.gather(writing, read(bench.engine), read(bench.reader))
    assert hits > 20
    assert counters.staged
    assert counters.overwritten
    await eventually(lambda: bench.owner.stager.pools.stagings == 0, what="stagings end")
    bench.owner.stager.pools.check()
    bench.owner.store._inventory.check()
    item = bench.owner.store.occupancy()[0]
    assert (item.reserved, item.quarantined) == (0, 0)


async def test_blocks_are_withdrawn_when_their_engine_is_killed(bench: Bench, directory: Path):
    """Its session ends without a word; the mapping in the mover is all that is left, and nobody asks it."""
    fingerprints = bench.cluster.blocks.chain(BLOCKS)
    await bench.publish(fingerprints, range(BLOCKS))
    await bench.known(BLOCKS)
    bench.engine._call.cancel()  # what the agent sees of a SIGKILL; test_tier_gpu_processes.py kills one
    await bench.known(0)
    assert (await bench.load(bench.reader, fingerprints)).hits == 0
    assert await bench.pool.publish(fingerprints, DeviceBlocks(bench.memory, range(10, 16), ready=bench.stream.record()))


async def test_every_slot_is_odd_when_the_session_has_ended(bench: Bench):
    """A staging under way then is not believed, although the engine may overwrite without a word from now on."""
    fingerprints = bench.cluster.blocks.chain(BLOCKS)
    await bench.publish(fingerprints, range(BLOCKS))
    table = bench.pool._table
    with Arena.open(table._table.path, writable=False) as seen:
        slots = b"".join(seen.classes[0].offset(slot).to_bytes(8, "little") for slot in range(SLOTS))

        def visible() -> int:
            return int(np.frombuffer(_native.records(seen.region, slots), BLOCK_RECORD)["state"].sum())

        assert visible() == BLOCKS
        await bench.engine.close()
        assert visible() == 0
    assert await bench.pool.withdraw(range(2)) == 0, "withdrawing what is withdrawn is no mistake"


async def test_staging_is_absent_in_time_and_slots_come_back_when_the_mover_stands_still(bench: Bench):
    fingerprints = bench.cluster.blocks.chain(BLOCKS)
    await bench.publish(fingerprints, range(BLOCKS))
    pid = bench.mover_pid
    os.kill(pid, signal.SIGSTOP)
    began_s = asyncio.get_running_loop().time()
    result = await bench.load(bench.engine, fingerprints, deadline_s=0.4)
    assert asyncio.get_running_loop().time() - began_s < 0.4 + 0.5
    assert result.hits == 0
    assert bench.owner.store.occupancy()[0].reserved == BLOCKS, "it may write when it goes on"
    await eventually(lambda: bench.owner.store.occupancy()[0].reserved == 0, what="the mover was ended")
    await eventually(lambda: bench.mover_pid not in (0, pid), what="a new mover")
    assert (await bench.load(bench.engine, fingerprints)).count(LoadStatus.HIT_LOCAL) == BLOCKS


async def test_loads_work_again_when_the_mover_was_killed(bench: Bench):
    fingerprints = bench.cluster.blocks.chain(BLOCKS)
    await bench.publish(fingerprints, range(BLOCKS))
    pid = bench.mover_pid
    os.kill(pid, signal.SIGKILL)
    await eventually(lambda: bench.mover_pid not in (0, pid), what="a new mover")
    result = await bench.load(bench.engine, fingerprints)
    assert result.count(LoadStatus.HIT_LOCAL) == BLOCKS, "the pool was opened again in the new mover"


async def test_loads_do_not_wait_for_a_mover_that_is_being_restarted_for_long(bench: Bench):
    fingerprints = bench.cluster.blocks.chain(BLOCKS)
    await bench.publish(fingerprints, range(BLOCKS))
    await bench.owner.stager._movers.close()
    began_s = asyncio.get_running_loop().time()
    assert (await bench.load(bench.engine, fingerprints, deadline_s=10)).hits == 0
    assert asyncio.get_running_loop().time() - began_s < 2
    item = bench.owner.store.occupancy()[0]
    assert (item.reserved, item.quarantined) == (0, 0)


async def test_tables_of_a_killed_agent_are_removed_by_the_next_one(directory: Path):
    with Arena.create(directory / "a.arena.pool1", [SizeClass(bytes(32), 1, 4)], epoch=1) as table:
        left, alive = directory / "a.arena.pool2", directory / "a.arena.pool1"
        left.write_bytes(bytes(table.region))
        async with local_cluster(directory, "a", coordinator=False):
            assert (left.exists(), alive.exists()) == (False, True)


async def test_pools_that_do_not_work_are_refused_with_the_reason(bench: Bench):
    small = bench.device.allocate(slots=2, segment_bytes=[512])
    with pytest.raises(InvalidInput, match="a block of this namespace 4096"):
        await bench.engine.register_pool(small)
    closed = bench.device.allocate(slots=2, segment_bytes=[4096])
    bench.device.close_pool(closed)
    with pytest.raises(KvdirError, match="export it where it was allocated"):
        await bench.engine.register_pool(closed)
    gone = bench.device.allocate(slots=2, segment_bytes=[4096])
    handle = bench.device.export_handle(gone)
    bench.device.close_pool(gone)
    register = bench.owner.stager.register
    session, digest = bench.engine._session().session, bench.cluster.namespace.digest  # type: ignore[union-attr]
    with pytest.raises(Unavailable, match="cannot open this pool"):
        await register(digest, session=session, device="fake:3", handle=handle, slots=2, block_bytes=4096)
    with pytest.raises(InvalidInput, match="the setting `devices` allows"):
        await register(digest, session=session, device="cuda:0", handle=handle, slots=2, block_bytes=4096)
    good = bench.device.export_handle(bench.memory)
    with pytest.raises(Unavailable, match="not 3 of 4096"):
        await register(digest, session=session, device="fake:3", handle=good, slots=3, block_bytes=4096)


async def test_publications_that_contradict_are_refused(bench: Bench):
    fingerprints = bench.cluster.blocks.chain(2)
    await bench.publish(fingerprints, range(2))
    with pytest.raises(InvalidInput, match="not withdrawn"):
        await bench.pool.publish(fingerprints, bench.fill(fingerprints, range(2)))
    foreign = bench.device.allocate(slots=2, segment_bytes=[4096])
    with pytest.raises(InvalidInput, match="another pool"):
        await bench.pool.publish(fingerprints, DeviceBlocks(foreign, [0, 1], ready=bench.stream.record()))
    with pytest.raises(InvalidInput, match="pool of 32"):
        await bench.pool.withdraw([SLOTS])
    publish = bench.owner.stager.publish
    for slots, generations in (([0, 0], [2, 2]), ([0, SLOTS], [2, 2]), ([0], [2]), ([0, 1], [3, 2])):
        with pytest.raises(InvalidInput):
            publish(bench.pool._table.number, fingerprints, slots, generations, session=bench.pool._table.session)
    assert bench.owner.stager.present(bench.cluster.namespace.digest, fingerprints) == b"\1\1"


async def test_staging_takes_at_most_its_share_of_the_arena(bench: Bench):
    here, there = bench.cluster.blocks.chain(14, root="here"), bench.cluster.blocks.chain(20, root="there")
    await bench.engine.store(here, bench.cluster.blocks.data(here))
    await bench.publish(there, range(20))
    await bench.load(bench.reader, there)
    assert (await bench.engine.lookup(here)).local.count(1) >= 7
    data = np.frombuffer((await bench.engine.lookup(there)).local, np.uint8)
    assert data.sum() == 20

"""Stores from and loads into a device's memory, through a real agent: event order, deadlines, and copies that miss them."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import peer_agent
from kvdir.errors import InvalidInput
from kvdir.fingerprint import Fingerprints
from kvdir.testing.wait import eventually
from peer_agent.client import aio
from peer_agent.client import device as device_module
from peer_agent.client.device import DeviceBlocks
from peer_agent.core.effects import LoadStatus
from peer_agent.memory import presence
from peer_agent.memory.arena import Arena
from peer_agent.memory.device import DeviceError, DevicePool
from peer_agent.memory.device_fake import FakeDevice, FakeEvent
from peer_agent.testing import LocalCluster, local_cluster

SEGMENTS = (1024, 512, 2560)
"""Three arrays that make up the 4096 bytes of a block."""

SLOTS = 32
BLOCKS = 6


@dataclass
class Bench:
    """One agent, an engine with a device that goes by itself, a pool on it."""

    cluster: LocalCluster
    device: FakeDevice
    pool: DevicePool
    engine: aio.Engine

    def __post_init__(self) -> None:
        self.stream = self.device.stream()

    @property
    def occupancy(self):
        return self.cluster.agents["a"].store.occupancy()[0]

    def computed(self, fingerprints: Fingerprints, slots: range) -> DeviceBlocks:
        """Blocks that a kernel begins to compute now."""
        done = self.device.fill(self.pool, slots, self.cluster.blocks.data(fingerprints), stream=self.stream)
        return DeviceBlocks(self.pool, slots, ready=done)

    def room(self, slots: range) -> DeviceBlocks:
        """Slots whose old bytes are no block's."""
        old = np.full((len(slots), self.pool.block_bytes), 0xA5, np.uint8)
        return DeviceBlocks(self.pool, slots, ready=self.device.fill(self.pool, slots, old, stream=self.stream))

    def check(self, fingerprints: Fingerprints, blocks: DeviceBlocks, result) -> None:
        self.cluster.blocks.check(fingerprints, self.device.content(self.pool, blocks.slots), result)


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvdir-") as path:
        yield Path(path)


@pytest.fixture
async def bench(directory: Path) -> AsyncIterator[Bench]:
    with FakeDevice(seed=3) as device:
        pool = device.allocate(slots=SLOTS, segment_bytes=SEGMENTS)
        async with local_cluster(directory, "a", coordinator=False, arena_bytes=64 << 10) as cluster:
            engine = await cluster.engine("a", device=device)
            yield Bench(cluster, device, pool, engine)
            device.resume()
        assert device.faults == []
        assert device.pageable_bytes == 0, "the arena was not page-locked"


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    late = [thread for thread in threading.enumerate() if thread.name == "kvdir-late-copies"]
    for thread in late:
        thread.join(5)
        assert not thread.is_alive()


def hit(result) -> int:
    return result.count(LoadStatus.HIT_LOCAL)


async def test_blocks_go_from_device_to_device_through_the_agent(bench: Bench):
    fingerprints = bench.cluster.blocks.chain(BLOCKS)
    stored = await bench.engine.store(fingerprints, bench.computed(fingerprints, range(BLOCKS)))
    assert (stored.stored, stored.reason) == (BLOCKS, "")
    into = bench.room(range(20, 20 + BLOCKS))
    result = await bench.engine.load(fingerprints, into=into)
    assert hit(result) == BLOCKS
    bench.check(fingerprints, into, result)
    host = bench.cluster.blocks.room(fingerprints)
    assert hit(await bench.engine.load(fingerprints, into=host)) == BLOCKS, "and to host memory as well"
    bench.cluster.blocks.check(fingerprints, host, result)


async def test_blocking_engine_does_the_same(bench: Bench):
    fingerprints = bench.cluster.blocks.chain(BLOCKS)
    unknown = bench.cluster.blocks.chain(1, root="unknown")
    mixed = Fingerprints(unknown.packed + fingerprints.packed, 32)

    def work() -> None:
        address = bench.cluster.agents["a"].ready.engine
        with peer_agent.connect(address, namespace=bench.cluster.namespace, device=bench.device, check=True) as engine:
            assert engine.store(fingerprints, bench.computed(fingerprints, range(BLOCKS))).stored == BLOCKS
            into = bench.room(range(10, 11 + BLOCKS))
            result = engine.load(mixed, into=into)
            assert (hit(result), result.recompute) == (BLOCKS, (0,))
            bench.check(mixed, into, result)
            assert (bench.device.content(bench.pool, [10]) == 0xA5).all(), "a miss leaves its slot alone"

    await asyncio.to_thread(work)


async def test_nothing_is_published_before_the_producer_and_the_copy_are_done(directory: Path):
    """Every step of the device in between is looked at."""
    with FakeDevice(seed=5, stepped=True) as device:
        pool = device.allocate(slots=4, segment_bytes=SEGMENTS)
        async with local_cluster(directory, "a", coordinator=False) as cluster:
            engine = await cluster.engine("a", device=device)
            store, fingerprints = cluster.agents["a"].store, cluster.blocks.chain(2)
            data = cluster.blocks.data(fingerprints)
            ready = device.fill(pool, [0, 3], data, stream=device.stream())
            storing = asyncio.ensure_future(engine.store(fingerprints, DeviceBlocks(pool, [0, 3], ready=ready), deadline_s=10))
            await eventually(lambda: store.occupancy()[0].reserved == 2, what="slots are reserved")
            copying: list[FakeEvent] = []
            begin = device.copy_to_host
            device.copy_to_host = lambda *a, **k: copying.append(begin(*a, **k)) or copying[-1]  # type: ignore[method-assign]
            while not storing.done():
                committed = store.occupancy()[0].committed
                if committed:
                    assert ready.done()
                    assert copying
                    assert copying[0].done()
                if not ready.done():
                    assert not copying, "a copy was begun before the producer's event"
                device.step()
                await asyncio.sleep(0)
            assert (await storing).stored == 2
            into = cluster.blocks.room(fingerprints)
            cluster.blocks.check(fingerprints, into, await engine.load(fingerprints, into=into))


async def test_store_gives_its_slots_back_at_once_when_the_producer_is_late(bench: Bench):
    fingerprints = bench.cluster.blocks.chain(BLOCKS)
    bench.device.hold()
    blocks = bench.computed(fingerprints, range(BLOCKS))
    stored = await bench.engine.store(fingerprints, blocks, deadline_s=0.05)
    assert stored.stored == 0
    assert "ready" in stored.reason
    assert not blocks.busy, "no copy was begun"
    assert (bench.occupancy.reserved, bench.occupancy.quarantined) == (0, 0)
    bench.device.resume()
    assert (await bench.engine.store(fingerprints, blocks)).stored == BLOCKS


async def test_slots_are_quarantined_until_a_late_copy_of_a_store_has_ended(bench: Bench):
    fingerprints, others = bench.cluster.blocks.chain(BLOCKS), bench.cluster.blocks.chain(14, root="others")
    blocks = bench.computed(fingerprints, range(BLOCKS))
    assert blocks.ready.wait(5)
    bench.device.hold()
    stored = await bench.engine.store(fingerprints, blocks, deadline_s=0.5)
    assert (stored.stored, blocks.busy) == (0, True)
    with Arena.open(bench.cluster.agents["a"].ready.arena, writable=True) as arena:
        session = bench.engine._session().session  # type: ignore[union-attr]
        assert presence.is_held(arena.fd, session), "the engine still counts as writing"
        another = await bench.cluster.engine("a")
        assert (await another.store(others, bench.cluster.blocks.data(others))).stored == 14 - BLOCKS
        await eventually(lambda: bench.occupancy.quarantined == BLOCKS, within_s=5, what="the lease has run out")
        bench.device.resume()
        await eventually(lambda: bench.occupancy.quarantined == 0, within_s=5, what="slots come back after the copy")
        assert not presence.is_held(arena.fd, session)
    assert blocks.wait_idle(5)
    into = bench.cluster.blocks.room(others)
    result = await another.load(others, into=into)
    bench.cluster.blocks.check(others, into, result)
    assert (await bench.engine.store(fingerprints, blocks)).stored == BLOCKS


async def test_load_is_late_and_keeps_its_lock_until_the_copy_has_ended(bench: Bench):
    fingerprints = bench.cluster.blocks.chain(BLOCKS)
    await bench.engine.store(fingerprints, bench.cluster.blocks.data(fingerprints))
    into = bench.room(range(BLOCKS))
    assert into.ready.wait(5)
    bench.device.hold()
    began_s = asyncio.get_running_loop().time()
    result = await bench.engine.load(fingerprints, into=into, deadline_s=0.5)
    assert asyncio.get_running_loop().time() - began_s < 0.5 + 0.5
    assert result.count(LoadStatus.LATE) == BLOCKS
    assert into.busy
    with pytest.raises(InvalidInput, match="still uses these slots"):
        await bench.engine.load(fingerprints, into=into)
    await bench.engine.lookup(fingerprints)
    await bench.engine.store(bench.cluster.blocks.chain(1, root="x"), bench.cluster.blocks.data(bench.cluster.blocks.chain(1)))
    assert bench.occupancy.locked == BLOCKS, "a request in between does not release the lock"
    refused = await bench.engine.load(fingerprints, into=bench.room(range(10, 10 + BLOCKS)), deadline_s=0.05)
    assert refused.count(LoadStatus.LATE) == BLOCKS
    bench.device.resume()
    assert into.wait_idle(5)
    again = bench.room(range(10, 10 + BLOCKS))
    await eventually(lambda: not into.busy, what="idle")
    result = await bench.engine.load(fingerprints, into=again)
    assert hit(result) == BLOCKS
    bench.check(fingerprints, again, result)


async def test_late_copy_outlives_a_cancelled_load_and_its_engine(bench: Bench):
    fingerprints = bench.cluster.blocks.chain(BLOCKS)
    engine = await bench.cluster.engine("a", device=bench.device)
    await engine.store(fingerprints, bench.cluster.blocks.data(fingerprints))
    into = bench.room(range(BLOCKS))
    assert into.ready.wait(5)
    bench.device.hold()
    loading = asyncio.ensure_future(engine.load(fingerprints, into=into, deadline_s=1))
    await eventually(lambda: bench.device.queued, what="the copy is begun")
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert into.busy
    await engine.close()
    bench.device.resume()  # had the arena been unmapped, this would crash
    assert into.wait_idle(5)


@pytest.mark.parametrize("storing", [False, True])
async def test_arena_stays_mapped_when_the_session_ends_before_the_deadline_of_a_copy(bench: Bench, storing: bool):
    """The copy is only then found to be late."""
    fingerprints = bench.cluster.blocks.chain(BLOCKS)
    await bench.engine.store(fingerprints, bench.cluster.blocks.data(fingerprints))
    blocks = bench.room(range(BLOCKS))
    assert blocks.ready.wait(5)
    bench.device.hold()
    others = bench.cluster.blocks.chain(BLOCKS, root="others")
    work = (
        bench.engine.store(others, blocks, deadline_s=1)
        if storing
        else bench.engine.load(fingerprints, into=blocks, deadline_s=1)
    )
    working = asyncio.ensure_future(work)
    await eventually(lambda: bench.device.queued, what="the copy is begun")
    bench.engine._drop()
    await working
    assert blocks.busy
    bench.device.resume()  # had the arena been unmapped, this would crash
    assert blocks.wait_idle(5)


async def test_cancelled_store_does_not_hand_its_slots_out_while_the_copy_runs(bench: Bench):
    fingerprints = bench.cluster.blocks.chain(BLOCKS)
    blocks = bench.computed(fingerprints, range(BLOCKS))
    assert blocks.ready.wait(5)
    bench.device.hold()
    storing = asyncio.ensure_future(bench.engine.store(fingerprints, blocks, deadline_s=1))
    await eventually(lambda: bench.device.queued, what="the copy is begun")
    storing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await storing
    assert blocks.busy
    assert bench.occupancy.free == 14 - BLOCKS
    bench.device.resume()
    await eventually(lambda: bench.occupancy.free == 14, within_s=5, what="slots come back")


async def test_failed_copy_is_a_reason_never_a_hit(bench: Bench):
    fingerprints = bench.cluster.blocks.chain(BLOCKS)
    await bench.engine.store(fingerprints, bench.cluster.blocks.data(fingerprints))
    bench.device.fail_next_copy()
    result = await bench.engine.load(fingerprints, into=bench.room(range(BLOCKS)))
    assert hit(result) == 0
    assert "illegal address" in result.reason
    bench.device.fail_next_copy()
    others = bench.cluster.blocks.chain(2, root="others")
    bench.device.drain()
    stored = await bench.engine.store(others, bench.room(range(2)))
    assert stored.stored == 0
    assert "illegal address" in stored.reason
    assert (await bench.engine.lookup(others)).local == bytes(2)


async def test_slots_are_busy_when_copies_go_on_behind_one_that_failed(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    """As when a driver refuses part of a step: that step's event fails, the stream does not."""

    class Refused:
        def wait(self, timeout_s: float) -> bool:
            raise DeviceError("a copy was refused")

    begin, steps = bench.device.copy_from_host, iter([Refused()])
    monkeypatch.setattr(device_module, "CHUNK_BYTES", bench.pool.block_bytes)
    monkeypatch.setattr(bench.device, "copy_from_host", lambda *args, **kwargs: next(steps, None) or begin(*args, **kwargs))
    fingerprints = bench.cluster.blocks.chain(BLOCKS)
    await bench.engine.store(fingerprints, bench.cluster.blocks.data(fingerprints))
    into = bench.room(range(BLOCKS))
    assert into.ready.wait(5)
    bench.device.hold()
    result = await bench.engine.load(fingerprints, into=into)
    assert (hit(result), result.reason) == (0, "a copy was refused")
    assert into.busy
    assert bench.occupancy.locked == BLOCKS
    bench.device.resume()
    assert await asyncio.to_thread(into.wait_idle, 5)


async def test_block_replaced_during_its_copy_is_stale(bench: Bench):
    """The lock ends (as by its lease) and another block takes the slot while the device copies."""
    fingerprints = bench.cluster.blocks.chain(BLOCKS)
    await bench.engine.store(fingerprints, bench.cluster.blocks.data(fingerprints))
    into = bench.room(range(BLOCKS))
    assert into.ready.wait(5)
    bench.device.hold()
    loading = asyncio.ensure_future(bench.engine.load(fingerprints, into=into, deadline_s=5))
    store = bench.cluster.agents["a"].store
    await eventually(lambda: bench.occupancy.locked == BLOCKS, what="the agent has answered")
    store.unlock(list(store._inventory._locks), session=bench.engine._session().session)  # type: ignore[union-attr]
    store.discard(bench.cluster.namespace.digest, fingerprints)
    bench.device.resume()
    result = await loading
    assert hit(result) == 0
    assert result.recompute == tuple(range(BLOCKS))


async def test_wrong_device_blocks_are_refused(bench: Bench):
    fingerprints, ready = bench.cluster.blocks.chain(2), bench.stream.record()
    small = DeviceBlocks(bench.device.allocate(slots=2, segment_bytes=[4095]), [0, 1], ready=ready)
    with pytest.raises(InvalidInput, match="hold 4095 bytes"):
        await bench.engine.store(fingerprints, small)
    with pytest.raises(InvalidInput, match="1 device slots for 2 fingerprints"):
        await bench.engine.load(fingerprints, into=DeviceBlocks(bench.pool, [0], ready=ready))
    for slots in ([0, SLOTS], [1, 1], [-1, 0]):
        with pytest.raises(InvalidInput, match="slot"):
            DeviceBlocks(bench.pool, slots, ready=ready)
    with FakeDevice(stepped=True) as other:
        elsewhere = DeviceBlocks(other.allocate(slots=2, segment_bytes=[4096]), [0, 1], ready=ready)
        with pytest.raises(InvalidInput, match="another device"):
            await bench.engine.store(fingerprints, elsewhere)
    without = await bench.cluster.engine("a")
    with pytest.raises(InvalidInput, match=r"connect\(\.\.\., device="):
        await without.store(fingerprints, DeviceBlocks(bench.pool, [0, 1], ready=ready))

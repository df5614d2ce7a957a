"""The read path over planes that tear, corrupt, stall and write late: it costs a recompute, never a wrong byte or a slot."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kvdir.testing.wait import eventually
from peer_agent.core.effects import LoadStatus
from peer_agent.testing import LocalCluster, local_cluster
from peer_agent.transport.fake import FakeNetwork, FakeTransport, Fault


@pytest.fixture
def directory() -> Iterator[Path]:
    """Short, because socket paths end at 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="kvdir-") as path:
        yield Path(path)


class Rig:
    """Agents whose only plane is a fake one; `spoil` gives the plane of one owner a fault."""

    def __init__(self, network: FakeNetwork, cluster: LocalCluster) -> None:
        self.network = network
        self.cluster = cluster

    async def spoil(self, node: str, fault: Fault | None) -> None:
        descriptor = await self.cluster.agents[node].store.planes[0].export()
        self.network.faults.pop(descriptor, None)
        if fault is not None:
            self.network.faults[descriptor] = fault

    def slots(self, node: str):
        return self.cluster.agents[node].store.occupancy()[0]

    async def store(self, node: str, count: int):
        fingerprints = self.cluster.blocks.chain(count)
        engine = await self.cluster.engine(node)
        assert (await engine.store(fingerprints, self.cluster.blocks.data(fingerprints))).stored == count
        await self.cluster.wait_known(node)
        return fingerprints

    async def load(self, engine, fingerprints, *, deadline_s: float = 1.0):
        into = self.cluster.blocks.room(fingerprints)
        result = await engine.load(fingerprints, into=into, deadline_s=deadline_s)
        self.cluster.blocks.check(fingerprints, into, result)
        return result


@pytest.fixture
async def rig(directory: Path) -> AsyncIterator[Rig]:
    network = FakeNetwork()

    def open_planes(names, arena, *, options):
        return {"fake": FakeTransport(network, arena)}

    async with local_cluster(directory, "a", "b", open_planes=open_planes, breaker_s=0.01, breaker_max_s=0.01) as cluster:
        yield Rig(network, cluster)


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        (Fault.WRONG_BYTES, LoadStatus.CORRUPT),
        (Fault.TORN, LoadStatus.CORRUPT),
        (Fault.WRONG_HEADER, LoadStatus.STALE),
        (Fault.GARBAGE, LoadStatus.MISS),
    ],
)
async def test_faulty_owner_costs_a_recompute_and_no_slot(rig: Rig, fault: Fault, status: LoadStatus):
    fingerprints = await rig.store("a", 6)
    await rig.spoil("a", fault)
    reader = await rig.cluster.engine("b")
    result = await rig.load(reader, fingerprints)
    assert {LoadStatus(value) for value in result.statuses} == {status}
    assert (rig.slots("b").committed, rig.slots("b").reserved, rig.slots("b").quarantined) == (0, 0, 0)
    await rig.spoil("a", None)
    for _ in range(200):
        result = await rig.load(reader, fingerprints)
        if result.hits == 6:
            return
    raise AssertionError("never healed")


async def test_blocks_that_arrived_count_when_the_connection_breaks_half_way(rig: Rig):
    fingerprints = await rig.store("a", 6)
    await rig.spoil("a", Fault.CLOSING)
    result = await rig.load(await rig.cluster.engine("b"), fingerprints)
    assert [LoadStatus(value).name for value in result.statuses] == ["HIT_PEER"] * 3 + ["MISS"] * 3
    assert rig.slots("b").committed == 3
    assert rig.slots("b").reserved == 0


async def test_second_owner_serves_what_the_first_one_corrupts(rig: Rig):
    fingerprints = await rig.store("a", 6)
    await rig.cluster.start_agent("c")
    await rig.store("c", 6)
    for bad in "ac":
        await rig.spoil(bad, Fault.WRONG_BYTES)
        result = await rig.load(await rig.cluster.engine("b"), fingerprints)
        if bad == "a":
            assert result.hits == 6
            rig.cluster.agents["b"].store.discard(rig.cluster.namespace.digest, fingerprints)
            await rig.spoil("a", None)
    assert result.hits == 6


async def test_late_by_the_deadline_when_the_owner_never_answers(rig: Rig):
    fingerprints = await rig.store("a", 4)
    await rig.spoil("a", Fault.SLOW)
    result = await rig.load(await rig.cluster.engine("b"), fingerprints, deadline_s=3.0)
    assert result.count(LoadStatus.LATE) == 4
    assert rig.slots("b").reserved == 0


async def test_slots_are_quarantined_until_a_late_transfer_has_settled(rig: Rig):
    await rig.cluster.stop_agent("b")
    await rig.cluster.start_agent("b", arena_bytes=32 << 10)  # 6 blocks
    fingerprints = await rig.store("a", 6)
    await rig.spoil("a", Fault.LATE_WRITE)
    reader = await rig.cluster.engine("b")
    result = await rig.load(reader, fingerprints, deadline_s=3.0)
    assert result.count(LoadStatus.LATE) == 6
    assert rig.slots("b").quarantined == 6
    mine = rig.cluster.blocks.chain(6, root="mine")
    assert (await reader.store(mine, rig.cluster.blocks.data(mine))).stored == 0, "nothing may be written there now"
    rig.network.land_late_writes()
    assert rig.slots("b").quarantined == 6, "settling takes a turn of the loop"
    await eventually(lambda: rig.slots("b").quarantined == 0, what="settled")
    assert (await reader.store(mine, rig.cluster.blocks.data(mine))).stored == 6
    assert (await rig.load(reader, mine)).hits == 6


async def test_load_goes_on_without_locks_when_its_engine_has_gone(rig: Rig):
    fingerprints = await rig.store("a", 4)
    await rig.spoil("a", Fault.SLOW)
    engine = await rig.cluster.engine("b")
    load = asyncio.ensure_future(engine.load(fingerprints, into=rig.cluster.blocks.room(fingerprints), deadline_s=3.0))
    await eventually(lambda: rig.slots("b").reserved == 4, what="the read is under way")
    await engine.close()
    result = await load
    assert result.hits == 0
    await eventually(lambda: rig.slots("b").reserved == 0, what="its slots came back")
    await eventually(lambda: rig.cluster.agents["b"].store.sessions == 0, what="its session ended")
    assert rig.cluster.agents["b"].store.locks == 0

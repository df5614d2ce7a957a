"""Agents at their limits and among peers that are half dead: what one of them may cost another, and what must come back."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc.aio
import pytest

from kvdir.core.event import EvictRequest
from kvdir.location import Tier
from kvdir.testing.wait import eventually
from kvdir.v1 import directory_pb2_grpc
from peer_agent.core.effects import LoadStatus
from peer_agent.core.inventory import PEERS
from peer_agent.server import publishing, ticker
from peer_agent.server.directory import Coordinators
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

    async def spoil(self, node: str, fault: Fault) -> None:
        descriptor = await self.cluster.agents[node].store.planes[0].export()
        self.network.faults[descriptor] = fault

    async def store(self, node: str, count: int, *, root: str = ""):
        fingerprints = self.cluster.blocks.chain(count, root=root)
        engine = await self.cluster.engine(node)
        assert (await engine.store(fingerprints, self.cluster.blocks.data(fingerprints))).stored == count
        await self.cluster.wait_known(node)
        return fingerprints

    async def load(self, engine, fingerprints, *, deadline_s: float = 1.0):
        into = self.cluster.blocks.room(fingerprints)
        result = await engine.load(fingerprints, into=into, deadline_s=deadline_s)
        self.cluster.blocks.check(fingerprints, into, result)
        return result

    def pause_s(self, reader: str, owner: str) -> float:
        """For how long the reader will skip the owner."""
        figures = self.cluster.agents[reader].reader._peers.figures(owner)
        return figures.skip_until_s - time.monotonic()


@pytest.fixture
async def rig(directory: Path) -> AsyncIterator[Rig]:
    network = FakeNetwork()

    def open_planes(names, arena, *, options):
        return {"fake": FakeTransport(network, arena)}

    async with local_cluster(
        directory, "a", "b", open_planes=open_planes, breaker_s=2.0, breaker_max_s=1000.0, connect_timeout_s=0.2
    ) as cluster:
        yield Rig(network, cluster)


# what a half-dead peer may cost


async def test_one_failure_is_one_pause_when_many_loads_see_it(rig: Rig):
    lists = [await rig.store("a", 3, root=str(number)) for number in range(8)]
    await rig.spoil("a", Fault.GARBAGE)
    reader = await rig.cluster.engine("b")
    results = await asyncio.gather(*(rig.load(reader, fingerprints) for fingerprints in lists))
    assert sum(result.hits for result in results) == 0
    assert rig.pause_s("b", "a") <= 2.0


async def test_second_owner_has_time_left_when_the_first_one_locks_and_then_falls_silent(rig: Rig):
    fingerprints = await rig.store("a", 6)
    await rig.cluster.start_agent("c")
    await rig.store("c", 6)
    await rig.spoil("a", Fault.SLOW)
    result = await rig.load(await rig.cluster.engine("b"), fingerprints, deadline_s=1.0)
    assert result.count(LoadStatus.HIT_PEER) == 6


async def test_slots_of_a_load_come_back_when_it_fails_between_reserve_and_read(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    fingerprints = await rig.store("a", 6)
    reader = await rig.cluster.engine("b")
    agent = rig.cluster.agents["b"]

    def broken(*arguments) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(agent.reader._fetcher, "_sort_out", broken)
    assert (await rig.load(reader, fingerprints)).hits == 0
    monkeypatch.undo()
    assert agent.store.occupancy()[0].reserved == 0
    assert (await rig.load(reader, fingerprints)).hits == 6


class SilentDirectory(directory_pb2_grpc.DirectoryServicer):
    """A coordinator that hangs: takes calls, never answers."""

    async def Lookup(self, request, context):
        await asyncio.Event().wait()


async def test_silent_directory_costs_one_load_its_patience_and_not_every_load(directory: Path):
    silent = grpc.aio.server()
    directory_pb2_grpc.add_DirectoryServicer_to_server(SilentDirectory(), silent)
    port = silent.add_insecure_port("127.0.0.1:0")
    await silent.start()
    async with local_cluster(directory, coordinator=False) as cluster:
        await cluster.start_agent("a", coordinators=(f"127.0.0.1:{port}",), directory_timeout_s=0.2)
        engine = await cluster.engine("a")
        fingerprints = cluster.blocks.chain(2)
        began_s = time.monotonic()
        for _ in range(20):
            await engine.load(fingerprints, into=cluster.blocks.room(fingerprints))
        took_s = time.monotonic() - began_s
        began_s = time.monotonic()
        for _ in range(20):
            await engine.load(fingerprints, into=cluster.blocks.room(fingerprints), deadline_s=0.15)
        impatient_s = time.monotonic() - began_s
    await silent.stop(None)
    assert took_s < 2.0
    assert impatient_s < 1.5


# what callers that went away, and other agents, may hold


async def test_locks_of_a_load_go_when_its_caller_has_given_up(rig: Rig):
    remote = await rig.store("a", 4)
    await rig.store("b", 4, root="here")
    await rig.spoil("a", Fault.SLOW)
    agent, engine = rig.cluster.agents["b"], await rig.cluster.engine("b")
    both = rig.cluster.blocks.chain(4, root="here")
    both = type(both)(both.packed + remote.packed, 32)
    load = asyncio.ensure_future(engine.load(both, into=rig.cluster.blocks.room(both), deadline_s=20))
    await eventually(lambda: agent.store.occupancy()[0].reserved == 4, what="the read is under way")
    assert agent.store.locks > 0
    load.cancel()
    await asyncio.wait({load})
    await eventually(lambda: agent.store.locks == 0, within_s=5, what="nobody's locks are gone")


async def test_engines_are_served_when_peers_hold_all_the_locks_they_may(directory: Path):
    async with local_cluster(directory, "a", coordinator=False, max_locks=2) as cluster:
        engine = await cluster.engine("a")
        fingerprints = cluster.blocks.chain(2)
        await engine.store(fingerprints, cluster.blocks.data(fingerprints))
        for _ in range(2):
            cluster.agents["a"].store.lock(cluster.namespace.digest, fingerprints, session=PEERS, lease_s=10)
        result = await engine.load(fingerprints, into=cluster.blocks.room(fingerprints))
        assert result.count(LoadStatus.HIT_LOCAL) == 2


async def test_waiting_ends_with_the_last_writer_when_another_has_ended_before(
    directory: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ticker, "TICK_S", 60.0)  # nobody else wakes whoever waits
    async with local_cluster(directory, "a", coordinator=False) as cluster:
        store, digest = cluster.agents["a"].store, cluster.namespace.digest
        fingerprints = cluster.blocks.chain(6)
        writers = [store.reserve(digest, fingerprints.slice(at, 1), session=0, lease_s=60)[0].reservation for at in range(6)]
        began_s = time.monotonic()
        waiting = asyncio.ensure_future(store.wait_for_writers(digest, fingerprints, timeout_s=5.0))
        await asyncio.sleep(0)
        order = list(store._inventory.writers(digest, fingerprints))
        assert sorted(order) == sorted(writers)
        for writer in reversed(order):
            store.abort(writer, session=0)
        await waiting
        assert time.monotonic() - began_s < 2.0


async def test_blocks_are_as_old_as_they_are_when_the_clock_has_not_ticked_yet(
    directory: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ticker, "TICK_S", 60.0)
    async with local_cluster(directory, "a", coordinator=False) as cluster:
        engine, store = await cluster.engine("a"), cluster.agents["a"].store
        fingerprints = cluster.blocks.chain(2)
        await engine.store(fingerprints, cluster.blocks.data(fingerprints))
        assert store.evict(cluster.namespace.digest, max_blocks=2, keep_blocks=0, older_than_s=100.0) == 0


async def test_eviction_for_a_quota_is_bounded_when_much_is_asked_at_once(directory: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(publishing, "MAX_EVICT_BLOCKS", 3)
    async with local_cluster(directory, "a", coordinator=False) as cluster:
        agent, engine = cluster.agents["a"], await cluster.engine("a")
        fingerprints = cluster.blocks.chain(5)
        await engine.store(fingerprints, cluster.blocks.data(fingerprints))
        request = EvictRequest(1, cluster.namespace.digest, Tier.CPU, max_blocks=1 << 60, keep_blocks=0, older_than_s=0.0)
        first, second = agent.publishing._evict(request), agent.publishing._evict(request)
    assert (first.evicted_blocks, first.reason) == (3, "no more than 3 at once")
    assert (second.evicted_blocks, second.owner_seq) == (2, first.owner_seq + 1)
    assert "in use" in second.reason


async def test_directory_is_asked_again_when_its_pause_is_over(rig: Rig):
    fingerprints = await rig.store("a", 4)
    reader, directory = await rig.cluster.engine("b"), rig.cluster.agents["b"].reader._directory
    assert isinstance(directory, Coordinators)
    directory._pause()
    assert (await rig.load(reader, fingerprints)).directory_reached is False
    for _ in range(500):
        if (await rig.load(reader, fingerprints)).hits == 4:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("never asked again")

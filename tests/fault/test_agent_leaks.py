"""Each failure some hundred times over: slots, locks, descriptors, threads, tasks, memory and tables end where they began."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

import peer_agent
from kvdir.fingerprint import Fingerprints
from kvdir.location import NodeTrust, StreamState
from kvdir.testing.wait import eventually
from peer_agent.client import aio
from peer_agent.core.inventory import PEERS
from peer_agent.core.nominees import Claim
from peer_agent.server.app import Agent
from peer_agent.server.load import Nominations
from peer_agent.testing import LocalCluster, local_cluster
from peer_agent.testing.leaks import expect_no_leak
from peer_agent.transport.fake import FakeNetwork, FakeTransport, Fault

pytestmark = pytest.mark.slow

WARM_UP = 10
"""Repeats before the first count: thread pools and tables reach their size."""


@pytest.fixture
def directory() -> Iterator[Path]:
    """Short, because socket paths end at 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="kvdir-") as path:
        yield Path(path)


def held_by(agent: Agent) -> dict[str, int]:
    """Everything that an agent could forget to give back."""
    store, peers, slots = agent.store, agent.reader._peers, agent.store.occupancy()[0]
    return {
        "reserved": slots.reserved,
        "quarantined": slots.quarantined,
        "retired": slots.retired,
        "locked": slots.locked,
        "locks": store.locks,
        "sessions": store.sessions,
        "waited for": len(store._done),
        "connecting": len(peers._connecting),
        "closing": len(peers._closing),
        "loads": len(agent.reader._tasks),
    }


async def repeat(agent: Agent, times: int, fail: Callable[[int], Awaitable[object]], *, engines: int = 0) -> None:
    """Fails `times` times after a warm-up; AssertionError, with the difference, unless everything comes back.

    engines: those that stay attached.
    """
    for number in range(WARM_UP):
        await fail(number)
    await eventually(lambda: sum(held_by(agent).values()) <= engines, within_s=5, what="the warm-up left nothing")
    await expect_no_leak(fail, times=times, warm_up=WARM_UP, also=lambda: held_by(agent))
    agent.store._inventory.check()


class OneOwner:
    """A directory that names one node for everything, wherever that is now."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.address = ""
        self.others: list[tuple[str, str]] = []

    async def nominate(self, namespace_digest: bytes, fingerprints: Fingerprints, *, timeout_s: float) -> Nominations:
        named = [(self.name, self.address), *self.others]
        nodes = [NodeTrust(name, 0, StreamState.SYNCED, "", 0.0, 0, address) for name, address in named]
        return Nominations([Claim.of(node, range(len(fingerprints))) for node in nodes], nodes)

    async def report_stale(
        self, namespace_digest: bytes, fingerprints: Fingerprints, *, node: str, epoch: int, owner_seq: int
    ) -> None:
        """Nobody listens."""


class Pair:
    """Reader "b" and owner "a", which is named for everything."""

    def __init__(self, cluster: LocalCluster, owner: OneOwner, reader: aio.Engine) -> None:
        self.cluster = cluster
        self.owner = owner
        self.reader = reader
        self.agent = cluster.agents["b"]

    async def start_owner(self, fingerprints: Fingerprints, **settings) -> None:
        agent = await self.cluster.start_agent("a", **settings)
        self.owner.address = agent.ready.peer
        await self.fill(agent, fingerprints)

    async def fill(self, agent: Agent, fingerprints: Fingerprints) -> None:
        store, digest = agent.store, self.cluster.namespace.digest
        reserved, _ = store.reserve(digest, fingerprints, session=0, lease_s=60)
        store.commit(
            reserved.reservation, session=0, checksums=await store.checksums(reserved.reservation, session=0, positions=None)
        )

    async def load(self, fingerprints: Fingerprints, *, deadline_s: float):
        self.agent.reader._peers._breakers.clear()  # every repeat tries
        into = self.cluster.blocks.room(fingerprints)
        return await self.reader.load(fingerprints, into=into, deadline_s=deadline_s)


@contextlib.asynccontextmanager
async def pair_of(directory: Path, **settings) -> AsyncIterator[Pair]:
    async with local_cluster(directory, "b", coordinator=False, grace_s=0.05, **settings) as cluster:
        owner = OneOwner("a")
        cluster.agents["b"].reader._directory = owner
        yield Pair(cluster, owner, await cluster.engine("b"))


@pytest.mark.parametrize("transports", [("shm",), ("tcp",)], ids=["shm", "tcp"])
async def test_nothing_is_left_when_peers_keep_dying_in_the_middle_of_loads(directory: Path, transports: tuple[str, ...]):
    async with pair_of(directory, transports=transports, max_chunk_bytes=8192, connect_timeout_s=0.2) as pair:
        fingerprints = pair.cluster.blocks.chain(40)

        async def die(number: int) -> None:
            await pair.start_owner(fingerprints)
            load = asyncio.ensure_future(pair.load(fingerprints, deadline_s=0.5))
            slots = pair.agent.store.occupancy
            await eventually(lambda: load.done() or slots()[0].reserved + slots()[0].committed > number % 20, what="under way")
            await pair.cluster.stop_agent("a")
            await load
            pair.agent.store.discard(pair.cluster.namespace.digest, fingerprints)
            await pair.reader.load(fingerprints, into=pair.cluster.blocks.room(fingerprints), local_only=True)  # releases

        await repeat(pair.agent, 40, die, engines=1)


async def test_nothing_is_left_when_peers_are_late_again_and_again(directory: Path):
    network = FakeNetwork()

    def open_planes(names, arena, *, options):
        return {"fake": FakeTransport(network, arena)}

    async with pair_of(directory, open_planes=open_planes) as pair:
        fingerprints = pair.cluster.blocks.chain(6)
        await pair.start_owner(fingerprints)
        descriptor = await pair.cluster.agents["a"].store.planes[0].export()

        async def be_late(number: int) -> None:
            network.faults[descriptor] = Fault.LATE_WRITE if number % 2 else Fault.SLOW
            result = await pair.load(fingerprints, deadline_s=0.01)
            assert result.hits == 0
            await eventually(lambda: pair.agent.store.occupancy()[0].reserved == 0, what="the read is over")
            network.land_late_writes()

        await repeat(pair.agent, 1000, be_late, engines=1)
        await eventually(lambda: pair.cluster.agents["a"].store.locks == 0, within_s=5, what="the owner's locks ended")


async def test_nothing_is_left_when_reads_are_hedged_again_and_again(directory: Path):
    """Two owners: the one that is asked first stalls, or gives up and writes later; the other one's copy wins."""
    network = FakeNetwork()

    def open_planes(names, arena, *, options):
        return {"fake": FakeTransport(network, arena)}

    async with pair_of(directory, open_planes=open_planes) as pair:
        fingerprints = pair.cluster.blocks.chain(6)
        await pair.start_owner(fingerprints)
        stalling = await pair.cluster.agents["a"].store.planes[0].export()
        helper = await pair.cluster.start_agent("c")
        pair.owner.others.append(("c", helper.ready.peer))
        await pair.fill(helper, fingerprints)
        counters = pair.agent.reader.counters

        async def hedge(number: int) -> None:
            network.faults[stalling] = Fault.LATE_WRITE if number % 3 == 0 else Fault.SLOW
            for name in ("a", "c"):
                pair.agent.reader._peers._learnt.forget(name)  # else nobody would read from the slow one again
            assert (await pair.load(fingerprints, deadline_s=2.0)).hits == 6
            pair.agent.store.discard(pair.cluster.namespace.digest, fingerprints)
            network.land_late_writes()
            await eventually(lambda: not len(pair.agent.reader._tasks), within_s=5, what="the loser has ended")

        await repeat(pair.agent, 30, hedge, engines=1)
        assert counters.hedges > 5
        assert counters.hedges_won == counters.hedges
        for agent in pair.cluster.agents.values():
            await eventually(lambda agent=agent: agent.store.locks == 0, within_s=5, what="the owners' locks ended")


async def test_nothing_is_left_when_locks_are_refused_again_and_again(directory: Path):
    async with pair_of(directory, max_locks=1) as pair:
        fingerprints = pair.cluster.blocks.chain(6)
        await pair.start_owner(fingerprints)
        pair.cluster.agents["a"].store.lock(pair.cluster.namespace.digest, fingerprints, session=PEERS, lease_s=600)

        async def be_refused(number: int) -> None:
            assert (await pair.load(fingerprints, deadline_s=1.0)).hits == 0

        await repeat(pair.agent, 1000, be_refused, engines=1)


async def test_nothing_is_left_when_stores_are_given_up_at_every_point(directory: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(aio, "LEASE_S", 0.02)
    async with local_cluster(directory, "a", coordinator=False) as cluster:
        agent, engine = cluster.agents["a"], await cluster.engine("a", deadline_s=0.05)

        async def give_up(number: int) -> None:
            fingerprints = cluster.blocks.chain(8, root=str(number))
            storing = asyncio.ensure_future(engine.store(fingerprints, cluster.blocks.data(fingerprints)))
            await asyncio.wait({storing}, timeout=number % 50 / 10_000)  # spread over Reserve, the copy, Commit
            storing.cancel()
            await asyncio.wait({storing})

        await repeat(agent, 1000, give_up, engines=1)
        slots = agent.store.occupancy()[0]
        assert slots.committed + slots.evicted > 0, "some of them came through"


async def test_nothing_is_left_when_engines_die_with_slots_and_locks(directory: Path):
    async with local_cluster(directory, "a", coordinator=False) as cluster:
        agent, fingerprints = cluster.agents["a"], cluster.blocks.chain(4)
        async with await aio.connect(agent.ready.engine, namespace=cluster.namespace) as engine:
            await engine.store(fingerprints, cluster.blocks.data(fingerprints))

        async def die(number: int) -> None:
            engine = await aio.connect(agent.ready.engine, namespace=cluster.namespace)
            attachment = engine._session()
            assert attachment is not None
            await engine.load(fingerprints, into=cluster.blocks.room(fingerprints))
            with attachment.storing():
                request = attachment.reserve_request(cluster.blocks.chain(4, root="never written"), lease_s=30)
                await engine._rpc("Reserve", request, time.monotonic() + 5)
                await engine.close()
            await eventually(lambda: agent.store.occupancy()[0].reserved == 0, what="its slots came back")

        await repeat(agent, 200, die)


async def test_nothing_is_left_when_blocking_engines_come_and_go(directory: Path):
    async with local_cluster(directory, "a", coordinator=False) as cluster:
        agent, fingerprints = cluster.agents["a"], cluster.blocks.chain(4)
        data = cluster.blocks.data(fingerprints)

        def visit() -> None:
            with peer_agent.connect(agent.ready.engine, namespace=cluster.namespace) as engine:
                engine.store(fingerprints, data)
                engine.load(fingerprints, into=bytearray(data.nbytes))

        async def come_and_go(number: int) -> None:
            await asyncio.to_thread(visit)

        await repeat(agent, 60, come_and_go)

"""Several owners at once: what a silent, dead or slow one may cost a load that others can serve, and what comes back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvdir.fingerprint import Fingerprints
from kvdir.testing.wait import eventually
from peer_agent.cli.bench_nodes import bench_nodes, blocks_of
from peer_agent.client import aio
from peer_agent.client.results import LoadResult
from peer_agent.core.effects import LoadStatus
from peer_agent.core.leases import AGENT
from peer_agent.demo.content import Content
from peer_agent.server.fetch import Fetcher
from peer_agent.server.load_work import LoadWork
from peer_agent.server.peer import Peer
from peer_agent.server.peers import Peers
from peer_agent.server.store import Store
from peer_agent.server.turns import Turns
from peer_agent.testing import LocalCluster, local_cluster
from peer_agent.testing.timing import DEADLINE_SLACK_S, expect_within
from peer_agent.transport.fake import FakeConnection, FakeNetwork, FakeTransport, Fault

DEADLINE_S = 5.0
SOON_S = 1.5
"""Far from the deadline, however busy the machine is."""


@pytest.fixture
def directory() -> Iterator[Path]:
    """Short, because socket paths end at 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="kvdir-") as path:
        yield Path(path)


class Rig:
    """Agents whose only plane is a fake one; "reader" loads what the others hold."""

    def __init__(self, network: FakeNetwork, cluster: LocalCluster, reader: aio.Engine, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch
        self.network = network
        self.cluster = cluster
        self.engine = reader
        self.reader = cluster.agents["reader"]
        self.descriptors: dict[str, bytes] = {}

    async def owner(self, name: str, held: Fingerprints, fault: Fault | None = None) -> None:
        agent = await self.cluster.start_agent(name)
        engine = await self.cluster.engine(name)
        assert (await engine.store(held, self.cluster.blocks.data(held))).stored == len(held)
        await self.cluster.wait_known(name)
        self.descriptors[name] = await agent.store.planes[0].export()
        if fault is not None:
            self.network.faults[self.descriptors[name]] = fault

    def hold_back(self, *, lock: str = "", read: str = "") -> asyncio.Event:
        """Lets this owner's lock answers, or its reads, come only after the event."""
        go = asyncio.Event()
        original_lock, original_read = Peer.lock, FakeConnection.read

        async def patched_lock(peer: Peer, *arguments, **options):
            answer = await original_lock(peer, *arguments, **options)
            if peer.node == lock:
                await go.wait()
            return answer

        async def patched_read(connection: FakeConnection, blocks, *, deadline_s: float):
            if read and connection._descriptor == self.descriptors[read]:
                await go.wait()
            return await original_read(connection, blocks, deadline_s=deadline_s)

        self.patch.setattr(Peer, "lock", patched_lock)
        self.patch.setattr(FakeConnection, "read", patched_read)
        return go

    async def load(self, wanted: Fingerprints, *, deadline_s: float = DEADLINE_S) -> tuple[LoadResult, float]:
        """(result, seconds); every hit has the right bytes."""
        into = self.cluster.blocks.room(wanted)
        began_s = time.monotonic()
        result = await self.engine.load(wanted, into=into, deadline_s=deadline_s, explain=True)
        took_s = time.monotonic() - began_s
        self.cluster.blocks.check(wanted, into, result)
        return result, took_s

    async def quiet(self) -> None:
        """Until nothing of any load is left."""
        slots, tasks = self.reader.store.occupancy, self.reader.reader._tasks
        await eventually(lambda: not len(tasks), within_s=DEADLINE_S + 3, what="background work ended")
        assert (slots()[0].reserved, slots()[0].quarantined) == (0, 0)
        self.reader.store._inventory.check()


def served(result: LoadResult) -> dict[str, int]:
    assert result.explanation is not None
    return {item["node"]: item["served"] for item in result.explanation["nominees"] if item["served"]}


@pytest.fixture
async def rig(directory: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    network = FakeNetwork()

    def open_planes(names, arena, *, options):
        return {"fake": FakeTransport(network, arena)}

    async with local_cluster(directory, "reader", open_planes=open_planes) as cluster:
        yield Rig(network, cluster, await cluster.engine("reader"), monkeypatch)


async def test_each_owner_serves_what_only_it_has_when_they_are_read_side_by_side(rig: Rig):
    wanted = rig.cluster.blocks.chain(12)
    for at, name in enumerate("abc"):
        await rig.owner(name, wanted.slice(4 * at, 4))
    result, _ = await rig.load(wanted)
    assert served(result) == {"a": 4, "b": 4, "c": 4}
    asks = [item["asked_us"] for item in result.explanation["nominees"]]
    answers = [item["asked_us"] + item["answer_us"] for item in result.explanation["nominees"]]
    assert max(asks) < min(answers), "asked one after another"
    await rig.quiet()


async def test_stalled_read_is_hedged_and_gives_its_slots_back_when_another_owner_has_the_blocks(rig: Rig):
    wanted = rig.cluster.blocks.chain(8)
    await rig.owner("first", wanted, Fault.SLOW)
    await rig.owner("second", wanted)
    result, took_s = await rig.load(wanted)
    assert result.count(LoadStatus.HIT_PEER) == 8
    assert took_s < SOON_S
    assert served(result) == {"second": 8}
    counters = rig.reader.reader.counters
    assert (counters.hedges, counters.hedges_won) == (1, 1)
    assert counters.peer_bytes == 8 * rig.cluster.namespace.block_bytes
    await rig.quiet()


async def test_hedge_loses_when_the_first_read_comes_through_after_all(rig: Rig):
    wanted = rig.cluster.blocks.chain(8)
    await rig.owner("first", wanted)
    await rig.owner("second", wanted, Fault.SLOW)
    slow = rig.hold_back(read="first")
    loading = asyncio.ensure_future(rig.load(wanted))
    counters, slots = rig.reader.reader.counters, rig.reader.store.occupancy
    await eventually(lambda: slots()[0].reserved == 16, what="both reads have their slots")
    slow.set()
    result, took_s = await loading
    assert result.count(LoadStatus.HIT_PEER) == 8
    assert took_s < SOON_S
    assert served(result) == {"first": 8}
    await rig.quiet()
    assert (counters.hedges, counters.hedges_won, counters.hedged_bytes) == (1, 0, 0)


async def test_both_copies_arrive_and_one_counts_when_hedge_and_first_read_end_together(rig: Rig):
    wanted = rig.cluster.blocks.chain(8)
    await rig.owner("first", wanted)
    await rig.owner("second", wanted)
    both = rig.hold_back(read="first")
    block_bytes = rig.cluster.namespace.block_bytes
    original = FakeConnection.read

    async def read(connection: FakeConnection, blocks, *, deadline_s: float):
        """The hedge's bytes are there, and before it is told so, the first read's are, too."""
        outcome = await original(connection, blocks, deadline_s=deadline_s)
        if connection._descriptor == rig.descriptors["second"]:
            both.set()
        return outcome

    rig.patch.setattr(FakeConnection, "read", read)
    result, _ = await rig.load(wanted)
    assert result.count(LoadStatus.HIT_PEER) == 8
    await rig.quiet()
    counters = rig.reader.reader.counters
    assert counters.hedges == 1
    assert counters.peer_bytes == 8 * block_bytes
    assert counters.hedged_bytes in (0, 8 * block_bytes)


async def test_first_read_goes_on_when_there_is_no_room_for_a_hedge(rig: Rig):
    wanted = rig.cluster.blocks.chain(8)
    await rig.owner("first", wanted)
    await rig.owner("second", wanted)
    slots = rig.reader.store.occupancy()[0].slots
    filler = rig.cluster.blocks.chain(slots - 8, root="filler")
    assert (await rig.engine.store(filler, rig.cluster.blocks.data(filler))).stored == slots - 8
    assert await rig.engine.pin(filler, pin_s=60) == slots - 8
    slow, tried = rig.hold_back(read="first"), asyncio.Event()
    original = Fetcher.fetch

    async def fetch(fetcher: Fetcher, load, reading, **options):
        await original(fetcher, load, reading, **options)
        if reading.fetch.hedges is not None:
            tried.set()

    rig.patch.setattr(Fetcher, "fetch", fetch)
    loading = asyncio.ensure_future(rig.load(wanted))
    await asyncio.wait_for(tried.wait(), DEADLINE_S)
    slow.set()
    result, _ = await loading
    assert result.count(LoadStatus.HIT_PEER) == 8
    counters = rig.reader.reader.counters
    assert (counters.hedges, counters.no_space) == (1, 0)
    await rig.quiet()


async def test_answer_does_not_wait_for_a_silent_owner_that_has_nothing_to_add(rig: Rig):
    """Half of the list nobody has: an owner that is silent might have it, though nobody says so."""
    wanted = rig.cluster.blocks.chain(8)
    await rig.owner("good", wanted.slice(0, 4))
    await rig.owner("a-silent-one", wanted.slice(0, 4))
    speak = rig.hold_back(lock="a-silent-one")
    result, took_s = await rig.load(wanted)
    assert result.explanation["nominees"][0]["node"] == "a-silent-one", "it was asked"
    speak.set()
    assert (result.count(LoadStatus.HIT_PEER), result.count(LoadStatus.MISS)) == (4, 4)
    assert took_s < SOON_S
    await rig.quiet()
    silent = rig.cluster.agents["a-silent-one"]
    await eventually(lambda: silent.store.locks == 0, within_s=5, what="its late lock was given back")


async def test_caller_waits_for_its_deadline_and_no_longer_when_every_owner_falls_silent(rig: Rig):
    wanted = rig.cluster.blocks.chain(8)
    for name in "abc":
        await rig.owner(name, wanted, Fault.SLOW)

    async def attempt() -> LoadResult:
        rig.reader.reader._peers._breakers.clear()
        return (await rig.load(wanted, deadline_s=0.2))[0]

    for result in await expect_within(0.2 + DEADLINE_SLACK_S, attempt):
        assert result.hits == 0
    await rig.quiet()


async def test_what_has_arrived_is_answered_when_the_rest_is_late_and_the_deadline_is_short(rig: Rig):
    wanted = rig.cluster.blocks.chain(8)
    await rig.owner("good", wanted.slice(0, 4))
    await rig.owner("silent", wanted.slice(4, 4), Fault.SLOW)
    await rig.load(wanted.slice(0, 1))  # connects
    load = await rig.reader.reader.load(rig.cluster.namespace.digest, wanted, session=AGENT, timeout_s=0.3, lease_s=0.0)
    assert load.plan.results == bytes([LoadStatus.HIT_LOCAL] + [LoadStatus.HIT_PEER] * 3 + [LoadStatus.LATE] * 4)
    await rig.quiet()


async def test_blocks_that_another_load_brought_are_hits_when_its_end_goes_unnoticed(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    async def for_ever(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Store, "wait_for_writers", for_ever)  # as while another writer of the list is stuck
    wanted = rig.cluster.blocks.chain(4)
    await rig.owner("a", wanted)
    go = rig.hold_back(read="a")
    first = asyncio.create_task(rig.load(wanted))
    await eventually(lambda: rig.reader.store.occupancy()[0].reserved == 4, what="the first load reads")
    second = asyncio.create_task(rig.load(wanted, deadline_s=1.0))
    await eventually(lambda: rig.reader.reader.counters.waited == 4, what="the second one waits for it")
    go.set()
    assert (await first)[0].hits == 4
    assert (await second)[0].hits == 4
    await rig.quiet()


async def test_figures_learn_from_bytes_that_moved_only(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    seen: list[int] = []
    original = Peers.observed

    def observed(peers: Peers, peer: Peer, *, size_bytes: int, **figures) -> None:
        seen.append(size_bytes)
        original(peers, peer, size_bytes=size_bytes, **figures)

    monkeypatch.setattr(Peers, "observed", observed)
    digest, wanted = rig.cluster.namespace.digest, rig.cluster.blocks.chain(8)
    await rig.owner("a", wanted)
    stuck, _ = rig.reader.store.reserve(digest, wanted.slice(2, 6), session=AGENT, lease_s=0.0)
    result, _ = await rig.load(wanted, deadline_s=0.3)
    assert result.hits == 2
    assert seen == [2 * rig.cluster.namespace.block_bytes]
    rig.reader.store.abort(stuck.reservation, session=AGENT)
    rig.network.faults[rig.descriptors["a"]] = Fault.WRONG_HEADER
    assert (await rig.load(wanted))[0].count(LoadStatus.STALE) == 6
    assert len(seen) == 1, "nothing moved"
    await rig.quiet()


@pytest.mark.parametrize(("flies_before_the_end_s", "lates"), [(0.5, 1), (0.03, 0)])
async def test_late_read_counts_against_its_peer_only_if_it_had_the_time_that_was_expected(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, flies_before_the_end_s: float, lates: int
):
    @contextlib.asynccontextmanager
    async def turn(turns: Turns, *, until_s: float, **_: object) -> AsyncIterator[bool]:
        await asyncio.sleep(until_s - turns._clock() - flies_before_the_end_s)
        yield True

    wanted, peers = rig.cluster.blocks.chain(4), rig.reader.reader._peers
    await rig.owner("a", wanted)
    await rig.load(wanted.slice(0, 1))
    peer = peers._peers["a"]
    for _ in range(20):
        peers.observed(peer, size_bytes=3 * rig.cluster.namespace.block_bytes, took_s=0.2, queued_bytes=0, complete=True)
    rig.network.faults[rig.descriptors["a"]] = Fault.SLOW
    monkeypatch.setattr(Turns, "turn", turn)
    result, _ = await rig.load(wanted, deadline_s=1.0)
    assert result.count(LoadStatus.LATE) == 3
    assert peer.lates == lates


async def test_lock_is_given_back_when_the_caller_goes_in_the_moment_of_the_answer(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    wanted, store, session = rig.cluster.blocks.chain(4), rig.reader.store, 77
    await rig.owner("a", wanted)
    store.open_session(session)
    conclude = LoadWork.conclude

    def answered_and_gone(work: LoadWork) -> None:
        conclude(work)
        loading.cancel()

    monkeypatch.setattr(LoadWork, "conclude", answered_and_gone)
    loading = asyncio.create_task(
        rig.reader.reader.load(rig.cluster.namespace.digest, wanted, session=session, timeout_s=DEADLINE_S, lease_s=60.0)
    )
    with pytest.raises(asyncio.CancelledError):
        await loading
    await rig.quiet()
    assert store.occupancy()[0].committed == 4
    assert store.locks == 0


async def test_late_write_of_a_read_that_was_given_up_hits_nobody(rig: Rig):
    wanted = rig.cluster.blocks.chain(6)
    await rig.owner("first", wanted, Fault.LATE_WRITE)
    await rig.owner("second", wanted)
    for _ in range(20):
        result, took_s = await rig.load(wanted)
        assert result.hits == 6
        assert served(result) == {"second": 6}
        assert took_s < SOON_S
        rig.network.land_late_writes()
        again, _ = await rig.load(wanted)
        assert again.count(LoadStatus.HIT_LOCAL) == 6
        rig.reader.store.discard(rig.cluster.namespace.digest, wanted)
        rig.reader.reader._peers._breakers.clear()
    await rig.quiet()


@pytest.mark.slow
async def test_good_owners_serve_at_once_when_another_is_stopped_and_another_is_dead():
    """Real processes: each owner holds everything, and the directory has not noticed yet."""
    async with bench_nodes(block_bytes=64 << 10) as nodes:
        wanted = blocks_of("wanted", 64)
        for name in ("dead", "good-1", "good-2", "stopped"):
            await nodes.start(name, blocks=64, transports="tcp", http_listen="")
            await nodes.fill(name, wanted)
        await nodes.start("reader", blocks=64, transports="tcp", http_listen="")
        engine = await nodes.engine("reader")
        content, into = Content(64 << 10), np.zeros((64, 64 << 10), np.uint8)
        os.kill(nodes.agents["stopped"].pid, signal.SIGSTOP)
        try:
            await nodes.agents["dead"].kill()
            began_s = time.monotonic()
            result = await engine.load(wanted, into=into, deadline_s=DEADLINE_S, explain=True)
            took_s = time.monotonic() - began_s
        finally:
            os.kill(nodes.agents["stopped"].pid, signal.SIGCONT)
        assert result.count(LoadStatus.HIT_PEER) == 64
        assert served(result).keys() <= {"good-1", "good-2"}
        assert took_s < SOON_S
        assert all(content.matches(fingerprint, block) for fingerprint, block in zip(wanted, into, strict=True))

"""What an engine library and its agent may do to each other at the worst moment: slots, locks and time come back."""

from __future__ import annotations

import asyncio
import math
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import peer_agent
from kvdir.testing.wait import eventually
from peer_agent.client import aio
from peer_agent.core.effects import LoadStatus
from peer_agent.memory import presence
from peer_agent.memory.arena import Arena
from peer_agent.server.engine_service import EngineService
from peer_agent.testing import LocalCluster, local_cluster, sample_namespace


@pytest.fixture
def directory() -> Iterator[Path]:
    """Short, because socket paths end at 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="kvdir-") as path:
        yield Path(path)


@pytest.fixture
async def cluster(directory: Path) -> AsyncIterator[LocalCluster]:
    """One agent, no coordinator, 14 blocks."""
    async with local_cluster(directory, "a", coordinator=False, arena_bytes=64 << 10) as cluster:
        yield cluster


def occupancy(cluster: LocalCluster):
    return cluster.agents["a"].store.occupancy()[0]


async def blocking_engine(cluster: LocalCluster, **options) -> peer_agent.Engine:
    return await asyncio.to_thread(
        peer_agent.connect, cluster.agents["a"].ready.engine, namespace=cluster.namespace, engine="blocking", **options
    )


async def test_slots_come_back_to_an_attached_engine_when_the_answer_to_reserve_was_lost(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(aio, "LEASE_S", 0.05)
    engine = await cluster.engine("a", deadline_s=0.05)
    store = cluster.agents["a"].store
    reserve = store.reserve
    fingerprints = cluster.blocks.chain(14)

    def granted_and_lost(*args, **options):
        answer = reserve(*args, **options)
        storing.cancel()
        return answer

    monkeypatch.setattr(store, "reserve", granted_and_lost)
    storing = asyncio.ensure_future(engine.store(fingerprints, cluster.blocks.data(fingerprints)))
    await asyncio.wait({storing})
    monkeypatch.undo()
    assert storing.cancelled()
    assert occupancy(cluster).free == 0
    await eventually(lambda: occupancy(cluster).free == 14, within_s=3, what="slots nobody knows of are free again")
    assert engine.attached
    assert (await engine.store(fingerprints, cluster.blocks.data(fingerprints), deadline_s=5)).stored == 14


async def test_presence_stays_as_long_as_a_copy_runs_when_its_store_was_torn_down(cluster: LocalCluster):
    attachment = (await cluster.engine("a"))._session()
    assert attachment is not None
    with Arena.open(cluster.agents["a"].ready.arena, writable=True) as arena:

        def writing() -> bool:
            return presence.is_held(arena.fd, attachment.session)

        assert not writing()
        copy = attachment.mapping.using(writing=True)
        with attachment.storing():
            assert writing()
            copy.__enter__()
        assert writing()
        with attachment.storing():
            assert writing()
        copy.__exit__(None, None, None)
        assert not writing()
        with attachment.mapping.using(writing=False):  # a load: an engine that always loads must not seem to write for ever
            with attachment.storing():
                assert writing()
            assert not writing()


# time


@pytest.fixture
async def silent_release(directory: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LocalCluster]:
    """An agent that falls silent when blocks are reported corrupt; it holds two blocks, the first of them rotten."""
    silence = asyncio.Event()

    async def release(self, request, context):
        await silence.wait()

    monkeypatch.setattr(EngineService, "Release", release)
    async with local_cluster(directory, "a", coordinator=False) as cluster:
        engine = await cluster.engine("a")
        fingerprints = cluster.blocks.chain(2)
        await engine.store(fingerprints, cluster.blocks.data(fingerprints))
        store = cluster.agents["a"].store
        locked = store.lock(cluster.namespace.digest, fingerprints, session=-1, lease_s=1)
        store._region[int.from_bytes(locked.records[:8], "little") + 128] ^= 0xFF
        yield cluster
        silence.set()


@pytest.mark.parametrize("blocking", [False, True])
async def test_load_keeps_its_deadline_when_nobody_takes_the_report_of_corrupt_blocks(
    silent_release: LocalCluster, blocking: bool
):
    cluster = silent_release
    fingerprints = cluster.blocks.chain(2)
    into = cluster.blocks.room(fingerprints)
    if blocking:
        engine = await blocking_engine(cluster, check=True, deadline_s=5.0)
        began_s = time.monotonic()
        result = await asyncio.to_thread(engine.load, fingerprints, into=into, deadline_s=0.2)
        took_s = time.monotonic() - began_s
        await asyncio.to_thread(engine.close)
    else:
        loop_engine = await cluster.engine("a", check=True, deadline_s=5.0)
        began_s = time.monotonic()
        result = await loop_engine.load(fingerprints, into=into, deadline_s=0.2)
        took_s = time.monotonic() - began_s
    assert [LoadStatus(status).name for status in result.statuses] == ["CORRUPT", "HIT_LOCAL"]
    assert took_s < 1.0


async def test_load_keeps_its_deadline_when_the_default_threads_of_the_loop_are_taken(directory: Path):
    namespace = sample_namespace(block_bytes=256 << 10)
    async with local_cluster(directory, "a", coordinator=False, namespace=namespace, arena_bytes=2 << 20) as cluster:
        engine = await cluster.engine("a")
        fingerprints = cluster.blocks.chain(4)
        data, into = cluster.blocks.data(fingerprints), cluster.blocks.room(fingerprints)
        release = threading.Event()
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        busy = loop.run_in_executor(None, release.wait)  # as an application may
        loop.call_later(5.0, release.set)  # or a failure of this test would hang
        began_s = time.monotonic()
        assert (await engine.store(fingerprints, data, deadline_s=1)).stored == 4
        assert (await engine.load(fingerprints, into=into, deadline_s=1)).hits == 4
        assert time.monotonic() - began_s < 3
        release.set()
        await busy
        assert (into == data).all()


@pytest.mark.parametrize("time_s", [-1.0, 0.0, 1e12, math.inf])
async def test_no_time_left_and_all_the_time_are_times_when_an_engine_asks(cluster: LocalCluster, time_s: float):
    fingerprints = cluster.blocks.chain(2)
    data, into = cluster.blocks.data(fingerprints), cluster.blocks.room(fingerprints)
    engine, threaded = await cluster.engine("a"), await blocking_engine(cluster)
    await engine.store(fingerprints, data)
    assert (await engine.lookup(fingerprints, deadline_s=time_s)).local == b"\1\1"
    await engine.pin(fingerprints, pin_s=time_s)
    await engine.prefetch(fingerprints, deadline_s=time_s)
    await engine.store(fingerprints, data, deadline_s=time_s)
    assert (await engine.load(fingerprints, into=into, deadline_s=time_s)).hits in ((0, 2) if time_s <= 0 else (2,))

    def work() -> None:
        with threaded:
            threaded.pin(fingerprints, pin_s=time_s)
            threaded.prefetch(fingerprints, deadline_s=time_s)
            threaded.lookup(fingerprints, deadline_s=time_s)
            threaded.store(fingerprints, data, deadline_s=time_s)
            threaded.load(fingerprints, into=into, deadline_s=time_s)

    await asyncio.to_thread(work)


# memory


def mappings_of(name: str) -> int:
    return Path("/proc/self/maps").read_text().count(name)


@pytest.mark.parametrize("blocking", [False, True])
async def test_idle_engine_lets_go_of_the_arena_when_the_agent_has_gone(directory: Path, blocking: bool):
    """Or the memory of a dead agent stays taken, and its successor's does not fit."""
    async with local_cluster(directory, "a", coordinator=False) as cluster:
        mine = mappings_of("a.arena")
        if blocking:
            engine = await blocking_engine(cluster)
            assert engine.attached
        else:
            loop_engine = await cluster.engine("a")
            assert loop_engine.attached
        assert mappings_of("a.arena") > mine
        await cluster.stop_agent("a")
        await eventually(lambda: mappings_of("a.arena") == 0, within_s=3, what="the mapping is gone")
        if blocking:
            await asyncio.to_thread(engine.close)


async def test_one_session_is_opened_when_the_background_attach_wins_the_race(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
):
    engine = peer_agent.Engine(cluster.agents["a"].ready.engine, namespace=cluster.namespace)
    session = engine._session

    def none_yet():
        """As if the thread had been the faster one, just after we looked."""
        found = session()
        if engine._attaching is not None:
            engine._attaching.join()
        return found

    def work() -> None:
        monkeypatch.setattr(engine, "_session", none_yet)
        engine.attach(timeout_s=5)
        monkeypatch.undo()
        assert engine.attached
        fingerprints = cluster.blocks.chain(2)
        assert engine.store(fingerprints, cluster.blocks.data(fingerprints)).stored == 2

    mine = mappings_of("a.arena")
    await asyncio.to_thread(work)
    assert cluster.agents["a"].store.sessions == 1
    assert mappings_of("a.arena") == mine + 1
    await asyncio.to_thread(engine.close)
    await eventually(lambda: mappings_of("a.arena") == mine, what="nothing stays mapped")

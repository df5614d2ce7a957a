"""Engine library and agent over a real socket and a real arena: what is promised, and what bad input gets."""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

import peer_agent
from kvdir.errors import ConfigError, InvalidInput, NoSpace, TooLarge, Unavailable, UnknownNamespace
from kvdir.fingerprint import Fingerprints
from kvdir.rpc.lookup_codec import encode_fingerprints
from kvdir.testing.wait import eventually
from peer_agent.client import aio
from peer_agent.client.buffers import Memory
from peer_agent.core.effects import LoadStatus
from peer_agent.memory.arena import ArenaError
from peer_agent.server.app import Agent
from peer_agent.testing import Blocks, LocalCluster, local_cluster, sample_namespace
from peer_agent.v1 import engine_pb2, engine_pb2_grpc


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


# what is promised


async def test_blocking_engine_stores_and_loads(cluster: LocalCluster):
    fingerprints = cluster.blocks.chain(10)

    def work() -> None:
        address = cluster.agents["a"].ready.engine
        with peer_agent.connect(address, namespace=cluster.namespace, engine="blocking", check=True) as engine:
            stored = engine.store(fingerprints, cluster.blocks.data(fingerprints))
            assert (stored.stored, stored.present, stored.reason) == (10, 0, "")
            assert engine.store(fingerprints, cluster.blocks.data(fingerprints)).present == 10
            into = cluster.blocks.room(fingerprints)
            result = engine.load(fingerprints, into=into)
            assert result.count(LoadStatus.HIT_LOCAL) == 10
            assert result.recompute == ()
            assert result.timings.total_us >= result.timings.copy_us > 0
            cluster.blocks.check(fingerprints, into, result)
            assert engine.lookup(fingerprints).local == b"\1" * 10
            assert engine.pin(fingerprints, pin_s=5) == 10
            assert engine.prefetch(fingerprints) == 0

    await asyncio.to_thread(work)
    await eventually(lambda: cluster.agents["a"].store.sessions == 0, what="session ended")
    assert occupancy(cluster).locked == 0


async def test_unknown_blocks_are_misses_and_their_memory_is_left_alone(cluster: LocalCluster):
    engine = await cluster.engine("a")
    known, unknown = cluster.blocks.chain(3), cluster.blocks.chain(3, root="other")
    await engine.store(known, cluster.blocks.data(known))
    mixed = Fingerprints(known.packed + unknown.packed, 32)
    into = cluster.blocks.room(mixed)
    result = await engine.load(mixed, into=into)
    assert result.recompute == (3, 4, 5)
    assert result.prefix_hits == 3
    cluster.blocks.check(mixed, into, result)
    assert (into[3:] == 0xA5).all()


@pytest.mark.parametrize("width", [8, 16, 32])
async def test_fingerprints_of_every_width_work(cluster: LocalCluster, width: int):
    engine = await cluster.engine("a")
    fingerprints = Fingerprints(os.urandom(width * 4), width)
    data = np.random.default_rng(1).integers(0, 255, (4, 4096), np.uint8)
    assert (await engine.store(fingerprints, data)).stored == 4
    into = np.zeros_like(data)
    assert (await engine.load(fingerprints, into=into)).hits == 4
    assert (into == data).all()


async def test_least_recently_used_blocks_give_way_and_pinned_ones_stay(cluster: LocalCluster):
    engine = await cluster.engine("a")
    pinned, old, new = cluster.blocks.chain(4), cluster.blocks.chain(10, root="old"), cluster.blocks.chain(10, root="new")
    for fingerprints in (pinned, old):
        await engine.store(fingerprints, cluster.blocks.data(fingerprints))
    await engine.pin(pinned, pin_s=60)
    assert (await engine.store(new, cluster.blocks.data(new))).stored == 10
    assert (await engine.lookup(pinned)).local == b"\1" * 4
    assert (await engine.lookup(old)).local == bytes(10)


async def test_torn_memory_is_corrupt_never_data(cluster: LocalCluster):
    engine = await cluster.engine("a", check=True)
    fingerprints = cluster.blocks.chain(4)
    await engine.store(fingerprints, cluster.blocks.data(fingerprints))
    agent = cluster.agents["a"]
    locked = agent.store.lock(cluster.namespace.digest, fingerprints.slice(2, 1), session=-1, lease_s=1)
    offset = int.from_bytes(locked.records[:8], "little")
    agent.store._region[offset + 128 + 1000] ^= 0xFF
    into = cluster.blocks.room(fingerprints)
    result = await engine.load(fingerprints, into=into)
    assert [LoadStatus(status).name for status in result.statuses] == ["HIT_LOCAL", "HIT_LOCAL", "CORRUPT", "HIT_LOCAL"]
    cluster.blocks.check(fingerprints, into, result)
    assert (await engine.lookup(fingerprints)).local == b"\1\1\0\1", "taken out of sight"


async def test_cancelled_store_gives_its_slots_back(cluster: LocalCluster):
    engine = await cluster.engine("a")
    big = cluster.blocks.chain(10)
    task = asyncio.ensure_future(engine.store(big, cluster.blocks.data(big)))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    assert (await engine.store(big, cluster.blocks.data(big))).refused in (0, 10)
    await eventually(lambda: occupancy(cluster).reserved == 0, what="nothing stays reserved")


async def test_cancelled_load_lets_go_of_its_blocks_when_the_copy_has_ended(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
):
    engine, held, locks = await cluster.engine("a"), cluster.blocks.chain(4), lambda: cluster.agents["a"].store.locks
    await engine.store(held, cluster.blocks.data(held))
    copying, go, copy_out = threading.Event(), threading.Event(), Memory.copy_out

    def slow(*arguments: Any, **options: Any) -> bytes:
        copying.set()
        go.wait(5)
        return copy_out(*arguments, **options)

    monkeypatch.setattr(Memory, "copy_out", slow)
    monkeypatch.setattr(aio, "INLINE_BYTES", 0)
    loading = asyncio.create_task(engine.load(held, into=cluster.blocks.room(held), deadline_s=5))
    await eventually(copying.is_set, what="the copy has begun")
    loading.cancel()
    go.set()
    await asyncio.wait({loading})
    assert loading.cancelled()
    assert locks() == 1
    await engine.load(cluster.blocks.chain(1, root="unknown"), into=bytearray(cluster.namespace.block_bytes), local_only=True)
    assert locks() == 0, "the lock went with the next request"


# engines and agents that go away


async def test_reservation_is_reclaimed_when_the_engine_dies_before_commit(cluster: LocalCluster):
    engine = await cluster.engine("a")
    attachment = engine._session()
    assert attachment is not None
    with attachment.storing():
        request = attachment.reserve_request(cluster.blocks.chain(6), lease_s=30)
        await engine._rpc("Reserve", request, asyncio.get_running_loop().time() + 5)
        assert occupancy(cluster).reserved == 6
        await engine.close()
    await eventually(lambda: occupancy(cluster).free == 14, what="slots are free again")
    assert (await (await cluster.engine("a")).lookup(cluster.blocks.chain(6))).local == bytes(6)


async def test_misses_with_a_reason_when_the_agent_is_gone_and_attached_again_when_it_is_back(cluster: LocalCluster):
    engine = await cluster.engine("a")
    fingerprints = cluster.blocks.chain(4)
    data, into = cluster.blocks.data(fingerprints), cluster.blocks.room(fingerprints)
    await engine.store(fingerprints, data)
    await cluster.stop_agent("a")
    result = await engine.load(fingerprints, into=into, deadline_s=0.5)
    assert result.recompute == (0, 1, 2, 3)
    assert result.reason
    assert (await engine.store(fingerprints, data)).stored == 0
    await cluster.start_agent("a")

    def attached() -> bool:
        return engine.attached

    await eventually(attached, what="attached again")
    assert (await engine.load(fingerprints, into=into)).hits == 0, "the new agent is empty"
    assert (await engine.store(fingerprints, data)).stored == 4
    result = await engine.load(fingerprints, into=into)
    assert result.hits == 4
    cluster.blocks.check(fingerprints, into, result)


async def test_blocking_engine_answers_misses_when_the_agent_is_gone_and_comes_back_by_itself(cluster: LocalCluster):
    fingerprints = cluster.blocks.chain(4)
    data, into = cluster.blocks.data(fingerprints), cluster.blocks.room(fingerprints)
    address = cluster.agents["a"].ready.engine
    engine = await asyncio.to_thread(peer_agent.connect, address, namespace=cluster.namespace, engine="blocking")
    assert (await asyncio.to_thread(engine.store, fingerprints, data)).stored == 4
    await cluster.stop_agent("a")
    result = await asyncio.to_thread(engine.load, fingerprints, into=into, deadline_s=0.3)
    assert (result.hits, bool(result.reason)) == (0, True)
    assert (await asyncio.to_thread(engine.store, fingerprints, data)).stored == 0
    assert (await asyncio.to_thread(engine.lookup, fingerprints)).local == bytes(4)
    assert await asyncio.to_thread(engine.prefetch, fingerprints) == 0
    await cluster.start_agent("a")
    await eventually(lambda: engine.attached, what="attached again")
    assert (await asyncio.to_thread(engine.store, fingerprints, data)).stored == 4
    result = await asyncio.to_thread(engine.load, fingerprints, into=into)
    assert result.hits == 4
    cluster.blocks.check(fingerprints, into, result)
    await asyncio.to_thread(engine.close)
    assert "closed" in (await asyncio.to_thread(engine.load, fingerprints, into=into)).reason
    await asyncio.to_thread(engine.close)


async def test_many_threads_share_one_engine(cluster: LocalCluster):
    address = cluster.agents["a"].ready.engine
    with await asyncio.to_thread(peer_agent.connect, address, namespace=cluster.namespace, engine="blocking") as engine:

        def work(number: int) -> None:
            fingerprints = cluster.blocks.chain(3, root=str(number % 3))
            blocks = Blocks(cluster.namespace)
            for _ in range(10):
                engine.store(fingerprints, blocks.data(fingerprints))
                into = blocks.room(fingerprints)
                blocks.check(fingerprints, into, engine.load(fingerprints, into=into))

        await asyncio.gather(*(asyncio.to_thread(work, number) for number in range(6)))
    cluster.agents["a"].store._inventory.check()


async def test_connect_says_what_is_wrong_when_nobody_answers(directory: Path):
    namespace = sample_namespace()
    with pytest.raises(Unavailable, match="does it run"):
        await aio.connect(f"unix:{directory}/none.sock", namespace=namespace, engine="x", timeout_s=0.2)
    engine = await aio.connect(f"unix:{directory}/none.sock", namespace=namespace, engine="x", timeout_s=0)
    fingerprints = Fingerprints(bytes(32), 32)
    assert (await engine.load(fingerprints, into=bytearray(4096))).recompute == (0,)
    await engine.close()


# bad input


async def test_unknown_namespace_is_explained_by_its_difference(cluster: LocalCluster):
    other = sample_namespace(kv_dtype="bfloat16")
    with pytest.raises(UnknownNamespace, match="kv_dtype: 'bfloat16' here, 'float16' there"):
        await aio.connect(cluster.agents["a"].ready.engine, namespace=other, engine="x")


@pytest.mark.parametrize("rate", [-1.0, float("nan"), float("inf")])
async def test_attach_is_refused_in_words_when_the_prefill_rate_is_no_rate(cluster: LocalCluster, rate: float):
    address = cluster.agents["a"].ready.engine
    with pytest.raises(InvalidInput, match="prefill_tokens_per_s must be a positive number"):
        await aio.connect(address, namespace=cluster.namespace, prefill_tokens_per_s=rate)
    assert cluster.agents["a"].store.sessions == 0


async def test_wrong_buffers_raise_and_store_nothing(cluster: LocalCluster):
    engine = await cluster.engine("a")
    fingerprints = cluster.blocks.chain(2)
    with pytest.raises(InvalidInput, match="2 blocks of 4096 bytes need 8192"):
        await engine.store(fingerprints, bytes(8191))
    with pytest.raises(InvalidInput, match="read-only"):
        await engine.load(fingerprints, into=bytes(8192))
    with pytest.raises(InvalidInput, match="must be one of 8, 16, 32"):
        Fingerprints(bytes(24), 12)
    with pytest.raises(InvalidInput, match="not a multiple of the width"):
        Fingerprints(bytes(33), 32)
    assert occupancy(cluster).free == 14


async def test_oversized_request_names_the_limit(directory: Path):
    async with local_cluster(directory, "a", coordinator=False, max_fingerprints=4) as cluster:
        engine = await cluster.engine("a")
        fingerprints = cluster.blocks.chain(5)
        with pytest.raises(TooLarge, match="max_fingerprints is 4"):
            await engine.load(fingerprints, into=cluster.blocks.room(fingerprints))
        request = engine_pb2.PinRequest(session=engine._session().session, fingerprints=encode_fingerprints(fingerprints))
        async with grpc.aio.insecure_channel(cluster.agents["a"].ready.engine) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await engine_pb2_grpc.EngineStub(channel).Pin(request)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "max_fingerprints is 4" in (caught.value.details() or "")


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"session": 5}, grpc.StatusCode.ABORTED, "attach again"),
        ({"fingerprints": {"packed": bytes(33), "width": 32}}, grpc.StatusCode.INVALID_ARGUMENT, "not a multiple of the width"),
        ({"fingerprints": {"packed": bytes(24), "width": 12}}, grpc.StatusCode.INVALID_ARGUMENT, "must be one of 8, 16, 32"),
    ],
)
async def test_bad_reserve_is_refused_in_words(cluster: LocalCluster, change: dict, code: grpc.StatusCode, words: str):
    engine = await cluster.engine("a")
    attachment = engine._session()
    values = {"session": attachment.session, "fingerprints": {"packed": bytes(32), "width": 32}} | change
    async with grpc.aio.insecure_channel(cluster.agents["a"].ready.engine) as channel:
        with attachment.storing(), pytest.raises(grpc.aio.AioRpcError) as caught:
            await engine_pb2_grpc.EngineStub(channel).Reserve(engine_pb2.ReserveRequest(**values))
    assert caught.value.code() is code
    assert words in (caught.value.details() or "")
    assert occupancy(cluster).free == 14


async def test_reserve_without_presence_lock_is_refused(cluster: LocalCluster):
    async with grpc.aio.insecure_channel(cluster.agents["a"].ready.engine) as channel:
        stub = engine_pb2_grpc.EngineStub(channel)
        request = engine_pb2.AttachRequest(protocol_version=1, engine="raw", namespace_digest=cluster.namespace.digest)
        call = stub.Attach(request)
        session = (await call.read()).session
        fingerprints = encode_fingerprints(cluster.blocks.chain(1))
        with pytest.raises(grpc.aio.AioRpcError, match="presence lock"):
            await stub.Reserve(engine_pb2.ReserveRequest(session=session, fingerprints=fingerprints))
        call.cancel()


async def test_arena_that_does_not_fit_says_how_much_is_free(directory: Path):
    cluster = LocalCluster(directory, sample_namespace(), {})
    with pytest.raises(NoSpace, match=r"[\d,]+ bytes are free"):
        await cluster.start_agent("a", arena_bytes=1 << 50)
    assert [name for name in os.listdir(directory) if name.startswith("a.arena")] == []


async def test_arena_too_small_for_one_block_is_refused(directory: Path):
    cluster = LocalCluster(directory, sample_namespace(block_bytes=1 << 20), {})
    with pytest.raises(ConfigError, match="less than one slot"):
        await cluster.start_agent("a", arena_bytes=64 << 10)


async def test_port_in_use_is_refused_and_nothing_is_left_behind(cluster: LocalCluster, directory: Path):
    taken = cluster.agents["a"].ready.peer
    with pytest.raises(ConfigError, match=f"listen: cannot listen on {taken}"):
        await cluster.start_agent("b", listen=taken)
    assert [name for name in os.listdir(directory) if name.startswith("b.arena")] == []


async def test_arena_in_use_names_its_owner(cluster: LocalCluster):
    with pytest.raises(ArenaError, match=f"in use by the agent with pid {os.getpid()}"):
        await Agent.start(cluster.config("a"))

"""Agents that serve the namespaces that engines bring along (accept_bytes), over real agents in this process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
import threading
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from click.testing import CliRunner

from kvdir.errors import ConfigError, InvalidInput, KvdirError, NoSpace, UnknownNamespace
from kvdir.fingerprint import Fingerprints
from kvdir.namespace import Namespace
from kvdir.testing.wait import eventually
from peer_agent.cli.main import main as agent_main
from peer_agent.client import aio
from peer_agent.client.attachment import attach_request
from peer_agent.core.effects import LoadStatus
from peer_agent.core.slot_table import SlotTable
from peer_agent.memory.arena import Arena
from peer_agent.memory.layout import SUPERBLOCK_BYTES, SizeClass
from peer_agent.memory.slots import Spare
from peer_agent.server import accepting, namespaces
from peer_agent.server.app import Agent
from peer_agent.server.capacity import plan_arena
from peer_agent.server.config import AgentConfig
from peer_agent.server.own_arena import slot_table
from peer_agent.testing import Blocks, LocalCluster, local_cluster, sample_namespace
from peer_agent.v1 import engine_pb2_grpc

SPARE: dict[str, Any] = {"namespaces": (), "accept_bytes": 1 << 18, "accept_namespaces": 2}


@pytest.fixture
def directory() -> Iterator[Path]:
    """Short, because socket paths end at 107 bytes; on a memory file system, where replicas must be."""
    with tempfile.TemporaryDirectory(prefix="kvdir-test-", dir="/dev/shm") as path:
        yield Path(path)


@pytest.fixture(params=["shm", "tcp"])
async def pair(directory: Path, request: pytest.FixtureRequest) -> AsyncIterator[LocalCluster]:
    planes: dict[str, Any] = {"transports": (request.param,), "allow_emulated_rma": True}
    async with local_cluster(directory, "a", "b", replica=True, **planes, **SPARE) as cluster:
        yield cluster


async def attached(agent: Agent, namespace: Namespace) -> aio.Engine:
    return await aio.connect(agent.ready.engine, namespace=namespace, engine="test")


async def found_at_b(pair: LocalCluster, namespace: Namespace, fingerprints: Fingerprints) -> None:
    """b's replica, which it asks first, knows where all of them are."""
    replica = pair.agents["b"].replica
    assert replica is not None
    count = len(fingerprints)
    await eventually(lambda: replica.reader.lookup(namespace.digest, fingerprints).hits == count, what="b's replica knows")


async def test_blocks_are_stored_published_and_read_by_peers_when_engines_bring_the_namespace(pair: LocalCluster) -> None:
    writer, reader = await pair.engine("a"), await pair.engine("b")
    fingerprints = pair.blocks.chain(20)
    assert (await writer.store(fingerprints, pair.blocks.data(fingerprints))).stored == 20
    await pair.wait_known("a")
    await found_at_b(pair, pair.namespace, fingerprints)
    into = pair.blocks.room(fingerprints)
    result = await reader.load(fingerprints, into=into)
    assert result.count(LoadStatus.HIT_PEER) == 20
    pair.blocks.check(fingerprints, into, result)
    assert pair.is_synced("a")


async def test_every_class_keeps_to_its_own_slots_when_two_namespaces_were_accepted(
    pair: LocalCluster,
) -> None:
    other = sample_namespace(model="second", block_bytes=1000)
    first = await pair.engine("a")
    mine, theirs = pair.blocks.chain(8), Blocks(other).chain(8)
    await first.store(mine, pair.blocks.data(mine))
    async with await attached(pair.agents["a"], other) as second:
        await second.store(theirs, Blocks(other).data(theirs))
        into = Blocks(other).room(theirs)
        Blocks(other).check(theirs, into, result := await second.load(theirs, into=into))
        assert result.count(LoadStatus.HIT_LOCAL) == 8
    into = pair.blocks.room(mine)
    pair.blocks.check(mine, into, result := await first.load(mine, into=into))
    assert result.count(LoadStatus.HIT_LOCAL) == 8
    await pair.wait_known("a")
    async with await attached(pair.agents["b"], other) as reader:
        into = Blocks(other).room(theirs)
        result = await reader.load(theirs, into=into)
        assert result.count(LoadStatus.HIT_PEER) == 8
        Blocks(other).check(theirs, into, result)


async def test_as_many_are_accepted_as_there_is_room_for_when_all_come_at_once(directory: Path) -> None:
    async with local_cluster(directory, "a", coordinator=False, **SPARE) as cluster:
        agent = cluster.agents["a"]
        wishes = [sample_namespace(model=f"m{number % 4}") for number in range(12)]
        outcomes = await asyncio.gather(*(attached(agent, wish) for wish in wishes), return_exceptions=True)
        engines = [outcome for outcome in outcomes if isinstance(outcome, aio.Engine)]
        assert all(isinstance(outcome, aio.Engine | NoSpace) for outcome in outcomes)
        assert len(engines) == 6
        assert {engine.namespace.digest for engine in engines} == set(agent.store.namespaces)
        for number, engine in enumerate(engines):
            blocks = Blocks(engine.namespace)
            mine = blocks.chain(5, root=f"{number}")
            assert (await engine.store(mine, blocks.data(mine))).stored == 5
            blocks.check(mine, into := blocks.room(mine), result := await engine.load(mine, into=into))
            assert result.count(LoadStatus.HIT_LOCAL) == 5
        for engine in engines:
            await engine.close()


async def test_namespace_is_accepted_later_when_its_engine_left_while_slots_were_laid_out(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    laying, go = threading.Event(), threading.Event()

    def slow(placed: SizeClass) -> SlotTable:
        laying.set()
        go.wait(10)
        return slot_table(placed)

    monkeypatch.setattr(accepting, "slot_table", slow)
    async with local_cluster(directory, "a", coordinator=False, **SPARE) as cluster:
        agent, wish = cluster.agents["a"], sample_namespace(model="second")
        impatient = asyncio.create_task(attached(agent, wish))
        await eventually(laying.is_set, what="slots are being laid out")
        impatient.cancel()
        await asyncio.wait({impatient})
        go.set()
        async with await attached(agent, wish):
            assert [item.namespace_digest for item in agent.store.occupancy()] == [wish.digest]


@pytest.mark.parametrize("pair", ["shm", "tcp", "ucx"], indirect=True)
async def test_peers_that_read_all_the_while_read_right_bytes_when_classes_are_added(pair: LocalCluster) -> None:
    """Their mapping, connection and grants are from before the class."""
    writer, reader = await pair.engine("a"), await pair.engine("b")
    mine = pair.blocks.chain(20)
    await writer.store(mine, pair.blocks.data(mine))
    await found_at_b(pair, pair.namespace, mine)
    added = asyncio.Event()

    async def keep_reading() -> int:
        rounds = 0
        while not added.is_set() or not rounds:
            pair.agents["b"].store.discard(mine_digest, mine)  # so that they come from the peer
            into = pair.blocks.room(mine)
            result = await reader.load(mine, into=into, deadline_s=10.0)
            pair.blocks.check(mine, into, result)
            rounds += result.count(LoadStatus.HIT_PEER) == 20
        return rounds

    mine_digest, other = pair.namespace.digest, sample_namespace(model="second", block_bytes=1000)
    reading = asyncio.create_task(keep_reading())
    await eventually(lambda: pair.agents["b"].reader.counters.peer_bytes > 0, what="b reads from a")
    theirs = Blocks(other).chain(8)
    async with await attached(pair.agents["b"], other) as later, await attached(pair.agents["a"], other) as second:
        await second.store(theirs, Blocks(other).data(theirs))
        await found_at_b(pair, other, theirs)
        into = Blocks(other).room(theirs)
        result = await later.load(theirs, into=into)
        assert result.count(LoadStatus.HIT_PEER) == 8
        Blocks(other).check(theirs, into, result)
    added.set()
    assert await reading >= 1


async def test_second_engine_shares_the_class_when_it_brings_the_same_namespace(pair: LocalCluster) -> None:
    writer, reader = await pair.engine("a"), await pair.engine("a")
    fingerprints = pair.blocks.chain(4)
    await writer.store(fingerprints, pair.blocks.data(fingerprints))
    assert (await reader.lookup(fingerprints)).local == b"\1" * 4
    assert len(pair.agents["a"].store.occupancy()) == 1


async def test_blocks_stay_when_the_engine_that_brought_the_namespace_has_gone(pair: LocalCluster) -> None:
    fingerprints = pair.blocks.chain(4)
    async with await attached(pair.agents["a"], pair.namespace) as writer:
        await writer.store(fingerprints, pair.blocks.data(fingerprints))
    await eventually(lambda: pair.agents["a"].store.sessions == 0, what="the engine has gone")
    await pair.wait_known("a")
    reader = await pair.engine("b")
    result = await reader.load(fingerprints, into=pair.blocks.room(fingerprints))
    assert result.count(LoadStatus.HIT_PEER) == 4


async def test_replica_follows_a_namespace_when_an_engine_brings_it(pair: LocalCluster) -> None:
    writer, _ = await pair.engine("a"), await pair.engine("b")
    fingerprints = pair.blocks.chain(6)
    await writer.store(fingerprints, pair.blocks.data(fingerprints))
    await found_at_b(pair, pair.namespace, fingerprints)
    other = sample_namespace(model="second")
    async with await attached(pair.agents["a"], other) as second, await attached(pair.agents["b"], other):
        theirs = Blocks(other).chain(3)
        await second.store(theirs, Blocks(other).data(theirs))
        await found_at_b(pair, other, theirs)
        await found_at_b(pair, pair.namespace, fingerprints)


async def test_engine_brings_its_namespace_again_when_the_agent_restarted(pair: LocalCluster) -> None:
    engine = await pair.engine("a")
    fingerprints = pair.blocks.chain(4)
    await engine.store(fingerprints, pair.blocks.data(fingerprints))
    address = pair.agents["a"].ready.engine
    await pair.stop_agent("a")
    assert (await pair.start_agent("a")).ready.engine == address
    async with asyncio.timeout(10):
        while (await engine.store(fingerprints, pair.blocks.data(fingerprints))).stored != 4:
            with contextlib.suppress(KvdirError):
                await engine.attach(timeout_s=1.0)
    await pair.wait_known("a")
    assert pair.known_blocks("a") == 4


async def test_refusal_says_what_to_do_when_there_is_no_room_or_no_geometry(directory: Path) -> None:
    async with local_cluster(directory, "a", coordinator=False, **SPARE) as cluster:
        agent = cluster.agents["a"]
        with pytest.raises(NoSpace, match=r"accept_bytes is 256.0 KiB.*restart the agent with more"):
            await attached(agent, sample_namespace(model="large", block_bytes=1 << 18))
        announced = Namespace.announced(model="m", block_tokens=16, hash_scheme="vllm:sha256", hash_seed="0")
        with pytest.raises(UnknownNamespace, match="only announced"):
            await attached(agent, announced)
        for number in range(2):
            await (await attached(agent, sample_namespace(model=f"m{number}"))).close()
        with pytest.raises(NoSpace, match=r"accept_namespaces is 2.*m0@.*, m1@.*run another one"):
            await attached(agent, sample_namespace(model="m2"))
        await (await attached(agent, sample_namespace(model="m1"))).close()


async def test_refusal_says_what_is_wrong_with_a_description_when_nothing_is_served_yet(directory: Path) -> None:
    async with local_cluster(directory, "a", coordinator=False, **SPARE) as cluster:
        address, asked = cluster.agents["a"].ready.engine, sample_namespace()
        request = attach_request(asked, engine="test", prefill_tokens_per_s=0.0)
        newer = asked.canonical().replace('"version":1', '"version":2').encode()
        other = sample_namespace(model="other").canonical().encode()
        for description, words in (
            (newer, "canonical version 2 is not 1"),
            (b"{", "not a canonical namespace"),
            (other, "is not that of the description"),
        ):
            request.namespace_canonical_json = description
            async with grpc.aio.insecure_channel(address) as channel:
                with pytest.raises(grpc.aio.AioRpcError, match=words):
                    await engine_pb2_grpc.EngineStub(channel).Attach(request, timeout=5).read()
        assert not cluster.agents["a"].store.namespaces


def test_probe_of_a_block_that_is_absurdly_long_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces, "explain_mismatch", lambda *_, **__: "computed")
    whole = {"kind": "recurrent", "layers": 1, "state_bytes": 1000}
    longest = sample_namespace(groups=[whole], bytes_override=0, block_tokens=namespaces.MAX_PROBE_TOKENS)
    with pytest.raises(InvalidInput, match="computed"):
        namespaces.check_probe(b"p", longest)
    namespaces.check_probe(b"p", replace(longest, block_tokens=namespaces.MAX_PROBE_TOKENS + 1))


async def test_unknown_namespace_is_refused_with_both_ways_out_when_none_is_accepted(directory: Path) -> None:
    async with local_cluster(directory, "a", coordinator=False) as cluster:
        with pytest.raises(UnknownNamespace, match=r"differs: model.*accept_bytes"):
            await attached(cluster.agents["a"], sample_namespace(model="other"))


async def test_configured_namespaces_keep_their_memory_when_others_are_accepted(directory: Path) -> None:
    async with local_cluster(directory, "a", coordinator=False, accept_bytes=1 << 18) as cluster:
        before = cluster.agents["a"].store.occupancy()
        other = sample_namespace(model="second")
        async with await attached(cluster.agents["a"], other) as engine:
            theirs = Blocks(other).chain(100)
            result = await engine.store(theirs, Blocks(other).data(theirs))
        after = cluster.agents["a"].store.occupancy()
        assert after[0] == before[0]
        assert result.stored == after[1].slots == (1 << 18) // (4096 + 128)


async def test_inventory_and_metrics_show_what_was_accepted_and_the_room_left(directory: Path) -> None:
    async with local_cluster(directory, "a", coordinator=False, **(SPARE | {"http_listen": "127.0.0.1:0"})) as cluster:
        agent = cluster.agents["a"]
        async with await attached(agent, cluster.namespace):
            text = (await _fetch(f"http://{agent.ready.http}/metrics")).decode()
        assert 'peer_agent_accepted_namespaces{state="accepted"} 1.0' in text
        assert 'peer_agent_accepted_namespaces{state="room"} 1.0' in text
        assert f'peer_agent_slots{{kv_namespace="{cluster.namespace.short}",state="free"}}' in text


async def _fetch(url: str) -> bytes:
    def get() -> bytes:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bytes(answer.read())

    return await asyncio.to_thread(get)


def test_dry_run_shows_the_spare_part_when_namespaces_are_accepted(directory: Path) -> None:
    arena = ["--arena-path", str(directory / "x"), "--accept-bytes", "1MiB", "--accept-namespaces", "3"]
    document = json.loads(CliRunner().invoke(agent_main, ["serve", "--dry-run", "--output", "json", *arena]).stdout)
    assert document["accepts"] == {"namespaces": 3, "each_bytes": 1 << 20}
    assert document["arena_bytes"] == SUPERBLOCK_BYTES + 3 * (1 << 20)
    text = CliRunner().invoke(agent_main, ["serve", "--dry-run", *arena]).stdout
    assert "3 namespaces" in " ".join(text.split())


def test_start_is_refused_when_there_is_neither_a_file_nor_accept_bytes(directory: Path) -> None:
    result = CliRunner().invoke(agent_main, ["serve", "--dry-run", "--arena-path", str(directory / "x")])
    assert result.exit_code != 0
    assert "accept_bytes" in " ".join(result.output.split())


def test_readers_see_an_added_class_when_they_mapped_the_arena_before(directory: Path) -> None:
    path, added = directory / "arena", SizeClass(b"b" * 32, 500, 3)
    with Arena.create(path, [], epoch=7, spare_bytes=10_000) as owner, Arena.open(path, writable=False) as reader:
        assert (owner.classes, owner.spare_bytes) == ((), 10_000 // 128 * 128)
        owner.add_class(added)
        assert owner.classes[0].first == SUPERBLOCK_BYTES
        with pytest.raises(ValueError, match="leaves the arena"):
            owner.add_class(SizeClass(b"c" * 32, 500, 100))
        with Arena.open(path, writable=False) as later:
            assert later.classes == owner.classes
        assert reader.region[:SUPERBLOCK_BYTES] == owner.region[:SUPERBLOCK_BYTES]


def test_faults_are_all_named_when_the_settings_are_impossible() -> None:
    faults = AgentConfig(accept_bytes=-1).faults()
    assert any("accept_bytes: must not be negative" in fault for fault in faults)
    with pytest.raises(ConfigError, match="room for 63"):
        plan_arena([], 1, Spare(1 << 20, 64))

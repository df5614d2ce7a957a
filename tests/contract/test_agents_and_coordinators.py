"""Agents beside coordinators that are away, come back, or hear of two agents with one name; and peers that misbehave."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import grpc
import grpc.aio
import numpy as np
import pytest

from kvdir.client.discovery import Discovery
from kvdir.client.standby import Standby
from kvdir.errors import Unavailable, UnknownNamespace
from kvdir.fingerprint import Fingerprints
from kvdir.location import NodeTrust, StreamState
from kvdir.rpc.lookup_codec import encode_fingerprints
from kvdir.testing.fake_node import FakeNode, some_fingerprints
from kvdir.testing.served import Served, serving
from kvdir.testing.wait import eventually
from peer_agent.core.effects import LoadStatus
from peer_agent.core.records import BLOCK_RECORD
from peer_agent.server.directory import Coordinators
from peer_agent.server.peer import PeerFailure
from peer_agent.testing import local_cluster, sample_namespace
from peer_agent.testing.link import link_to
from peer_agent.v1 import peer_pb2, peer_pb2_grpc


@pytest.fixture
def directory() -> Iterator[Path]:
    """Short, because socket paths end at 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="kvdir-") as path:
        yield Path(path)


async def test_serves_locally_and_says_so_when_the_coordinator_is_down_at_start(directory: Path):
    async with local_cluster(directory, coordinator=False) as cluster:
        await cluster.start_agent("a", coordinators=("127.0.0.1:1",))
        engine = await cluster.engine("a")
        mine, other = cluster.blocks.chain(5), cluster.blocks.chain(5, root="other")
        assert (await engine.store(mine, cluster.blocks.data(mine))).stored == 5
        both = Fingerprints(mine.packed + other.packed, 32)
        into = cluster.blocks.room(both)
        result = await engine.load(both, into=into, deadline_s=1)
        assert (result.count(LoadStatus.HIT_LOCAL), result.count(LoadStatus.MISS)) == (5, 5)
        assert not result.directory_reached
        cluster.blocks.check(both, into, result)
        assert "127.0.0.1:1: not connected" in cluster.agents["a"].publishing.in_words()


async def test_pause_ends_when_a_coordinator_answers_that_it_knows_nothing_yet():
    async with serving() as fresh:
        now_s = 0.0
        coordinators = Coordinators(Discovery(fresh.address), node="n1", timeout_s=5.0, clock=lambda: now_s)
        coordinators._pause()
        ask = partial(coordinators.nominate, bytes(32), some_fingerprints(1), timeout_s=5.0)
        with pytest.raises(Unavailable, match="asked again in"):
            await ask()
        now_s = 10.0
        for _ in range(2):
            with pytest.raises(UnknownNamespace):
                await ask()
        await coordinators.close()


async def test_one_coordinator_under_two_addresses_is_published_to_once():
    """As where a name has an A and an AAAA record: two publishers would replace each other for ever."""
    standby = Standby()
    async with serving() as served:
        host, _, port = served.address.rpartition(":")
        async with (
            link_to(host, int(port)) as link,
            FakeNode(served.address, "n1", standby=standby) as node,
            node.also(f"127.0.0.1:{link.port}", standby) as other,
        ):
            first, second = node.publisher.stats, other.publisher.stats
            await eventually(lambda: {first().standby, second().standby} == {True, False}, what="one stands by")
            calls = first().calls + second().calls
            for number in range(20):
                node.store(some_fingerprints(1, seed=number))
                await eventually(lambda: node.outbox.last_seq in (first().acked_seq, second().acked_seq), what="heard")
            assert first().calls + second().calls <= calls + 1, "and it stays so"


async def test_directory_is_whole_again_when_the_coordinator_was_restarted(directory: Path):
    async with local_cluster(directory, "a", "b") as cluster:
        fingerprints = cluster.blocks.chain(20)
        writer, reader = await cluster.engine("a"), await cluster.engine("b")
        await writer.store(fingerprints.slice(0, 10), cluster.blocks.data(fingerprints.slice(0, 10)))
        await cluster.wait_known("a")
        address = cluster.coordinator_address
        await cluster.stop_coordinator()
        await writer.store(fingerprints.slice(10, 10), cluster.blocks.data(fingerprints.slice(10, 10)))
        into = cluster.blocks.room(fingerprints)
        assert (await reader.load(fingerprints, into=into, deadline_s=0.5)).hits == 0
        await cluster.start_coordinator(listen=address)
        await cluster.wait_known("a")
        await eventually(lambda: cluster.is_synced("a"), what="a is synced")

        # The reader's client may still shun the coordinator that had been away.
        for _ in range(100):
            result = await reader.load(fingerprints, into=into, deadline_s=1)
            cluster.blocks.check(fingerprints, into, result)
            if result.hits == 20:
                break
        assert result.hits == 20


async def test_older_agent_is_fenced_and_serves_on_when_another_takes_its_name(directory: Path):
    async with local_cluster(directory, "a") as cluster:
        old = cluster.agents["a"]
        engine = await cluster.engine("a")
        mine = cluster.blocks.chain(5)
        await engine.store(mine, cluster.blocks.data(mine))
        await cluster.wait_known("a")
        new = await cluster.start_agent("a", arena_path=str(directory / "second.arena"))
        await eventually(lambda: bool(old.publishing.fenced), what="the older one is fenced")
        assert old.publishing.in_words().startswith("fenced: ")
        into = cluster.blocks.room(mine)
        result = await engine.load(mine, into=into)
        assert result.count(LoadStatus.HIT_LOCAL) == 5
        cluster.blocks.check(mine, into, result)
        await cluster.wait_known("a")
        assert not new.publishing.fenced
        assert cluster.known_blocks("a") == 0
        await old.close()


async def test_reads_go_on_when_the_owner_was_restarted_at_another_address(directory: Path):
    async with local_cluster(directory, "a", "b", breaker_s=0.05) as cluster:
        fingerprints = cluster.blocks.chain(10)
        writer, reader = await cluster.engine("a"), await cluster.engine("b")
        into = cluster.blocks.room(fingerprints)
        await writer.store(fingerprints, cluster.blocks.data(fingerprints))
        await cluster.wait_known("a")
        assert (await reader.load(fingerprints.slice(0, 5), into=into[:5])).hits == 5
        await cluster.stop_agent("a")
        await cluster.start_agent("a")
        again = await cluster.engine("a")
        await again.store(fingerprints, cluster.blocks.data(fingerprints))
        await cluster.wait_known("a")
        result = await reader.load(fingerprints, into=into)
        assert result.hits == 10
        cluster.blocks.check(fingerprints, into, result)


async def test_dead_peer_costs_one_connect_not_one_per_load(directory: Path):
    async with local_cluster(directory, "a", "b", breaker_s=60.0, breaker_max_s=60.0) as cluster:
        fingerprints = cluster.blocks.chain(10)
        writer, reader = await cluster.engine("a"), await cluster.engine("b")
        await writer.store(fingerprints, cluster.blocks.data(fingerprints))
        await cluster.wait_known("a")
        assert cluster.coordinator is not None
        # The agent is gone, but no goodbye reached the directory: it still names it.
        agent = cluster.agents.pop("a")
        agent.publishing._leaving = True
        for _, task in agent.publishing._publishers._running.values():
            task.cancel()
        await agent.close()
        failures = cluster.agents["b"].reader.counters
        into = cluster.blocks.room(fingerprints)
        for _ in range(5):
            result = await reader.load(fingerprints, into=into)
            assert result.hits == 0
        assert failures.peer_failures == 1


async def test_agent_follows_the_list_of_coordinators_when_it_changes(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is listed no more is left without a goodbye: it still names our blocks, and takes us back when it returns."""
    listed: list[str] = []
    monkeypatch.setattr("kvdir.client.discovery.REFRESH_S", 0.02)
    monkeypatch.setattr("kvdir.client.discovery.resolve_name", lambda name, port: list(listed))
    async with serving() as first, serving() as second, local_cluster(directory, coordinator=False) as cluster:

        def synced(*where: Served) -> bool:
            known = [served.coordinator.directory.nodes.get("a") for served in where]
            streams = [node.stream for node in known if node is not None and node.stream is not None]
            return [stream.cursor.state for stream in streams] == [StreamState.SYNCED] * len(where)

        agent = await cluster.start_agent("a", coordinators=("dns:///coordinators:1",))
        assert "none found" in agent.publishing.in_words()
        listed[:] = [first.address]
        await eventually(lambda: synced(first), what="published to the first")
        engine, mine = await cluster.engine("a"), cluster.blocks.chain(5)
        await engine.store(mine, cluster.blocks.data(mine))
        listed[:] = [first.address, second.address]
        await eventually(lambda: synced(first, second), what="and to the second")
        listed[:] = [second.address]
        await eventually(lambda: len(agent.publishing.stats()) == 1, what="the first is left")
        answer = await first.client.lookup(cluster.namespace.digest, mine)
        assert answer.hits == 5, "its hints stay"
        listed[:] = [second.address, first.address]
        await eventually(lambda: len(agent.publishing.stats()) == 2 and synced(first, second), what="both again")
        assert not agent.publishing.fenced


async def test_lock_for_another_epoch_is_refused(directory: Path):
    async with local_cluster(directory, "a", coordinator=False) as cluster:
        async with grpc.aio.insecure_channel(cluster.agents["a"].ready.peer) as channel:
            request = peer_pb2.LockRequest(
                namespace_digest=cluster.namespace.digest,
                fingerprints=encode_fingerprints(cluster.blocks.chain(1)),
                expected_epoch=12345,
            )
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await peer_pb2_grpc.PeerStub(channel).Lock(request)
        assert caught.value.code() is grpc.StatusCode.ABORTED
        assert "it restarted" in (caught.value.details() or "")


async def test_unknown_namespace_names_the_known_ones(directory: Path):
    async with local_cluster(directory, "a", coordinator=False) as cluster:
        async with grpc.aio.insecure_channel(cluster.agents["a"].ready.peer) as channel:
            fingerprints = encode_fingerprints(cluster.blocks.chain(1))
            request = peer_pb2.LockRequest(namespace_digest=bytes(32), fingerprints=fingerprints)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await peer_pb2_grpc.PeerStub(channel).Lock(request)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert cluster.namespace.short in (caught.value.details() or "")


async def test_too_many_locks_are_refused_by_name(directory: Path):
    async with local_cluster(directory, "a", coordinator=False, max_locks=2) as cluster:
        engine = await cluster.engine("a")
        fingerprints = cluster.blocks.chain(1)
        await engine.store(fingerprints, cluster.blocks.data(fingerprints))
        async with grpc.aio.insecure_channel(cluster.agents["a"].ready.peer) as channel:
            stub = peer_pb2_grpc.PeerStub(channel)
            request = peer_pb2.LockRequest(
                namespace_digest=cluster.namespace.digest, fingerprints=encode_fingerprints(fingerprints), lease_ms=60_000
            )
            locks = [(await stub.Lock(request)).lock for _ in range(2)]
            with pytest.raises(grpc.aio.AioRpcError, match="max_locks"):
                await stub.Lock(request)
            assert (await stub.Unlock(peer_pb2.UnlockRequest(locks=[*locks, 77]))).unknown == 1
            assert (await stub.Lock(request)).present == 1


async def test_blocks_are_handed_out_over_grpc_only_under_a_lock_and_in_small_amounts(directory: Path):
    async with local_cluster(directory, "a", coordinator=False, max_reply_bytes=3 * 4096) as cluster:
        engine = await cluster.engine("a")
        fingerprints = cluster.blocks.chain(4)
        data = cluster.blocks.data(fingerprints)
        await engine.store(fingerprints, data)
        async with grpc.aio.insecure_channel(cluster.agents["a"].ready.peer) as channel:
            stub = peer_pb2_grpc.PeerStub(channel)
            request = peer_pb2.LockRequest(
                namespace_digest=cluster.namespace.digest, fingerprints=encode_fingerprints(fingerprints)
            )
            answer = await stub.Lock(request)
            two = answer.blocks[:64]
            chunks = [chunk async for chunk in stub.Read(peer_pb2.ReadRequest(lock=answer.lock, blocks=two))]
            assert [np.frombuffer(chunk.payload, np.uint8).tolist() for chunk in chunks] == data[:2].tolist()
            assert all(chunk.header[8:16] == chunk.generation_after.to_bytes(8, "little") for chunk in chunks)
            with pytest.raises(grpc.aio.AioRpcError, match="max_reply_bytes is 12288"):
                [chunk async for chunk in stub.Read(peer_pb2.ReadRequest(lock=answer.lock, blocks=answer.blocks))]
            forged = np.frombuffer(two, BLOCK_RECORD).copy()
            forged["offset"] += 64
            with pytest.raises(grpc.aio.AioRpcError, match="does not cover"):
                [chunk async for chunk in stub.Read(peer_pb2.ReadRequest(lock=answer.lock, blocks=forged.tobytes()))]
            with pytest.raises(grpc.aio.AioRpcError, match="does not cover"):
                [chunk async for chunk in stub.Read(peer_pb2.ReadRequest(lock=answer.lock + 1, blocks=two))]


async def test_peer_that_answers_under_another_name_is_not_used(directory: Path):
    async with local_cluster(directory, "a", "b", coordinator=False) as cluster:
        address = cluster.agents["b"].ready.peer
        trust = NodeTrust("c", 1, StreamState.SYNCED, "", 0.0, 0, address)
        with pytest.raises(PeerFailure, match="answers as 'b', not 'c'"):
            await cluster.agents["a"].reader._peers.reach(trust, timeout_s=2)


async def test_agents_of_different_namespaces_share_nothing(directory: Path):
    async with local_cluster(directory, "a") as cluster:
        writer = await cluster.engine("a")
        fingerprints = cluster.blocks.chain(5)
        await writer.store(fingerprints, cluster.blocks.data(fingerprints))
        await cluster.wait_known("a")
        cluster.namespace = sample_namespace(kv_dtype="bfloat16", model="other")
        await cluster.start_agent("b")
        reader = await cluster.engine("b")
        result = await reader.load(fingerprints, into=cluster.blocks.room(fingerprints))
        assert result.hits == 0


@pytest.mark.parametrize("transports", [("shm", "tcp"), ("tcp",)], ids=["shm", "tcp"])
async def test_no_wrong_byte_and_no_lost_slot_under_churn(directory: Path, transports: tuple[str, ...]):
    """Small arenas, many engines that store and load overlapping lists at once: evictions, locks and reads interleave."""
    rng = random.Random(7)
    settings = {"arena_bytes": 100 << 10, "transports": transports, "max_chunk_bytes": 4 * 4096}
    async with local_cluster(directory, "a", "b", "c", **settings) as cluster:
        chains = [cluster.blocks.chain(12, root=str(number)) for number in range(8)]
        engines = [await cluster.engine(node) for node in "aabbcc"]
        hits = [0]

        async def work(engine) -> None:
            for _ in range(15):
                fingerprints = rng.choice(chains)
                if rng.random() < 0.4:
                    await engine.store(fingerprints, cluster.blocks.data(fingerprints))
                    continue
                into = cluster.blocks.room(fingerprints)
                result = await engine.load(fingerprints, into=into, deadline_s=rng.choice([0.02, 0.5]))
                cluster.blocks.check(fingerprints, into, result)
                assert result.count(LoadStatus.CORRUPT) == 0
                hits[0] += result.count(LoadStatus.HIT_PEER)

        await asyncio.gather(*map(work, engines))
        assert hits[0] > 0
        for node in "abc":
            await cluster.wait_known(node)
            cluster.agents[node].store._inventory.check()
            occupancy = cluster.agents[node].store.occupancy()[0]
            await eventually(
                lambda node=node: cluster.agents[node].store.occupancy()[0].quarantined == 0, what="nothing stays quarantined"
            )
            assert occupancy.reserved == 0

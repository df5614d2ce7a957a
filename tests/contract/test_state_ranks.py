"""Ranks of a parallel split at real agents: what is published, and what engines are told, is what every rank has."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kvdir.client.aio import DirectoryClient
from kvdir.fingerprint import Fingerprints
from kvdir.namespace import Namespace
from kvdir.testing.wait import eventually
from peer_agent.client import aio
from peer_agent.core.effects import LoadStatus
from peer_agent.testing import Blocks, LocalCluster, local_cluster, sample_namespace

FIRST, SECOND = (sample_namespace(parallel=f"tp={rank}/2") for rank in range(2))


@pytest.fixture
def directory() -> Iterator[Path]:
    """Short, because socket paths end at 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="kvdir-") as path:
        yield Path(path)


@pytest.fixture
async def pair(directory: Path) -> AsyncIterator[LocalCluster]:
    settings = {"namespaces": (), "accept_bytes": 1 << 18, "accept_namespaces": 2}
    async with local_cluster(directory, "a", "b", namespace=FIRST, **settings) as cluster:
        yield cluster


async def engines(cluster: LocalCluster, node: str) -> tuple[aio.Engine, aio.Engine]:
    address = cluster.agents[node].ready.engine
    return await aio.connect(address, namespace=FIRST), await aio.connect(address, namespace=SECOND)


async def store(engine: aio.Engine, fingerprints: Fingerprints) -> None:
    assert (await engine.store(fingerprints, Blocks(engine.namespace).data(fingerprints))).stored == len(fingerprints)


async def loaded(engine: aio.Engine, fingerprints: Fingerprints, status: LoadStatus) -> int:
    blocks = Blocks(engine.namespace)
    into = blocks.room(fingerprints)
    result = await engine.load(fingerprints, into=into)
    blocks.check(fingerprints, into, result)
    return result.count(status)


async def settled(cluster: LocalCluster, node: str, blocks: int) -> None:
    """The coordinator knows so many blocks of the node, and count and digest in its heartbeats prove that these are all."""
    await eventually(lambda: cluster.known_blocks(node) == blocks, what=f"{blocks} blocks of {node} are known")
    async with DirectoryClient(cluster.coordinator_address) as client:
        assert (await client.reconcile(node)).done  # an absolute statement of the node changes nothing
    assert cluster.known_blocks(node) == blocks
    await eventually(lambda: cluster.is_synced(node), what="the stream is synced")


async def test_blocks_are_published_when_the_last_rank_has_them(pair: LocalCluster) -> None:
    first, second = await engines(pair, "a")
    fingerprints = pair.blocks.chain(10)
    await store(first, fingerprints)
    await settled(pair, "a", 0)
    assert (await first.lookup(fingerprints)).local == bytes(10)
    await store(second, fingerprints.slice(2, 6))
    await settled(pair, "a", 2 * 6)
    for engine in (first, second):
        assert (await engine.lookup(fingerprints)).local == bytes(2) + b"\1" * 6 + bytes(2)
        await engine.close()


async def test_blocks_vanish_for_every_rank_when_the_first_one_loses_them(pair: LocalCluster) -> None:
    first, second = await engines(pair, "a")
    fingerprints = pair.blocks.chain(6)
    await store(first, fingerprints)
    await store(second, fingerprints)
    await settled(pair, "a", 12)
    assert pair.agents["a"].store.discard(SECOND.digest, fingerprints.slice(0, 2)) == 2
    await settled(pair, "a", 8)
    assert pair.agents["a"].store.incomplete(FIRST.digest) == 2
    await store(second, fingerprints.slice(0, 2))
    await settled(pair, "a", 12)
    for engine in (first, second):
        await engine.close()


async def test_own_part_is_loaded_although_another_rank_lacks_its_own(pair: LocalCluster) -> None:
    first, second = await engines(pair, "a")
    fingerprints = pair.blocks.chain(4)
    await store(first, fingerprints)
    assert await loaded(first, fingerprints, LoadStatus.HIT_LOCAL) == 4
    assert await loaded(second, fingerprints, LoadStatus.MISS) == 4
    for engine in (first, second):
        await engine.close()


async def test_every_rank_reads_its_part_from_the_peer_when_all_are_there(pair: LocalCluster) -> None:
    writers, readers = await engines(pair, "a"), await engines(pair, "b")
    fingerprints = pair.blocks.chain(8)
    for writer in writers:
        await store(writer, fingerprints)
    await settled(pair, "a", 16)
    assert await loaded(readers[0], fingerprints, LoadStatus.HIT_PEER) == 8
    await settled(pair, "b", 0)  # only one rank has read its part there
    assert await loaded(readers[1], fingerprints, LoadStatus.HIT_PEER) == 8
    await settled(pair, "b", 16)
    for engine in (*writers, *readers):
        await engine.close()


async def test_nothing_is_complete_any_more_when_another_rank_begins_to_be_served(pair: LocalCluster) -> None:
    address = pair.agents["a"].ready.engine
    fingerprints = pair.blocks.chain(4)
    async with await aio.connect(address, namespace=FIRST) as first:
        await store(first, fingerprints)
        await settled(pair, "a", 4)  # nobody knows that there will be another rank here, instead of on another node
        async with await aio.connect(address, namespace=SECOND) as second:
            await settled(pair, "a", 0)
            await store(second, fingerprints)
            await settled(pair, "a", 8)


async def test_other_splits_and_models_are_not_waited_for(directory: Path) -> None:
    strangers: list[Namespace] = [
        sample_namespace(parallel="tp=0/4"),
        sample_namespace(parallel="tp=1/2", model="other"),
        sample_namespace(parallel="replicated"),
    ]
    settings = {"namespaces": (), "accept_bytes": 1 << 18, "accept_namespaces": 4}
    async with local_cluster(directory, "a", namespace=FIRST, **settings) as cluster:
        attached = [await aio.connect(cluster.agents["a"].ready.engine, namespace=namespace) for namespace in strangers]
        async with await aio.connect(cluster.agents["a"].ready.engine, namespace=FIRST) as engine:
            await store(engine, cluster.blocks.chain(3))
            await settled(cluster, "a", 3)
        for stranger in attached:
            await stranger.close()


async def test_quota_takes_no_more_published_blocks_than_were_meant_when_others_are_incomplete(pair: LocalCluster) -> None:
    first, second = await engines(pair, "a")
    fingerprints = pair.blocks.chain(10)
    await store(first, fingerprints)
    await store(second, fingerprints.slice(0, 6))
    agent = pair.agents["a"]
    agent.store.evict(FIRST.digest, max_blocks=100, keep_blocks=4, older_than_s=-1000.0)
    assert agent.store.occupancy()[0].committed == 8  # two of the six published ones may go, whichever were used least lately
    for engine in (first, second):
        await engine.close()

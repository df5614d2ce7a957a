"""Agents that keep a replica: loads and engines look up in it, and nothing that fails about it fails a load."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import peer_agent
from kvdir.cli.main import main as kvdir_main
from kvdir.core.answer import Lookup
from kvdir.errors import ConfigError
from kvdir.fingerprint import Fingerprints
from kvdir.location import StreamState
from kvdir.testing.wait import eventually
from peer_agent.core.effects import LoadStatus
from peer_agent.server.nearest import NearestDirectory
from peer_agent.server.replica import replica_families
from peer_agent.testing import LocalCluster, local_cluster

SHM = "/dev/shm"


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvdir-test-", dir=SHM) as path:
        yield Path(path)


@pytest.fixture
async def pair(directory: Path) -> AsyncIterator[LocalCluster]:
    async with local_cluster(directory, "a", "b", replica=True) as cluster:
        yield cluster


def in_replica(cluster: LocalCluster, node: str, fingerprints: Fingerprints) -> Lookup:
    replica = cluster.agents[node].replica
    assert replica is not None
    return replica.reader.lookup(cluster.namespace.digest, fingerprints)


def asked(cluster: LocalCluster, node: str) -> dict[str, int]:
    nearest = cluster.agents[node].reader._directory
    assert isinstance(nearest, NearestDirectory)
    return dict(nearest.asked)


async def filled(cluster: LocalCluster, blocks: int) -> Fingerprints:
    """Blocks of a that b's replica knows."""
    fingerprints = cluster.blocks.chain(blocks)
    writer = await cluster.engine("a")
    assert (await writer.store(fingerprints, cluster.blocks.data(fingerprints))).stored == blocks
    await eventually(lambda: in_replica(cluster, "b", fingerprints).hits == blocks, what="b's replica knows a's blocks")
    return fingerprints


async def test_load_asks_the_replica_and_no_coordinator(pair: LocalCluster) -> None:
    fingerprints = await filled(pair, 40)
    reader = await pair.engine("b")
    into = pair.blocks.room(fingerprints)
    result = await reader.load(fingerprints, into=into, deadline_s=10.0)
    assert result.count(LoadStatus.HIT_PEER) == 40
    pair.blocks.check(fingerprints, into, result)
    assert asked(pair, "b") == {"replica": 1, "coordinator": 0, "none": 0}


async def test_load_comes_from_peers_when_every_coordinator_is_gone(pair: LocalCluster) -> None:
    fingerprints = await filled(pair, 8)
    reader = await pair.engine("b")
    await pair.stop_coordinator()
    into = pair.blocks.room(fingerprints)
    first = await reader.load(fingerprints.slice(0, 4), into=into[:4])
    assert first.count(LoadStatus.HIT_PEER) == 4
    answer = in_replica(pair, "b", fingerprints)
    await eventually(lambda: in_replica(pair, "b", fingerprints).lag_s > 1.5, what="its lag is seen to grow")
    assert answer.lag_s < 1.5
    second = await reader.load(fingerprints.slice(4, 4), into=into[4:])
    assert second.count(LoadStatus.HIT_PEER) == 4, second
    pair.blocks.check(fingerprints.slice(4, 4), into[4:], second)


async def test_replica_hears_what_a_load_found_stale(directory: Path) -> None:
    """The owner loses blocks and does not say so; its next heartbeat, which would show it, is far away."""
    async with local_cluster(directory, coordinator=False, replica=True) as pair:
        await pair.start_coordinator(heartbeat_interval_ms=60_000, stale_after_s=300.0, expire_after_s=600.0)
        for node in ("a", "b"):
            await pair.start_agent(node)
        fingerprints = await filled(pair, 8)
        store, gone = pair.agents["a"].store, fingerprints.slice(0, 4)
        store._publish = lambda *_: 0
        assert store.discard(pair.namespace.digest, gone) == 4
        assert in_replica(pair, "b", gone).hits == 4
        reader = await pair.engine("b")
        into = pair.blocks.room(fingerprints)
        result = await reader.load(fingerprints, into=into, deadline_s=10.0)
        assert (result.hits, result.count(LoadStatus.STALE)) == (4, 4)
        pair.blocks.check(fingerprints, into, result)
        await eventually(lambda: in_replica(pair, "b", gone).hits == 0, what="the replica names nobody for them any more")
        await eventually(lambda: pair.agents["b"].reader.counters.stale_reported == 4, what="the coordinator has confirmed it")


async def test_engine_looks_up_in_the_replica_of_its_node(pair: LocalCluster) -> None:
    fingerprints = await filled(pair, 8)
    engine = await pair.engine("b")
    answer = engine.directory.lookup(pair.namespace.digest, fingerprints)
    assert (answer.hits, answer.source) == (8, "replica")
    (node,) = answer.nodes
    assert (node.node, node.epoch, node.state) == ("a", pair.agents["a"].epoch, StreamState.SYNCED)
    assert node.peer_address == pair.agents["a"].ready.peer
    await pair.stop_agent("b")
    await eventually(
        lambda: engine.directory.lookup(pair.namespace.digest, fingerprints).source == "none", what="the region is gone"
    )
    await pair.start_agent("b")
    await eventually(lambda: engine.attached, what="the engine is attached again")
    await eventually(
        lambda: engine.directory.lookup(pair.namespace.digest, fingerprints).hits == 8, what="and finds the new replica"
    )


async def test_blocking_engine_asks_the_coordinators_of_its_agent_while_that_is_away(pair: LocalCluster) -> None:
    fingerprints = await filled(pair, 8)
    address, digest = pair.agents["b"].ready.engine, pair.namespace.digest
    engine = await asyncio.to_thread(peer_agent.connect, address, namespace=pair.namespace)

    async def ask() -> Lookup:
        return await asyncio.to_thread(engine.directory.lookup, digest, fingerprints, deadline_s=5.0)

    try:
        assert ((await ask()).source, (await ask()).hits) == ("replica", 8)
        await pair.stop_agent("b")
        await eventually(lambda: not engine.directory.replica.usable, what="the region is gone")
        assert ((await ask()).source, (await ask()).hits) == ("coordinator", 8)
    finally:
        await asyncio.to_thread(engine.close)
    assert engine.directory.lookup(digest, fingerprints).reason == "this was closed"


async def test_engine_is_told_that_there_is_no_replica_when_the_agent_keeps_none(directory: Path) -> None:
    async with local_cluster(directory, "a") as cluster:
        engine = await cluster.engine("a")
        answer = engine.directory.lookup(cluster.namespace.digest, cluster.blocks.chain(2))
        assert (answer.source, answer.asked) == ("none", 2)


async def test_second_agent_is_refused_the_path_of_a_replica(pair: LocalCluster) -> None:
    with pytest.raises(
        ConfigError, match=r"replica_path: .*a\.arena\.replica has a writer already \(process \d+\): stop it, or"
    ):
        await pair.start_agent("c", replica_path=pair.agents["a"].config.replica_file)
    assert "c" not in pair.agents


async def test_bound_that_holds_no_index_is_refused_at_start(pair: LocalCluster) -> None:
    with pytest.raises(ConfigError, match=r"replica_max_bytes: max_bytes must be 0 .* or at least"):
        await pair.start_agent("c", replica_max_bytes=1)


async def test_replica_follows_the_coordinator_that_comes_back(pair: LocalCluster) -> None:
    fingerprints = await filled(pair, 8)
    address = pair.coordinator_address
    await pair.stop_coordinator()
    await pair.start_coordinator(listen=address)
    more = pair.blocks.chain(5, root="more")
    writer = await pair.engine("a")
    assert (await writer.store(more, pair.blocks.data(more))).stored == 5
    await eventually(lambda: in_replica(pair, "b", more).hits == 5, what="the replica follows the new coordinator")
    assert in_replica(pair, "b", fingerprints).hits == 8


async def test_metrics_say_how_far_the_replica_is_behind_and_who_nominated(pair: LocalCluster) -> None:
    fingerprints = await filled(pair, 8)
    reader = await pair.engine("b")
    await reader.load(fingerprints, into=pair.blocks.room(fingerprints))
    replica = pair.agents["b"].replica
    assert replica is not None
    families = {family.name: family.samples[0].value for family in replica_families(replica)}
    assert families["peer_agent_replica_blocks"] == 8
    assert families["peer_agent_replica_snapshots"] == 1
    assert families["peer_agent_replica_lag_seconds"] < 5


async def test_commands_read_the_region_of_an_agent(pair: LocalCluster) -> None:
    fingerprints = await filled(pair, 8)
    path = pair.agents["b"].config.replica_file
    result = await asyncio.to_thread(CliRunner().invoke, kvdir_main, ["replica", path, "--output", "json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert (document["usable"], document["blocks"], document["writer_pid"]) == (True, 8, os.getpid())
    assert {node["node"]: node["state"] for node in document["nodes"]} == {"a": "synced", "b": "synced"}
    asked = ["lookup", pair.namespace.digest.hex()[:8], *(item.hex() for item in fingerprints), "--region", path]
    assert "8 of 8 blocks" in (await asyncio.to_thread(CliRunner().invoke, kvdir_main, asked)).stdout

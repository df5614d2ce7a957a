"""Models whose state is kept in groups, over real agents: lookups and loads end at legal restore points, and nowhere else."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import kvdir
import peer_agent
from kvdir.cli.main import main as kvdir_main
from kvdir.client.aio import DirectoryClient
from kvdir.client.state import lookup_state, lookup_state_async
from kvdir.core.state_lookup import StateLookup
from kvdir.errors import InvalidInput
from kvdir.fingerprint import Fingerprints
from kvdir.namespace import Namespace
from kvdir.testing.wait import eventually
from peer_agent.client import aio
from peer_agent.client.state import StateEngine
from peer_agent.testing import Blocks, LocalCluster, local_cluster, sample_namespace

ATTENTION = {"layers": 1, "kv_heads": 1, "head_dim": 8}
GROUPS: list[dict[str, Any]] = [
    {"kind": "full", **ATTENTION},
    {"kind": "sliding_window", "window_tokens": 33, **ATTENTION},  # 32 tokens back: 2 blocks of 16
    {"kind": "recurrent", "layers": 1, "state_bytes": 1000},
]
HYBRID = sample_namespace(groups=GROUPS, bytes_override=0)
FULL, WINDOW, RECURRENT = HYBRID.parts()
BLOCKS = 10
PROMPT = Fingerprints.chain(b"%d" % number for number in range(BLOCKS))


@pytest.fixture
def directory() -> Iterator[Path]:
    """Short, because socket paths end at 107 bytes; on a memory file system, where replicas must be."""
    with tempfile.TemporaryDirectory(prefix="kvdir-test-", dir="/dev/shm") as path:
        yield Path(path)


@pytest.fixture
async def pair(directory: Path) -> AsyncIterator[LocalCluster]:
    settings = {"namespaces": (), "accept_bytes": 1 << 17, "replica": True}
    async with local_cluster(directory, "a", "b", namespace=HYBRID, **settings) as cluster:
        yield cluster


async def store(cluster: LocalCluster, node: str, part: Namespace, positions: list[int]) -> None:
    chosen = PROMPT.select(positions)
    async with await aio.connect(cluster.agents[node].ready.engine, namespace=part) as engine:
        assert (await engine.store(chosen, Blocks(part).data(chosen))).stored == len(positions)
    await cluster.wait_known(node)


async def looked_up(cluster: LocalCluster, **options: Any) -> StateLookup:
    """By every client there is: all agree."""
    options["deadline_s"] = 10.0
    async with DirectoryClient(cluster.coordinator_address) as client:
        awaited = await lookup_state_async(client, HYBRID, PROMPT, **options)

    def blocking() -> StateLookup:
        with kvdir.connect(cluster.coordinator_address) as client:
            return lookup_state(client, HYBRID, PROMPT, **options)

    assert (await asyncio.to_thread(blocking)).points.points.tolist() == awaited.points.points.tolist()
    return awaited


async def test_lookup_answers_in_points_that_every_group_can_be_restored_at(pair: LocalCluster) -> None:
    await store(pair, "a", FULL, [0, 1, 2, 3, 4, 5])
    await store(pair, "a", WINDOW, [2, 3, 4, 5])
    assert (await looked_up(pair)).points.best_tokens == 0  # no recurrent state anywhere
    await store(pair, "a", RECURRENT, [1, 4])
    found = await looked_up(pair)
    assert found.points.points.tolist() == [5 * 16]
    full, window, recurrent = found.points.partial
    assert (full.prefix_tokens, window.reach_tokens, recurrent.held_blocks) == (6 * 16, 6 * 16, 2)
    assert (await looked_up(pair, prompt_tokens=5 * 16)).points.best_tokens == 0


async def test_nodes_complement_one_another_and_are_told_apart(pair: LocalCluster) -> None:
    for part, positions in ((FULL, [0, 1, 2, 3]), (WINDOW, [0, 1]), (RECURRENT, [1])):
        await store(pair, "a", part, positions)
    for part, positions in ((FULL, [0]), (WINDOW, [2, 3]), (RECURRENT, [0, 3])):
        await store(pair, "b", part, positions)
    found = await looked_up(pair)
    assert found.points.best_tokens == 4 * 16
    assert {trust.node: found.at(trust.node).best_tokens for trust in found.nodes} == {"a": 2 * 16, "b": 0}


async def test_lookup_costs_no_call_when_the_node_keeps_a_replica(pair: LocalCluster) -> None:
    for part, positions in ((FULL, [0, 1]), (WINDOW, [0, 1]), (RECURRENT, [1])):
        await store(pair, "a", part, positions)
    for part in HYBRID.parts():  # or b would not follow them
        await (await aio.connect(pair.agents["b"].ready.engine, namespace=part)).close()
    with kvdir.attach(pair.agents["b"].ready.replica) as attached:
        await eventually(lambda: lookup_state(attached, HYBRID, PROMPT).points.best_tokens == 32, what="the replica knows all")
        assert lookup_state(attached, HYBRID, PROMPT).reasons == ()


async def test_namespace_that_nobody_knows_is_a_miss_with_a_reason(pair: LocalCluster) -> None:
    await store(pair, "a", FULL, [0, 1])
    found = await looked_up(pair)
    assert found.points.best_tokens == 0
    assert found.points.partial[0].prefix_tokens == 32
    assert len(found.reasons) == 2  # one for each other group, in words


async def test_every_rank_of_a_split_is_asked_for(pair: LocalCluster) -> None:
    ranks = [sample_namespace(groups=GROUPS[:1], bytes_override=0, parallel=f"tp={rank}/2") for rank in range(2)]
    await store(pair, "a", ranks[0], [0, 1, 2])
    await store(pair, "b", ranks[1], [0, 1])
    async with DirectoryClient(pair.coordinator_address) as client:
        found = await lookup_state_async(client, ranks[0], PROMPT)
    assert found.points.best_tokens == 32
    assert found.at("a").best_tokens == 0


def rooms() -> list[Any]:
    return [Blocks(part).room(PROMPT) for part in HYBRID.parts()]


def stored(engine: StateEngine, positions: tuple[list[int], ...]) -> None:
    chosen = [PROMPT.select(group) for group in positions]
    data = [Blocks(part).data(fingerprints) for part, fingerprints in zip(HYBRID.parts(), chosen, strict=True)]
    results = engine.store(chosen, data)
    assert [result.stored for result in results] == [len(group) for group in positions]


def check(into: list[Any], tokens: int, *, window_blocks: int) -> None:
    """What a restore at `tokens` reads has the right bytes, and nothing else was touched."""
    end = tokens // 16
    for part, room, first in zip(HYBRID.parts(), into, (0, end - window_blocks, end - 1), strict=True):
        right = Blocks(part).data(PROMPT)
        assert np.array_equal(room[first:end], right[first:end])
        assert (room[:first] == 0xA5).all()
        assert (room[end:] == 0xA5).all()


async def test_load_brings_what_the_restore_point_reads_and_no_more(pair: LocalCluster) -> None:
    def work() -> None:
        everything = list(range(BLOCKS))
        with peer_agent.connect_state(pair.agents["a"].ready.engine, namespace=HYBRID, deadline_s=10.0) as writer:
            stored(writer, (everything, everything, [3, 7, 9]))
        eventually_known()
        with peer_agent.connect_state(pair.agents["b"].ready.engine, namespace=HYBRID, deadline_s=10.0) as reader:
            into = rooms()
            result = reader.load([PROMPT] * 3, into=into, prompt_tokens=BLOCKS * 16)
            assert (result.restored_tokens, result.hoped_tokens, result.rounds) == (8 * 16, 8 * 16, 1)
            check(into, 8 * 16, window_blocks=2)
            assert result.peer_bytes == 8 * FULL.block_bytes + 2 * WINDOW.block_bytes + RECURRENT.block_bytes
            points, answers = reader.lookup([PROMPT] * 3)
            assert points.best_tokens == 8 * 16
            assert answers[0].local == b"\1" * 8 + bytes(2)
            assert reader.load([PROMPT] * 3, into=rooms(), prompt_tokens=BLOCKS * 16 + 1).restored_tokens == BLOCKS * 16

    loop = asyncio.get_running_loop()

    def eventually_known() -> None:
        asyncio.run_coroutine_threadsafe(pair.wait_known("a"), loop).result(10)

    await asyncio.to_thread(work)


async def test_what_arrived_decides_when_the_directory_names_blocks_that_are_gone(pair: LocalCluster) -> None:
    for part, positions in ((FULL, list(range(6))), (WINDOW, list(range(6))), (RECURRENT, [2, 5])):
        await store(pair, "a", part, positions)
    address = pair.agents["b"].ready.engine
    reader = await asyncio.to_thread(lambda: peer_agent.connect_state(address, namespace=HYBRID))
    replica = pair.agents["b"].replica
    assert replica is not None
    held = ((FULL, 6), (WINDOW, 6), (RECURRENT, 2))
    await eventually(
        lambda: all(replica.reader.lookup(part.digest, PROMPT).hits == blocks for part, blocks in held),
        what="b's replica knows all that a has",
    )
    await pair.stop_coordinator()  # so that nobody hears of what goes now
    assert pair.agents["a"].store.discard(RECURRENT.digest, PROMPT.select([5])) == 1

    def work() -> None:
        into = rooms()
        result = reader.load([PROMPT] * 3, into=into, deadline_s=10.0)
        reader.close()
        assert (result.hoped_tokens, result.restored_tokens, result.rounds) == (6 * 16, 3 * 16, 2)
        for part, room, (first, end) in zip(HYBRID.parts(), into, ((0, 3), (1, 3), (2, 3)), strict=True):
            assert np.array_equal(room[first:end], Blocks(part).data(PROMPT)[first:end])

    await asyncio.to_thread(work)


async def test_everything_is_recomputed_when_there_is_no_agent(pair: LocalCluster) -> None:
    address = pair.agents["a"].ready.engine

    def attach() -> StateEngine:
        return peer_agent.connect_state(address, namespace=HYBRID)

    reader = await asyncio.to_thread(attach)
    await pair.stop_agent("a")

    def work() -> None:
        result = reader.load([PROMPT] * 3, into=rooms(), deadline_s=1.0)
        assert (result.restored_tokens, result.rounds) == (0, 0)
        assert result.reason
        with pytest.raises(InvalidInput, match="2 lists for 3 state groups"):
            reader.load([PROMPT] * 2, into=rooms())
        reader.close()

    await asyncio.to_thread(work)


async def test_callers_own_mistakes_are_raised_and_failures_are_reasons(pair: LocalCluster) -> None:
    async with DirectoryClient(pair.coordinator_address) as client:
        with pytest.raises(InvalidInput, match="2 lists of fingerprints for 3 state groups"):
            await lookup_state_async(client, HYBRID, [PROMPT, PROMPT])
    await pair.stop_coordinator()
    async with DirectoryClient("127.0.0.1:1") as client:
        found = await lookup_state_async(client, HYBRID, PROMPT, deadline_s=0.5)
    assert found.points.best_tokens == 0
    assert found.reasons


async def test_command_shows_points_and_what_holds_them_back(pair: LocalCluster) -> None:
    for part, positions in ((FULL, [0, 1, 2, 3]), (WINDOW, [0, 1]), (RECURRENT, [1])):
        await store(pair, "a", part, positions)

    def run(*more: str) -> Result:
        chosen = [fingerprint.hex() for fingerprint in PROMPT]
        arguments = ["restore-points", *more, *chosen, "--coordinator", pair.coordinator_address]
        return CliRunner().invoke(kvdir_main, arguments)

    answer = await asyncio.to_thread(run, FULL.digest.hex()[:10], "--output", "json")
    document = json.loads(answer.stdout)
    assert (document["best_tokens"], document["points"]) == (32, [32])
    assert [group["reach_tokens"] for group in document["groups"]] == [64, 32, 32]
    assert [(node["node"], node["best_tokens"]) for node in document["nodes"]] == [("a", 32)]
    shown = " ".join((await asyncio.to_thread(run, RECURRENT.digest.hex())).stdout.split())
    assert "all nodes together 32 64 (4) 32 (2) 32 (1)" in shown
    refused = await asyncio.to_thread(run, "00" * 32)
    assert refused.exit_code != 0
    assert "nobody has announced" in " ".join(refused.output.split())


async def test_command_finds_every_rank_when_asked_for_the_part_that_all_share(directory: Path) -> None:
    groups = [{"kind": "mla", **ATTENTION, "tensors": 1}, {"kind": "full", **ATTENTION, "block_tokens": 32}]
    first, second = (sample_namespace(groups=groups, bytes_override=0, parallel=f"tp={rank}/2") for rank in range(2))
    prompts = [PROMPT.slice(0, 4), PROMPT.slice(0, 2)]  # 64 tokens in blocks of 16, and of 32
    latent, *ranks = first.parts()[0], first.parts()[1], second.parts()[1]
    settings = {"namespaces": (), "accept_bytes": 1 << 17}
    async with local_cluster(directory, "a", namespace=first, **settings) as cluster:
        for part, blocks in ((latent, 4), *((rank, 2) for rank in ranks)):
            await store(cluster, "a", part, list(range(blocks)))
        files = [directory / f"{number}.fps" for number in range(2)]
        for file, prompt in zip(files, prompts, strict=True):
            file.write_bytes(prompt.packed)
        named = [text for file in files for text in ("--file", str(file))]
        arguments = [latent.digest.hex(), *named, "--coordinator", cluster.coordinator_address, "--output", "json"]
        answer = await asyncio.to_thread(CliRunner().invoke, kvdir_main, ["restore-points", *arguments])
        document = json.loads(answer.stdout)
        assert (document["best_tokens"], document["reasons"]) == (64, [])
        assert [group["held_blocks"] for group in document["groups"]] == [4, 2]

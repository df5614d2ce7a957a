"""Real processes that serve a namespace which only engines brought: engines and agents are killed in the middle of things."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from peer_agent.core.effects import LoadStatus
from peer_agent.testing import sample_namespace
from peer_agent.testing.processes import ProcessCluster
from peer_agent.v1 import engine_pb2, engine_pb2_grpc

pytestmark = pytest.mark.slow

BROUGHT = sample_namespace(block_bytes=1 << 20, model="brought")
ACCEPT = ("--arena-bytes", "8MiB", "--accept-bytes", "60MiB", "--accept-namespaces", "1")


@pytest.fixture
async def cluster() -> AsyncIterator[ProcessCluster]:
    """Agents have a file for another namespace than that of the engines."""
    with tempfile.TemporaryDirectory(prefix="kvdir-test-", dir="/dev/shm") as path:
        made = ProcessCluster(Path(path), BROUGHT)
        fields = json.loads(sample_namespace(model="in a file").canonical())
        fields.pop("version")
        made.namespace_file.write_text(json.dumps(fields))
        try:
            yield made
        finally:
            await made.close()


async def wait_brought(cluster: ProcessCluster, node: str, condition: Callable[[Any], object]) -> None:
    """Until what the agent says of the slots of the namespace that was brought satisfies the condition."""
    until_s = time.monotonic() + 20
    async with grpc.aio.insecure_channel(cluster.children[node].ready["engine"]) as channel:
        while True:
            answer = await engine_pb2_grpc.EngineStub(channel).Inventory(engine_pb2.InventoryRequest(), timeout=5)
            held = [item for item in answer.namespaces if item.digest == BROUGHT.digest]
            if held and condition(held[0]):
                return
            assert time.monotonic() < until_s, f"{node} never got there: {answer.namespaces}"
            await asyncio.sleep(0.005)


DOOMED = """
import sys, time
import peer_agent
from kvdir.namespace import Namespace
from peer_agent.testing import Blocks
namespace = Namespace.from_canonical(sys.argv[1])
with peer_agent.connect(sys.argv[2], namespace=namespace, engine="doomed") as engine:
    blocks = Blocks(namespace)
    for number in range(1000):
        fingerprints = blocks.chain(10, root=f"doomed {number}")
        engine.store(fingerprints, blocks.data(fingerprints), deadline_s=10)
        if number == 1:
            print("storing", flush=True)
"""


def kill_while_storing(address: str) -> None:
    """An engine in a process of its own stores for ever, and is killed."""
    command = [sys.executable, "-c", DOOMED, BROUGHT.canonical(), address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        assert engine.stdout.readline() == "storing\n"
        engine.kill()


async def test_slots_come_back_and_what_was_published_is_right_when_the_engine_that_brought_it_is_killed(
    cluster: ProcessCluster,
) -> None:
    coordinator = await cluster.start_coordinator()
    for node in ("owner", "reader"):
        await cluster.start_agent(node, coordinator, *ACCEPT)
    await asyncio.to_thread(kill_while_storing, str(cluster.children["owner"].ready["engine"]))
    await wait_brought(cluster, "owner", lambda held: held.reserved == held.quarantined == 0 and held.committed > 0)
    reader, writer = await cluster.engine("reader"), await cluster.engine("owner")
    fingerprints = cluster.blocks.chain(10, root="doomed 1")
    result, _ = await cluster.load(reader, fingerprints, deadline_s=5.0)  # checks the bytes of every hit
    assert result.count(LoadStatus.CORRUPT) == 0
    fresh = cluster.blocks.chain(10, root="fresh")
    assert (await writer.store(fresh, cluster.blocks.data(fresh), deadline_s=10)).stored == 10
    await cluster.wait_nominated(reader, fresh)
    result, _ = await cluster.load(reader, fresh, deadline_s=10.0)
    assert result.count(LoadStatus.HIT_PEER) == 10


async def test_engines_bring_their_namespace_again_when_the_agent_was_killed_during_a_load(cluster: ProcessCluster) -> None:
    coordinator = await cluster.start_coordinator()
    options = (*ACCEPT, "--max-chunk-bytes", "1MiB")
    for node in ("owner", "reader"):
        await cluster.start_agent(node, coordinator, *options)
    owner, reader = await cluster.engine("owner", deadline_s=10), await cluster.engine("reader")
    fingerprints = cluster.blocks.chain(50)
    assert (await owner.store(fingerprints, cluster.blocks.data(fingerprints))).stored == 50
    await cluster.wait_nominated(reader, fingerprints)
    load = asyncio.ensure_future(cluster.load(reader, fingerprints, deadline_s=3.0))
    await wait_brought(cluster, "reader", lambda held: held.committed + held.reserved > 0 or load.done())
    await cluster.children["owner"].kill()
    result, seconds = await load
    assert result.count(LoadStatus.CORRUPT) == 0
    assert seconds < 4.0
    await wait_brought(cluster, "reader", lambda held: held.quarantined == held.reserved == 0)

    await cluster.start_agent("owner", coordinator, *options)
    fresh = cluster.blocks.chain(5, root="fresh")
    for _ in range(400):  # the engine attaches again by itself, with what it brought before
        if (await owner.store(fresh, cluster.blocks.data(fresh))).stored == 5:
            break
        await asyncio.sleep(0.05)
    await cluster.wait_nominated(reader, fresh)
    for _ in range(100):  # the reader's circuit breaker skips the owner at first
        result, _ = await cluster.load(reader, fresh, deadline_s=1.0)
        if result.hits == 5:
            break
        await asyncio.sleep(0.05)
    assert result.hits == 5

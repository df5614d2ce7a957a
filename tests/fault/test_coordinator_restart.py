"""A coordinator process that is killed or stopped, and started again with its checkpoint: hints at once, then the truth."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvdir.client.aio import DirectoryClient
from kvdir.core.answer import Lookup
from kvdir.location import StreamState
from kvdir.testing.fake_node import EXAMPLE_NAMESPACE, FakeNode, some_fingerprints
from kvdir.testing.wait import POLL_S, eventually
from peer_agent.demo.processes import Child

pytestmark = pytest.mark.slow

DIGEST = EXAMPLE_NAMESPACE.digest
BLOCKS = some_fingerprints(5000)


@pytest.fixture
async def home() -> AsyncIterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvdir-test-") as path:
        yield Path(path)


@contextlib.asynccontextmanager
async def coordinator(home: Path, *more: str, listen: str = "127.0.0.1:0") -> AsyncIterator[Child]:
    child = await Child.start(
        "coordinator",
        [
            "-m", "kvdir", "serve", "--listen", listen, "--http-listen", "", "--heartbeat-interval-ms", "100",
            "--checkpoint", str(home / "checkpoint"), "--output", "json", *more,
        ],
        log=home / "coordinator.log",
        ready_s=20,
    )  # fmt: skip
    try:
        yield child
    finally:
        await child.end(grace_s=5)


async def ask(address: str) -> Lookup:
    async with DirectoryClient(address, deadline_s=5.0) as client:
        return await client.lookup(DIGEST, BLOCKS)


async def test_answers_are_flagged_hints_at_once_and_the_truth_when_the_node_is_back(home: Path) -> None:
    async with coordinator(home) as first:
        address = str(first.ready["grpc"])
        async with FakeNode(address, "n1") as node:
            node.store(BLOCKS)
            await node.synced()
    # Nobody publishes to the second one yet; all it can know is in the file, written when the first was told to stop.
    async with coordinator(home, listen=address) as second:
        answer = await ask(str(second.ready["grpc"]))
        assert (answer.hits, answer.warming) == (5000, True)
        assert answer.nodes[0].state is not StreamState.SYNCED
        assert "checkpoint" in answer.nodes[0].reason
        async with FakeNode(address, "n1", epoch=node.epoch, outbox=node.outbox) as back:
            back.held = node.held
            back.remove(BLOCKS.slice(0, 1000))
            await back.synced()
            answer = await ask(address)
            assert (answer.hits, answer.nodes[0].state) == (4000, StreamState.SYNCED)


async def test_last_whole_file_counts_when_the_coordinator_is_killed(home: Path) -> None:
    async with coordinator(home, "--checkpoint-every-s", "0.1") as first, FakeNode(str(first.ready["grpc"]), "n1") as node:
        node.store(BLOCKS)
        await node.synced()
        file = home / "checkpoint"
        await eventually(lambda: file.exists() and file.stat().st_size > 8 * len(BLOCKS), what="a checkpoint with the blocks")
        await first.kill()
    async with coordinator(home) as second:
        assert (await ask(str(second.ready["grpc"]))).hits == 5000


async def test_new_life_of_the_node_is_not_mixed_with_the_old_one_when_both_restarted(home: Path) -> None:
    async with coordinator(home) as first:
        address = str(first.ready["grpc"])
        async with FakeNode(address, "n1") as node:
            node.store(BLOCKS)
            await node.synced()
    async with coordinator(home, listen=address), FakeNode(address, "n1") as reborn:
        await reborn.synced()

        assert (await ask(address)).hits == 0
        reborn.store(BLOCKS.slice(0, 7))
        await reborn.synced()
        assert (await ask(address)).hits == 7


async def test_nodes_are_synced_again_one_after_the_other_when_many_return(home: Path) -> None:
    async with coordinator(home) as first:
        address = str(first.ready["grpc"])
        nodes = [FakeNode(address, f"n{number}") for number in range(12)]
        async with contextlib.AsyncExitStack() as stack:
            for number, node in enumerate(nodes):
                await stack.enter_async_context(node)
                node.store(some_fingerprints(100, seed=number))
            await asyncio.gather(*(node.synced() for node in nodes))
            await first.end(grace_s=5)
            again = coordinator(home, "--max-snapshots", "2", listen=address)
            async with again, DirectoryClient(address, deadline_s=5.0) as client, asyncio.timeout(30):
                status = await client.status()
                while status.streams_synced < 12:
                    await asyncio.sleep(POLL_S)
                    status = await client.status()
                assert (status.blocks, status.restored_blocks) == (1200, 0)
                assert sum(view.snapshots for view in await client.nodes()) == 12

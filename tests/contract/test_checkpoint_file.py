"""The checkpoint file of a running coordinator: written whole or not at all, read back as hints, refused when damaged."""

from __future__ import annotations

import asyncio
import stat
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest

from kvdir.core.checkpoint import VERSION, Head, frames
from kvdir.core.directory import Directory, Hello, Limits, Welcomed
from kvdir.core.event import Event
from kvdir.core.namespaces import Announced
from kvdir.index import Sketch, open_index
from kvdir.location import StreamState, Tier
from kvdir.server.checkpoint import CheckpointFigures, load
from kvdir.server.config import CoordinatorConfig
from kvdir.testing.fake_node import EXAMPLE_NAMESPACE, FakeNode, some_fingerprints
from kvdir.testing.served import FAST_CONFIG, Served, serving
from kvdir.testing.wait import eventually

DIGEST = EXAMPLE_NAMESPACE.digest
CANONICAL = EXAMPLE_NAMESPACE.canonical().encode()
BLOCKS = some_fingerprints(500)


def with_file(path: Path, **fields: object) -> CoordinatorConfig:
    return replace(FAST_CONFIG, checkpoint=str(path), **fields)  # type: ignore[arg-type]


async def left_behind(path: Path) -> FakeNode:
    """A coordinator took in a node's blocks and was stopped. Returns the node, which lives on."""
    async with serving(with_file(path)) as served:
        async with FakeNode(served.address, "n1") as node:
            node.store(BLOCKS)
            await node.synced()
        return node


def readyz(served: Served) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{served.http}/readyz", timeout=5) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


async def test_restarted_coordinator_answers_flagged_at_once_and_is_exact_when_the_node_returns(tmp_path: Path) -> None:
    file = tmp_path / "directory.checkpoint"
    old = await left_behind(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    async with serving(with_file(file)) as served:
        answer = await served.client.lookup(DIGEST, BLOCKS)
        assert (answer.hits, answer.warming) == (500, True)
        assert answer.nodes[0].state in (StreamState.GAP, StreamState.STALE)
        assert "checkpoint" in answer.nodes[0].reason
        assert (await served.client.status()).restored_blocks == 500
        async with FakeNode(served.address, "n1", epoch=old.epoch, outbox=old.outbox) as node:
            node.held = old.held
            node.remove(BLOCKS.slice(0, 100))
            await node.synced()
            answer = await served.client.lookup(DIGEST, BLOCKS)
            assert (answer.hits, answer.nodes[0].state) == (400, StreamState.SYNCED)
            status = await served.client.status()
            assert (status.restored_blocks, status.partial) == (0, False)
            await eventually(lambda: served.coordinator.directory.counters.snapshots_applied == 1)
            served.coordinator.tick()
            kinds = [entry.kind for entry in (await served.client.story(node="n1")).entries]
            assert kinds.index("restored") < kinds.index("snapshot")


async def test_coordinator_is_ready_but_partial_when_a_restored_node_does_not_return(tmp_path: Path) -> None:
    file = tmp_path / "directory.checkpoint"
    await left_behind(file)
    async with serving(with_file(file, warm_limit_s=0.5)) as served:
        assert (await asyncio.to_thread(readyz, served))[0] == 503
        await eventually(lambda: served.coordinator.directory.partial)
        status, words = await asyncio.to_thread(readyz, served)
        assert (status, "partial" in words) == (200, True)
        assert (await served.client.status()).partial


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "other"])
async def test_damaged_file_is_refused_with_a_reason_and_the_coordinator_starts_empty(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "directory.checkpoint"
    await left_behind(file)
    data = file.read_bytes()
    changed = data[:3000] + bytes([data[3000] ^ 1]) + data[3001:]
    file.write_bytes({"cut": data[:-20], "changed": changed, "empty": b"", "other": b"KVDIRCP9" + data[8:]}[damage])
    async with serving(with_file(file)) as served, FakeNode(served.address, "n1") as node:
        assert served.coordinator.checkpoints.refused
        node.store(BLOCKS.slice(0, 1))
        await node.synced()
        assert (await served.client.status()).blocks == 1


async def test_old_file_stays_when_a_new_one_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "directory.checkpoint"
    await left_behind(file)
    before = file.read_bytes()
    (tmp_path / "directory.checkpoint.part").mkdir()  # so the new one cannot even be begun
    async with serving(with_file(file, checkpoint_every_s=0.05)) as served:
        await eventually(lambda: served.coordinator.checkpoints.failed > 1)
        assert file.read_bytes() == before
        (tmp_path / "directory.checkpoint.part").rmdir()
        await eventually(lambda: served.coordinator.checkpoints.written > 1)


def test_directory_of_the_file_must_exist(tmp_path: Path) -> None:
    assert any("make it first" in fault for fault in with_file(tmp_path / "missing" / "file").faults())


def test_restoring_a_block_costs_no_more_when_there_are_many(tmp_path: Path) -> None:
    """Blocks come in table order: an index that grew under them would take time in the square of their number."""

    def cost_s(blocks: int) -> float:
        file = tmp_path / str(blocks)
        source = Directory(open_index(seed=3), Sketch, Limits(), now_s=0.0)
        hello = Hello("n1", 1, 0, "h:1", 0, (Announced(DIGEST, CANONICAL, EXAMPLE_NAMESPACE.block_bytes),))
        welcomed = source.hello(hello, now_s=0.0)
        assert isinstance(welcomed, Welcomed)
        source.batch(welcomed.stream, 1, [Event.stored(Tier.CPU, DIGEST, some_fingerprints(blocks, width=16))], now_s=0.0)
        head = Head(VERSION, 3, 0, 0.0, "test", source.index.stats().blocks)
        file.write_bytes(b"".join(frames(source, head)))

        def make(seed: int, room: int) -> Directory:
            return Directory(open_index(seed=seed, expected_blocks=room), Sketch, Limits(), now_s=0.0)

        started_s = time.process_time()
        loaded = load(file, make, CheckpointFigures(), now_s=0.0)
        assert loaded is not None
        assert loaded[0].index.stats().blocks == blocks
        return (time.process_time() - started_s) / blocks

    assert cost_s(200_000) < 5 * cost_s(10_000)

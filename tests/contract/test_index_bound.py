"""What only the native index promises about its bound: how near to exact LRU it is, and that a coordinator keeps to it."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import struct
import urllib.request
from collections import OrderedDict
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvdir.cli.main import main
from kvdir.config import show_bytes
from kvdir.errors import ConfigError
from kvdir.index import LEAST_MAX_BYTES, Index, create_region
from kvdir.server.app import build_coordinator
from kvdir.server.config import CoordinatorConfig
from kvdir.testing.fake_node import EXAMPLE_NAMESPACE, FakeNode, some_fingerprints
from kvdir.testing.served import FAST_CONFIG, Served, serving
from kvdir.testing.wait import eventually
from kvdir.testing.watching import replicating

SECOND_BLOCKS = 2_000


def test_blocks_that_go_are_among_the_oldest_eighth_when_access_is_known_to_the_second() -> None:
    index, rng = Index(seed=3, max_bytes=2**20), random.Random(1)
    access: dict[int, int] = {}
    outside = evicted_blocks = 0
    for now_s in range(1, 400):
        fresh = [rng.getrandbits(64) for _ in range(500)]
        used = rng.sample(list(access), 200) if len(access) > 200 else []
        evicted = index.make_room(len(fresh), holder=1)
        if evicted is not None:
            heads = struct.unpack(f"<{len(evicted.keys) // 8}Q", index.heads(evicted.keys, scope=0))
            oldest = sorted(access.values())[len(access) // 8]
            outside += sum(access[head] > oldest for head in heads)
            evicted_blocks += len(heads)
            for head in heads:
                del access[head]
        index.store(struct.pack(f"<{len(fresh)}Q", *fresh), 8, scope=0, holder=1, now_s=now_s)
        index.lookup(struct.pack(f"<{len(used)}Q", *used), 8, scope=0, touch_s=now_s)
        access.update(dict.fromkeys(fresh + used, now_s))
    assert evicted_blocks > 100_000
    assert outside <= evicted_blocks // 1000


def test_hits_are_those_of_exact_lru_within_a_hundredth_when_some_blocks_are_asked_for_more_often() -> None:
    """Pareto-distributed popularity; the exact cache holds as many blocks as the index does when it is full."""
    index, rng = Index(seed=3, max_bytes=2**20), random.Random(2)
    blocks = [int(rng.paretovariate(0.4) * 100) % 2_000_000 for _ in range(400_000)]
    hits = 0
    for at in range(0, len(blocks), 500):
        batch = blocks[at : at + 500]
        packed = struct.pack("<500Q", *batch)
        hits += index.lookup(packed, 8, scope=0).hits
        index.make_room(500, holder=1)
        index.store(packed, 8, scope=0, holder=1, now_s=at // SECOND_BLOCKS)
    exact: OrderedDict[int, None] = OrderedDict()
    exact_hits = 0
    for at in range(0, len(blocks), 500):
        batch = blocks[at : at + 500]
        exact_hits += sum(block in exact for block in batch)
        for block in batch:
            exact[block] = None
            exact.move_to_end(block)
        while len(exact) > index.stats().blocks:
            exact.popitem(last=False)
    assert abs(hits - exact_hits) <= len(blocks) // 100, f"{hits / len(blocks):.4f} against {exact_hits / len(blocks):.4f}"


def test_region_keeps_to_its_bound_when_it_has_a_roster(tmp_path: object) -> None:
    region = create_region(f"{tmp_path}/region", seed=1, max_bytes=LEAST_MAX_BYTES)
    for turn in range(20):
        region.set_node(turn, b"record" * 100)
        region.make_room(500, holder=turn)
        region.store(some_fingerprints(500, seed=turn, width=8).packed, 8, scope=0, holder=turn, now_s=turn)
    assert region.stats().bytes <= LEAST_MAX_BYTES
    region.close()


async def test_coordinator_keeps_to_its_bound_and_says_so_when_a_node_holds_more() -> None:
    config = dataclasses.replace(FAST_CONFIG, max_index_bytes=LEAST_MAX_BYTES)
    blocks = some_fingerprints(12_000)
    async with serving(config) as served, FakeNode(served.address, "n1") as node:
        for at in range(0, len(blocks), 3000):
            node.store(blocks.slice(at, 3000))
        await node.synced()
        directory = served.coordinator.directory
        stream = directory.nodes["n1"].stream
        assert stream is not None
        (holder,) = stream.holders.values()
        await eventually(lambda: stream.blocks_figure(holder).trusted)
        assert stream.blocks_figure(holder).require_trusted() == 12_000
        status = await served.client.status()
        assert status.index_bytes <= status.max_index_bytes == LEAST_MAX_BYTES
        assert status.evicted_blocks == 12_000 - status.blocks >= 8_000
        found = await served.client.lookup(EXAMPLE_NAMESPACE.digest, blocks.slice(0, 4096))
        assert found.incomplete
        proofs, repairs = directory.reconciler.proofs, stream.cursor.sketches + stream.cursor.snapshots
        await eventually(lambda: directory.reconciler.proofs > proofs + 2)
        assert stream.cursor.sketches + stream.cursor.snapshots == repairs, "nobody loops"
        assert directory.reconciler.contradictions == 0
        outcome = await served.client.reconcile("n1")
        assert (outcome.done, outcome.blocks) == (True, 12_000)  # what its owner holds, here as everywhere


async def test_replica_follows_evictions_when_the_coordinators_index_is_full(tmp_path: Path) -> None:
    config = dataclasses.replace(FAST_CONFIG, max_index_bytes=LEAST_MAX_BYTES)
    blocks = some_fingerprints(6_000, width=16)
    asked = blocks.slice(2_000, 4_000)
    async with (
        serving(config) as served,
        FakeNode(served.address, "n1") as node,
        replicating(served.address, tmp_path / "region") as (_, reader),
    ):
        node.store(blocks.slice(0, 1000))
        await node.synced()
        await eventually(lambda: reader.lookup(EXAMPLE_NAMESPACE.digest, blocks.slice(0, 1000)).hits == 1000)
        for at in range(1000, len(blocks), 500):
            node.store(blocks.slice(at, 500))
        await node.synced()
        directory = served.coordinator.directory

        def equal() -> bool:
            theirs = directory.lookup(EXAMPLE_NAMESPACE.digest, asked, now_s=served.coordinator.now_s())
            ours = reader.lookup(EXAMPLE_NAMESPACE.digest, asked)
            return (ours.runs, ours.hits, ours.incomplete) == (theirs.runs, theirs.hits, True)

        await eventually(equal)
        assert 0 < reader.lookup(EXAMPLE_NAMESPACE.digest, asked).hits < 3_500


def metrics_of(served: Served) -> str:
    with urllib.request.urlopen(f"http://{served.http}/metrics", timeout=5) as response:
        return str(response.read(), "utf-8")


async def test_status_says_what_was_evicted_when_there_is_a_bound() -> None:
    config = dataclasses.replace(FAST_CONFIG, max_index_bytes=LEAST_MAX_BYTES)
    async with serving(config) as served, FakeNode(served.address, "n1") as node:
        node.store(some_fingerprints(6_000))
        await node.synced()
        arguments = ["status", "--coordinator", served.address]
        outcome = await asyncio.to_thread(CliRunner().invoke, main, arguments)
        assert outcome.exit_code == 0, outcome.output
        assert f"of at most {show_bytes(LEAST_MAX_BYTES)}" in outcome.output
        assert "evicted, unknown since" in outcome.output
        text = await asyncio.to_thread(metrics_of, served)
        assert f"kvdir_index_max_bytes {float(LEAST_MAX_BYTES)}" in text
        assert "kvdir_partial_holders 1.0" in text
        evicted = served.coordinator.directory.room.evicted_blocks
        assert f"kvdir_index_evicted_blocks_total {float(evicted)}" in text


async def test_checkpoint_larger_than_the_bound_is_restored_as_far_as_it_fits(tmp_path: object) -> None:
    config = dataclasses.replace(FAST_CONFIG, checkpoint=f"{tmp_path}/checkpoint")
    async with serving(config) as served, FakeNode(served.address, "n1") as node:
        node.store(some_fingerprints(10_000))
        await node.synced()
    async with serving(dataclasses.replace(config, max_index_bytes=LEAST_MAX_BYTES)) as served:
        status = await served.client.status()
        assert 2_000 <= status.restored_blocks == status.blocks < 4_000
        assert status.evicted_blocks == 10_000 - status.blocks


@pytest.mark.parametrize("bound", ["1", str(LEAST_MAX_BYTES - 1), "-5"])
def test_bound_is_refused_with_the_least_that_works_when_it_is_too_small(bound: str) -> None:
    assert any(show_bytes(LEAST_MAX_BYTES) in fault for fault in CoordinatorConfig(max_index_bytes=int(bound)).faults())
    assert not any("max_index_bytes" in fault for fault in CoordinatorConfig(max_index_bytes=LEAST_MAX_BYTES).faults())


def test_bound_is_refused_when_there_is_less_memory_for_workers_to_share() -> None:
    with pytest.raises(ConfigError, match=r"max_index_bytes: .* free in /dev/shm"):
        build_coordinator(CoordinatorConfig(max_index_bytes=2**50, lookup_workers=1))


def test_coordinator_with_workers_has_its_bound_in_the_region() -> None:
    coordinator = build_coordinator(CoordinatorConfig(max_index_bytes=LEAST_MAX_BYTES, lookup_workers=1))
    assert coordinator.place is not None
    try:
        with pytest.raises(MemoryError):
            coordinator.directory.index.make_room(100_000, holder=0)
    finally:
        coordinator.place.close()

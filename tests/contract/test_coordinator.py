"""The coordinator as its clients see it, over real gRPC: lookups, streams, feedback."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import grpc
import grpc.aio
import pytest

from kvdir.core.answer import LookupMode
from kvdir.core.event import Event
from kvdir.core.feedback import StaleReport
from kvdir.core.outbox import OwnerOutbox
from kvdir.errors import (
    TooLarge,
    UnknownNamespace,
)
from kvdir.fingerprint import Fingerprints
from kvdir.location import StreamState, Tier
from kvdir.testing.fake_node import EXAMPLE_NAMESPACE, FakeNode, some_fingerprints
from kvdir.testing.served import FAST_CONFIG, publishing, said, serving
from kvdir.testing.wait import eventually
from kvdir.v1 import common_pb2, directory_pb2, directory_pb2_grpc

DIGEST = EXAMPLE_NAMESPACE.digest


async def test_lookup_names_holders_when_a_node_stored_blocks() -> None:
    blocks = some_fingerprints(100)
    async with serving() as served, FakeNode(served.address, "n1") as node:
        node.store(blocks.slice(0, 60))
        node.store(blocks.slice(50, 20), Tier.DISK)
        await node.synced()
        answer = await served.client.lookup(DIGEST, blocks)
        assert (answer.hits, answer.asked) == (70, 100)
        assert [(run.start, run.count, [tier for _, tier in run.holders]) for run in answer] == [
            (0, 50, [Tier.CPU]),
            (50, 10, [Tier.CPU, Tier.DISK]),
            (60, 10, [Tier.DISK]),
        ]
        (trust,) = answer.nodes
        assert (trust.node, trust.epoch, trust.state, trust.peer_address) == ("n1", node.epoch, StreamState.SYNCED, "n1:7500")


async def test_prefix_ends_at_the_first_miss_when_blocks_are_missing() -> None:
    blocks = some_fingerprints(64)
    async with serving() as served, FakeNode(served.address, "n1") as node:
        node.store(blocks.slice(0, 10))
        node.store(blocks.slice(20, 10))
        await node.synced()
        answer = await served.client.lookup(DIGEST, blocks, mode=LookupMode.PREFIX)
        assert [(run.start, run.count) for run in answer] == [(0, 10)]


async def test_unknown_namespace_names_the_known_ones_when_asked() -> None:
    async with serving() as served, FakeNode(served.address, "n1") as node:
        await node.synced()
        with pytest.raises(UnknownNamespace, match=EXAMPLE_NAMESPACE.short):
            await served.client.lookup(bytes(32), some_fingerprints(1))


@pytest.mark.parametrize(("packed", "width", "words"), [(b"x" * 10, 8, "multiple"), (b"x" * 12, 12, "width is 12")])
async def test_bad_packing_is_refused_when_looked_up(packed: bytes, width: int, words: str) -> None:
    request = directory_pb2.LookupRequest(
        namespace_digest=DIGEST, fingerprints=common_pb2.Fingerprints(packed=packed, width=width)
    )
    async with serving() as served, FakeNode(served.address, "n1") as node:
        await node.synced()
        async with grpc.aio.insecure_channel(served.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
                await directory_pb2_grpc.DirectoryStub(channel).Lookup(request, timeout=5)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert ("kvdir-code", "invalid-input") in tuple(caught.value.trailing_metadata() or ())


async def test_oversized_lookup_names_the_limit_when_refused() -> None:
    async with serving() as served, FakeNode(served.address, "n1") as node:
        await node.synced()
        with pytest.raises(TooLarge, match="max_fingerprints is 4096"):
            await served.client.lookup(DIGEST, some_fingerprints(4097, width=8))
        assert (await served.client.lookup(DIGEST, some_fingerprints(4096, width=8))).hits == 0


async def test_one_bad_list_does_not_fail_the_others_when_batched() -> None:
    blocks = some_fingerprints(4)
    packed = common_pb2.Fingerprints(packed=blocks.packed, width=32)
    good = directory_pb2.LookupRequest(namespace_digest=DIGEST, fingerprints=packed)
    bad = directory_pb2.LookupRequest(namespace_digest=b"no", fingerprints=packed)
    async with serving() as served, FakeNode(served.address, "n1") as node:
        node.store(blocks)
        await node.synced()
        async with grpc.aio.insecure_channel(served.address) as channel:
            stub = directory_pb2_grpc.DirectoryStub(channel)
            answer = await stub.LookupBatch(directory_pb2.LookupBatchRequest(requests=[good, bad, good]), timeout=5)
    assert [item.hits for item in answer.responses] == [4, 0, 4]
    assert [item.error.partition(":")[0] for item in answer.responses] == ["", "unknown-namespace", ""]


async def test_batch_is_refused_when_it_is_of_too_many_lists_though_they_are_empty() -> None:
    async with serving() as served, grpc.aio.insecure_channel(served.address) as channel:
        many = directory_pb2.LookupBatchRequest(requests=[directory_pb2.LookupRequest()] * 4097)
        with pytest.raises(grpc.aio.AioRpcError, match="max_fingerprints is 4096") as caught:
            await directory_pb2_grpc.DirectoryStub(channel).LookupBatch(many, timeout=5)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_removed_and_cleared_blocks_vanish_when_published() -> None:
    blocks = some_fingerprints(30)
    async with serving() as served, FakeNode(served.address, "n1") as node:
        node.store(blocks)
        node.remove(blocks.slice(0, 10))
        await node.synced()
        assert (await served.client.lookup(DIGEST, blocks)).hits == 20
        node.held[Tier.CPU].clear()
        node.outbox.append(Event.cleared(Tier.CPU))
        await node.synced()
        assert (await served.client.lookup(DIGEST, blocks)).hits == 0


async def test_stream_heals_when_batches_are_lost() -> None:
    async with serving() as served, FakeNode(served.address, "n1", loss=0.2) as node:
        for number in range(60):
            node.store(some_fingerprints(8, seed=number))
            if number % 3 == 2:
                node.remove(some_fingerprints(8, seed=number - 1))
            await asyncio.sleep(0)
        await node.synced()
        await eventually(lambda: node.state is StreamState.SYNCED)
        held = Fingerprints.of(sorted(node.held[Tier.CPU]))
        assert (await served.client.lookup(DIGEST, held)).hits == len(held)
        (view,) = await served.client.nodes()
        assert [(item.blocks.value, item.blocks.trusted) for item in view.holdings] == [(len(held), True)]


async def test_snapshot_restores_trust_when_the_owner_lost_events_itself() -> None:
    blocks = some_fingerprints(50)
    async with serving() as served, FakeNode(served.address, "n1") as node:
        await node.synced()
        node.held[Tier.CPU] = set(blocks)
        node.outbox.lose(3)
        node.store(some_fingerprints(1, seed=9))
        await node.synced()
        assert (await served.client.lookup(DIGEST, blocks)).hits == 50
        (view,) = await served.client.nodes()
        assert (view.snapshots, view.holdings[0].blocks.require_trusted()) == (1, 51)


async def test_snapshot_in_chunks_is_whole_when_large() -> None:
    blocks = some_fingerprints(40_000, width=16)
    async with serving(replace(FAST_CONFIG, max_fingerprints=65_536)) as served:
        node = FakeNode(served.address, "n1", outbox=OwnerOutbox(max_events=1))
        node.held[Tier.CPU] = set(blocks)
        node.outbox.lose()
        async with node:
            await node.synced()
            assert (await served.client.lookup(DIGEST, blocks)).hits == 40_000


async def test_older_agent_is_fenced_and_told_when_two_have_one_name() -> None:
    blocks = some_fingerprints(5)
    async with serving() as served, FakeNode(served.address, "twin", epoch=1) as older:
        older.store(blocks)
        await older.synced()
        async with FakeNode(served.address, "twin", epoch=2) as newer:
            await newer.synced()
            await eventually(lambda: older.fenced)
            assert "registered later" in older.fenced
            assert (await served.client.lookup(DIGEST, blocks)).hits == 0
            newer.store(blocks)
            await newer.synced()
            (trust,) = (await served.client.lookup(DIGEST, blocks)).nodes
            assert trust.epoch == 2
            async with publishing(served, node="twin", epoch=1) as call:
                fenced = await said(call, "fenced")
                assert (fenced.epoch, fenced.newer_epoch) == (1, 2)


async def test_blocks_vanish_at_once_when_a_node_says_goodbye() -> None:
    blocks = some_fingerprints(5)
    async with serving() as served, FakeNode(served.address, "n1") as node:
        node.store(blocks)
        await node.synced()
        node.publisher.leave()
        await eventually(lambda: not served.coordinator.directory.nodes["n1"].stream.holders)  # type: ignore[union-attr]
        assert (await served.client.lookup(DIGEST, blocks)).hits == 0


async def test_namespace_is_known_when_announced_in_the_middle_of_a_call() -> None:
    other = replace(EXAMPLE_NAMESPACE, weights="rev-2")
    async with serving() as served, FakeNode(served.address, "n1") as node:
        await node.synced()
        node.publisher.announce((EXAMPLE_NAMESPACE, other))
        node.outbox.append(Event.stored(Tier.CPU, other.digest, some_fingerprints(3)))
        await eventually(lambda: served.coordinator.directory.ingest.applied == 1)
        assert (await served.client.lookup(other.digest, some_fingerprints(3))).hits == 3
        assert node.publisher.stats().calls == 1


async def test_stale_hint_is_removed_when_a_reader_reports_it() -> None:
    blocks = some_fingerprints(4)
    async with serving() as served, FakeNode(served.address, "n1") as node:
        await node.synced()
        node.store(blocks)
        await node.synced()
        report = StaleReport("n1", node.epoch, node.outbox.last_seq, DIGEST, Tier.CPU, blocks.slice(0, 1), "reader")
        old = replace(report, epoch=node.epoch + 1)
        assert (await served.client.report_stale(old)).ignored_reason == "old epoch"
        assert (await served.client.report_stale(replace(report, node="n9"))).ignored_reason == "unknown node"
        older = replace(report, owner_seq=0)
        assert (await served.client.report_stale(older)).ignored_reason == "a newer store was heard"
        assert (await served.client.lookup(DIGEST, blocks)).hits == 4
        assert (await served.client.report_stale(report)).removed == 1
        assert (await served.client.lookup(DIGEST, blocks)).hits == 3
        # The reader was wrong: the digest of the next heartbeat says so, and a sketch puts it right.
        directory = served.coordinator.directory
        await eventually(lambda: directory.reconciler.repaired_blocks == 1)
        assert directory.counters.snapshots_applied == 0
        assert (await served.client.lookup(DIGEST, blocks)).hits == 4

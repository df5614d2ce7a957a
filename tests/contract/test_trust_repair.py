"""Repair and trust over real gRPC: what is silently wrong heals at a small cost; sums say whether they may be acted upon."""

from __future__ import annotations

import pytest

from kvdir.core.outbox import OwnerOutbox
from kvdir.core.repair import Ask
from kvdir.core.sketches import OwnerSketches
from kvdir.core.trust import Trusted
from kvdir.core.views import ViewScope
from kvdir.errors import InvalidInput, UntrustedView
from kvdir.index import Sketch
from kvdir.location import StreamState, Tier
from kvdir.rpc.lookup_codec import encode_fingerprints
from kvdir.testing.fake_node import EXAMPLE_NAMESPACE, FakeNode, some_fingerprints
from kvdir.testing.served import Served, publishing, said, serving
from kvdir.testing.wait import eventually
from kvdir.v1 import directory_pb2, directory_pb2_grpc, events_pb2

DIGEST = EXAMPLE_NAMESPACE.digest


def scraped(served: Served) -> dict[tuple[str, ...], float]:
    """What /metrics shows, by name and label values."""
    coordinator = served.coordinator
    list(coordinator.gather_metrics())
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in coordinator.metrics.collect()
        for sample in family.samples
    }


async def test_lost_remove_is_found_and_repaired_when_nobody_touches_the_block() -> None:
    blocks = some_fingerprints(200)
    async with serving() as served, FakeNode(served.address, "n1") as node:
        node.store(blocks)
        await node.synced()
        directory = served.coordinator.directory
        stream = directory.nodes["n1"].stream
        assert stream is not None
        before = directory.repairs[Ask.SNAPSHOT].asked
        node.forget(blocks.slice(0, 7))
        await eventually(lambda: directory.reconciler.repaired_blocks == 7)
        await eventually(lambda: stream.cursor.state is StreamState.SYNCED and stream.unconfirmed_blocks == 0)
        assert (await served.client.lookup(DIGEST, blocks)).hits == 193
        assert directory.repairs[Ask.SNAPSHOT].asked == before
        assert directory.repairs[Ask.SKETCH].bytes < 3_300
        (view,) = await served.client.nodes()
        assert (view.sketches, view.snapshots) == (1, before)
        figures = scraped(served)
        assert figures["kvdir_repairs_total", "sketch", "done"] == 1
        assert 0 < figures["kvdir_repair_bytes_total", "sketch"] < 3_300
        assert 0 < figures["kvdir_repair_seconds_total", "sketch"] < 5
        assert figures["kvdir_sketch_repaired_blocks_total",] == 7
        assert figures["kvdir_digest_contradictions_total",] == 1
        assert figures["kvdir_stream_confirmed_ratio", "n1"] == 1.0
        assert (figures["kvdir_views", "tenant", "true"], figures["kvdir_views", "tenant", "false"]) == (1, 0)


async def test_stream_heals_by_sketch_when_the_ring_is_too_short() -> None:
    outbox = OwnerOutbox(max_events=4, sketches=OwnerSketches(Sketch))
    async with serving() as served, FakeNode(served.address, "n1", outbox=outbox) as node:
        node.store(some_fingerprints(500))
        await node.synced()
        directory = served.coordinator.directory
        before = directory.repairs[Ask.SNAPSHOT].asked
        for seed in range(1, 20):
            node.store(some_fingerprints(2, seed=seed))  # faster than the publisher can run: the oldest fall out
        await eventually(lambda: directory.repairs[Ask.SKETCH].done == 1)
        await node.synced()
        assert directory.repairs[Ask.SNAPSHOT].asked == before
        (view,) = await served.client.nodes()
        assert (view.holdings[0].blocks.require_trusted(), view.missed_events) == (538, 15)


async def test_sums_are_trusted_only_when_every_contributing_stream_is_whole() -> None:
    async with serving() as served, FakeNode(served.address, "n1") as one, FakeNode(served.address, "n2") as two:
        one.store(some_fingerprints(10))
        two.store(some_fingerprints(4, seed=2), Tier.DISK)
        await one.synced()
        await two.synced()
        sums = await served.client.views()
        tenant = sums.find(ViewScope.TENANT, "none")
        assert tenant is not None
        assert isinstance(tenant.blocks.require_trusted(), Trusted)
        assert tenant.bytes.require_trusted() == 14 * EXAMPLE_NAMESPACE.block_bytes
        blocks = {(total.scope, total.subject): total.blocks.value for total in sums.totals if total.blocks.value}
        assert blocks == {
            (ViewScope.NODE, "n1"): 10,
            (ViewScope.NODE, "n2"): 4,
            (ViewScope.TIER, "cpu"): 10,
            (ViewScope.TIER, "disk"): 4,
            (ViewScope.NAMESPACE, DIGEST.hex()): 14,
            (ViewScope.TENANT, "none"): 14,
        }
        assert [load.node for load in sums.loads] == ["n1", "n2"]
        assert [load.oldest_use_ms.value for load in sums.loads] == [1500, 1500]
        assert [load.read_bytes_per_s.value for load in sums.loads] == [2**20, 2**20]
        async with publishing(served) as call:  # a third node of the namespace, of which something is missing
            await said(call, "welcome")
            await call.write(events_pb2.PublishRequest(heartbeat=events_pb2.Heartbeat(epoch=7, last_seq=3)))
            await said(call, "replay_request")
            sums = await served.client.views()
            tenant, node = sums.find(ViewScope.TENANT, "none"), sums.find(ViewScope.NODE, "n1")
            assert tenant is not None
            assert node is not None
            assert (node.blocks.require_trusted(), tenant.blocks.value) == (10, 14)
            with pytest.raises(UntrustedView, match="3 events missing"):
                tenant.blocks.require_trusted()


async def test_sketch_that_nobody_asked_for_changes_nothing() -> None:
    async with serving() as served, publishing(served) as call:
        await said(call, "welcome")
        sketch = events_pb2.Sketch(epoch=7, request_id=1, at_seq=9, parts=[events_pb2.SketchPart(namespace_digest=DIGEST)])
        await call.write(events_pb2.PublishRequest(sketch=sketch))
        await eventually(lambda: served.coordinator.directory.reconciler.failures["unasked"] == 1)
        stream = served.coordinator.directory.nodes["raw"].stream
        assert stream is not None
        assert (stream.cursor.state, stream.cursor.applied_seq) == (StreamState.SYNCED, 0)


async def test_lookup_is_refused_when_it_asks_for_a_trust_that_is_unknown() -> None:
    async with serving() as served, FakeNode(served.address, "n1") as node:
        node.store(some_fingerprints(1))
        await node.synced()
        request = directory_pb2.LookupRequest(
            namespace_digest=DIGEST,
            fingerprints=encode_fingerprints(some_fingerprints(1)),
            min_trust=9,  # type: ignore[arg-type]
        )
        batch = directory_pb2.LookupBatchRequest(requests=[request])
        await served.client.status()
        channel = served.client._channels[served.address]
        answer = await directory_pb2_grpc.DirectoryStub(channel).LookupBatch(batch)
        assert InvalidInput.code in answer.responses[0].error

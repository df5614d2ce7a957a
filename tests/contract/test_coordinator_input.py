"""Bad input on a stream: each gets a clear answer, costs only itself, and is counted."""

from __future__ import annotations

from dataclasses import replace

import grpc
import grpc.aio
import pytest

from kvdir.errors import (
    Overloaded,
    UnknownNamespace,
)
from kvdir.location import PROTOCOL_VERSION, StreamState
from kvdir.rpc.event_codec import encode_hello
from kvdir.testing.fake_node import EXAMPLE_NAMESPACE, FakeNode, some_fingerprints
from kvdir.testing.served import FAST_CONFIG, batch, publishing, said, serving, stored
from kvdir.testing.wait import eventually
from kvdir.v1 import events_pb2, events_pb2_grpc

DIGEST = EXAMPLE_NAMESPACE.digest


async def test_other_protocol_version_is_refused_when_it_says_hello() -> None:
    async with serving() as served, publishing(served, protocol_version=PROTOCOL_VERSION + 1) as call:
        with pytest.raises(grpc.aio.AioRpcError, match="run the same release"):
            await call.read()


async def test_call_is_refused_when_it_does_not_begin_with_hello() -> None:
    async with serving() as served, grpc.aio.insecure_channel(served.address) as channel:
        call = events_pb2_grpc.EventsStub(channel).Publish()
        await call.write(batch(1))
        with pytest.raises(grpc.aio.AioRpcError, match="begins with hello"):
            await call.read()


async def test_unknown_kinds_and_tiers_are_skipped_when_the_rest_of_the_batch_is_good() -> None:
    blocks = some_fingerprints(6)
    async with serving() as served, publishing(served) as call:
        await said(call, "welcome")
        good, other = stored(blocks.slice(0, 2)), stored(blocks.slice(2, 2))
        odd = [stored(blocks.slice(4, 2), kind=9), stored(blocks.slice(4, 2), tier=77), stored(blocks.slice(4, 2))]
        odd[2].namespace_digest = b"never announced"
        await call.write(batch(1, good, *odd, other))
        await eventually(lambda: served.coordinator.directory.ingest.applied == 2)
        assert (await served.client.lookup(DIGEST, blocks)).hits == 4
        assert [served.rejected(why) for why in ("unknown-kind", "unknown-tier", "unknown-namespace")] == [1, 1, 1]
        (view,) = await served.client.nodes()
        assert view.trust.state is not StreamState.SYNCED  # an event we do not understand may have changed a figure


async def test_broken_fingerprints_ask_for_a_snapshot_when_in_an_event() -> None:
    async with serving() as served, publishing(served) as call:
        await said(call, "welcome")
        event = stored(some_fingerprints(2))
        event.fingerprints.packed = b"short"
        await call.write(batch(1, event))
        request = await said(call, "snapshot_request")
        assert "skipped" in request.reason
        assert served.rejected("bad-fingerprints") == 1


async def test_batch_is_ignored_when_it_is_of_another_epoch() -> None:
    blocks = some_fingerprints(2)
    async with serving() as served, publishing(served) as call:
        await said(call, "welcome")
        await call.write(batch(1, stored(blocks), epoch=8))
        await eventually(lambda: served.rejected("wrong-epoch") == 1)
        assert (await served.client.lookup(DIGEST, blocks)).hits == 0


async def test_snapshot_changes_nothing_when_its_total_is_a_lie() -> None:
    blocks = some_fingerprints(4)
    async with serving() as served, publishing(served) as call:
        await said(call, "welcome")
        await call.write(batch(1, stored(blocks.slice(0, 2))))
        await call.write(batch(3, stored(blocks.slice(0, 2))))
        await said(call, "replay_request")
        await call.write(events_pb2.PublishRequest(replay_unavailable=events_pb2.ReplayUnavailable(epoch=7, oldest_seq=3)))
        for total in (99, 2):
            request = await said(call, "snapshot_request")
            chunk = events_pb2.SnapshotChunk(
                epoch=7, snapshot_id=request.snapshot_id, at_seq=3, entries=[stored(blocks.slice(2, 2))], last=True,
                total_blocks=total,
            )  # fmt: skip
            await call.write(events_pb2.PublishRequest(snapshot=chunk))
            if total == 99:
                await eventually(lambda: served.coordinator.directory.counters.snapshots_refused == 1)
                assert [(run.start, run.count) for run in await served.client.lookup(DIGEST, blocks)] == [(0, 2)]
        await eventually(lambda: served.coordinator.directory.counters.snapshots_applied == 1)
        assert [(run.start, run.count) for run in await served.client.lookup(DIGEST, blocks)] == [(2, 2)]


async def test_namespace_is_refused_when_its_digest_is_not_its_own() -> None:
    async with serving() as served, grpc.aio.insecure_channel(served.address) as channel:
        call = events_pb2_grpc.EventsStub(channel).Publish()
        request = encode_hello(
            node="raw", epoch=7, last_seq=0, peer_address="h:1", started_unix_ms=0,
            namespaces=[EXAMPLE_NAMESPACE], agent_version="test",
        )  # fmt: skip
        request.hello.namespaces[0].digest = bytes(32)
        await call.write(request)
        await said(call, "welcome")
        assert served.coordinator.directory.counters.namespaces_refused == 1
        with pytest.raises(UnknownNamespace):
            await served.client.lookup(bytes(32), some_fingerprints(1))
        call.cancel()


async def test_hello_is_refused_when_there_are_too_many_nodes() -> None:
    async with serving(replace(FAST_CONFIG, max_streams=1)) as served, FakeNode(served.address, "n1") as node:
        await node.synced()
        with pytest.raises(grpc.aio.AioRpcError, match="max_streams") as caught:  # by the write, if the refusal is faster
            async with publishing(served, node="one too many") as call:
                await call.read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert ("kvdir-code", Overloaded.code) in tuple(caught.value.trailing_metadata() or ())

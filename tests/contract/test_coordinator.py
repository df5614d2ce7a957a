"""The coordinator as its clients see it: a real gRPC server in this process, on a free port."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvdir.client.aio import DirectoryClient
from kvdir.core.answer import LookupMode
from kvdir.core.event import Event
from kvdir.core.feedback import StaleReport
from kvdir.core.outbox import OwnerOutbox
from kvdir.errors import (
    DeadlineExceeded,
    InvalidInput,
    Overloaded,
    RemoteProtocolError,
    TooLarge,
    Unavailable,
    UnknownNamespace,
)
from kvdir.fingerprint import Fingerprints
from kvdir.location import PROTOCOL_VERSION, StreamState, Tier
from kvdir.rpc.event_codec import encode_hello
from kvdir.server.app import build_coordinator
from kvdir.server.config import CoordinatorConfig
from kvdir.server.coordinator import Coordinator
from kvdir.server.serve import running
from kvdir.testing.fake_node import EXAMPLE_NAMESPACE, FakeNode, some_fingerprints
from kvdir.testing.wait import eventually
from kvdir.v1 import common_pb2, directory_pb2, directory_pb2_grpc, events_pb2, events_pb2_grpc

CONFIG = CoordinatorConfig(
    listen="127.0.0.1:0",
    http_listen="127.0.0.1:0",
    heartbeat_interval_ms=50,
    stale_after_s=1.0,
    expire_after_s=3.0,
    replay_idle_s=0.3,
    max_fingerprints=4096,
    grace_s=1.0,
)
DIGEST = EXAMPLE_NAMESPACE.digest


class Served:
    """A running coordinator, with the ends a test needs."""

    def __init__(self, coordinator: Coordinator, grpc_address: str, http_address: str) -> None:
        self.coordinator = coordinator
        self.address = grpc_address
        self.http = http_address
        self.client = DirectoryClient(grpc_address, deadline_s=5.0)

    def rejected(self, reason: str) -> int:
        return self.coordinator.directory.ingest.rejected[reason]


@contextlib.asynccontextmanager
async def serving(config: CoordinatorConfig = CONFIG) -> AsyncIterator[Served]:
    coordinator = build_coordinator(config)
    async with running(coordinator) as bound:
        served = Served(coordinator, bound.grpc, bound.http)
        async with served.client:
            yield served


@contextlib.asynccontextmanager
async def publishing(served: Served, *, node: str = "raw", epoch: int = 7, **hello: Any) -> AsyncIterator[Any]:
    """A raw publish call after its welcome, for messages that our own publisher would never send."""
    async with grpc.aio.insecure_channel(served.address) as channel:
        call = events_pb2_grpc.EventsStub(channel).Publish()
        request = encode_hello(
            node=node, epoch=epoch, last_seq=0, peer_address="h:1", started_unix_ms=0,
            namespaces=[EXAMPLE_NAMESPACE], agent_version="test",
        )  # fmt: skip
        for name, value in hello.items():
            setattr(request.hello, name, value)
        await call.write(request)
        yield call
        call.cancel()


async def said(call: Any, kind: str) -> Any:
    """The next response of a kind; others are passed over."""
    async with asyncio.timeout(10):
        while True:
            response = await call.read()
            assert response is not grpc.aio.EOF, f"the call ended before {kind}"
            if response.WhichOneof("message") == kind:
                return getattr(response, kind)


def batch(first_seq: int, *events: events_pb2.Event, epoch: int = 7) -> events_pb2.PublishRequest:
    return events_pb2.PublishRequest(batch=events_pb2.Batch(epoch=epoch, first_seq=first_seq, events=events))


def stored(fingerprints: Fingerprints, **fields: Any) -> events_pb2.Event:
    packed = common_pb2.Fingerprints(packed=fingerprints.packed, width=fingerprints.width)
    event = events_pb2.Event(kind=1, tier=2, namespace_digest=DIGEST, fingerprints=packed)
    for name, value in fields.items():
        setattr(event, name, value)
    return event


# -- lookups -------------------------------------------------------------------------------------------------------------


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


# -- streams -------------------------------------------------------------------------------------------------------------


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
    async with serving(replace(CONFIG, max_fingerprints=65_536)) as served:
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


# -- bad input on a stream -----------------------------------------------------------------------------------------------


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
    async with serving(replace(CONFIG, max_streams=1)) as served, FakeNode(served.address, "n1") as node:
        await node.synced()
        async with publishing(served, node="one too many") as call:
            with pytest.raises(grpc.aio.AioRpcError, match="max_streams") as caught:
                await call.read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert ("kvdir-code", Overloaded.code) in tuple(caught.value.trailing_metadata() or ())


# -- feedback ------------------------------------------------------------------------------------------------------------


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
        # The reader was wrong: the owner's next count says so, and a snapshot puts it right.
        await eventually(lambda: served.coordinator.directory.counters.snapshots_applied == 1)
        assert (await served.client.lookup(DIGEST, blocks)).hits == 4


# -- operators -----------------------------------------------------------------------------------------------------------


async def test_reconcile_restates_a_node_when_asked() -> None:
    async with serving() as served, FakeNode(served.address, "n1") as node:
        node.store(some_fingerprints(10))
        await node.synced()
        outcome = await served.client.reconcile("n1")
        assert (outcome.done, outcome.blocks, outcome.trust.state) == (True, 10, StreamState.SYNCED)
        with pytest.raises(InvalidInput, match="kvdir nodes"):
            await served.client.reconcile("nobody")


async def test_reconcile_says_not_done_when_the_node_is_silent() -> None:
    async with serving() as served, publishing(served) as call:
        await said(call, "welcome")
        outcome = await served.client.reconcile("raw", deadline_s=0.5)
        assert not outcome.done


async def test_dump_has_every_block_once_when_streamed() -> None:
    blocks = some_fingerprints(1000)
    async with serving() as served, FakeNode(served.address, "n1") as one, FakeNode(served.address, "n2") as two:
        one.store(blocks)
        two.store(blocks.slice(0, 300))
        await one.synced()
        await two.synced()
        parts = [part async for part in served.client.dump(chunk_blocks=128)]
        keys = [key for part in parts for key in memoryview(part.keys).cast("Q")]
        assert (len(parts) > 1, len(keys), len(set(keys))) == (True, 1000, 1000)
        only_two = [part async for part in served.client.dump(node="n2")]
        assert sum(len(part.keys) // 8 for part in only_two) == 300
        assert {name for part in only_two for name in part.nodes} == {"n2"}


async def test_status_counts_what_happened_when_asked() -> None:
    async with serving() as served, FakeNode(served.address, "n1") as node:
        node.store(some_fingerprints(10))
        await node.synced()
        await served.client.lookup(DIGEST, some_fingerprints(20))
        status = await served.client.status()
        assert (status.blocks, status.streams_synced, status.streams_total) == (10, 1, 1)
        assert (status.lookups, status.lookup_blocks, status.lookup_hits) == (1, 20, 10)
        assert [item.digest for item in status.namespaces] == [DIGEST]


async def test_health_and_reflection_answer_when_asked() -> None:
    async with serving() as served, grpc.aio.insecure_channel(served.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(service="kvdir.v1.Directory"), timeout=5)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        ask = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=5
        )
        listed = {item.name for item in (await ask.read()).list_services_response.service}
        assert {"kvdir.v1.Directory", "kvdir.v1.Events", "kvdir.v1.Admin"} <= listed


def _get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


async def test_http_side_tells_state_and_figures_when_asked() -> None:
    async with serving() as served, FakeNode(served.address, "n1") as node:
        node.store(some_fingerprints(10))
        await node.synced()
        await eventually(lambda: served.coordinator.metrics.ready)
        assert await asyncio.to_thread(_get, f"http://{served.http}/healthz") == (200, "ok\n")
        assert (await asyncio.to_thread(_get, f"http://{served.http}/readyz"))[0] == 200
        _, text = await asyncio.to_thread(_get, f"http://{served.http}/metrics")
        assert 'kvdir_streams{state="synced"} 1.0' in text
        assert "kvdir_index_blocks 10.0" in text
        served.coordinator.drain()
        status, words = await asyncio.to_thread(_get, f"http://{served.http}/readyz")
        assert (status, words) == (503, "draining\n")


# -- clients -------------------------------------------------------------------------------------------------------------


async def test_client_takes_the_next_coordinator_when_the_first_is_down() -> None:
    async with serving() as served:
        async with DirectoryClient(f"127.0.0.1:1,{served.address}", deadline_s=5.0) as client:
            assert (await client.status()).version
        async with DirectoryClient("127.0.0.1:1", deadline_s=1.0) as client:
            with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1"):
                await client.status()


async def test_client_ends_by_its_deadline_when_nobody_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel connects, nobody ever speaks
        port = silent.getsockname()[1]
        async with DirectoryClient(f"127.0.0.1:{port}", deadline_s=0.3) as client:
            loop = asyncio.get_running_loop()
            started_s = loop.time()
            with pytest.raises((Unavailable, DeadlineExceeded)):
                await client.status()
            assert loop.time() - started_s < 3.0


async def test_answer_is_refused_when_it_speaks_another_version() -> None:
    class Other(directory_pb2_grpc.DirectoryServicer):
        async def Lookup(self, request: Any, context: Any) -> Any:
            return directory_pb2.LookupResponse(protocol_version=9)

    server = grpc.aio.server()
    directory_pb2_grpc.add_DirectoryServicer_to_server(Other(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with DirectoryClient(f"127.0.0.1:{port}", deadline_s=5.0) as client:
        with pytest.raises(RemoteProtocolError, match="protocol version 9"):
            await client.lookup(DIGEST, some_fingerprints(1))
    await server.stop(None)

"""What operators and clients of the coordinator rely on, over real gRPC and HTTP."""

from __future__ import annotations

import asyncio
import socket
import urllib.error
import urllib.request
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvdir.client.aio import DirectoryClient
from kvdir.errors import (
    DeadlineExceeded,
    InvalidInput,
    RemoteProtocolError,
    Unavailable,
)
from kvdir.location import StreamState
from kvdir.testing.fake_node import EXAMPLE_NAMESPACE, FakeNode, some_fingerprints
from kvdir.testing.served import publishing, said, serving
from kvdir.testing.wait import eventually
from kvdir.v1 import directory_pb2, directory_pb2_grpc

DIGEST = EXAMPLE_NAMESPACE.digest


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
        await eventually(lambda: not served.coordinator.directory.warming)
        assert await asyncio.to_thread(_get, f"http://{served.http}/healthz") == (200, "ok\n")
        assert (await asyncio.to_thread(_get, f"http://{served.http}/readyz"))[0] == 200
        _, text = await asyncio.to_thread(_get, f"http://{served.http}/metrics")
        assert 'kvdir_streams{state="synced"} 1.0' in text
        assert "kvdir_index_blocks 10.0" in text
        served.coordinator.drain()
        status, words = await asyncio.to_thread(_get, f"http://{served.http}/readyz")
        assert (status, words) == (503, "draining\n")


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

"""Callers that ask and ask and take no answer, at real daemons: others are served, and what waits for them is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from kvdir.client.aio import DirectoryClient
from kvdir.errors import KvdirError
from kvdir.fingerprint import Fingerprints
from kvdir.rpc.event_codec import encode_hello
from kvdir.rpc.lookup_codec import encode_fingerprints
from kvdir.testing.crowd import Cost
from kvdir.testing.fake_node import EXAMPLE_NAMESPACE
from kvdir.testing.served import batch, stored
from kvdir.testing.wait import eventually
from kvdir.v1 import directory_pb2, directory_pb2_grpc, events_pb2_grpc
from peer_agent.demo.processes import Child
from peer_agent.testing import sample_namespace
from peer_agent.testing.daemons import everything_answers, started
from peer_agent.testing.processes import ProcessCluster
from peer_agent.transport.faulty_owner import HELLO, HELLO_MAGIC, MAX_REQUEST_BLOCKS, REQUEST, REQUEST_MAGIC, VERSION

GROWTH_BYTES = 96 << 20
ASKED = 4_000
"""Messages, unless the server stops reading before: then the rest is not sent."""

STUCK_S = 1.0
"""A write that takes so long: the server reads no further. Nothing depends on it being so."""


@pytest.fixture
async def cluster() -> AsyncIterator[ProcessCluster]:
    with tempfile.TemporaryDirectory(prefix="kvdir-test-", dir="/dev/shm") as path:
        made = ProcessCluster(Path(path), sample_namespace(block_bytes=1 << 16))
        try:
            yield made
        finally:
            await made.close()


async def write_without_reading(write: Callable[[int], Awaitable[Any]]) -> None:
    for number in range(ASKED):
        try:
            async with asyncio.timeout(STUCK_S):
                await write(number)
        except (TimeoutError, asyncio.CancelledError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return


ALL = Fingerprints(b"".join(number.to_bytes(16, "little") for number in range(2_048)), 16)
"""Every other one is published, so an answer has 1,024 runs: 12 KiB."""


async def publish(call: Any) -> None:
    hello = encode_hello(
        node="raw", epoch=7, last_seq=0, peer_address="h:1", started_unix_ms=0, namespaces=[EXAMPLE_NAMESPACE],
        agent_version="test",
    )  # fmt: skip
    await call.write(hello)
    await call.write(batch(1, stored(ALL.select(range(0, len(ALL), 2)))))


async def wait_known(address: str) -> None:
    async with DirectoryClient(address) as client:

        async def known() -> bool:
            with contextlib.suppress(KvdirError):
                return (await client.lookup(EXAMPLE_NAMESPACE.digest, ALL)).hits == len(ALL) // 2
            return False

        await eventually(known, what="the blocks are known")


async def lookups(address: str) -> None:
    """200 MB of answers, were they all made."""
    one = directory_pb2.LookupRequest(namespace_digest=EXAMPLE_NAMESPACE.digest, fingerprints=encode_fingerprints(ALL))
    message = directory_pb2.LookupStreamRequest(
        lookups=[directory_pb2.StreamedLookup(id=number, lookup=one, deadline_ms=60_000) for number in range(4)]
    )
    async with grpc.aio.insecure_channel(address) as channel:
        call = directory_pb2_grpc.DirectoryStub(channel).LookupStream()
        await write_without_reading(lambda _: call.write(message))
        call.cancel()


async def events(call: Any) -> None:
    some = stored(Fingerprints(bytes(range(16)), 16))
    await write_without_reading(lambda number: call.write(batch(number + 2, some)))


def plane_and_scrapes(coordinator: Child, agent: Child, stack: contextlib.AsyncExitStack) -> None:
    """Of each some connections whose buffers are as small as they may be, and that ask for much."""
    nothing = REQUEST.pack(REQUEST_MAGIC, MAX_REQUEST_BLOCKS, 1, bytes(64)) + bytes(24 * MAX_REQUEST_BLOCKS)
    reads = HELLO.pack(HELLO_MAGIC, VERSION, 0, 0) + 8 * nothing
    scrape = b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    for address, words in ((agent.ready["data"], reads), (agent.ready["http"], scrape), (coordinator.ready["http"], scrape)):
        host, _, port = str(address).rpartition(":")
        for _ in range(20):
            sock = stack.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.settimeout(10.0)
            sock.connect((host, int(port)))
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError, ConnectionError):
                sock.send(words)


async def test_others_are_served_and_memory_is_bounded_when_callers_take_no_answers(cluster: ProcessCluster) -> None:
    coordinator, agent = await started(cluster)
    await everything_answers(coordinator, agent)
    before = {child: Cost.of(child.pid) for child in (coordinator, agent)}
    address = str(coordinator.ready["grpc"])
    async with contextlib.AsyncExitStack() as stack:
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
        publishing = events_pb2_grpc.EventsStub(channel).Publish()
        await publish(publishing)
        await wait_known(address)
        plane_and_scrapes(coordinator, agent, stack)
        crowd = [asyncio.create_task(one) for one in (lookups(address), lookups(address), events(publishing))]
        await everything_answers(coordinator, agent)
        await asyncio.gather(*crowd)
        await everything_answers(coordinator, agent)
        for child, cost in before.items():
            now = Cost.of(child.pid)
            assert now.rss_bytes < cost.rss_bytes + GROWTH_BYTES, "answers that nobody takes pile up"
            assert now.threads < cost.threads + 32
    assert coordinator.running
    assert agent.running

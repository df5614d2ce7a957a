"""A coordinator in this process, on free ports, for tests of whatever talks to one; and raw publish calls against it.

Everything is real but the process: the gRPC server, the directory, the ticker, the HTTP side.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from kvdir.client.aio import DirectoryClient
from kvdir.core.event import Event
from kvdir.fingerprint import Fingerprints
from kvdir.location import Tier
from kvdir.rpc.certificates import TlsFiles
from kvdir.rpc.event_codec import encode_event, encode_hello
from kvdir.rpc.tls import Dialer
from kvdir.server.app import build_coordinator
from kvdir.server.config import CoordinatorConfig
from kvdir.server.coordinator import Coordinator
from kvdir.server.serve import Bound, running
from kvdir.testing.fake_node import EXAMPLE_NAMESPACE
from kvdir.v1 import events_pb2, events_pb2_grpc

FAST_CONFIG = CoordinatorConfig(
    listen="127.0.0.1:0",
    http_listen="127.0.0.1:0",
    heartbeat_interval_ms=50,
    stale_after_s=1.0,
    expire_after_s=3.0,
    replay_idle_s=0.3,
    max_fingerprints=4096,
    grace_s=1.0,
)


class Served:
    """A running coordinator, with the ends a test needs. dialer: of its clients."""

    def __init__(self, coordinator: Coordinator, bound: Bound, tls: TlsFiles | None = None) -> None:
        self.coordinator = coordinator
        self.address = bound.grpc
        self.http = bound.http
        self.indexer = bound.indexer
        self.page = bound.page
        self.health = bound.health
        self.dialer = Dialer.of(tls)
        self.client = DirectoryClient(bound.grpc, deadline_s=5.0, connect_timeout_s=5.0, tls=self.dialer)

    def rejected(self, reason: str) -> int:
        """Events skipped so far, by reason."""
        return self.coordinator.directory.ingest.rejected[reason]


@contextlib.asynccontextmanager
async def serving(config: CoordinatorConfig = FAST_CONFIG, *, tls: TlsFiles | None = None) -> AsyncIterator[Served]:
    """Serves inside the block; nothing is left of it afterwards. tls: of clients; its own where none is given."""
    coordinator = build_coordinator(config)
    async with running(coordinator) as bound:
        served = Served(coordinator, bound, tls or config.tls)
        async with served.client:
            yield served


@contextlib.asynccontextmanager
async def publishing(served: Served, *, node: str = "raw", epoch: int = 7, **hello: Any) -> AsyncIterator[Any]:
    """A raw publish call that has said hello (its welcome is yet to be read: `said`), for messages that our own publisher
    would never send."""
    async with served.dialer.aio(served.address, options=()) as channel:
        call = events_pb2_grpc.EventsStub(channel).Publish()
        request = encode_hello(
            node=node, epoch=epoch, last_seq=0, peer_address="h:1", started_unix_ms=0,
            namespaces=[EXAMPLE_NAMESPACE], agent_version="test",
        )  # fmt: skip
        for name, value in hello.items():
            setattr(request.hello, name, value)
        with contextlib.suppress(grpc.aio.AioRpcError):  # refused already: the first read raises it again
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
    """A batch message, of the epoch that `publishing` takes."""
    return events_pb2.PublishRequest(batch=events_pb2.Batch(epoch=epoch, first_seq=first_seq, events=events))


def stored(fingerprints: Fingerprints, **fields: Any) -> events_pb2.Event:
    """A `stored` event in the cpu tier, with some fields put wrong on purpose."""
    event = encode_event(Event.stored(Tier.CPU, EXAMPLE_NAMESPACE.digest, fingerprints))
    for name, value in fields.items():
        setattr(event, name, value)
    return event

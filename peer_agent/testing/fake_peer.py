"""A peer agent that says what a test tells it to: the Peer service, with any answer, delay or version, over real gRPC.

    async with fake_peer(FakePeer(node="a", offers={"tcp": descriptor}, records=records)) as address: ...

With `faulty_owner` behind its descriptor, the bytes are wrong as well. `asked` counts the Locks it was sent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from kvdir.location import PROTOCOL_VERSION
from peer_agent.core.capability import KEY_BYTES, CapabilityMint
from peer_agent.v1 import peer_pb2, peer_pb2_grpc


@dataclass(slots=True)
class FakePeer(peer_pb2_grpc.PeerServicer):
    """records: what Lock answers, whatever is asked. silent: calls, by name, that are never answered."""

    node: str
    epoch: int = 77
    offers: Mapping[str, bytes] = field(default_factory=dict)
    records: bytes = b""
    lock: int = 7
    protocol_version: int = PROTOCOL_VERSION
    silent: frozenset[str] = frozenset()
    asked: int = 0

    async def Hello(self, request: peer_pb2.HelloRequest, context: Any) -> peer_pb2.HelloResponse:
        await self._maybe_never("Hello")
        return peer_pb2.HelloResponse(
            protocol_version=self.protocol_version,
            node=self.node,
            epoch=self.epoch,
            transports=[peer_pb2.TransportOffer(transport=name, descriptor=item) for name, item in self.offers.items()],
        )

    async def Lock(self, request: peer_pb2.LockRequest, context: Any) -> peer_pb2.LockResponse:
        self.asked += 1
        await self._maybe_never("Lock")
        return peer_pb2.LockResponse(
            protocol_version=self.protocol_version,
            epoch=self.epoch,
            lock=self.lock,
            lease_ms=1000,
            blocks=self.records,
            capability=self._capability(request.reader),
        )

    async def Unlock(self, request: peer_pb2.UnlockRequest, context: Any) -> peer_pb2.UnlockResponse:
        return peer_pb2.UnlockResponse()

    def _capability(self, reader: str) -> bytes:
        """As an owner gives it; under a key that everybody knows, since whoever is behind the descriptor believes anything."""
        mint = CapabilityMint(bytes(KEY_BYTES), epoch=self.epoch)
        return mint.capability(self.lock, self.records, reader=reader, expires_s=time.monotonic() + 1.0)

    async def _maybe_never(self, call: str) -> None:
        if call in self.silent:
            await asyncio.Event().wait()


@asynccontextmanager
async def fake_peer(peer: FakePeer) -> AsyncIterator[str]:
    """Its address on 127.0.0.1."""
    server = grpc.aio.server()
    peer_pb2_grpc.add_PeerServicer_to_server(peer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)

"""One connected agent: hello, lock, read, unlock. Its failures are values (`PeerFailure`) for the reader.

Unlocks travel with the next Lock, or alone after a moment. Does not: decide when a peer is worth a call (peers.py), or bound
what is under way (turns.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc.aio

from kvdir.errors import DeadlineExceeded, Overloaded, StaleEpoch, TooLarge, UnknownNamespace
from kvdir.fingerprint import Fingerprints
from kvdir.location import PROTOCOL_VERSION
from kvdir.obs import trace
from kvdir.obs.logs import say
from kvdir.obs.spans import Kind, rpc_span
from kvdir.rpc.cancel import call_alone_cancelled
from kvdir.rpc.lookup_codec import encode_fingerprints
from kvdir.rpc.refusal import cause
from kvdir.rpc.status import from_rpc_error
from peer_agent.transport.base import Connection, ReadList, ReadOutcome
from peer_agent.v1 import peer_pb2, peer_pb2_grpc

log = logging.getLogger(__name__)

UNLOCK_DELAY_S = 0.05
"""How long an Unlock waits for a Lock to travel on."""

UNLOCK_TIMEOUT_S = 1.0


class PeerFailure(Exception):
    """The peer did not answer usefully. late: by the deadline. restarted: it has another epoch now, ask again."""

    def __init__(self, reason: str, *, late: bool = False, restarted: bool = False) -> None:
        super().__init__(reason)
        self.late = late
        self.restarted = restarted


@dataclass(frozen=True, slots=True)
class LockAnswer:
    """What the owner holds of a list: BLOCK_RECORD per fingerprint. lock is 0 when nothing was present."""

    lock: int
    epoch: int
    records: bytes
    owner_seq: int
    capability: bytes = field(repr=False)


class Peer:
    """One connected peer. `broken` once anything on it failed; then `Peers` makes a new one.

    generation: of the certificate that we showed. fallback: plane is not the first one that both sides have. asking: locks that
    it has not answered yet.
    """

    def __init__(
        self,
        node: str,
        address: str,
        channel: grpc.aio.Channel,
        hello: peer_pb2.HelloResponse,
        connection: Connection,
        *,
        plane: str,
        same_host: bool,
        fallback: bool = False,
        generation: int = 0,
    ) -> None:
        self.node = node
        self.address = address
        self.epoch: int = hello.epoch
        self.plane = plane
        self.same_host = same_host
        self.fallback = fallback
        self.generation = generation
        self.broken = False
        self.lates = 0
        self.asking = 0
        self.used_s = 0.0
        self._channel = channel
        self._stub = peer_pb2_grpc.PeerStub(channel)
        self._connection = connection
        self._unlocks: list[int] = []

    async def lock(
        self, namespace_digest: bytes, fingerprints: Fingerprints, *, reader: str, lease_s: float, timeout_s: float
    ) -> LockAnswer:
        """Which of these does it hold? Raises PeerFailure."""
        unlocks, self._unlocks = self._unlocks, []
        request = peer_pb2.LockRequest(
            namespace_digest=namespace_digest,
            fingerprints=encode_fingerprints(fingerprints),
            lease_ms=max(1, int(lease_s * 1000)),
            expected_epoch=self.epoch,
            reader=reader,
            unlock=unlocks,
        )
        with rpc_span("peer_agent.v1.Peer/Lock", Kind.CLIENT) as span:
            if span:
                span.server(self.address)
                span.set("kvdir.peer", self.node)
                span.set("kvdir.blocks", len(fingerprints))
            answer = await self._ask(request, timeout_s)
            if span:
                span.set("kvdir.present", answer.present)
        if len(answer.blocks) != 32 * len(fingerprints):
            self.broken = True
            raise PeerFailure(f"{self.node} answered {len(answer.blocks)} bytes of records for {len(fingerprints)} blocks")
        return LockAnswer(answer.lock, answer.epoch, answer.blocks, answer.owner_seq, answer.capability)

    async def _ask(self, request: peer_pb2.LockRequest, timeout_s: float) -> peer_pb2.LockResponse:
        self.asking += 1
        try:
            answer: peer_pb2.LockResponse = await self._stub.Lock(request, timeout=timeout_s, metadata=trace.metadata())
        except grpc.aio.AioRpcError as error:
            raise self._failure(error) from error
        except grpc.aio.UsageError as error:
            raise PeerFailure(f"{self.node}: the connection was closed") from error
        except asyncio.CancelledError as error:
            if not call_alone_cancelled():
                raise
            raise PeerFailure(f"{self.node}: the connection was closed meanwhile") from error
        finally:
            self.asking -= 1
        return answer

    async def read(self, blocks: ReadList, *, timeout_s: float) -> ReadOutcome:
        """See Connection.read: ends by its time, and what has not settled by then is told."""
        return await self._connection.read(blocks, deadline_s=timeout_s)

    def unlock_soon(self, lock: int) -> bool:
        """Queues an Unlock for the next Lock to carry. True: the caller must see to `flush_unlocks` (nobody else will)."""
        self._unlocks.append(lock)
        return len(self._unlocks) == 1

    async def flush_unlocks(self) -> None:
        """Sends queued Unlocks that no Lock has taken along. A lost one ends with its lease."""
        await asyncio.sleep(UNLOCK_DELAY_S)  # the window in which a Lock may carry them
        unlocks, self._unlocks = self._unlocks, []
        if not unlocks or self.broken:
            return
        try:
            await self._stub.Unlock(peer_pb2.UnlockRequest(locks=unlocks), timeout=UNLOCK_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            say(log, logging.DEBUG, "unlock not delivered", peer=self.node, error=error.details())
        except grpc.aio.UsageError:
            say(log, logging.DEBUG, "unlock not delivered", peer=self.node, error="closed")
        except asyncio.CancelledError:
            if not call_alone_cancelled():
                raise

    async def close(self) -> None:
        self.broken = True
        await self._connection.close()
        await self._channel.close()

    def _failure(self, error: grpc.aio.AioRpcError) -> PeerFailure:
        meant = from_rpc_error(error, target=self.address)
        match meant:
            case DeadlineExceeded():
                return PeerFailure(f"{self.node}: no answer in time", late=True)
            case StaleEpoch():
                self.broken = True
                return PeerFailure(f"{self.node}: {meant}", restarted=True)
            case UnknownNamespace() | TooLarge() | Overloaded():
                return PeerFailure(f"{self.node}: {meant}")
        self.broken = True
        return PeerFailure(f"{self.node}: {meant}")


async def say_hello(
    channel: grpc.aio.Channel, *, me: str, epoch: int, planes: Sequence[str], timeout_s: float
) -> tuple[peer_pb2.HelloResponse, float]:
    """(its answer, round trip in seconds). Raises PeerFailure: not reachable, or another protocol version."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    request = peer_pb2.HelloRequest(protocol_version=PROTOCOL_VERSION, node=me, epoch=epoch, transports=planes)
    try:
        stub = peer_pb2_grpc.PeerStub(channel)
        hello = await stub.Hello(request, timeout=timeout_s, wait_for_ready=False, metadata=trace.metadata())
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            raise PeerFailure("something answers there, but it is no peer agent") from error
        raise PeerFailure(f"cannot be reached: {cause(error.details() or '') or error.details()}") from error
    if hello.protocol_version != PROTOCOL_VERSION:
        raise PeerFailure(
            f"{hello.node} speaks protocol {hello.protocol_version}, we speak {PROTOCOL_VERSION}: run the same release on both"
        )
    return hello, loop.time() - began_s

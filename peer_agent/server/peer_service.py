"""peer_agent.v1.Peer: what this node answers to other agents. Thin: messages to values, one call into the store, and back.

Errors leave as KvdirError and become statuses in kvdir/rpc (interceptor). Namespaces of tenants that the caller may not see are
not there for him; what he has locked he may read and unlock, and nobody under another identity. Does not: decide, wait.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import grpc.aio
import numpy as np

from kvdir.errors import InvalidInput, StaleEpoch, TooLarge
from kvdir.location import PROTOCOL_VERSION
from kvdir.obs.spans import active
from kvdir.rpc.caller import caller
from kvdir.rpc.lookup_codec import decode_fingerprints, encode_fingerprints
from peer_agent import _native
from peer_agent.core.effects import BLOCK_RECORD_BYTES
from peer_agent.core.inventory import PEERS
from peer_agent.core.records import BLOCK_RECORD
from peer_agent.memory.layout import HEADER_BYTES
from peer_agent.server.device_calls import STAGE_TIME_SHARE
from peer_agent.server.identity import Identity, Limits
from peer_agent.server.staging import Stager
from peer_agent.server.store import Store
from peer_agent.v1 import peer_pb2, peer_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class PeerService(peer_pb2_grpc.PeerServicer):
    """offers: descriptor per plane, as `Transport.export` returns it now. owner_seq: our last event's number."""

    def __init__(
        self,
        store: Store,
        region: memoryview,
        identity: Identity,
        limits: Limits,
        *,
        stager: Stager,
        offers: Callable[[], Awaitable[Mapping[str, bytes]]],
        owner_seq: Callable[[], int],
    ) -> None:
        self._store = store
        self._region = region
        self._identity = identity
        self._limits = limits
        self._stager = stager
        self._offers = offers
        self._owner_seq = owner_seq

    async def Hello(self, request: peer_pb2.HelloRequest, context: Context) -> peer_pb2.HelloResponse:
        offers = await self._offers()
        return peer_pb2.HelloResponse(
            protocol_version=PROTOCOL_VERSION,
            node=self._identity.node,
            epoch=self._identity.epoch,
            transports=[peer_pb2.TransportOffer(transport=name, descriptor=descriptor) for name, descriptor in offers.items()],
            agent_version=self._identity.version,
        )

    async def Lock(self, request: peer_pb2.LockRequest, context: Context) -> peer_pb2.LockResponse:
        who = caller().identity
        self._store.unlock(request.unlock, session=PEERS, holder=who.name)
        if request.expected_epoch not in (0, self._identity.epoch):
            raise StaleEpoch(
                f"{self._identity.node} has epoch {self._identity.epoch:x}, not {request.expected_epoch:x}: "
                "it restarted, say Hello again"
            )
        self._store.namespace(request.namespace_digest, who.tenants)
        self._store.admit_lock(for_peers=True)
        lease_s = self._limits.lease_s(request.lease_ms)
        fingerprints = decode_fingerprints(request.fingerprints)
        timeout_s = self._limits.deadline_s(0, context.time_remaining())
        await self._stager.stage(request.namespace_digest, fingerprints, timeout_s=timeout_s * STAGE_TIME_SHARE)
        self._store.admit_lock(for_peers=True)  # again: others were admitted meanwhile
        reader = who.signed(request.reader)
        locked = self._store.lock(
            request.namespace_digest, fingerprints, session=PEERS, lease_s=lease_s, reader=reader, holder=who.name
        )
        if mine := active():
            mine.set("kvdir.reader", reader)
            mine.set("kvdir.blocks", len(fingerprints))
            mine.set("kvdir.present", locked.present)
        return peer_pb2.LockResponse(
            protocol_version=PROTOCOL_VERSION,
            epoch=self._identity.epoch,
            lock=locked.lock,
            lease_ms=int(lease_s * 1000),
            blocks=locked.records,
            present=locked.present,
            owner_seq=self._owner_seq(),
            capability=locked.capability,
        )

    async def Sample(self, request: peer_pb2.SampleRequest, context: Context) -> peer_pb2.SampleResponse:
        self._store.admit_lock(for_peers=True)
        answer = peer_pb2.SampleResponse(protocol_version=PROTOCOL_VERSION, epoch=self._identity.epoch)
        who = caller().identity
        most = max(self._store.occupancy(who.tenants), key=lambda table: table.committed, default=None)
        if most is None:
            return answer
        count = min(request.max_blocks, self._limits.max_fingerprints, request.max_bytes // most.block_bytes)
        held = self._store.held(most.namespace_digest, count)
        if held:
            lease_s = self._limits.lease_s(request.lease_ms)
            reader = who.signed(request.reader)
            locked = self._store.lock(
                most.namespace_digest, held[0], session=PEERS, lease_s=lease_s, reader=reader, holder=who.name
            )
            answer.namespace_digest, answer.lock, answer.blocks = most.namespace_digest, locked.lock, locked.records
            answer.fingerprints.CopyFrom(encode_fingerprints(held[0]))
            answer.capability = locked.capability
        return answer

    async def Unlock(self, request: peer_pb2.UnlockRequest, context: Context) -> peer_pb2.UnlockResponse:
        return peer_pb2.UnlockResponse(unknown=self._store.unlock(request.locks, session=PEERS, holder=caller().identity.name))

    async def Read(self, request: peer_pb2.ReadRequest, context: Context) -> AsyncIterator[peer_pb2.ReadChunk]:
        records = self._readable(request)
        for position, record in enumerate(records):
            offset, length = int(record["offset"]), int(record["length"])
            packed = offset.to_bytes(8, "little")
            header = _native.headers(self._region, packed)
            payload = bytes(self._region[offset + HEADER_BYTES : offset + HEADER_BYTES + length])
            after = _native.headers(self._region, packed)
            yield peer_pb2.ReadChunk(
                position=position, header=header, payload=payload, generation_after=int.from_bytes(after[8:16], "little")
            )

    def _readable(self, request: peer_pb2.ReadRequest) -> np.ndarray[Any, Any]:
        if len(request.blocks) % BLOCK_RECORD_BYTES:
            raise InvalidInput(f"{len(request.blocks)} bytes of records: pass whole LockResponse.blocks records")
        records = np.frombuffer(request.blocks, BLOCK_RECORD)
        size = int(records["length"].sum(dtype=np.uint64))
        if size > self._limits.max_reply_bytes:
            limit = self._limits.max_reply_bytes
            raise TooLarge(f"{size} bytes asked over gRPC, max_reply_bytes is {limit}: use a data plane, or ask for less")
        starts = range(0, len(request.blocks), BLOCK_RECORD_BYTES)
        asked = {request.blocks[at : at + BLOCK_RECORD_BYTES] for at in starts}
        if not asked <= self._store.locked_records(request.lock, session=PEERS, holder=caller().identity.name):
            raise InvalidInput(f"lock {request.lock:x} does not cover these blocks, or has ended: lock them first")
        return records

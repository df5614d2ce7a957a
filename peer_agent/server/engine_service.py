"""peer_agent.v1.Engine: what this node answers to engines of its host. Thin: messages to values, one call, and back.

A session lives as long as its Attach call. When that ends, locks go at once, and reservations when the engine can no longer
write (peer_agent/memory/presence.py). Errors leave as KvdirError and become statuses in kvdir/rpc (interceptor).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc.aio
import numpy as np

from kvdir.client.engine_streams import EngineStreams
from kvdir.errors import Forbidden, InvalidInput, KvdirError, RemoteProtocolError, StaleEpoch
from kvdir.fingerprint import Fingerprints
from kvdir.location import PROTOCOL_VERSION, Tier
from kvdir.namespace import Namespace
from kvdir.obs.logs import say
from kvdir.obs.spans import active, span
from kvdir.obs.trace import trace_id
from kvdir.rpc.caller import Caller, caller
from kvdir.rpc.lookup_codec import decode_fingerprints, encode_trust
from peer_agent.core.effects import Occupancy
from peer_agent.core.inventory import AGENT
from peer_agent.core.schedule import Priority
from peer_agent.server.accepting import Accepting
from peer_agent.server.device_calls import STAGE_TIME_SHARE, DeviceCalls
from peer_agent.server.engines import stream_inventory
from peer_agent.server.explaining import describe, explanation_json
from peer_agent.server.identity import Identity, Limits
from peer_agent.server.load import Directory
from peer_agent.server.namespaces import check_probe
from peer_agent.server.reader import Reader
from peer_agent.server.refusals import Refusals
from peer_agent.server.staging import Stager
from peer_agent.server.store import Store
from peer_agent.server.tasks import OwnedTasks
from peer_agent.server.writers import Writers
from peer_agent.v1 import engine_pb2

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class _Session:
    """What an engine attached for, how fast it recomputes (0: not known), and whose call that was."""

    namespace_digest: bytes
    prefill_tokens_per_s: float
    who: Caller


class EngineService(DeviceCalls):
    """accepting: for namespaces that no file describes. writers: which engines may still be writing.

    publishing: in words, for Inventory; so are engines. prefill_tokens_per_s: by namespace digest, for engines that do not say
    it.
    """

    def __init__(
        self,
        store: Store,
        reader: Reader,
        stager: Stager,
        directory: Directory | None,
        identity: Identity,
        limits: Limits,
        *,
        accepting: Accepting,
        prefetches: OwnedTasks,
        writers: Writers,
        publishing: Callable[[], str],
        engines: EngineStreams,
        prefill_tokens_per_s: Mapping[bytes, float],
    ) -> None:
        self._store = store
        self._reader = reader
        self._stager = stager
        self._directory = directory
        self._identity = identity
        self._limits = limits
        self._accepting = accepting
        self._prefetches = prefetches
        self._writers = writers
        self._publishing = publishing
        self._engines = engines
        self._prefill_tokens_per_s = prefill_tokens_per_s
        self._sessions: dict[int, _Session] = {}
        self._refusals = Refusals()
        self._closing = asyncio.Event()

    def close(self) -> None:
        """Ends every session: engines see their Attach call end."""
        self._closing.set()

    async def Attach(self, request: engine_pb2.AttachRequest, context: Context) -> AsyncIterator[engine_pb2.AttachResponse]:
        namespace = await self._admit(request)
        gone = "it may not attach for the tenant of its namespace any more"
        caller().rests_on(lambda identity: "" if namespace.tenant in identity.tenants else gone)
        session = secrets.randbits(64) or 1
        slots = next(item.slots for item in self._store.occupancy() if item.namespace_digest == namespace.digest)
        self._store.open_session(session)
        prefill_tokens_per_s = request.prefill_tokens_per_s or self._prefill_tokens_per_s.get(namespace.digest, 0.0)
        self._sessions[session] = _Session(namespace.digest, prefill_tokens_per_s, caller())
        say(log, logging.INFO, "engine attached", engine=request.engine, session=f"{session:x}", namespace=namespace.short)
        try:
            yield engine_pb2.AttachResponse(
                protocol_version=PROTOCOL_VERSION,
                node=self._identity.node,
                epoch=self._identity.epoch,
                session=session,
                arena_path=self._identity.arena_path,
                arena_id=self._identity.arena_id,
                arena_bytes=self._identity.arena_bytes,
                block_bytes=namespace.block_bytes,
                block_tokens=namespace.block_tokens,
                slots=slots,
                max_fingerprints=self._limits.max_fingerprints,
                replica_path=self._identity.replica_path,
                coordinators=self._identity.coordinators,
            )
            await self._closing.wait()
        finally:
            del self._sessions[session]
            self._writers.ended(session)
            writing = self._writers.is_writing(session)
            self._stager.end_session(session)
            self._store.end_session(session, writing=writing)
            say(log, logging.INFO, "engine detached", engine=request.engine, session=f"{session:x}", writing=writing)

    async def Reserve(self, request: engine_pb2.ReserveRequest, context: Context) -> engine_pb2.ReserveResponse:
        digest = self._stored_in(request.session)
        if not self._writers.is_held(request.session):
            raise InvalidInput("reserve without the presence lock: take it after Attach, see peer_agent/memory/presence.py")
        self._store.unlock(request.release, session=request.session)
        if request.from_device:
            self._writers.uses_device(request.session)
        lease_s = self._limits.lease_s(request.lease_ms)
        reserved, records = self._store.reserve(
            digest, decode_fingerprints(request.fingerprints), session=request.session, lease_s=lease_s
        )
        return engine_pb2.ReserveResponse(
            protocol_version=PROTOCOL_VERSION, reservation=reserved.reservation, blocks=records, lease_ms=int(lease_s * 1000)
        )

    async def Commit(self, request: engine_pb2.CommitRequest, context: Context) -> engine_pb2.CommitResponse:
        self._namespace_of(request.session)
        session, reservation = request.session, request.reservation
        granted = self._store.granted_positions(reservation, session=session)
        chosen = _positions(request.positions) if request.positions else list(granted)
        checksums = request.checksums
        if checksums:
            checksums = _select_checksums(checksums, granted, chosen)
        else:
            checksums = await self._store.checksums(reservation, session=session, positions=chosen)
        committed, rejected = self._store.commit(reservation, session=session, positions=chosen, checksums=checksums)
        self._store.abort(reservation, session=session)
        return engine_pb2.CommitResponse(protocol_version=PROTOCOL_VERSION, committed=committed, rejected=rejected)

    async def Abort(self, request: engine_pb2.AbortRequest, context: Context) -> engine_pb2.AbortResponse:
        self._namespace_of(request.session)
        return engine_pb2.AbortResponse(aborted=self._store.abort(request.reservation, session=request.session))

    async def Lookup(self, request: engine_pb2.EngineLookupRequest, context: Context) -> engine_pb2.EngineLookupResponse:
        digest = self._namespace_of(request.session)
        fingerprints = decode_fingerprints(request.fingerprints)
        answer = engine_pb2.EngineLookupResponse(protocol_version=PROTOCOL_VERSION, local=self._local(digest, fingerprints))
        if request.deadline_ms and self._directory is not None:
            await self._nominate(answer, digest, fingerprints, self._deadline_s(request.deadline_ms, context))
        if not answer.nominated:
            answer.nominated = bytes(len(fingerprints))
        return answer

    async def Load(self, request: engine_pb2.LoadRequest, context: Context) -> engine_pb2.LoadResponse:
        session = self._session(request.session)
        self._store.unlock(request.release, session=request.session)
        self._store.admit_lock(for_peers=False)
        lease_s = self._limits.lease_s(request.lease_ms)
        fingerprints = decode_fingerprints(request.fingerprints)
        timeout_s = self._deadline_s(request.deadline_ms, context)
        staged_s = await self._stager.stage(session.namespace_digest, fingerprints, timeout_s=timeout_s * STAGE_TIME_SHARE)
        self._store.admit_lock(for_peers=False)  # again: others were admitted meanwhile
        load = await self._reader.load(
            session.namespace_digest,
            fingerprints,
            session=request.session,
            timeout_s=timeout_s - staged_s,
            lease_s=lease_s,
            local_only=request.local_only,
            prefill_tokens_per_s=session.prefill_tokens_per_s,
        )
        describe(active(), load)
        return engine_pb2.LoadResponse(
            protocol_version=PROTOCOL_VERSION,
            lock=load.lock,
            lease_ms=int(lease_s * 1000),
            blocks=load.answer(),
            peer_bytes=load.peer_bytes,
            lookup_us=int(load.lookup_s * 1e6),
            lock_us=int(load.lock_s * 1e6),
            read_us=int(load.read_s * 1e6),
            nodes=[encode_trust(node) for node in load.nodes],
            directory_reached=load.directory_reached,
            predicted_us=int(load.plan.predicted_s * 1e6),
            net_gain_us=int(load.net_gain_s * 1e6),
            explanation=explanation_json(load) if request.explain else "",
            trace_id=trace_id(),
        )

    async def Release(self, request: engine_pb2.ReleaseRequest, context: Context) -> engine_pb2.ReleaseResponse:
        digest = self._namespace_of(request.session)
        if request.HasField("corrupt"):
            corrupt = decode_fingerprints(request.corrupt)
            gone = self._store.discard(digest, corrupt)
            say(
                log,
                logging.WARNING,
                "blocks failed verification",
                session=f"{request.session:x}",
                blocks=len(corrupt),
                gone=gone,
            )
        return engine_pb2.ReleaseResponse(unknown=self._store.unlock(request.locks, session=request.session))

    async def Prefetch(self, request: engine_pb2.PrefetchRequest, context: Context) -> engine_pb2.PrefetchResponse:
        session = self._session(request.session)
        fingerprints = decode_fingerprints(request.fingerprints)
        local = self._local(session.namespace_digest, fingerprints).count(1)
        work = self._prefetch(session, fingerprints, timeout_s=self._deadline_s(request.deadline_ms, None))
        started = self._prefetches.start(work, name="prefetch")
        accepted = len(fingerprints) - local if started is not None else 0
        return engine_pb2.PrefetchResponse(protocol_version=PROTOCOL_VERSION, accepted=accepted, local=local)

    async def Pin(self, request: engine_pb2.PinRequest, context: Context) -> engine_pb2.PinResponse:
        digest = self._namespace_of(request.session)
        pin_s = min(request.pin_ms / 1000, self._limits.max_pin_s)
        pinned = self._store.pin(digest, decode_fingerprints(request.fingerprints), pin_s=pin_s)
        return engine_pb2.PinResponse(protocol_version=PROTOCOL_VERSION, pinned=pinned)

    async def Inventory(self, request: engine_pb2.InventoryRequest, context: Context) -> engine_pb2.InventoryResponse:
        now_s = time.monotonic()
        return engine_pb2.InventoryResponse(
            protocol_version=PROTOCOL_VERSION,
            node=self._identity.node,
            epoch=self._identity.epoch,
            arena_path=self._identity.arena_path,
            arena_bytes=self._identity.arena_bytes,
            namespaces=[self._namespace_inventory(item) for item in self._store.occupancy(caller().tenants)],
            sessions=self._store.sessions,
            locks=self._store.locks,
            publishing=self._publishing(),
            arena_memory=self._identity.arena_memory,
            engine_streams=stream_inventory(self._engines) if caller().tenants.every else (),
            refused=[
                engine_pb2.RefusedEngine(
                    engine=item.engine, words=item.words, age_ms=int((now_s - item.at_s) * 1000), times=item.times
                )
                for item in self._refusals.recent(now_s=now_s)
                if caller().tenants.every  # they are of all tenants
            ],
        )

    # internals

    async def _admit(self, request: engine_pb2.AttachRequest) -> Namespace:
        """What it attaches for, served from now on. Raises KvdirError, and remembers it for those who look for the engine."""
        try:
            namespace = await self._admissible(request)
        except KvdirError as error:
            if self._refusals.refused(request.engine, str(error), now_s=time.monotonic()):
                say(log, logging.WARNING, "engine refused", engine=request.engine, words=str(error))
            raise
        self._refusals.admitted(request.engine)
        return namespace

    async def _admissible(self, request: engine_pb2.AttachRequest) -> Namespace:
        if request.protocol_version != PROTOCOL_VERSION:
            raise RemoteProtocolError(
                f"engine speaks protocol {request.protocol_version}, agent {PROTOCOL_VERSION}: run the same release on both"
            )
        namespace = self._accepting.described(request.namespace_digest, request.namespace_canonical_json, caller().identity)
        check_probe(request.probe, namespace)
        told = request.prefill_tokens_per_s
        if not 0 <= told < float("inf"):
            raise InvalidInput(f"prefill_tokens_per_s must be a positive number, or 0 when it is not known; is {told}")
        await self._accepting.accept(namespace, caller().tenants)
        return namespace

    async def _prefetch(self, session: _Session, fingerprints: Fingerprints, *, timeout_s: float) -> None:
        digest = session.namespace_digest
        with span("prefetch") as mine:
            staged_s = await self._stager.stage(digest, fingerprints, timeout_s=timeout_s * STAGE_TIME_SHARE)
            load = await self._reader.load(
                digest,
                fingerprints,
                session=AGENT,
                timeout_s=timeout_s - staged_s,
                lease_s=0.0,
                priority=Priority.PREFETCH,
                prefill_tokens_per_s=session.prefill_tokens_per_s,
            )
            describe(mine, load)

    def _local(self, digest: bytes, fingerprints: Fingerprints) -> bytes:
        """One byte per fingerprint: 1 if it is in the arena or in a device of this host, and so are the other ranks' parts."""
        here = np.frombuffer(self._store.present(digest, fingerprints), np.uint8)
        here = here | np.frombuffer(self._stager.present(digest, fingerprints), np.uint8)
        completeness = self._store.completeness
        if completeness.tracks(digest):
            whole = [completeness.complete(tier, digest, fingerprints) for tier in (Tier.CPU, Tier.GPU)]
            here &= np.frombuffer(whole[0], np.uint8) | np.frombuffer(whole[1], np.uint8)
        return here.tobytes()

    def _stored_in(self, session: int) -> bytes:
        """The namespace into which the engine stores. Raises Forbidden for one that may only read of its tenant."""
        digest, who = self._namespace_of(session), caller().identity
        if self._store.namespaces[digest].tenant not in who.stores:
            raise Forbidden(f"{who.name} may not store for the tenant of this namespace: see the agent's policy file (store)")
        return digest

    def _namespace_of(self, session: int) -> bytes:
        return self._session(session).namespace_digest

    def _session(self, session: int) -> _Session:
        found = self._sessions.get(session)
        if found is None or found.who.identity.name != caller().identity.name:  # its number stands in logs, and is no proof
            raise StaleEpoch(f"session {session:x} is not attached: the agent restarted or the session ended, attach again")
        return found

    def _deadline_s(self, deadline_ms: int, context: Context | None) -> float:
        return self._limits.deadline_s(deadline_ms, context.time_remaining() if context else None)

    async def _nominate(
        self, answer: engine_pb2.EngineLookupResponse, digest: bytes, fingerprints: Fingerprints, timeout_s: float
    ) -> None:
        assert self._directory is not None
        try:
            found = await self._directory.nominate(digest, fingerprints, timeout_s=timeout_s)
        except KvdirError as error:
            say(log, logging.DEBUG, "no directory", error=error)
            return
        counts = np.zeros(len(fingerprints), np.int64)
        for claim in found.claims:
            if claim.node.node != self._identity.node:
                counts[claim.positions] += 1
        answer.nominated = np.minimum(counts, 255).astype(np.uint8).tobytes()
        answer.nodes.extend(encode_trust(node) for node in found.nodes)
        answer.directory_reached = True

    def _namespace_inventory(self, item: Occupancy) -> engine_pb2.NamespaceInventory:
        namespace = self._store.namespaces[item.namespace_digest]
        return engine_pb2.NamespaceInventory(
            digest=item.namespace_digest,
            name=namespace.short,
            block_bytes=item.block_bytes,
            block_tokens=namespace.block_tokens,
            slots=item.slots,
            committed=item.committed,
            free=item.free,
            reserved=item.reserved,
            retired=item.retired,
            quarantined=item.quarantined,
            locked=item.locked,
            pinned=item.pinned,
            evicted=item.evicted,
        )


def _positions(packed: bytes) -> list[int]:
    if len(packed) % 4:
        raise InvalidInput(f"{len(packed)} bytes of positions: pass u32 little endian, packed")
    return sorted(set(np.frombuffer(packed, "<u4").tolist()))


def _select_checksums(packed: bytes, granted: tuple[int, ...], chosen: list[int]) -> bytes:
    """Checksums come for all granted blocks in Reserve order; those of the chosen positions."""
    if not granted:
        return b""  # the reservation is gone: commit will reject everything
    if len(packed) != 8 * len(granted):
        raise InvalidInput(
            f"{len(packed)} bytes of checksums for {len(granted)} granted blocks: 8 bytes each, in Reserve order"
        )
    index = {position: at for at, position in enumerate(granted)}
    if not set(chosen) <= index.keys():
        raise InvalidInput("commit names positions that were not granted by this reservation")
    return b"".join(packed[8 * index[position] : 8 * index[position] + 8] for position in chosen)

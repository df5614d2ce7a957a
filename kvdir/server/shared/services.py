"""kvdir.v1.Events and the sources of lookups and scores, over a shared store. Thin: sessions and the coordinator decide."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any

import grpc.aio

from kvdir.core.admission import Refused
from kvdir.core.answer import Lookup
from kvdir.core.event import Batch
from kvdir.core.namespaces import NamespaceTable
from kvdir.core.policy import ALL, Grant
from kvdir.core.serving import Serving
from kvdir.errors import Overloaded, Unavailable, Unsupported
from kvdir.fingerprint import Fingerprints
from kvdir.location import PROTOCOL_VERSION, MinTrust, NodeTrust
from kvdir.rpc.caller import caller
from kvdir.rpc.event_codec import decode_chunk, decode_events, decode_heartbeat, decode_hello, decode_stale_report
from kvdir.rpc.lookup_codec import decode_fingerprints, decode_min_trust, encode_lookup
from kvdir.server.coordinator import fenced_response
from kvdir.server.directory_service import DirectoryService
from kvdir.server.events_service import read_hello, write_all
from kvdir.server.lookup_source import PREFIX, remember
from kvdir.server.publishers import Publisher
from kvdir.server.score_source import RecentEngines, models_of
from kvdir.server.shared.coordinator import SharedCoordinator
from kvdir.server.shared.session import End, Goodbye, Message, ReplayUnavailable, Session
from kvdir.store.base import Fenced
from kvdir.v1 import directory_pb2, events_pb2, events_pb2_grpc

_LAST_WORD_S = 1.0


class StoreSource:
    """server.lookup_source.LookupSource over a shared store: always a wait, never longer than store_lookup_s."""

    def __init__(self, coordinator: SharedCoordinator) -> None:
        self._coordinator = coordinator

    def lookup(self, request: directory_pb2.LookupRequest) -> Awaitable[directory_pb2.LookupResponse]:
        fingerprints, min_trust = decode_fingerprints(request.fingerprints), decode_min_trust(request.min_trust)
        tenants = caller().tenants

        async def answer() -> directory_pb2.LookupResponse:
            coordinator = self._coordinator
            answered = await coordinator.questions.lookup(
                request.namespace_digest,
                fingerprints,
                prefix=request.mode == PREFIX,
                min_trust=min_trust,
                tenants=tenants,
            )
            remember(coordinator.recent, request.namespace_digest, answered, now_s=coordinator.now_s())
            return encode_lookup(answered)

        return answer()


class StoreScores:
    """server.score_source.ScoreSource over a shared store."""

    def __init__(self, coordinator: SharedCoordinator) -> None:
        self._coordinator = coordinator
        self.engines = RecentEngines(self.serving, coordinator.now_s)

    @property
    def namespaces(self) -> NamespaceTable:
        return self._coordinator.link.namespaces

    def serving(self, min_trust: MinTrust, tenants: Grant = ALL) -> Iterable[Serving]:
        for trust, digests in self._coordinator.link.fleet.announced(self._coordinator.now_s()):
            yield Serving(trust.node, models_of(self.namespaces, digests, tenants), min_trust.admits(trust.state))

    def trusts(self) -> Iterable[NodeTrust]:
        return [trust for trust, _ in self._coordinator.link.fleet.announced(self._coordinator.now_s())]

    async def lookup(self, namespace_digest: bytes, fingerprints: Fingerprints, min_trust: MinTrust) -> Lookup:
        return await self._coordinator.questions.lookup(namespace_digest, fingerprints, prefix=False, min_trust=min_trust)

    async def refresh(self, digests: Iterable[bytes], tenants: Grant = ALL) -> None:
        for digest in digests:
            await self._coordinator.questions.know(digest, tenants)


class SharedDirectoryService(DirectoryService):
    """Lookups as everywhere; no feed, because a directory larger than one machine has no replica on one."""

    async def Watch(self, request_iterator: Any, context: Any) -> None:
        raise Unsupported(
            "not with --store redis: a directory in Redis is shared by all coordinators and may be larger than one machine; "
            "nodes ask any coordinator instead of a replica"
        )


class SharedEventsService(events_pb2_grpc.EventsServicer):
    """See the module docstring."""

    def __init__(self, coordinator: SharedCoordinator) -> None:
        self._coordinator = coordinator

    async def ReportStale(self, request: events_pb2.ReportStaleRequest, context: Any) -> events_pb2.ReportStaleResponse:
        identity = caller().identity
        report = decode_stale_report(request, identity)
        feedback = await self._coordinator.questions.report_stale(report, tenants=identity.tenants)
        return events_pb2.ReportStaleResponse(
            protocol_version=PROTOCOL_VERSION, removed=feedback.removed, ignored_reason=feedback.ignored_reason
        )

    async def Publish(self, request_iterator: Any, context: Any) -> None:
        """Ends when the owner, the session or the writer has said the last word."""
        session = await self._open(context)
        if session is None:
            return
        connection = session.connection
        reader = asyncio.create_task(self._read(session, context))
        worker = asyncio.create_task(self._work(session))
        writer = asyncio.create_task(write_all(connection, context))
        try:
            await asyncio.wait((reader, worker, writer), return_when=asyncio.FIRST_COMPLETED)
            if reader.done() and reader.exception() is None:
                await asyncio.wait((worker, writer), return_when=asyncio.FIRST_COMPLETED)  # what was read is still taken
            # A write under way must end by itself: a call that is aborted in the middle of one ends for nobody.
            connection.end()
            await asyncio.wait((writer,), timeout=_LAST_WORD_S)
        finally:
            for task in (reader, worker, writer):
                task.cancel()
            self._coordinator.connections.remove(connection)
            self._coordinator.ended(session)  # before the wait, in which we may be cancelled ourselves
            results = await asyncio.gather(reader, worker, writer, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _open(self, context: Any) -> Session | None:
        coordinator, config = self._coordinator, self._coordinator.config
        if coordinator.draining:
            raise Unavailable("this coordinator is going down: publish to another one, or come back")
        if len(coordinator.connections) >= config.max_streams:
            raise Overloaded(f"{config.max_streams} streams are connected already (max_streams)")
        hello = await read_hello(context)
        publisher = Publisher(coordinator.gate, coordinator.link.namespaces)
        publisher.check_node(hello.node)
        outcome = await coordinator.hello(hello, publisher)
        if isinstance(outcome, Refused):
            await context.write(fenced_response(hello.epoch, outcome.newer_epoch, outcome.reason))
            return None
        session, resume_seq, foreign = outcome
        coordinator.connections.add(session.connection)
        publisher.rest_on(hello.node, session.connection.end)
        session.connection.say(
            events_pb2.PublishResponse(
                welcome=events_pb2.Welcome(
                    protocol_version=PROTOCOL_VERSION,
                    coordinator=coordinator.name,
                    resume_seq=resume_seq,
                    heartbeat_interval_ms=config.heartbeat_interval_ms,
                    credit_events=config.credit_events,
                    store_id=coordinator.link.store_id,
                )
            )
        )
        publisher.refuse(hello.node, foreign, session.connection.say)
        return session

    async def _work(self, session: Session) -> None:
        try:
            await session.run()
        except Fenced:
            refused = await self._coordinator.overtaken(session)
            session.connection.end(fenced_response(session.stream.epoch, refused.newer_epoch, refused.reason))

    async def _read(self, session: Session, context: Any) -> None:
        rejected = self._coordinator.rejected
        while True:
            request = await context.read()
            if request is grpc.aio.EOF or session.publisher.ended:
                await session.put(End())
                return
            kind = request.WhichOneof("message")
            message = getattr(request, kind) if kind else None
            if message is None:
                rejected["unknown-message"] += 1
            elif message.epoch != session.stream.epoch:
                rejected["wrong-epoch"] += len(message.events) if kind == "batch" else 1
            elif kind == "batch" and message.first_seq < 1:
                rejected["bad-sequence"] += len(message.events)
            else:
                value = _decode(kind, message)
                if value is not None:
                    self._coordinator.counters.batches += kind == "batch"
                    await session.put(value)


def _decode(kind: str, message: Any) -> Message | None:
    """None: of no use here. A sketch was not asked for; evictions for quotas neither."""
    match kind:
        case "batch":
            return Batch(message.first_seq, tuple(decode_events(message.events)), message.replay)
        case "heartbeat":
            return decode_heartbeat(message)
        case "snapshot":
            return decode_chunk(message)
        case "replay_unavailable":
            return ReplayUnavailable()
        case "hello":
            return decode_hello(message)
        case "goodbye":
            return Goodbye()
    return None

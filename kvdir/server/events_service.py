"""kvdir.v1.Events: one task reads a publish call, one writes it. Thin: every decision is the directory's."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc.aio

from kvdir.core.directory import Hello, Refused
from kvdir.core.node import Stream
from kvdir.errors import DeadlineExceeded, Overloaded, RemoteProtocolError, Unavailable
from kvdir.location import PROTOCOL_VERSION
from kvdir.obs.logs import say
from kvdir.rpc.caller import caller
from kvdir.rpc.event_codec import (
    decode_chunk,
    decode_events,
    decode_evict_result,
    decode_heartbeat,
    decode_hello,
    decode_sketch,
    decode_stale_report,
)
from kvdir.rpc.lookup_codec import check_version
from kvdir.server.connections import Connection
from kvdir.server.coordinator import Coordinator, fenced_response
from kvdir.server.publishers import Publisher, without
from kvdir.v1 import events_pb2, events_pb2_grpc

log = logging.getLogger("kvdir.events")

_HELLO_S = 10.0


class EventsService(events_pb2_grpc.EventsServicer):
    """See the module docstring."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    async def ReportStale(self, request: events_pb2.ReportStaleRequest, context: Any) -> events_pb2.ReportStaleResponse:
        coordinator, identity = self._coordinator, caller().identity
        report = decode_stale_report(request, identity)
        feedback = coordinator.directory.report_stale(report, tenants=identity.tenants, now_s=coordinator.now_s())
        return events_pb2.ReportStaleResponse(
            protocol_version=PROTOCOL_VERSION, removed=feedback.removed, ignored_reason=feedback.ignored_reason
        )

    async def Publish(self, request_iterator: Any, context: Any) -> None:
        """Ends when either side ends it. The reader is stopped when the writer has said the last word (Fenced, drain)."""
        opened = await self._open(context)
        if opened is None:
            return
        coordinator = self._coordinator
        connection, publisher = opened
        reader = asyncio.create_task(self._read(connection, context, publisher))
        writer = asyncio.create_task(write_all(connection, context))
        try:
            await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (reader, writer):
                task.cancel()
            coordinator.connections.remove(connection)
            coordinator.directory.disconnected(connection.stream, connection.number, now_s=coordinator.now_s())
            results = await asyncio.gather(reader, writer, return_exceptions=True)  # last: we may be cancelled in it
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _open(self, context: Any) -> tuple[Connection[Stream], Publisher] | None:
        coordinator, config = self._coordinator, self._coordinator.config
        if coordinator.draining:
            raise Unavailable("this coordinator is going down: publish to another one, or come back")
        if len(coordinator.connections) >= config.max_streams:
            raise Overloaded(f"{config.max_streams} streams are connected already (max_streams)")
        hello = await read_hello(context)
        publisher = Publisher(coordinator.gate, coordinator.directory.namespaces)
        publisher.check_node(hello.node)
        foreign = publisher.foreign(hello)
        outcome = coordinator.directory.hello(without(hello, foreign), now_s=coordinator.now_s())
        coordinator.execute(coordinator.directory.take_effects())
        if isinstance(outcome, Refused):
            await context.write(fenced_response(hello.epoch, outcome.newer_epoch, outcome.reason))
            return None
        _log_refused(hello.node, outcome.refused_namespaces)
        connection = Connection(outcome.stream, outcome.connection, ack_every=max(1, config.credit_events // 8))
        coordinator.connections.add(connection)
        publisher.rest_on(hello.node, connection.end)
        connection.say(
            events_pb2.PublishResponse(
                welcome=events_pb2.Welcome(
                    protocol_version=PROTOCOL_VERSION,
                    coordinator=coordinator.name,
                    resume_seq=outcome.resume_seq,
                    heartbeat_interval_ms=config.heartbeat_interval_ms,
                    credit_events=config.credit_events,
                    store_id=coordinator.store_id,
                )
            )
        )
        coordinator.directory.withdraw(outcome.stream, [item.digest for item in foreign], now_s=coordinator.now_s())
        publisher.refuse(hello.node, foreign, connection.say)
        return connection, publisher

    async def _read(self, connection: Connection[Stream], context: Any, publisher: Publisher) -> None:
        coordinator, stream = self._coordinator, connection.stream
        directory, rejected = coordinator.directory, coordinator.directory.ingest.rejected
        while True:
            request = await context.read()
            if request is grpc.aio.EOF or publisher.ended:
                return
            now_s = coordinator.now_s()
            kind = request.WhichOneof("message")
            message = getattr(request, kind) if kind else None
            if message is None:
                rejected["unknown-message"] += 1
            elif message.epoch != stream.epoch:
                rejected["wrong-epoch"] += len(message.events) if kind == "batch" else 1
            elif kind == "batch":
                directory.batch(stream, message.first_seq, decode_events(message.events), now_s=now_s)
            elif kind == "heartbeat":
                directory.heartbeat(stream, decode_heartbeat(message), now_s=now_s)
            elif kind == "snapshot":
                directory.snapshot_chunk(stream, decode_chunk(message), now_s=now_s)
            elif kind == "sketch":
                directory.sketch(stream, decode_sketch(message), now_s=now_s)
            elif kind == "replay_unavailable":
                directory.replay_unavailable(stream, now_s=now_s)
            elif kind == "evict_result":
                coordinator.evicted(stream, decode_evict_result(message))
            elif kind == "hello":
                hello = decode_hello(message)
                foreign = publisher.foreign(hello)
                _log_refused(stream.node, directory.announce(stream, without(hello, foreign), now_s=now_s))
                publisher.refuse(stream.node, foreign, connection.say)
            elif kind == "goodbye":
                directory.goodbye(stream, now_s=now_s)
                coordinator.execute(directory.take_effects())
                return
            connection.heard(now=kind == "heartbeat")


async def write_all(connection: Connection[Any], context: Any) -> None:
    """Sends what the connection has to say, until it has said the last word."""
    while True:
        response = connection.take()
        if response is not None:
            await context.write(response)
        elif connection.ending:
            return
        else:
            connection.wake.clear()
            await connection.wake.wait()


async def read_hello(context: Any) -> Hello:
    """The first message of a call. Raises DeadlineExceeded, RemoteProtocolError."""
    try:
        async with asyncio.timeout(_HELLO_S):
            request = await context.read()
    except TimeoutError:
        raise DeadlineExceeded(f"no hello within {_HELLO_S:g} s") from None
    if request is grpc.aio.EOF or request.WhichOneof("message") != "hello":
        raise RemoteProtocolError("a publish call begins with hello")
    check_version(request.hello.protocol_version)
    return decode_hello(request.hello)


def _log_refused(node: str, refused: tuple[str, ...]) -> None:
    for words in refused:
        say(log, logging.WARNING, "namespace refused", node=node, reason=words)

"""A lookup worker: a process that answers lookups from the region its coordinator writes, on the coordinator's port.

    python -m kvdir.server.lookup_worker '{"listen": ...}'        started by lookup_workers.py, never by hand

Answers Lookup, LookupBatch and LookupStream, health and reflection; passes everything else on, with what the caller's
certificate says. Rules:
- it dies with its coordinator (PR_SET_PDEATHSIG), also when it is stopped or stuck: its answers would be nobody's;
- while the coordinator hangs it goes on, its answers age, and its health says NOT_SERVING;
- SIGTERM: clients are told to go, calls under way finish, then it ends. SIGINT is the coordinator's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import msgspec
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

import kvdir
from kvdir.core.region_directory import RegionDirectory
from kvdir.errors import KvdirError
from kvdir.index import RegionReader
from kvdir.obs import trace
from kvdir.obs.call_figures import CallFigures
from kvdir.obs.logs import configure
from kvdir.obs.process_figures import ProcessFigures, read
from kvdir.obs.spans import Kind, Tracer, rpc_span
from kvdir.obs.tracing import SPANS_S, open_tracing
from kvdir.rpc.caller import caller, carried_claims
from kvdir.rpc.channel import client_options, server_options
from kvdir.rpc.gate import CallLimits
from kvdir.rpc.interceptors import EdgeInterceptor
from kvdir.rpc.security import Security
from kvdir.rpc.status import from_rpc_error
from kvdir.rpc.tls import PLAINTEXT, ServerTls, TlsFiles, bind
from kvdir.server.directory_service import DirectoryService
from kvdir.server.lookup_stream import LOOKUP, METHOD, LookupStreams
from kvdir.server.pass_through import pass_through
from kvdir.server.region_source import RegionSource, WorkerCounters
from kvdir.server.rights import RIGHTS
from kvdir.server.services import HEALTH_NAMES, REFLECTED, SERVICES, log_bug
from kvdir.v1 import directory_pb2

READY = b"ready\n"
"""What a worker writes to stdout once it serves."""
TURN_S = 0.25
HANGS_S = 5.0
"""A coordinator that says nothing for so long makes our health NOT_SERVING."""

_LOCAL = ("Lookup", "LookupBatch", "LookupStream")
_PR_SET_PDEATHSIG = 1

log = logging.getLogger("kvdir.worker")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """What a worker has to know. parent: process id of the coordinator. index, figures: paths; main: address for gRPC, and
    over how many connections.

    secured: the port asks for certificates. policy: path of its file; empty: none.
    """

    number: int
    parent: int
    listen: str
    index: str
    main: str
    main_connections: int
    figures: str
    max_fingerprints: int
    max_message_bytes: int
    max_lookup_streams: int
    max_deadline_s: float
    grace_s: float
    log_level: str
    log_format: str
    otlp_endpoint: str
    trace_ratio: float
    name: str
    secured: bool = False
    policy: str = ""
    max_requests_per_s: float = 0.0
    max_streams_per_identity: int = 0
    tls: TlsFiles | None = None


def main(argument: str) -> None:
    """Serves until told to end. Exit code 1 when the port or the region cannot be had; the reason goes to stderr."""
    spec = msgspec.json.decode(argument, type=WorkerSpec)
    _die_with(spec.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    configure(spec.log_level, spec.log_format)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(spec))


def _die_with(parent: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before that
        sys.exit("the coordinator is gone")


async def _serve(spec: WorkerSpec) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    options = client_options(max_message_bytes=spec.max_message_bytes)
    async with contextlib.AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(PLAINTEXT.aio(spec.main, options=options)) for _ in range(spec.main_connections)
        ]
        tracing = open_tracing(
            spec.otlp_endpoint,
            spec.trace_ratio,
            service="kvdir-coordinator",
            instance=spec.name,
            version=kvdir.__version__,
            process=f"worker-{spec.number}",
        )
        try:
            worker = _Worker(spec, channels, tracing.tracer)
            await worker.start()
            sys.stdout.buffer.write(READY)
            sys.stdout.flush()
            await worker.run_until(stop)
        finally:
            await asyncio.to_thread(tracing.close, grace_s=min(spec.grace_s, SPANS_S))


class _Worker:
    def __init__(self, spec: WorkerSpec, channels: Sequence[grpc.aio.Channel], tracer: Tracer) -> None:
        self._spec = spec
        self._figures = Path(spec.figures)
        before = read(self._figures) or ProcessFigures()
        self._calls = CallFigures()
        for name, figures in before.methods.items():
            figures.running = 0
            self._calls.methods[name] = figures
        self._counters = WorkerCounters(**before.counters)
        self._source = RegionSource(
            RegionDirectory(RegionReader(spec.index)),
            _asking(channels, spec.max_deadline_s),
            self._counters,
            max_fingerprints=spec.max_fingerprints,
        )
        self._streams = LookupStreams(
            self._source,
            self._calls,
            max_streams=spec.max_lookup_streams,
            max_deadline_s=spec.max_deadline_s,
            on_bug=log_bug,
            process=f"worker-{spec.number}",
            tracer=tracer,
        )
        self._security = Security(
            policy=spec.policy,
            secured=spec.secured,
            rights=RIGHTS,
            limits=CallLimits(max_requests_per_s=spec.max_requests_per_s, max_streams=spec.max_streams_per_identity),
        )
        self._healthy = health.aio.HealthServicer()
        self._server = grpc.aio.server(
            interceptors=[
                EdgeInterceptor(
                    self._calls,
                    max_deadline_s=spec.max_deadline_s,
                    on_bug=log_bug,
                    gate=self._security.gate,
                    tracer=tracer,
                )
            ],
            options=server_options(max_message_bytes=spec.max_message_bytes, share_port=True),
        )
        service = DirectoryService(self._source, self._streams, max_fingerprints=spec.max_fingerprints)
        self._server.add_generic_rpc_handlers(tuple(_handlers(service, channels, spec.max_deadline_s)))
        health_pb2_grpc.add_HealthServicer_to_server(self._healthy, self._server)
        reflection.enable_server_reflection(REFLECTED, self._server)

    async def start(self) -> None:
        tls = ServerTls(self._spec.tls) if self._spec.tls is not None else None
        if not bind(self._server, self._spec.listen, tls):
            sys.exit(f"{self._spec.listen} cannot be shared with the coordinator")
        await self._turn()
        await self._server.start()

    async def run_until(self, stop: asyncio.Event) -> None:
        waiting = asyncio.create_task(stop.wait())
        async with self._security.kept():
            while not stop.is_set():
                await asyncio.wait({waiting}, timeout=TURN_S)
                await self._turn()
        await self._healthy.enter_graceful_shutdown()
        self._streams.drain()
        await self._server.stop(self._spec.grace_s)
        self._write_figures()

    async def _turn(self) -> None:
        hangs = self._source.silent_s > HANGS_S
        status = health_pb2.HealthCheckResponse.NOT_SERVING if hangs else health_pb2.HealthCheckResponse.SERVING
        for name in HEALTH_NAMES:
            await self._healthy.set(name, status)
        self._write_figures()

    def _write_figures(self) -> None:
        """Only of lookups: what is passed on, main counts."""
        methods = {name: figures for name, figures in self._calls.methods.items() if name in (*_LOCAL, METHOD)}
        ProcessFigures(time.monotonic_ns(), asdict(self._counters), methods).write(self._figures)


def _handlers(
    service: DirectoryService, channels: Sequence[grpc.aio.Channel], max_deadline_s: float
) -> list[grpc.GenericRpcHandler]:
    out = []
    for descriptor in SERVICES:
        methods = {item.name: item.client_streaming or item.server_streaming for item in descriptor.methods}
        handlers = pass_through(channels, descriptor.full_name, methods, max_deadline_s=max_deadline_s)
        if descriptor.name == "Directory":
            handlers |= _local(service)
        out.append(grpc.method_handlers_generic_handler(descriptor.full_name, handlers))
    return out


def _local(service: DirectoryService) -> dict[str, Any]:
    pb = directory_pb2
    return {
        "Lookup": grpc.unary_unary_rpc_method_handler(
            service.Lookup,
            request_deserializer=pb.LookupRequest.FromString,
            response_serializer=pb.LookupResponse.SerializeToString,
        ),
        "LookupBatch": grpc.unary_unary_rpc_method_handler(
            service.LookupBatch,
            request_deserializer=pb.LookupBatchRequest.FromString,
            response_serializer=pb.LookupBatchResponse.SerializeToString,
        ),
        "LookupStream": grpc.stream_stream_rpc_method_handler(
            service.LookupStream,
            request_deserializer=pb.LookupStreamRequest.FromString,
            response_serializer=pb.LookupStreamResponse.SerializeToString,
        ),
    }


def _asking(channels: Sequence[grpc.aio.Channel], timeout_s: float) -> Any:
    """Asks the main process for one lookup; whoever waits for the answer may have less patience and cancels then."""
    methods: Iterator[Any] = itertools.cycle(
        [
            channel.unary_unary(
                "/kvdir.v1.Directory/Lookup",
                request_serializer=directory_pb2.LookupRequest.SerializeToString,
                response_deserializer=directory_pb2.LookupResponse.FromString,
            )
            for channel in channels
        ]
    )

    async def ask(request: directory_pb2.LookupRequest) -> directory_pb2.LookupResponse:
        with rpc_span(LOOKUP, Kind.CLIENT):
            try:
                metadata = (*(trace.metadata() or ()), *carried_claims(caller()))
                answer: directory_pb2.LookupResponse = await next(methods)(request, timeout=timeout_s, metadata=metadata)
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error, target="the coordinator's main process") from error
            return answer

    return ask


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except (KvdirError, OSError) as error:
        sys.exit(str(error))

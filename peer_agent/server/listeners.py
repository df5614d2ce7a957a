"""The ports of an agent: peers over TCP, engines over a socket of this host, http. Each bound or refused with what to do.

Rules: two gRPC servers with one service each, so that nobody on the network can attach as an engine; what listens is stopped
by the exit stack it was given, within grace_s. Does not: implement any service.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Iterator

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvdir.errors import ConfigError
from kvdir.obs.call_figures import CallFigures
from kvdir.obs.http import HttpSide, LoopPulse, Metrics
from kvdir.obs.logs import say, say_bug
from kvdir.obs.tally import Tally
from kvdir.obs.tracing import SPANS_S, open_tracing
from kvdir.rpc.channel import server_options
from kvdir.rpc.health_port import HealthPort
from kvdir.rpc.interceptors import EdgeInterceptor
from kvdir.rpc.tls import ServerTls, bind
from peer_agent.server.config import AgentConfig, join_address, split_address
from peer_agent.server.engine_service import EngineService
from peer_agent.server.identity import version
from peer_agent.server.peer_service import PeerService
from peer_agent.server.rights import agent_security
from peer_agent.v1 import engine_pb2_grpc, peer_pb2_grpc

log = logging.getLogger(__name__)

PEER_SERVICE = "peer_agent.v1.Peer"
DEADLINE_MARGIN_S = 1.0
"""Beyond max_deadline_s: a call that is answered at its deadline still gets its answer out."""


def open_tls(config: AgentConfig) -> ServerTls | None:
    """Of the control plane. None: plaintext. Raises ConfigError, also when peers would refuse the name that they dial."""
    if config.tls is None:
        return None
    if found := [item for item in config.coordinators if ":///" in item and not config.tls_server_name]:
        remark = f"coordinators: those of {', '.join(found)} are dialled by address, which their certificates have to hold: "
        say(log, logging.WARNING, "certificate", remark=f"{remark}set tls_server_name to a DNS name that is in all of them")
    if expected := config.peer_name(config.node_name) or config.tls_server_name:
        return ServerTls(config.tls, names=(expected,))
    dialled = [config.advertise or config.listen]
    if not config.engine_address.startswith("unix:"):
        dialled.append(config.engine_address)
    return ServerTls(config.tls, names=tuple(dict.fromkeys(split_address(address)[0] for address in dialled)))


PORT_PART = 0.25
"""Of our descriptors, for each of the two gRPC ports; the data plane has as many at most."""


class Listeners:
    """See the module docstring. calls, bugs: what the interceptor counted. tally: for parts of it all."""

    def __init__(self, config: AgentConfig, stack: contextlib.AsyncExitStack, tls: ServerTls | None = None) -> None:
        self.calls = CallFigures()
        self.tally = Tally("peer_agent")
        self.bugs = 0
        self._config = config
        self._stack = stack
        tracing = open_tracing(
            config.otlp_endpoint,
            config.trace_ratio,
            service="kvdir-peer-agent",
            instance=config.node_name,
            version=version(),
        )
        tracing.watched_by(self.tally)
        self._tracer = tracing.tracer
        stack.push_async_callback(asyncio.to_thread, tracing.close, grace_s=min(config.grace_s, SPANS_S))
        self.security = agent_security(config)
        self.security.watched_by(self.tally)
        self._tls = tls
        if tls is not None:
            tls.watched_by(self.tally)
        self._health = health.aio.HealthServicer()

    async def drain(self) -> None:
        """Health says NOT_SERVING from now on."""
        await self._health.enter_graceful_shutdown()

    async def serve_peers(self, service: PeerService) -> str:
        server = self._server()
        peer_pb2_grpc.add_PeerServicer_to_server(service, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        port = self._bind(server, self._config.listen, "listen")
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        await self._health.set(PEER_SERVICE, health_pb2.HealthCheckResponse.SERVING)
        await self._start(server)
        bound = join_address(split_address(self._config.listen)[0], port)
        return self._config.advertise or bound

    async def serve_engines(self, service: EngineService) -> str:
        server = self._server()
        engine_pb2_grpc.add_EngineServicer_to_server(service, server)
        address = self._config.engine_address
        with _private_files():
            port = self._bind(server, address, "engine_listen")
        await self._start(server)
        self._stack.callback(service.close)
        if address.startswith("unix:"):
            self._stack.callback(_unlink, address.removeprefix("unix:"))
            return address
        return join_address(split_address(address)[0], port)

    def _server(self) -> grpc.aio.Server:
        def on_bug(method: str, request_id: str, error: Exception) -> None:
            self.bugs += 1
            say_bug(log, "call failed", error, method=method, request_id=request_id)

        edge = EdgeInterceptor(
            self.calls,
            max_deadline_s=self._config.max_deadline_s + DEADLINE_MARGIN_S,
            on_bug=on_bug,
            gate=self.security.gate,
            tracer=self._tracer,
        )
        return grpc.aio.server(interceptors=[edge], options=server_options(part=PORT_PART))

    def _bind(self, server: grpc.aio.Server, address: str, setting: str) -> int:
        port = bind(server, address, self._tls)
        if not port:
            raise ConfigError([_taken(setting, address)])
        return port

    async def _start(self, server: grpc.aio.Server) -> None:
        await server.start()
        self._stack.push_async_callback(server.stop, self._config.grace_s)

    def serve_health(self, pulse: LoopPulse, *, not_ready: Callable[[], str]) -> str:
        """As serve_http, for probes by gRPC."""
        if not self._config.health_listen:
            return ""
        probes = HealthPort(self._config.health_listen, started=lambda: "", alive=pulse.fault, ready=not_ready)
        self._stack.push_async_callback(asyncio.to_thread, probes.close)
        return join_address(split_address(self._config.health_listen)[0], probes.port)

    def serve_http(self, metrics: Metrics, pulse: LoopPulse, *, not_ready: Callable[[], str]) -> str:
        """Readiness never depends on a coordinator: it gates the engine's pod."""
        if not self._config.http_listen:
            return ""
        host, port = split_address(self._config.http_listen)
        side = HttpSide((host, port), metrics, alive=pulse.fault, ready=not_ready, remark=self._remark)
        self._stack.push_async_callback(asyncio.to_thread, side.close)
        return join_address(host, side.address[1])

    def _remark(self) -> str:
        """An expired certificate, too: engines of this host go on without the others, so it does not make us unready."""
        tls = (self._tls.fault(), self._tls.remark()) if self._tls is not None else ()
        return " ".join(filter(None, (*tls, self.security.remark())))


@contextlib.contextmanager
def _private_files() -> Iterator[None]:
    """Files made meanwhile are for this user only; a socket that is chmod-ed afterwards was open to all for a moment."""
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _taken(setting: str, address: str) -> str:
    flag = f"--{setting.replace('_', '-')}"
    return (
        f"{setting}: cannot listen on {address}: stop the process that has it (`ss -lxtnp` names it; another agent?), "
        f"or give another address with {flag} (port 0 takes a free one)"
    )

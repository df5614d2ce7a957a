"""A port for probes alone: grpc.health.v1 in plaintext, on threads of its own, whatever the other ports ask of callers.

    startup      everything listens
    liveness     the process's event loop has turned lately; never a matter of peers, a store or other coordinators
    readiness    it may be asked; also under the empty name

Why: before Kubernetes 1.37 the kubelet's gRPC probes speak no TLS, and a loop that is busy must not look like one that is dead.
Rules: it says three words and nothing else, so it may be public; Watch is not served, lest a watcher hold a thread for ever;
no connection stays long, or who opened enough of them would keep the kubelet out, and have the pod restarted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvdir.errors import ConfigError
from kvdir.rpc.channel import HANDSHAKE_MS
from kvdir.rpc.open_files import part_of_open_files

Probe = Callable[[], str]
"""Returns why not, or an empty string. Called on a thread of gRPC."""

NAMES = ("startup", "liveness", "readiness")
_THREADS = 2
_MAX_CALLS = 32
_MAX_CONNECTIONS = 256
_MAX_BYTES = 4096
_IDLE_MS = 1_000
"""Without a call; the kubelet connects for each probe."""
_AGE_MS = 10_000
_AGE_GRACE_MS = 1_000


class HealthPort:
    """Serves from construction until `close`. port: where. Raises ConfigError if the address cannot be had."""

    def __init__(self, address: str, *, started: Probe, alive: Probe, ready: Probe) -> None:
        probes = {"startup": started, "liveness": alive, "readiness": ready, "": ready}
        options = (
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", _MAX_BYTES),
            ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
            ("grpc.max_allowed_incoming_connections", max_connections()),
            ("grpc.max_connection_idle_ms", _IDLE_MS),
            ("grpc.max_connection_age_ms", _AGE_MS),
            ("grpc.max_connection_age_grace_ms", _AGE_GRACE_MS),
        )
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="health")
        self._server = grpc.server(self._threads, options=options, maximum_concurrent_rpcs=_MAX_CALLS)
        health_pb2_grpc.add_HealthServicer_to_server(_Servicer(probes), self._server)
        try:
            self.port = self._server.add_insecure_port(address)
        except RuntimeError:
            self.port = 0
        if not self.port:
            raise ConfigError(
                [
                    f"health_listen: {address} cannot be used: stop the process that has it (`ss -ltnp` names it), or give "
                    "another port with --health-listen (0 takes a free one)"
                ]
            )
        self._server.start()

    def close(self) -> None:
        self._server.stop(None).wait()
        self._threads.shutdown(wait=False)


def max_connections() -> int:
    """At a time."""
    return part_of_open_files(0.0625, most=_MAX_CONNECTIONS)


class _Servicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # it has no types
    def __init__(self, probes: Mapping[str, Probe]) -> None:
        self._probes: Mapping[str, Probe] = probes

    def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> health_pb2.HealthCheckResponse:
        probe = self._probes.get(request.service)
        if probe is None:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no such service; known: {', '.join(NAMES)}")
        assert probe is not None, "abort raises"
        states = health_pb2.HealthCheckResponse
        return states(status=states.NOT_SERVING if probe() else states.SERVING)

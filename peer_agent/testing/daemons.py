"""A coordinator and an agent as processes with every port open, and whether each of them answers who comes anew.

For tests of daemons under callers that do not behave. Does not: store blocks (processes.py has engines).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import urllib.request

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvdir.testing.wait import eventually
from peer_agent import _native
from peer_agent.demo.processes import Child
from peer_agent.testing.processes import ProcessCluster

SERVED_S = 20.0
"""In which a caller that tries again is served, whatever others do: handshakes that nobody finishes end after 5 s."""


async def grpc_answers(address: str) -> None:
    """Until a new connection's call is answered."""

    async def asked() -> bool:
        async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            with contextlib.suppress(grpc.aio.AioRpcError):
                answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=5.0)
                return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
            return False

    await eventually(asked, within_s=SERVED_S, what=f"a call to {address} is answered")


async def http_answers(url: str) -> None:
    def asked() -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5.0) as answer:
            return bool(answer.status == 200 and answer.read())
        return False

    await eventually(lambda: asyncio.to_thread(asked), within_s=SERVED_S, what=f"{url} is answered")


async def plane_answers(address: str) -> None:
    host, _, port = address.rpartition(":")

    def greeted() -> bool:
        with contextlib.suppress(ConnectionError):
            _native.TcpConnection(host, int(port), time.monotonic_ns() + 5 * 10**9).close()
            return True
        return False

    await eventually(lambda: asyncio.to_thread(greeted), within_s=SERVED_S, what=f"the data plane at {address} says hello")


async def everything_answers(coordinator: Child, agent: Child) -> None:
    await asyncio.gather(
        grpc_answers(coordinator.ready["grpc"]),
        grpc_answers(coordinator.ready["health"]),
        grpc_answers(agent.ready["peer"]),
        http_answers(f"http://{coordinator.ready['http']}/healthz"),
        http_answers(f"http://{coordinator.ready['http']}/metrics"),
        http_answers(f"http://{coordinator.ready['indexer']}/health"),
        http_answers(f"http://{agent.ready['http']}/healthz"),
        plane_answers(agent.ready["data"]),
    )


async def started(cluster: ProcessCluster, *, prefix: tuple[str, ...] = ()) -> tuple[Child, Child]:
    free = "127.0.0.1:0"
    coordinator = await Child.start(
        "coordinator",
        ("-m", "kvdir", "serve", "--listen", free, "--http-listen", free, "--indexer-listen", free, "--health-listen", free,
         "--output", "json"),
        log=cluster.directory / "coordinator.log", ready_s=30.0, prefix=prefix,
    )  # fmt: skip
    cluster.children["coordinator"] = coordinator
    agent = await Child.start(
        "agent",
        ("-m", "peer_agent", "serve", "--node", "agent", "--namespaces", str(cluster.namespace_file),
         "--arena-path", str(cluster.directory / "agent"), "--arena-bytes", "8MiB", "--coordinators", coordinator.ready["grpc"],
         "--listen", free, "--data-listen", free, "--http-listen", free, "--output", "json"),
        log=cluster.directory / "agent.log", ready_s=30.0, prefix=prefix,
    )  # fmt: skip
    cluster.children["agent"] = agent
    return coordinator, agent

"""The plaintext port for probes: three names, answered from a thread, whatever the other ports ask of callers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvdir.errors import ConfigError
from kvdir.rpc.health_port import NAMES, HealthPort, max_connections
from kvdir.testing.certificates import shared_certificates
from kvdir.testing.crowd import Crowd, open_files
from kvdir.testing.served import FAST_CONFIG, Served, serving
from kvdir.testing.wait import eventually
from peer_agent.testing.cluster import LocalCluster, local_cluster

FILES = shared_certificates().files("coordinator")
TLS = {"tls_cert": FILES.certificate, "tls_key": FILES.key, "tls_ca": FILES.ca}


async def probe(address: str, name: str) -> str:
    """As the kubelet asks: SERVING, NOT_SERVING, or the gRPC code."""

    def ask() -> str:
        with grpc.insecure_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            try:
                answer = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=20)
            except grpc.RpcError as error:
                return str(error.code().name)  # type: ignore[attr-defined]
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))

    return await asyncio.to_thread(ask)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving(replace(FAST_CONFIG, health_listen="127.0.0.1:0", **TLS)) as made:
        yield made


async def test_probes_need_no_certificate_when_everything_else_does(served: Served) -> None:
    await eventually(lambda: served.coordinator.not_ready() == "", what="it is ready")
    assert [await probe(served.health, name) for name in (*NAMES, "")] == ["SERVING"] * 4
    assert await probe(served.health, "kvdir.v1.Directory") == "NOT_FOUND"


async def test_readiness_ends_and_liveness_goes_on_when_the_certificate_has_ended(served: Served) -> None:
    await eventually(lambda: served.coordinator.not_ready() == "", what="it is ready")
    tls = served.coordinator.tls
    assert tls is not None
    tls.clock = lambda: tls.expires_unix_s + 60
    assert [await probe(served.health, name) for name in NAMES] == ["SERVING", "SERVING", "NOT_SERVING"]


async def test_readiness_ends_and_liveness_goes_on_when_the_coordinator_drains(served: Served) -> None:
    served.coordinator.drain()
    assert [await probe(served.health, name) for name in NAMES] == ["SERVING", "SERVING", "NOT_SERVING"]


async def test_nothing_but_health_is_served_there_when_somebody_asks_for_more(served: Served) -> None:
    def ask() -> grpc.StatusCode:
        with grpc.insecure_channel(served.health) as channel, pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary("/kvdir.v1.Admin/Status")(b"", timeout=20)
        return caught.value.code()  # type: ignore[attr-defined, no-any-return]

    assert await asyncio.to_thread(ask) is grpc.StatusCode.UNIMPLEMENTED


async def test_agent_is_ready_when_no_coordinator_is_there_and_its_certificate_has_ended(tmp_path: Path) -> None:
    cluster: LocalCluster
    async with local_cluster(tmp_path, coordinator=False) as cluster:
        agent = await cluster.start_agent("a", health_listen="127.0.0.1:0", coordinators=("127.0.0.1:1",), **TLS)
        tls = agent._listeners._tls
        assert tls is not None
        tls.clock = lambda: tls.expires_unix_s + 60
        assert [await probe(agent.ready.health, name) for name in NAMES] == ["SERVING"] * 3
        assert "expired 60 s ago" in agent._listeners._remark()


def test_start_is_refused_with_the_fix_when_the_port_is_taken() -> None:
    port = HealthPort("127.0.0.1:0", started=str, alive=str, ready=str)
    try:
        with pytest.raises(ConfigError, match=r"health_listen: .* cannot be used: stop the process"):
            HealthPort(f"127.0.0.1:{port.port}", started=str, alive=str, ready=str)
    finally:
        port.close()


async def test_probes_are_answered_when_somebody_has_opened_all_connections_and_keeps_them(served: Served) -> None:
    """He has said hello on each, as HTTP/2 begins, and then nothing."""
    await eventually(lambda: served.coordinator.not_ready() == "", what="it is ready")
    hello = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
    with open_files(4096), Crowd(served.health, 2 * max_connections(), saying=hello):
        until_s = time.monotonic() + 30
        while (answer := await probe(served.health, "liveness")) != "SERVING":
            assert time.monotonic() < until_s, answer

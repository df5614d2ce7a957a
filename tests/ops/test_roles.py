"""A certificate opens the methods of its roles and no other, at coordinators, their workers, and agents."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvdir.client.aio import DirectoryClient
from kvdir.core.policy import Role
from kvdir.errors import ConfigError, Forbidden
from kvdir.rpc.event_codec import encode_hello
from kvdir.server.app import build_coordinator
from kvdir.server.config import CoordinatorConfig
from kvdir.server.rights import RIGHTS
from kvdir.testing.certificates import shared_certificates
from kvdir.testing.served import Served
from kvdir.testing.tenants import POLICY, dialer, hear, secured, secured_serving
from kvdir.v1 import common_pb2, directory_pb2

STREAMED = directory_pb2.LookupStreamRequest(lookups=[directory_pb2.StreamedLookup(id=1, deadline_ms=9000)])
NOTHING = common_pb2.Fingerprints()
"""Encodes to no bytes: an empty request of any method."""
ROLES = {"agent-a": Role.AGENT, "engine-a": Role.ENGINE, "router": Role.ROUTER, "admin": Role.ADMIN}


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with secured_serving(tmp_path) as served:
        yield served


@pytest.mark.parametrize("name", ROLES)
async def test_exactly_the_methods_of_a_role_are_open_when_it_calls(served: Served, name: str) -> None:
    heard = {method: await hear(served.address, name, method, NOTHING, most=1) for method in RIGHTS}
    closed = {method for method, said in heard.items() if said.code == "PERMISSION_DENIED"}
    assert closed == {method for method, roles in RIGHTS.items() if ROLES[name] not in roles}
    for method in closed:
        assert f"{name} (roles: {ROLES[name]}) may not call" in heard[method].details
    assert served.coordinator.gate.refused["role"] == len(closed)


async def test_a_certificate_without_an_identity_may_nothing_when_there_is_a_policy(served: Served) -> None:
    said = await hear(served.address, "node", "/kvdir.v1.Directory/Lookup", NOTHING)
    assert (said.code, "kvdir test node" in said.details) == ("PERMISSION_DENIED", True)
    health = await hear(served.address, "node", "/grpc.health.v1.Health/Check", NOTHING)
    assert health.code == "OK"


async def test_an_agent_publishes_as_itself_only_when_names_are_whose(served: Served) -> None:
    for node, fine in (("a", True), ("a/vllm@0", True), ("b", False), ("ab", False), ("", False)):
        hello = encode_hello(
            node=node, epoch=7, last_seq=0, peer_address="h:1", started_unix_ms=0, namespaces=(), agent_version="test"
        )
        said = await hear(served.address, "agent-a", "/kvdir.v1.Events/Publish", hello, most=1)
        assert bool(said.answers) is fine, node
        if not fine:
            assert "may not publish as node" in said.details
    assert set(served.coordinator.directory.nodes) == {"a", "a/vllm@0"}
    assert served.coordinator.gate.refused["node"] == 3


async def test_whoami_tells_everybody_what_they_are_when_asked(served: Served) -> None:
    async with DirectoryClient(served.address, tls=shared_certificates().files("router")) as client:
        found = await client.who_am_i()
        assert (found.identity, found.roles, found.tenants, found.remark) == ("router", ("router",), ("none",), "")
        assert "spiffe://kvdir.test/router" in found.certificate
        with pytest.raises(Forbidden, match="takes one of admin"):
            await client.status()


async def test_workers_open_the_same_and_pass_the_caller_on_when_they_share_the_port(tmp_path: Path) -> None:
    async with secured_serving(tmp_path, lookup_workers=1) as served:
        for _ in range(8):  # connections go to the main process or its worker, as the kernel likes
            who = await hear(served.address, "router", "/kvdir.v1.Admin/WhoAmI", NOTHING)
            assert (who.code, b"spiffe://kvdir.test/router" in who.answers[0]) == ("OK", True)
            for method in ("Admin/Nodes", "Directory/Watch", "Events/Publish"):
                refused = await hear(served.address, "router", f"/kvdir.v1.{method}", NOTHING)
                assert refused.code == "PERMISSION_DENIED", (method, refused.details)


def test_nothing_starts_when_the_policy_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'king' is unknown"):
        build_coordinator(secured(tmp_path, POLICY.replace('"router"]', '"king"]')))
    assert any("needs tls_cert" in fault for fault in CoordinatorConfig(policy=secured(tmp_path).policy).faults())


async def test_one_identity_is_held_back_and_others_are_not_when_there_are_limits(tmp_path: Path) -> None:
    async with secured_serving(tmp_path, max_requests_per_s=0.01, max_streams_per_identity=1) as served:
        gate = served.coordinator.gate
        assert (await hear(served.address, "router", "/kvdir.v1.Admin/WhoAmI", NOTHING)).code == "OK"
        refused = await hear(served.address, "router", "/kvdir.v1.Admin/WhoAmI", NOTHING)
        assert (refused.code, "max_requests_per_s" in refused.details) == ("RESOURCE_EXHAUSTED", True)
        trailing = dict(refused.trailing)
        assert trailing["kvdir-code"] == "overloaded"
        assert 0 < int(trailing["kvdir-retry-after-ms"]) <= 100_000
        # One that is not held back, with a stream open, until it wants a second one.
        async with dialer("engine-a").aio(served.address, options=()) as channel:
            stream: Any = channel.stream_stream("/kvdir.v1.Directory/LookupStream")()
            await stream.initial_metadata()
            second = await hear(served.address, "engine-a", "/kvdir.v1.Directory/LookupStream", NOTHING)
            assert second.code == "RESOURCE_EXHAUSTED"
            await stream.write(STREAMED.SerializeToString())
            answer = directory_pb2.LookupStreamResponse.FromString(await stream.read()).answers[0].lookup
            assert answer.error.startswith("overloaded: engine-a asks more than 0.01 times a second")
            stream.cancel()
        assert gate.limited["rate"] >= 2

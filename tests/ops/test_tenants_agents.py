"""Tenants at agents: what a foreign peer asks for is not there, and blocks move between those who may."""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from kvdir.fingerprint import Fingerprints
from kvdir.rpc.lookup_codec import encode_fingerprints
from kvdir.rpc.tls import PLAINTEXT
from kvdir.testing.certificates import shared_certificates
from kvdir.testing.tenants import POLICY, SALT, Said, dialer, hear, write_policy
from peer_agent.core.effects import LoadStatus
from peer_agent.testing import LocalCluster, local_cluster
from peer_agent.testing.cluster import sample_namespace
from peer_agent.v1 import engine_pb2, engine_pb2_grpc, peer_pb2

BLOCKS = 8
TCP = "127.0.0.1:0"
ACME = sample_namespace(model="acme", tenant_salt=SALT)
NOBODYS = dataclasses.replace(ACME, model="nobody")


def files(name: str, policy: Path) -> dict[str, Any]:
    found = shared_certificates().files(name)
    return {"tls_cert": found.certificate, "tls_key": found.key, "tls_ca": found.ca, "policy": str(policy)}


@pytest.fixture
async def cluster() -> AsyncIterator[LocalCluster]:
    """Agents a (acme's, as agent-a) and b, both serving acme's namespace; a holds BLOCKS blocks. The policy knows b only as of
    no tenant. Sockets' paths end at 107 bytes, so their directory is short.
    """
    with tempfile.TemporaryDirectory(prefix="kvdir-") as path:
        policy = Path(path) / "policy.toml"
        write_policy(policy, POLICY)
        async with local_cluster(Path(path), namespace=ACME, transports=("tcp",), coordinator=False) as cluster:
            await cluster.start_coordinator(**files("coordinator", policy))
            await cluster.start_agent("a", **files("agent-a", policy))
            writer = await cluster.engine("a")
            fingerprints = cluster.blocks.chain(BLOCKS)
            assert (await writer.store(fingerprints, cluster.blocks.data(fingerprints))).stored == BLOCKS
            await cluster.wait_known("a")
            yield cluster


def lock(digest: bytes, fingerprints: Fingerprints) -> peer_pb2.LockRequest:
    return peer_pb2.LockRequest(
        namespace_digest=digest, fingerprints=encode_fingerprints(fingerprints), lease_ms=1000, reader="x"
    )


async def peer(cluster: LocalCluster, name: str, method: str, request: Any) -> Said:
    return await hear(cluster.agents["a"].ready.peer, name, f"/peer_agent.v1.Peer/{method}", request)


async def test_a_foreign_namespace_is_absent_when_a_peer_locks_in_it(cluster: LocalCluster) -> None:
    fingerprints = cluster.blocks.chain(BLOCKS)
    own = await peer(cluster, "agent-a", "Lock", lock(ACME.digest, fingerprints))
    assert peer_pb2.LockResponse.FromString(own.answers[0]).present == BLOCKS
    foreign = await peer(cluster, "agent-b", "Lock", lock(ACME.digest, fingerprints))
    absent = await peer(cluster, "agent-b", "Lock", lock(NOBODYS.digest, fingerprints))
    assert foreign.of(ACME.digest, shown_as=NOBODYS.digest) == absent
    assert (foreign.code, "acme" in foreign.details) == ("NOT_FOUND", False)
    sample = await peer(cluster, "agent-b", "Sample", peer_pb2.SampleRequest(max_blocks=4, max_bytes=2**20))
    assert peer_pb2.SampleResponse.FromString(sample.answers[0]).lock == 0


async def test_a_number_is_no_right_when_another_identity_knows_it(cluster: LocalCluster) -> None:
    locked = await peer(cluster, "agent-a", "Lock", lock(ACME.digest, cluster.blocks.chain(BLOCKS)))
    answer = peer_pb2.LockResponse.FromString(locked.answers[0])
    for name, code, unknown in (("coordinator", "INVALID_ARGUMENT", 1), ("agent-a", "OK", 0)):
        read = await peer(cluster, name, "Read", peer_pb2.ReadRequest(lock=answer.lock, blocks=answer.blocks[:32]))
        assert read.code == code, name
        unlocked = await peer(cluster, name, "Unlock", peer_pb2.UnlockRequest(locks=[answer.lock]))
        assert peer_pb2.UnlockResponse.FromString(unlocked.answers[0]).unknown == unknown
    engines = POLICY.replace('["engine"]\ntenants = ["none"]', '["engine"]\ntenants = ["acme"]')
    write_policy(Path(cluster.agents["a"].config.policy), engines.replace('["router"]\ntenants', '["engine"]\ntenants'))
    agent = await cluster.start_agent("b", **files("agent-b", Path(cluster.agents["a"].config.policy)), engine_listen=TCP)
    request = engine_pb2.AttachRequest(
        protocol_version=1, engine="e", namespace_digest=ACME.digest, namespace_canonical_json=ACME.canonical().encode()
    )
    async with dialer("engine-a").aio(agent.ready.engine, options=()) as channel:
        call = engine_pb2_grpc.EngineStub(channel).Attach(request)
        release = engine_pb2.ReleaseRequest(session=(await call.read()).session)
        for name, code in (("router", "ABORTED"), ("engine-a", "OK")):
            said = await hear(agent.ready.engine, name, "/peer_agent.v1.Engine/Release", release)
            assert said.code == code, said
        call.cancel()


async def test_only_agents_are_peers_when_roles_are_given(cluster: LocalCluster) -> None:
    for name in ("router", "engine-a", "admin"):
        said = await peer(cluster, name, "Hello", peer_pb2.HelloRequest(protocol_version=1))
        assert said.code == "PERMISSION_DENIED", name
    engine = cluster.agents["a"].ready.engine
    assert engine.startswith("unix:")
    inventory = await hear(engine, "router", "/peer_agent.v1.Engine/Inventory", engine_pb2.InventoryRequest())
    assert inventory.code == "OK", "over the socket of this host everybody is local"


async def test_blocks_move_between_those_who_may_and_no_others_when_tenants_are_kept_apart(cluster: LocalCluster) -> None:
    policy = Path(cluster.agents["a"].config.policy)
    fingerprints, into = cluster.blocks.chain(BLOCKS), cluster.blocks.room(cluster.blocks.chain(BLOCKS))
    await cluster.start_agent("b", **files("agent-b", policy))
    result = await (await cluster.engine("b")).load(fingerprints, into=into, deadline_s=5.0)
    assert result.count(LoadStatus.HIT_PEER) == 0
    cluster.blocks.check(fingerprints, into, result)
    # b is acme's, too, from now on: once all have read that, it is served.
    allowed = POLICY.replace('tenants = ["none"]\nnodes = ["b"]', 'tenants = ["none", "acme"]\nnodes = ["b"]')
    write_policy(policy, allowed)
    engine = await cluster.engine("b")
    async with asyncio.timeout(30):
        while not (result := await engine.load(fingerprints, into=into, deadline_s=5.0)).count(LoadStatus.HIT_PEER):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    assert result.count(LoadStatus.HIT_PEER) == BLOCKS
    cluster.blocks.check(fingerprints, into, result)


async def test_an_engine_is_let_go_when_its_tenant_is_taken_from_this_hosts_callers(cluster: LocalCluster) -> None:
    agent = cluster.agents["a"]
    request = engine_pb2.AttachRequest(
        protocol_version=1, engine="e", namespace_digest=ACME.digest, namespace_canonical_json=ACME.canonical().encode()
    )
    async with PLAINTEXT.aio(agent.ready.engine, options=()) as channel:
        call = engine_pb2_grpc.EngineStub(channel).Attach(request)
        assert (await call.read()).node == "a"
        write_policy(Path(agent.config.policy), POLICY + '[local]\nroles = ["engine"]\ntenants = ["none"]\n')
        async with asyncio.timeout(20):
            with pytest.raises(grpc.aio.AioRpcError, match="may not attach for the tenant of its namespace any more"):
                await call.read()
        again = engine_pb2_grpc.EngineStub(channel).Attach(request)
        with pytest.raises(grpc.aio.AioRpcError, match="local may not attach for the tenant of this namespace"):
            await again.read()
        request.namespace_canonical_json = b"{}"  # by the digest alone it is as unknown as any
        unknown = engine_pb2_grpc.EngineStub(channel).Attach(request)
        with pytest.raises(grpc.aio.AioRpcError, match="is not served here \\(here: none yet\\)"):
            await unknown.read()

"""Tenants where coordinators share a store: the same words for what is foreign and what is not there, and writers are told."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvdir.fingerprint import Fingerprints
from kvdir.rpc.event_codec import encode_hello
from kvdir.rpc.lookup_codec import encode_fingerprints, encode_lookup_request
from kvdir.store.memory import MemoryBlockStore
from kvdir.testing.fake_node import FakeNode
from kvdir.testing.served import said
from kvdir.testing.shared import Shared, shared
from kvdir.testing.tenants import ACME_SPACE, OPEN_SPACE, POLICY, dialer, hear, secured, write_policy
from kvdir.testing.wait import eventually
from kvdir.v1 import admin_pb2, directory_pb2, events_pb2, events_pb2_grpc

BLOCKS = Fingerprints.chain(b"%d" % number for number in range(20))
NOBODYS = dataclasses.replace(ACME_SPACE, model="nobody-has-this")


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Shared]:
    config = secured(tmp_path)
    names = ("tls_cert", "tls_key", "tls_ca", "policy")
    settings = {name: getattr(config, name) for name in names}
    async with shared(MemoryBlockStore(), **settings) as served:
        yield served


def lookup(digest: bytes) -> Any:
    return encode_lookup_request(digest, BLOCKS, mode=directory_pb2.LOOKUP_MODE_PREFIX, touch=False)


def score(digest: bytes) -> directory_pb2.ScoreRequest:
    name = directory_pb2.ScoreName(namespace_digest=digest, fingerprints=encode_fingerprints(BLOCKS))
    return directory_pb2.ScoreRequest(parts=[directory_pb2.ScorePart(groups=[directory_pb2.ScoreGroup(names=[name])])])


async def test_a_foreign_namespace_is_absent_when_the_directory_is_shared(served: Shared) -> None:
    async with FakeNode(served.address, "a", namespace=ACME_SPACE, dialer=dialer("agent-a")) as node:
        node.store(BLOCKS)
        await node.synced()
        own = await hear(served.address, "agent-a", "/kvdir.v1.Directory/Lookup", lookup(ACME_SPACE.digest))
        assert directory_pb2.LookupResponse.FromString(own.answers[0]).nodes[0].node == "a"
        for method, ask in (("Lookup", lookup), ("Score", score)):
            heard = [
                await hear(served.address, "router", f"/kvdir.v1.Directory/{method}", ask(digest))
                for digest in (ACME_SPACE.digest, NOBODYS.digest)
            ]
            assert heard[0].of(ACME_SPACE.digest, shown_as=NOBODYS.digest) == heard[1]
            assert heard[1].code == "NOT_FOUND"
        views = await hear(served.address, "router", "/kvdir.v1.Admin/Views", admin_pb2.ViewsRequest())
        assert views.code == "PERMISSION_DENIED"


async def test_a_writer_is_told_when_the_directory_is_shared(served: Shared) -> None:
    hello = encode_hello(
        node="b", epoch=5, last_seq=0, peer_address="h:1", started_unix_ms=0,
        namespaces=[OPEN_SPACE, ACME_SPACE], agent_version="test",
    )  # fmt: skip
    async with dialer("agent-b").aio(served.address, options=()) as channel:
        call = events_pb2_grpc.EventsStub(channel).Publish()
        await call.write(hello)
        first = await call.read()
        assert first.WhichOneof("message") == "welcome"
        refused = await said(call, "namespace_refused")
        assert refused.namespace_digest == ACME_SPACE.digest
        assert set(served.coordinator.sessions["b"].stream.namespaces) == {OPEN_SPACE.digest}
        await call.write(events_pb2.PublishRequest(hello=hello.hello))  # the same again, in the middle of the call
        assert (await said(call, "namespace_refused")).namespace_digest == ACME_SPACE.digest
        call.cancel()
    assert served.coordinator.gate.refused["tenant"] == 2


async def test_what_was_stored_goes_when_its_tenant_is_taken_away(served: Shared) -> None:
    async with FakeNode(served.address, "a", namespace=ACME_SPACE, dialer=dialer("agent-a")) as node:
        node.store(BLOCKS)
        await node.synced()
        without = POLICY.replace('tenants = ["none", "acme"]\nnodes = ["a"]', 'tenants = ["none"]\nnodes = ["a"]')
        write_policy(Path(served.coordinator.config.policy), without)
        await eventually(lambda: served.held("a") == 0, within_s=20.0, what="its blocks are gone")

"""A foreign tenant's namespace is what a namespace that does not exist is: compared byte by byte, for every way to ask."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvdir.core.feed_items import HolderItem, NamespaceItem, SnapshotEnd, Start, Stored
from kvdir.core.watcher import MIN_CREDIT_BYTES
from kvdir.errors import UnknownNamespace
from kvdir.fingerprint import Fingerprints
from kvdir.namespace import Namespace
from kvdir.rpc.event_codec import encode_hello
from kvdir.rpc.lookup_codec import encode_fingerprints, encode_lookup_request
from kvdir.rpc.watch_codec import decode_response, encode_start
from kvdir.testing.fake_node import FakeNode
from kvdir.testing.served import Served, said
from kvdir.testing.tenants import ACME_SPACE, OPEN_SPACE, POLICY, SALT, Said, dialer, hear, secured_serving
from kvdir.testing.wait import eventually
from kvdir.v1 import admin_pb2, directory_pb2, events_pb2, events_pb2_grpc

BLOCKS = Fingerprints.chain(b"%d" % number for number in range(20))
NOBODYS = dataclasses.replace(ACME_SPACE, model="nobody-has-this")
SOME_ADMIN = POLICY.replace('name = "admin"', 'name = "no-admin"').replace("/admin", "/no-admin") + (
    '[[identity]]\nname = "admin"\nspiffe = ["spiffe://kvdir.test/admin"]\nroles = ["admin"]\ntenants = ["none"]\n'
)


class World:
    """Node a holds BLOCKS for acme, node b for nobody in particular."""

    def __init__(self, served: Served, a: FakeNode, b: FakeNode) -> None:
        self.served = served
        self.a = a
        self.b = b

    async def hear(self, name: str, method: str, *requests: Any, most: int = 64) -> Said:
        return await hear(self.served.address, name, method, *requests, most=most)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with made_world(tmp_path) as world:
        yield world


@contextlib.asynccontextmanager
async def made_world(directory: Path, **settings: Any) -> AsyncIterator[World]:
    async with secured_serving(directory, SOME_ADMIN, **settings) as served:
        a = FakeNode(served.address, "a", namespace=ACME_SPACE, dialer=dialer("agent-a"))
        b = FakeNode(served.address, "b", namespace=OPEN_SPACE, dialer=dialer("agent-b"))
        async with a, b:
            for node in (a, b):
                node.store(BLOCKS)
                await node.synced()
            await eventually(lambda: not served.coordinator.directory.warming, within_s=20.0, what="the directory is warm")
            yield World(served, a, b)


def lookup(space: Namespace) -> directory_pb2.LookupRequest:
    return encode_lookup_request(space.digest, BLOCKS, mode=directory_pb2.LOOKUP_MODE_PREFIX, touch=True)


def score(*spaces: Namespace) -> directory_pb2.ScoreRequest:
    names = [
        directory_pb2.ScoreName(namespace_digest=space.digest, fingerprints=encode_fingerprints(BLOCKS)) for space in spaces
    ]
    return directory_pb2.ScoreRequest(
        parts=[directory_pb2.ScorePart(groups=[directory_pb2.ScoreGroup(names=[name])]) for name in names]
    )


def report(space: Namespace, node: str, epoch: int) -> events_pb2.ReportStaleRequest:
    return events_pb2.ReportStaleRequest(
        reporter="b", node=node, epoch=epoch, owner_seq=2**40, namespace_digest=space.digest, tier=2,
        fingerprints=encode_fingerprints(BLOCKS),
    )  # fmt: skip


async def test_the_owner_finds_its_blocks_when_it_asks(world: World) -> None:
    found = await world.hear("agent-a", "/kvdir.v1.Directory/Lookup", lookup(ACME_SPACE))
    assert found.code == "OK"
    assert directory_pb2.LookupResponse.FromString(found.answers[0]).nodes[0].node == "a"
    with pytest.raises(UnknownNamespace):
        world.served.coordinator.directory.namespaces.require(NOBODYS.digest)


@pytest.mark.parametrize(
    ("method", "ask"),
    [
        ("Directory/Lookup", lookup),
        ("Directory/LookupBatch", lambda space: directory_pb2.LookupBatchRequest(requests=[lookup(space), lookup(OPEN_SPACE)])),
        (
            "Directory/LookupStream",
            lambda space: directory_pb2.LookupStreamRequest(
                lookups=[directory_pb2.StreamedLookup(id=1, lookup=lookup(space), deadline_ms=9000)]
            ),
        ),
        ("Directory/Score", score),
    ],
    ids=lambda value: value.rpartition("/")[2] if isinstance(value, str) else "",
)
async def test_a_foreign_namespace_is_absent_when_it_is_asked_about(world: World, method: str, ask: Any) -> None:
    for name in ("agent-b", "router", "engine-a"):
        foreign = await world.hear(name, f"/kvdir.v1.{method}", ask(ACME_SPACE))
        absent = await world.hear(name, f"/kvdir.v1.{method}", ask(NOBODYS))
        assert stable(foreign.of(ACME_SPACE.digest, shown_as=NOBODYS.digest)) == stable(absent), name
        assert "acme" not in foreign.details
        assert not any(b"acme" in answer for answer in foreign.answers)


async def test_a_worker_says_the_same_as_its_coordinator_when_a_namespace_is_foreign(tmp_path: Path) -> None:
    async with made_world(tmp_path, lookup_workers=1) as world:
        heard = set()
        for _ in range(6):  # connections go to either of them, as the kernel likes
            foreign = await world.hear("router", "/kvdir.v1.Directory/Lookup", lookup(ACME_SPACE))
            heard.add(foreign.of(ACME_SPACE.digest, shown_as=NOBODYS.digest))
            heard.add(await world.hear("router", "/kvdir.v1.Directory/Lookup", lookup(NOBODYS)))
            own = await world.hear("agent-a", "/kvdir.v1.Directory/Lookup", lookup(ACME_SPACE))
            assert own.code == "OK"
        assert [said.code for said in heard] == ["NOT_FOUND"]


def stable(said: Said) -> Said:
    """Without the nodes of what may be seen: their ages and states differ from call to call."""
    answers = []
    for answer in said.answers:
        batch = directory_pb2.LookupBatchResponse.FromString(answer)
        for item in batch.responses:
            item.ClearField("nodes")
        answers.append(batch.SerializeToString(deterministic=True) if batch.responses else answer)
    return dataclasses.replace(said, answers=tuple(answers))


async def test_a_part_that_is_foreign_counts_as_unknown_when_a_prompt_is_scored(world: World) -> None:
    mixed = await world.hear("router", "/kvdir.v1.Directory/Score", score(OPEN_SPACE, ACME_SPACE))
    answer = directory_pb2.ScoreResponse.FromString(mixed.answers[0])
    assert list(answer.unknown_namespaces) == [ACME_SPACE.digest]
    assert {item.node for item in answer.nodes} == {"b"}


async def test_feedback_about_a_foreign_namespace_changes_nothing_when_it_comes(world: World) -> None:
    epoch = world.a.epoch
    foreign = await world.hear("agent-b", "/kvdir.v1.Events/ReportStale", report(ACME_SPACE, "a", epoch))
    absent = await world.hear("agent-b", "/kvdir.v1.Events/ReportStale", report(NOBODYS, "a", epoch))
    assert foreign == absent
    own = await world.hear("agent-a", "/kvdir.v1.Directory/Lookup", lookup(ACME_SPACE))
    assert directory_pb2.LookupResponse.FromString(own.answers[0]).nodes[0].node == "a"


async def watched(world: World, name: str, *digests: bytes) -> list[Any]:
    """The items of a snapshot, and of what came before it ended."""
    start = Start("test", digests=frozenset(digests), credit_bytes=4 * MIN_CREDIT_BYTES)
    async with dialer(name).aio(world.served.address, options=()) as channel:
        call: Any = channel.stream_stream("/kvdir.v1.Directory/Watch")()
        await call.write(encode_start(start).SerializeToString())
        items: list[Any] = []
        while not any(isinstance(item, SnapshotEnd) for item in items):
            items += decode_response(await call.read()).items
        call.cancel()
    return items


async def test_a_watcher_hears_of_its_tenants_only_when_it_watches_all(world: World) -> None:
    def spaces(items: list[Any]) -> set[bytes]:
        announced = {item.announced.digest for item in items if isinstance(item, NamespaceItem)}
        return announced | {item.digest for item in items if isinstance(item, HolderItem)}

    everything, some = await watched(world, "agent-a"), await watched(world, "agent-b")
    assert spaces(everything) == {ACME_SPACE.digest, OPEN_SPACE.digest}
    assert spaces(some) == {OPEN_SPACE.digest}
    assert [item.blocks for item in some if isinstance(item, SnapshotEnd)] == [len(BLOCKS)]
    named = await watched(world, "agent-b", ACME_SPACE.digest)
    absent = await watched(world, "agent-b", NOBODYS.digest)
    assert spaces(named) == set()
    assert [type(item) for item in named] == [type(item) for item in absent]


async def test_nobody_goes_on_where_another_stood_when_they_see_different_tenants(world: World) -> None:
    async def welcomed(name: str, start: Start) -> Any:
        async with dialer(name).aio(world.served.address, options=()) as channel:
            call: Any = channel.stream_stream("/kvdir.v1.Directory/Watch")()
            await call.write(encode_start(start).SerializeToString())
            first = decode_response(await call.read())
            call.cancel()
        return first.welcome

    begin = Start("test", credit_bytes=4 * MIN_CREDIT_BYTES)
    some, all_of_it = await welcomed("agent-b", begin), await welcomed("coordinator", begin)
    head = world.served.coordinator.watching.feed.head  # type: ignore[union-attr]
    assert some.log_id != all_of_it.log_id
    again = dataclasses.replace(begin, log_id=some.log_id, position=head)
    assert not (await welcomed("agent-b", again)).snapshot
    assert (await welcomed("coordinator", again)).snapshot
    assert (await welcomed("agent-b", dataclasses.replace(again, log_id=all_of_it.log_id))).snapshot


async def test_changes_of_other_tenants_are_not_told_when_they_happen(world: World) -> None:
    start = encode_start(Start("test", credit_bytes=4 * MIN_CREDIT_BYTES))
    async with dialer("agent-b").aio(world.served.address, options=()) as channel:
        call: Any = channel.stream_stream("/kvdir.v1.Directory/Watch")()
        await call.write(start.SerializeToString())
        items: list[Any] = []
        more = Fingerprints.chain(b"%d" % number for number in range(100, 103))
        while not any(isinstance(item, SnapshotEnd) for item in items):
            items += decode_response(await call.read()).items
        items.clear()
        world.a.store(more)
        await world.a.synced()
        world.b.store(more)
        while not any(isinstance(item, Stored) for item in items):
            items += decode_response(await call.read()).items
        call.cancel()
    stored = [item for item in items if isinstance(item, Stored)]
    assert sum(len(item.packed) // 8 for item in stored) == len(more)


@pytest.mark.parametrize("method", ["Dump", "Views"])
async def test_an_admin_of_some_tenants_sees_theirs_only_when_it_asks(world: World, method: str) -> None:
    request = admin_pb2.DumpRequest if method == "Dump" else admin_pb2.ViewsRequest
    everything = await world.hear("coordinator", f"/kvdir.v1.Admin/{method}", request())
    some = await world.hear("admin", f"/kvdir.v1.Admin/{method}", request())
    if method == "Views":
        hidden = ACME_SPACE.digest.hex().encode()
        assert any(hidden in answer for answer in everything.answers)
        assert not any(hidden in answer or ACME_SPACE.tenant.encode() in answer for answer in some.answers)
        return
    chunks = [admin_pb2.DumpChunk.FromString(answer) for answer in some.answers]
    assert {node for chunk in chunks for node in chunk.nodes} == {"b"}
    foreign, absent = [
        await world.hear("admin", "/kvdir.v1.Admin/Dump", admin_pb2.DumpRequest(namespace_digest=space.digest))
        for space in (ACME_SPACE, NOBODYS)
    ]
    assert foreign == absent


async def test_what_speaks_of_all_tenants_is_refused_alike_when_an_admin_sees_some(world: World) -> None:
    for request in (
        admin_pb2.StoryRequest(node="a"),
        admin_pb2.StoryRequest(node="nobody"),
        admin_pb2.StoryRequest(fingerprint=bytes(32)),
    ):
        told = await world.hear("admin", "/kvdir.v1.Admin/Story", request)
        assert (told.code, "admin sees some tenants" in told.details) == ("PERMISSION_DENIED", True)
    nodes = await world.hear("admin", "/kvdir.v1.Admin/Nodes", admin_pb2.NodesRequest())
    assert nodes.code == "PERMISSION_DENIED"


async def test_a_writer_is_told_and_nothing_is_kept_when_it_stores_for_a_foreign_tenant(world: World) -> None:
    gate, directory = world.served.coordinator.gate, world.served.coordinator.directory
    # Its own namespace, a foreign one as it is, and the foreign digest with a description that is its own.
    hello = encode_hello(
        node="b", epoch=world.b.epoch + 2, last_seq=0, peer_address="h:1", started_unix_ms=0,
        namespaces=[OPEN_SPACE, ACME_SPACE], agent_version="test",
    )  # fmt: skip
    disguised = hello.hello.namespaces.add()
    disguised.CopyFrom(hello.hello.namespaces[0])
    disguised.digest = ACME_SPACE.digest
    async with dialer("agent-b").aio(world.served.address, options=()) as channel:
        call = events_pb2_grpc.EventsStub(channel).Publish()
        await call.write(hello)
        await said(call, "welcome")
        refused = await said(call, "namespace_refused")
        assert refused.namespace_digest == ACME_SPACE.digest
        assert "agent-b may not store in the tenant of this namespace" in refused.words
        event = events_pb2.Event(
            kind=events_pb2.EVENT_KIND_STORED,
            tier=2,
            namespace_digest=ACME_SPACE.digest,
            fingerprints=encode_fingerprints(BLOCKS),
        )
        await call.write(
            events_pb2.PublishRequest(batch=events_pb2.Batch(epoch=hello.hello.epoch, first_seq=1, events=[event]))
        )
        await eventually(lambda: directory.ingest.rejected["unknown-namespace"] == 1, what="the event is counted")
        call.cancel()
    assert gate.refused["tenant"] == 2
    stream = directory.nodes["b"].stream
    assert stream is not None
    assert stream.namespaces == {OPEN_SPACE.digest}


def http(address: str, path: str, document: Any = None, **headers: str) -> tuple[int, str]:
    """Status and body of a request to the indexer; GET without a document."""
    data = None if document is None else json.dumps(document).encode()
    request = urllib.request.Request(f"http://{address}{path}", data=data, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


async def test_the_indexer_knows_no_tenant_when_a_policy_names_none_for_it(tmp_path: Path) -> None:
    async with made_world(tmp_path, indexer_listen="127.0.0.1:0") as world:
        ask = functools.partial(asyncio.to_thread, http, world.served.indexer)
        tokens = list(range(32))
        status, known = await ask("/query", {"model": OPEN_SPACE.model, "token_ids": tokens})
        assert status == 200, known
        heard = []
        for model in (ACME_SPACE.model, "nobody-has-this"):
            status, body = await ask("/query", {"model": model, "token_ids": tokens, "cache_salt": SALT})
            heard.append((status, body.replace(model, "?")))
        assert heard[0] == heard[1]
        assert (heard[0][0], "acme" in heard[0][1]) == (404, False)
        assert "acme" not in (await ask("/workers"))[1]
        foreign = {
            "endpoint": "tcp://127.0.0.1:5557", "type": "vLLM", "modelname": "m", "block_size": 16, "instance_id": "i",
            "tenant_id": "acme", "dp_rank": 0,
        }  # fmt: skip
        status, body = await ask("/register", foreign)
        assert (status, "none of the indexer's" in body) == (403, True)
        status, body = await ask("/workers", Origin="https://evil.example")
        assert (status, "foreign_page" in body) == (403, True)
        status, body = await ask("/workers", Host="evil.example")
        assert (status, "foreign_page" in body) == (403, True)

"""The live page of real coordinators, without a browser: where it is, what it copies, whom it answers about."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from dataclasses import replace

import pytest

from kvdir.errors import InvalidInput
from kvdir.fingerprint import Fingerprints
from kvdir.obs import trace
from kvdir.server.config import CoordinatorConfig
from kvdir.server.page.answers import Answers
from kvdir.server.page.copies import DirectoryPage, PageSource, StorePage
from kvdir.server.page.document import document, node_document
from kvdir.store.memory import Blocks, MemoryBlockStore
from kvdir.testing.fake_node import EXAMPLE_NAMESPACE, FakeNode, some_fingerprints
from kvdir.testing.served import FAST_CONFIG, serving
from kvdir.testing.shared import shared
from kvdir.testing.wait import eventually

DIGEST = EXAMPLE_NAMESPACE.digest


async def told(source: PageSource, text: str, **more: str) -> dict[str, object]:
    answers = Answers(source, asyncio.get_running_loop())
    return await asyncio.to_thread(answers.explain, json.dumps({"text": text, **more}).encode())


def in_hex(fingerprints: Fingerprints) -> str:
    return " ".join(item.hex() for item in fingerprints)


async def test_a_copy_says_what_admin_says_and_the_story_of_a_node() -> None:
    blocks = some_fingerprints(60)
    async with serving() as served, FakeNode(served.address, "n1") as one, FakeNode(served.address, "n2"):
        one.store(blocks)
        await one.synced()
        source = DirectoryPage(served.coordinator)
        copy, views = await source.copy(), await served.client.nodes()
        assert [(view.trust.node, view.trust.epoch) for view in copy.nodes] == [
            (view.trust.node, view.trust.epoch) for view in views
        ]
        assert copy.status.blocks == 60
        said = document(copy, None, number=1, viewers=1)
        assert said["namespaces"][0]["blocks"] == (60, "")
        assert {note["kind"] for note in said["notes"]} >= {"registered", "state"}
        story, now_s = await source.story("n1")
        told = node_document(copy.nodes[0], copy, story, now_s=now_s)
        assert (told["holdings"][0]["model"], told["holdings"][0]["blocks"]) == ("example", (60, ""))
        assert {entry["kind"] for entry in told["story"]} >= {"registered", "state"}


async def test_a_lookup_is_found_by_the_name_of_its_request() -> None:
    blocks = some_fingerprints(8)
    async with serving() as served, FakeNode(served.address, "n1") as node:
        node.store(blocks)
        await node.synced()
        with trace.within(None, request_id="chat-7"):
            await served.client.lookup(DIGEST, blocks)
        answer = await told(DirectoryPage(served.coordinator), "chat-7")
        request = answer["request"]
        assert isinstance(request, dict)
        assert (request["hits"], request["asked"], request["nodes"][0]["node"]) == (8, 8, "n1")
        with pytest.raises(InvalidInput, match="no recent lookup"):
            await told(DirectoryPage(served.coordinator), "chat-8")


async def test_the_explainer_asks_every_namespace_unless_one_is_named() -> None:
    blocks = some_fingerprints(8)
    async with serving() as served, FakeNode(served.address, "n1") as node:
        other = replace(EXAMPLE_NAMESPACE, model="other")
        async with FakeNode(served.address, "n2", namespace=other) as second:
            node.store(blocks)
            await node.synced()
            await second.synced()
            source = DirectoryPage(served.coordinator)
            answer = await told(source, in_hex(blocks))
            (lookup,) = answer["lookups"]  # type: ignore[misc]
            assert (lookup["hits"], lookup["namespace"]["model"], lookup["claims"][0]["node"]) == (8, "example", "n1")
            answer = await told(source, in_hex(blocks), namespace=other.digest.hex()[:12])
            (lookup,) = answer["lookups"]  # type: ignore[misc]
            assert (lookup["hits"], lookup["claims"]) == (0, [])
            with pytest.raises(InvalidInput, match="0 namespaces"):
                await told(source, in_hex(blocks), namespace="ff" * 32)


async def test_coordinators_of_a_store_show_each_others_nodes_and_say_who_is_named() -> None:
    store, blocks = Blocks(), some_fingerprints(30)
    async with shared(MemoryBlockStore(store), "a") as a, shared(MemoryBlockStore(store), "b") as b:
        source = StorePage(b.coordinator)
        await source.copy()
        async with FakeNode(a.address, "n") as node:
            node.store(blocks)
            await node.synced()
            await eventually(lambda: b.held("n") == 30, what="b has read that n is whole")
            copy = await source.copy()
            assert [view.trust.node for view in copy.nodes] == ["n"]
            assert [note.kind for note in copy.notes] == ["registered"]
            answer = await told(source, in_hex(blocks))
            (lookup,) = answer["lookups"]  # type: ignore[misc]
            assert (lookup["hits"], lookup["claims"][0]["node"]) == (30, "n")


def status_of(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


async def test_it_is_beside_the_metrics_where_those_are_on_loopback_and_else_has_its_own_place() -> None:
    async with serving() as served:
        assert served.page == served.http
        assert await asyncio.to_thread(status_of, f"http://{served.http}/") == 200
        assert await asyncio.to_thread(status_of, f"http://{served.http}/healthz") == 200
    async with serving(replace(FAST_CONFIG, http_listen="0.0.0.0:0", page_listen="127.0.0.1:0", insecure=True)) as served:
        port = served.http.rpartition(":")[2]
        assert await asyncio.to_thread(status_of, f"http://127.0.0.1:{port}/") == 404
        assert await asyncio.to_thread(status_of, f"http://{served.page}/") == 200


def test_a_public_place_is_refused_with_what_to_do_instead() -> None:
    (fault,) = CoordinatorConfig(page_listen="0.0.0.0:7402").faults()
    assert "kubectl port-forward" in fault
    assert "--insecure" in fault
    tls = {"tls_cert": "c", "tls_key": "k", "tls_ca": "a"}
    assert any(fault.startswith("page_listen") for fault in CoordinatorConfig(page_listen="0.0.0.0:7402", **tls).faults())
    assert CoordinatorConfig(page_listen="127.0.0.1:7402").faults() == []

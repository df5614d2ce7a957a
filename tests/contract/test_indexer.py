"""The indexer API as routers see it: each dialect's calls and answers, and what goes wrong in words."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvdir.core.policy import ALL, Grant
from kvdir.errors import Unsupported
from kvdir.fingerprint import Fingerprints
from kvdir.hashing import fingerprints
from kvdir.location import Tier
from kvdir.namespace import NO_TENANT, Namespace
from kvdir.server.http_server import HttpLimits, HttpServer
from kvdir.store.memory import MemoryBlockStore
from kvdir.testing.fake_node import FakeNode
from kvdir.testing.indexing import FakeFollowed, call, indexing_fakes
from kvdir.testing.served import Served, serving
from kvdir.testing.shared import Shared, shared

GOLDEN = Path(__file__).parents[1] / "golden/indexer"
MODEL = "deepseek"
SCHEME = "vllm:sha256_cbor:low64"
TOKENS = list(range(1, 1 + 4 * 16))
REGISTER = {
    "endpoint": "tcp://1.1.1.1:5557", "type": "vLLM", "modelname": MODEL, "instance_id": "prefill-1", "block_size": 16,
    "dp_rank": 0,
}  # fmt: skip
QUERY = {"model": MODEL, "token_ids": TOKENS, "block_size": 16}


@dataclass(frozen=True)
class Api:
    served: Served | Shared
    address: str
    followed: FakeFollowed
    server: HttpServer

    async def post(self, path: str, body: Any, *, msgpack: bool = False) -> Any:
        """The answer of a call that must work."""
        status, answer = await call(self.address, path, body, msgpack=msgpack)
        assert status in (200, 201), answer
        return answer

    async def register(self, **fields: Any) -> FakeNode:
        """The stream that is followed from then on."""
        before = set(self.followed.nodes)
        await self.post("/register", REGISTER | fields)
        (name,) = set(self.followed.nodes) - before
        return self.followed.nodes[name]


@contextlib.asynccontextmanager
async def api(limits: HttpLimits | None = None) -> AsyncIterator[Api]:
    async with serving() as served, indexing_fakes(served.coordinator, served.address, limits) as (address, followed, server):
        yield Api(served, address, followed, server)


def blocks(count: int, scheme: str = SCHEME, tokens: list[int] = TOKENS) -> Fingerprints:
    return fingerprints(np.array(tokens), scheme=scheme, block_tokens=16).slice(0, count)


def announced(**fields: Any) -> Namespace:
    return Namespace.announced(**{"model": MODEL, "block_tokens": 16, "hash_scheme": SCHEME, "hash_seed": "builtin"} | fields)


async def test_router_finds_who_has_a_prompt_when_it_registered_two_instances() -> None:
    async with api() as it:
        near, far = await it.register(), await it.register(instance_id="prefill-2", endpoint="tcp://1.1.1.2:5557")
        near.store(blocks(3), Tier.GPU)
        near.store(blocks(4), Tier.CPU)
        far.store(blocks(1), Tier.GPU)
        await near.synced()
        await far.synced()
        answer = (await it.post("/query", QUERY))["default"]
        assert list(answer) == ["prefill-1", "prefill-2"]
        first = answer["prefill-1"]
        assert {key: first[key] for key in ("longest_matched", "GPU", "CPU", "DISK", "DP")} == {
            "longest_matched": 64, "GPU": 48, "CPU": 64, "DISK": 64, "DP": {"0": 48},
        }  # fmt: skip
        assert (first["kvdir"]["score"], first["kvdir"]["streams"][0]["state"]) == (pytest.approx(48 + 16 * 0.8), "synced")
        assert answer["prefill-2"]["longest_matched"] == 16
        only = await it.post("/query", QUERY | {"instance_id": "prefill-2"})
        assert list(only["default"]) == ["prefill-2"]
        assert (await it.post("/query", QUERY | {"block_size": 64}))["default"]["prefill-1"]["longest_matched"] == 0
        hashes = [int.from_bytes(item, "big") for item in blocks(4)]
        by_hash = (await it.post("/query_by_hash", {"model": MODEL, "seq_hashes": hashes}))["default"]
        assert {name: hit["longest_matched"] for name, hit in by_hash.items()} == {"prefill-1": 64, "prefill-2": 16}


async def test_ranks_are_counted_one_by_one_when_an_instance_has_several() -> None:
    async with api() as it:
        ranks = [await it.register(dp_rank=rank, endpoint=f"tcp://1.1.1.1:555{rank}") for rank in range(2)]
        for rank, node in enumerate(ranks):
            node.store(blocks(rank + 1), Tier.GPU)
            await node.synced()
        answer = await it.post("/query", QUERY)
        assert answer["default"]["prefill-1"]["DP"] == {"0": 16, "1": 32}
        assert answer["instances"]["prefill-1"]["rank_matches"]["1"] == {"gpu": 32, "cpu": 32, "disk": 32}
        dynamo = await it.post("/query", {"model_name": MODEL, "token_ids": TOKENS})
        assert dynamo["scores"] == {"prefill-1": {"0": 16, "1": 32}}
        assert dynamo["frequencies"] == [2, 1]


async def test_engines_that_agents_follow_are_answered_for_when_nobody_registered_them() -> None:
    async with (
        api() as it,
        FakeNode(it.served.address, "n1/vllm-0", namespace=announced()) as engine,
        FakeNode(it.served.address, "n2/vllm-0", namespace=announced(model="other")) as other,
    ):
        engine.store(blocks(2), Tier.GPU)
        await engine.synced()
        await other.synced()
        answer = await it.post("/query", QUERY)
        assert {name: hit["longest_matched"] for name, hit in answer["default"].items()} == {"n1/vllm-0": 32}
        assert (await it.post("/query", QUERY | {"tenant_id": "acme"}))["acme"] == {}
        _, workers = await call(it.address, f"/workers?model_name={MODEL}")
        assert [(worker["instance_id"], worker["source"]) for worker in workers] == [("n1/vllm-0", "agent")]
        assert workers[0]["listeners"]["0"]["kvdir"]["state"] == "synced"


async def test_tenants_see_their_own_instances_only_when_registered_for_them() -> None:
    async with api() as it:
        node = await it.register(tenant_id="acme", instance_id="http://10.0.0.1:8000/v1")
        node.store(blocks(4), Tier.GPU)
        await node.synced()
        ours = await it.post("/query", QUERY | {"tenant_id": "acme"})
        assert ours["acme"]["http://10.0.0.1:8000/v1"]["longest_matched"] == 64
        assert (await it.post("/query", QUERY))["default"] == {}


async def test_a_registered_instance_is_unknown_when_its_tenant_is_taken_from_the_indexer() -> None:
    sees = [ALL]
    async with serving() as served, indexing_fakes(served.coordinator, served.address, sees=lambda: sees[-1]) as at:
        address, followed, _ = at
        assert (await call(address, "/register", REGISTER | {"tenant_id": "acme"}))[0] in (200, 201)
        for node in followed.nodes.values():  # its model is known from then on
            node.store(blocks(1), Tier.GPU)
            await node.synced()
        query = QUERY | {"tenant_id": "acme"}
        assert (await call(address, "/query", query))[1]["acme"]
        sees.append(Grant(frozenset((NO_TENANT,))))
        status, foreign = await call(address, "/query", query)
        assert (status, foreign["acme"]) == (200, {})
        assert await call(address, "/query", QUERY | {"tenant_id": "nobody"}) == (200, {"nobody": {}, "instances": {}})
        assert await call(address, "/workers") == (200, [])


async def test_arena_of_the_agent_beside_it_counts_when_an_instance_is_registered_with_its_node() -> None:
    arena_space = Namespace.create(
        model=MODEL, weights="w", kv_dtype="bfloat16", layout="NHD", block_tokens=16, position="rope", parallel="replicated",
        groups=({"kind": "full", "layers": 1, "kv_heads": 1, "head_dim": 8},), adapter="none", tenant="none",
        hash_scheme="vllm:sha256_cbor", hash_seed="builtin", cache_policy="exact",
    )  # fmt: skip
    async with api() as it, FakeNode(it.served.address, "n1", namespace=arena_space) as arena:
        node = await it.register(node="n1")
        node.store(blocks(1), Tier.GPU)
        arena.store(blocks(4, "vllm:sha256_cbor"))
        await node.synced()
        await arena.synced()
        hit = (await it.post("/query", QUERY))["default"]["prefill-1"]
        assert (hit["GPU"], hit["CPU"], hit["longest_matched"]) == (16, 64, 64)
        assert {stream["stream"] for stream in hit["kvdir"]["streams"]} == {"n1", "n1/~prefill-1@0"}


async def test_registration_is_followed_once_when_it_is_repeated_and_gone_at_once_when_withdrawn() -> None:
    async with api() as it:
        node = await it.register()
        again = await it.post("/register", REGISTER)
        assert again == {"status": "registered successfully", "instance_id": "prefill-1"}
        node.store(blocks(4), Tier.GPU)
        await node.synced()
        removed = await it.post("/unregister", {"instance_id": "prefill-1", "dp_rank": 0})
        assert removed == {"status": "unregistered successfully", "removed_instances": ["prefill-1|default|0"]}
        assert (await it.post("/query", QUERY))["default"] == {}
        status, answer = await call(it.address, "/unregister", {"instance_id": "prefill-1", "dp_rank": 0})
        assert (status, answer["reason"]) == (404, "not_found")
        await it.register()


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"endpoint": "tcp://1.1.1.9:1"}, 409, "registered with other values"),
        ({"instance_id": "prefill-2"}, 409, "every block would count twice"),
        ({"dp_rank": 1, "modelname": "other", "endpoint": "tcp://1.1.1.9:1"}, 409, "registered for model"),
        ({"dp_rank": 1, "node": "n9", "endpoint": "tcp://1.1.1.9:1"}, 409, "node"),
        ({"instance_id": "x", "endpoint": "tcp://1.1.1.9:1", "node": "a/b"}, 400, "a node has no '/'"),
        ({"block_size": "16"}, 400, "block_size must be a whole number"),
    ],
)
async def test_registration_is_refused_with_words_when_it_contradicts_another(
    change: dict[str, Any], status: int, words: str
) -> None:
    async with api() as it:
        await it.register()
        refused, answer = await call(it.address, "/register", REGISTER | change)
        assert refused == status
        assert words in answer["error"]
        assert len(it.followed.nodes) == 1


async def test_registration_is_refused_when_streams_cannot_be_followed_here() -> None:
    async with api() as it:
        it.followed.refuse = Unsupported("pyzmq is missing: pip install 'kvdir[engines]'")
        status, answer = await call(it.address, "/register", REGISTER)
        assert (status, answer["reason"]) == (501, "unsupported")
        assert "pip install" in answer["error"]
        assert (await call(it.address, "/workers"))[1] == []


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/query", b"{", 400, "not valid JSON"),
        ("/query", [1], 400, "one JSON object"),
        ("/query", {"model": MODEL}, 400, "token_ids is required"),
        ("/query", {"model": "nobody-has-it", "token_ids": []}, 404, "known: deepseek"),
        ("/query_by_hash", {"model": MODEL, "seq_hashes": ["?"]}, 400, "is no hash"),
        ("/query", {"model": MODEL, "token_ids": list(range(16 * 5000))}, 413, "max_fingerprints is 4096"),
        ("/nothing", {}, 404, "/query_by_hash"),
        ("/query", None, 405, "takes POST"),
        ("/workers", {}, 405, "takes GET"),
    ],
)
async def test_bad_calls_are_refused_with_words_when_they_come(path: str, body: Any, status: int, words: str) -> None:
    async with api() as it:
        node = await it.register()
        node.store(blocks(1), Tier.GPU)
        await node.synced()
        refused, answer = await call(it.address, path, body)
        assert refused == status
        assert words in answer["error"]


async def test_long_prompt_is_hashed_beside_the_loop_when_it_comes() -> None:
    tokens = list(range(40_000))
    async with api() as it:
        node = await it.register()
        node.store(blocks(2_500, tokens=tokens), Tier.GPU)
        await node.synced()
        answer = await it.post("/query", {"model": MODEL, "token_ids": tokens})
        assert answer["default"]["prefill-1"]["longest_matched"] == 40_000


async def test_namespaces_that_cannot_be_asked_are_named_when_their_hashes_are_unknown_here() -> None:
    space = announced(hash_scheme="opaque")
    async with api() as it, FakeNode(it.served.address, "n1/e", namespace=space) as engine:
        engine.store(blocks(4), Tier.GPU)
        await engine.synced()
        await it.register()
        hit = (await it.post("/query", QUERY))["default"]["prefill-1"]
        assert "known to nobody" in hit["kvdir"]["skipped_namespaces"][space.short]
        hashes = [f"0x{item.hex()}" for item in blocks(4)]
        by_hash = await it.post("/query_by_hash", {"model": MODEL, "seq_hashes": hashes})
        assert by_hash["default"]["n1/e"]["longest_matched"] == 64


async def test_calls_are_answered_in_kind_when_they_come_in_msgpack() -> None:
    async with api() as it:
        node = await it.register()
        node.store(blocks(4), Tier.GPU)
        await node.synced()
        packed = {"model": MODEL, "block_size": 16, "token_ids": np.array(TOKENS, "<i4").tobytes(), "tenant_id": "default"}
        answer = await it.post("/query", packed, msgpack=True)
        assert answer["instances"]["prefill-1"]["longest_matched"] == 64


async def test_health_says_so_when_nobody_should_come_any_more() -> None:
    async with api() as it:
        assert (await call(it.address, "/health"))[0] == 200
        it.served.coordinator.draining = True
        assert await call(it.address, "/health") == (503, {"status": "draining"})
        status, answer = await call(it.address, "/register", REGISTER)
        assert status == 503
        assert "another one" in answer["error"]
        it.served.coordinator.draining = False


async def test_another_coordinator_answers_for_a_registered_instance_when_they_share_a_store() -> None:
    async with (
        shared(MemoryBlockStore()) as served,
        indexing_fakes(served.coordinator, served.address) as (address, followed, server),
        indexing_fakes(served.coordinator, served.address) as (elsewhere, _, _),
    ):
        it = Api(served, address, followed, server)
        node = await it.register(tenant_id="acme")
        node.store(blocks(4), Tier.GPU)
        await node.synced()
        _, answer = await call(elsewhere, "/query", QUERY | {"tenant_id": "acme"})
        assert answer["acme"]["prefill-1"]["longest_matched"] == 64


# -- golden --------------------------------------------------------------------------------------------------------------


def shape(value: Any) -> Any:
    """Keys and types; text as it is."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items() if key != "kvdir"}
    return type(value).__name__ if isinstance(value, int | float) else value


def covers(answer: Any, expected: Any, where: str = "") -> None:
    """Everything that is expected is there; what is more, readers pass over."""
    if isinstance(expected, dict):
        for key, item in expected.items():
            assert key in answer, f"{where}/{key} is missing in {answer}"
            covers(answer[key], item, f"{where}/{key}")
    else:
        assert shape(answer) == shape(expected), where


@pytest.mark.parametrize("dialect", ["rfc", "conductor", "dynamo"])
async def test_calls_are_answered_as_written_when_they_are_the_dialects_own_examples(dialect: str) -> None:
    calls = {path.stem.removeprefix(f"{dialect}-"): json.loads(path.read_text()) for path in GOLDEN.glob(f"{dialect}-*.json")}
    async with api() as it:
        if dialect != "dynamo":  # the examples' answers have two ranks
            register = calls["register"]["request"]
            await it.post("/register", register | {"dp_rank": 1, "endpoint": "tcp://1.1.1.1:6557"})
        for step in ("register", "query", "query-by-hash", "unregister"):
            if step in calls:
                status, answer = await call(it.address, calls[step]["path"], calls[step]["request"])
                assert status == calls[step]["status"], answer
                covers(answer, calls[step]["answer"], step)


# -- a router, from the text of the RFC alone ----------------------------------------------------------------------------


class Router:
    """Registers its instances, and sends each prompt to the one with the longest match; round robin where nobody has any."""

    def __init__(self, indexer: str, instances: dict[str, str]) -> None:
        self._indexer = indexer
        self._instances = instances
        self._turn = 0

    async def start(self) -> None:
        for instance_id, endpoint in self._instances.items():
            body = {
                "endpoint": endpoint, "type": "vLLM", "modelname": MODEL, "tenant_id": "default", "instance_id": instance_id,
                "block_size": 16, "dp_rank": 0,
            }  # fmt: skip
            status, answer = await call(self._indexer, "/register", body)
            assert (status, answer) == (200, {"status": "registered successfully", "instance_id": instance_id})

    async def choose(self, tokens: list[int]) -> str:
        _, answer = await call(self._indexer, "/query", {"model": MODEL, "token_ids": tokens, "block_size": 16})
        matches = {name: hit["longest_matched"] for name, hit in answer["default"].items() if name in self._instances}
        if any(matches.values()):
            return max(matches, key=lambda name: matches[name])
        self._turn += 1
        return list(self._instances)[self._turn % len(self._instances)]


async def test_router_sends_a_conversation_where_it_was_when_it_only_knows_the_rfc() -> None:
    async with api() as it:
        router = Router(it.address, {f"vllm-{number}": f"tcp://1.1.1.{number}:5557" for number in range(3)})
        await router.start()
        engines = {f"vllm-{number}": it.followed.nodes[f"/~vllm-{number}@0"] for number in range(3)}
        talks = [[talk * 1000 + at for at in range(32)] for talk in range(4)]
        homes = []
        for turn in range(3):
            for talk, tokens in enumerate(talks):
                chosen = await router.choose(tokens)
                homes.append((talk, chosen))
                engines[chosen].store(blocks(len(tokens) // 16, tokens=tokens), Tier.GPU)
                await engines[chosen].synced()
                tokens += [turn * 10_000 + at for at in range(16)]
        assert len(set(homes)) == len(talks), homes
        assert len({chosen for _, chosen in homes}) == 3

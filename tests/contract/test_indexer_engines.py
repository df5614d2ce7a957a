"""Engines that routers register with a coordinator: their own events over ZeroMQ, followed to the router's answer."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvdir.core.score import ScorePart
from kvdir.errors import ConfigError
from kvdir.hashing import fingerprints
from kvdir.location import StreamState
from kvdir.namespace import Namespace
from kvdir.server.app import build_coordinator
from kvdir.server.config import CoordinatorConfig
from kvdir.server.serve import running
from kvdir.testing.fake_engine import CLEARED, FakeEngine, removed, stored
from kvdir.testing.indexing import call
from kvdir.testing.served import FAST_CONFIG, Served, serving
from kvdir.testing.wait import eventually

MODEL = "llama"
TOKENS = list(range(1, 65))
WITH_INDEXER = replace(FAST_CONFIG, indexer_listen="127.0.0.1:0")
PROFILE = {"strategy": "vllm_v1", "algorithm": "sha256_cbor", "python_hash_seed": "0", "index_projection": "low64_be"}
HASHES = [
    int.from_bytes(item, "big")
    for item in fingerprints(np.array(TOKENS), scheme="vllm:sha256_cbor:low64", seed="0", block_tokens=16)
]


@contextlib.contextmanager
def engine(**options: Any) -> Any:
    publisher = FakeEngine(**options)
    try:
        yield publisher
    finally:
        publisher.close()


def registration(publisher: FakeEngine, **fields: Any) -> dict[str, Any]:
    return {
        "endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint, "type": "vLLM", "modelname": MODEL,
        "instance_id": "vllm-1", "block_size": 16, "dp_rank": 0, "hash_profile": PROFILE,
    } | fields  # fmt: skip


async def matched(served: Served, instance_id: str = "vllm-1") -> int:
    status, answer = await call(served.indexer, "/query", {"model": MODEL, "token_ids": TOKENS, "block_size": 16})
    assert status == 200, answer
    hit = answer["instances"].get(instance_id)
    return -1 if hit is None else int(hit["longest_matched"])


def until(served: Served, tokens: int) -> Callable[[], Awaitable[bool]]:
    async def condition() -> bool:
        return await matched(served) == tokens

    return condition


async def workers(served: Served) -> list[dict[str, Any]]:
    status, answer = await call(served.indexer, "/workers")
    assert status == 200
    return list(answer)


async def test_router_hears_what_an_engine_announces_when_it_registered_it() -> None:
    async with serving(WITH_INDEXER) as served:
        with engine() as publisher:
            status, answer = await call(served.indexer, "/register", registration(publisher))
            assert (status, answer["status"]) == (200, "registered successfully")
            assert await matched(served) == 0
            publisher.publish(stored(HASHES[:3], token_ids=TOKENS[:48]))
            await eventually(until(served, 48))
            publisher.publish(stored(HASHES[3:], parent=HASHES[2], token_ids=TOKENS[48:]))
            await eventually(until(served, 64))
            publisher.publish(removed([HASHES[1]]))
            await eventually(until(served, 16))
            publisher.publish(CLEARED)
            await eventually(until(served, 0))
            (worker,) = await workers(served)
            assert (worker["instance_id"], worker["status"], worker["endpoints"]) == (
                "vllm-1",
                "active",
                {"0": publisher.endpoint},
            )
            assert worker["listeners"]["0"]["kvdir"]["stream"] == "/~vllm-1@0"


async def test_blocks_are_gone_for_everybody_when_the_instance_is_unregistered() -> None:
    space = Namespace.announced(model=MODEL, block_tokens=16, hash_scheme="vllm:sha256_cbor:low64", hash_seed="0")
    prompt = fingerprints(np.array(TOKENS), scheme=space.hash_scheme, seed="0", block_tokens=16)
    async with serving(WITH_INDEXER) as served:
        with engine() as publisher:
            await call(served.indexer, "/register", registration(publisher))
            publisher.publish(stored(HASHES, token_ids=TOKENS))
            await eventually(until(served, 64))
            scores = await served.client.score([ScorePart.of(space.digest, prompt)])
            assert [item.instance for item in scores.instances] == ["/~vllm-1"]
            status, answer = await call(served.indexer, "/unregister", {"instance_id": "vllm-1", "dp_rank": 0})
            assert (status, answer["removed_instances"]) == (200, ["vllm-1|default|0"])
            stream = served.coordinator.directory.nodes["/~vllm-1@0"].stream
            assert stream is not None
            assert stream.state is StreamState.FENCED
            assert not stream.holders
            assert await workers(served) == []
            status, _ = await call(served.indexer, "/register", registration(publisher))
            assert status == 200


async def test_worker_says_why_when_its_engine_is_not_there() -> None:
    async with serving(WITH_INDEXER) as served:
        with engine() as publisher:
            publisher.kill()
            await call(served.indexer, "/register", registration(publisher))

            async def said() -> bool:
                (worker,) = await workers(served)
                return worker["status"] == "failed" and bool(worker["listeners"]["0"]["last_error"])

            await eventually(said)
            assert await matched(served) == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"endpoint": "tcp://*:5557"}, "where the engine listens"),
        ({"endpoint": "5557"}, "neither tcp://HOST:PORT"),
        ({"endpoint": "tcp://1.1.1.1:65536"}, "neither tcp://HOST:PORT"),
        ({"replay_endpoint": "udp://x:1"}, "replay_endpoint"),
        ({"type": "dynamo", "endpoint": "http://x:1"}, "endpoint"),
        ({"hash_profile": PROFILE | {"algorithm": "md5"}}, "'vllm:md5' is unknown"),
    ],
)
async def test_registration_is_refused_with_words_when_it_could_never_be_followed(change: dict[str, Any], words: str) -> None:
    async with serving(WITH_INDEXER) as served:
        with engine() as publisher:
            status, answer = await call(served.indexer, "/register", registration(publisher) | change)
            assert status == 400
            assert words in answer["error"]
            assert await workers(served) == []


async def test_indexer_is_off_when_nothing_is_configured() -> None:
    async with serving() as served:
        assert served.indexer == ""


def test_public_address_is_refused_when_nobody_said_insecure() -> None:
    config = CoordinatorConfig(indexer_listen="0.0.0.0:7402")
    assert any(fault.startswith("indexer_listen: 0.0.0.0:7402 is not loopback") for fault in config.faults())
    assert not replace(config, insecure=True).faults()


async def test_port_that_is_taken_is_named_when_the_coordinator_starts() -> None:
    async with serving(WITH_INDEXER) as served:
        taken = replace(FAST_CONFIG, indexer_listen=served.indexer)
        with pytest.raises(ConfigError, match="indexer_listen"):
            async with running(build_coordinator(taken)):
                pass

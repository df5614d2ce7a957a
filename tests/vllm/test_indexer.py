"""A router that registered a real vLLM hears, before it sends a prompt, what the engine then finds in its cache."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvdir.testing.indexing import call
from kvdir.testing.served import FAST_CONFIG, Served, serving
from kvdir.testing.wait import eventually
from tests.vllm.engines import BLOCK_TOKENS, Engine, Prompt, shared_prompts

INSTANCE = "http://10.0.0.7:8000"


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def publishing(model: Path, events: int, replay: int, **options: Any) -> Engine:
    from vllm.config import KVEventsConfig

    config = KVEventsConfig(
        enable_kv_cache_events=True, publisher="zmq", endpoint=f"tcp://*:{events}", replay_endpoint=f"tcp://*:{replay}"
    )
    return Engine(model, kv_events_config=config, **options)


def cached(engine: Engine) -> dict[int, set[bytes]]:
    """By window (0: full attention) the low 64 bits of the hashes that every group of that kind has in the prefix cache."""
    groups = engine.scheduler.kv_cache_config.kv_cache_groups
    by_group: dict[int, set[bytes]] = {index: set() for index in range(len(groups))}
    for key in engine.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block._cache:
        by_group[int.from_bytes(key[-4:], "big")].add(bytes(key[:-4][-8:]))
    held: dict[int, set[bytes]] = {}
    for index, group in enumerate(groups):
        window = getattr(group.kv_cache_spec, "sliding_window", None) or 0
        held[window] = held.get(window, by_group[index]) & by_group[index]
    return held


async def caught_up(served: Served, engine: Engine) -> None:
    directory, wanted = served.coordinator.directory, cached(engine)

    def equal() -> bool:
        streams = [node.stream for node in directory.nodes.values()]
        holders = [holder for stream in streams if stream for holder in stream.holders.values()]
        for holder in holders:
            blocks = wanted[holder.namespace.namespace.group.window_tokens]
            found = directory.index.lookup(b"".join(blocks), 8, scope=holder.namespace.scope)
            if (holder.blocks, found.hits) != (len(blocks), len(blocks)):
                return False
        return len(holders) == sum(map(bool, wanted.values()))

    await eventually(equal, what="the directory has what the engine's cache has")


async def matched(served: Served, prompt: Prompt) -> int:
    body = {"model": "tiny", "token_ids": prompt, "block_size": BLOCK_TOKENS}
    status, answer = await call(served.indexer, "/query", body)
    assert status == 200, answer
    return int(answer["default"][INSTANCE]["longest_matched"])


@pytest.mark.parametrize("model", ["llama", "gemma3"])
async def test_router_hears_what_the_engine_then_finds_cached(model: str, request: pytest.FixtureRequest) -> None:
    events, replay = free_port(), free_port()
    prompts = shared_prompts()
    async with serving(replace(FAST_CONFIG, indexer_listen="127.0.0.1:0")) as served:
        registration = {
            "endpoint": f"tcp://127.0.0.1:{events}", "replay_endpoint": f"tcp://127.0.0.1:{replay}", "type": "vLLM",
            "modelname": "tiny", "tenant_id": "default", "instance_id": INSTANCE, "block_size": BLOCK_TOKENS, "dp_rank": 0,
        }  # fmt: skip
        status, answer = await call(served.indexer, "/register", registration)
        assert status == 200, answer
        engine = publishing(
            request.getfixturevalue(f"tiny_{model}"), events, replay, num_gpu_blocks_override=40, max_model_len=384
        )
        told, found = [], []
        for prompt in (*prompts, *prompts[::-1], prompts[0]):  # more than the pool holds: some are evicted meanwhile
            await caught_up(served, engine)
            # The engine always computes the last token, and so the block that ends with it.
            told.append(min(await matched(served, prompt), (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS))
            found.append((await asyncio.to_thread(engine.generate, prompt, tokens=1))[0].cached)
        assert told == found
        assert 0 < sum(bool(count) for count in found) < len(found)
        engine.close()

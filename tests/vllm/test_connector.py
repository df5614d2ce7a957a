"""Proof of the connector: an engine that loads another node's KV answers as one that computes it, and really loads it.

Llama and the hybrid Gemma3 (two sliding-window groups and one of full attention). Faults: test_connector_faults.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.connectors import connector, forget, reader_of, settle
from tests.vllm.world import World, assert_same, shareable


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def world(request: pytest.FixtureRequest, shared_memory: Path) -> Iterator[World]:
    model = request.getfixturevalue(f"tiny_{request.param}")
    made = World.start(shared_memory / f"connector-{request.param}", model, connector)
    yield made
    made.close()


def test_answers_are_the_same_and_blocks_are_loaded_when_another_node_has_them(world: World):
    engine = reader_of(world)
    answers = []
    for prompt in world.prompts:
        answers += engine.generate(prompt)
        forget(engine)
    assert_same(answers, world.right)
    half, totals = engine.connector.half, engine.connector.totals
    assert half.figures.hit_tokens >= 0.8 * shareable(world.prompts), "vLLM loaded too little"
    assert sum(answer.cached for answer in answers) == half.figures.hit_tokens, "vLLM counts what was loaded, and nothing else"
    assert totals["failed_blocks"] == 0
    assert totals["peer_bytes"] > 0
    engine.close()


def test_answers_are_the_same_when_all_prompts_come_at_once(world: World):
    engine = reader_of(world)
    assert_same(engine.generate(*world.prompts), world.right)
    settle(engine)
    assert engine.connector.half.held_blocks == 0
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == engine.scheduler.kv_cache_config.num_blocks - 1
    engine.close()

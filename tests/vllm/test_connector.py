"""Proof of the connector: an engine that loads another node's KV answers as one that computes it, and really loads it.

Llama and the hybrid Gemma3 (two sliding-window groups and one of full attention). Faults: test_connector_faults.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.connectors import assert_free, connector, forget, fresh_reader, worker_half, zero
from tests.vllm.world import World, assert_same, shareable


@pytest.fixture(scope="module")
def gemma3(tiny_gemma3: Path, shared_memory: Path) -> Iterator[World]:
    made = World.start(shared_memory / "connector-gemma3", tiny_gemma3, connector)
    yield made
    made.close()


@pytest.fixture(scope="module", params=["gemma3", "connector_llama"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    made: World = request.getfixturevalue(request.param)
    yield made
    made.close_engine()


def test_answers_are_the_same_and_blocks_are_loaded_when_another_node_has_them(world: World):
    engine = fresh_reader(world)
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


def test_answers_are_the_same_when_all_prompts_come_at_once(world: World):
    engine = fresh_reader(world)
    assert_same(engine.generate(*world.prompts), world.right)
    assert_free(engine)


def test_answer_is_right_when_the_last_block_of_a_load_did_not_come(world: World, monkeypatch: pytest.MonkeyPatch):
    engine, half = fresh_reader(world), worker_half()
    arriving = half._arriving

    def lacking(blocks: Any, load: Any, report: Any) -> set[int]:
        bad: set[int] = arriving(blocks, load, report)
        if blocks.group < len(half._groups) - 1:
            return bad
        zero(half, blocks.group, blocks.block_ids[-1])
        return bad | {blocks.block_ids[-1]}

    monkeypatch.setattr(half, "_arriving", lacking)
    assert_same(engine.generate(world.prompts[1]), [world.right[1]])
    assert engine.connector.totals["failed_loads"] == 1
    assert_free(engine)

"""Proof of the tier: an engine that loads another node's KV answers as one that computes it, and really loads it."""

from __future__ import annotations

from tests.vllm.world import World, assert_same, shareable


def test_answers_are_the_same_and_blocks_are_loaded_when_another_node_has_them(world: World):
    engine = world.reader()
    answers = engine.one_by_one(world.prompts, forget=True)
    assert_same(answers, world.right)
    assert sum(answer.cached for answer in answers) >= 0.8 * shareable(world.prompts)
    engine.close()

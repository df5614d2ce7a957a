"""Scores: which blocks count for which instance, and what they are worth."""

from __future__ import annotations

import pytest

from kvdir.core.best_tiers import Answered
from kvdir.core.score import Scores, score
from kvdir.core.serving import Engines, Serving
from kvdir.errors import InvalidInput
from kvdir.location import Tier
from kvdir.namespace import Namespace
from kvdir.testing.fake_node import EXAMPLE_NAMESPACE
from kvdir.testing.made_answer import made_answer as answer

GPU, CPU, DISK, REMOTE = Tier
MODEL = "m"


def announced(**fields: object) -> Namespace:
    return Namespace.announced(**{"model": MODEL, "block_tokens": 16, "hash_scheme": "s", "hash_seed": "0"} | fields)  # type: ignore[arg-type]


FULL = announced()
WINDOW = announced(kind="sliding_window", window_tokens=32)


NOBODY = Engines(())


def serves(*streams: str, model: str = MODEL) -> Engines:
    return Engines(Serving(stream, frozenset({model})) for stream in streams)


def matched(scores: Scores) -> dict[str, int]:
    return {item.instance: item.matched_tokens for item in scores.instances}


def test_blocks_are_weighted_by_best_tier_when_held_in_several() -> None:
    held = {"n1/e": {GPU: range(2), CPU: range(4), DISK: range(5)}}
    (item,) = score([[[Answered(FULL, answer(held, 8))]]], serves("n1/e")).instances
    assert (item.instance, item.matched_tokens) == ("n1/e", 80)
    assert item.tiers == ((GPU, 32), (CPU, 32), (DISK, 16))
    assert item.score == pytest.approx(32 * 1.0 + 32 * 0.8 + 16 * 0.5)
    assert item.ranks[0].through == (32, 64, 80, 80)


def test_prefix_ends_when_a_block_is_missing() -> None:
    held = {"n1/e": {GPU: [0, 1, 3, 4]}, "n2/e": {GPU: [1, 2]}}
    scores = score([[[Answered(FULL, answer(held, 5))]]], serves("n1/e", "n2/e"))
    assert matched(scores) == {"n1/e": 32}


def test_arena_continues_what_each_engine_of_its_node_has_when_named_in_both_namespaces() -> None:
    names = [
        Answered(FULL, answer({"n1/a": {GPU: [0, 1]}, "n1/b": {GPU: [0]}, "n2/a": {GPU: [0, 1, 2]}}, 6)),
        Answered(EXAMPLE_NAMESPACE, answer({"n1": {CPU: [1, 2, 3]}}, 6)),
    ]
    scores = score([[names]], serves("n1/a", "n1/b", "n2/a"))
    assert matched(scores) == {"n1/a": 64, "n1/b": 64, "n2/a": 48}
    assert scores.instances[0].tiers == ((GPU, 32), (CPU, 32))
    assert {scores.nodes[number].node for number in scores.instances[0].nodes} == {"n1", "n1/a"}


def test_arena_counts_only_for_engines_of_the_model_when_several_share_a_node() -> None:
    names = [Answered(EXAMPLE_NAMESPACE, answer({"n1": {CPU: [0]}, "n2": {CPU: [0]}}, 1))]
    scores = score(
        [[names]],
        Engines(
            Serving(stream, frozenset({model}))
            for stream, model in (("n1/a", EXAMPLE_NAMESPACE.model), ("n1/b", "other"), ("n2/b", "other"))
        ),
    )
    assert matched(scores) == {"n1/a": 16, "n2": 16}


def test_ranks_have_their_own_blocks_and_share_the_arena_when_data_parallel() -> None:
    names = [
        Answered(FULL, answer({"n1/e@0": {GPU: [0, 1]}, "n1/e@1": {GPU: [0, 1, 2]}}, 6)),
        Answered(EXAMPLE_NAMESPACE, answer({"n1": {CPU: [2]}}, 6)),
    ]
    (item,) = score([[names]], serves("n1/e@0", "n1/e@1")).instances
    assert [(rank.dp_rank, rank.tokens, rank.through[0]) for rank in item.ranks] == [(0, 48, 32), (1, 48, 48)]
    assert (item.matched_tokens, item.score) == (48, 48.0)


def test_point_is_one_that_every_group_can_be_restored_at_when_a_window_is_among_them() -> None:
    # The window of 32 tokens needs the last two blocks before the point; blocks 0 and 1 left it long ago.
    groups = [
        [Answered(FULL, answer({"n1/e": {GPU: range(6)}}, 8))],
        [Answered(WINDOW, answer({"n1/e": {GPU: [2, 3], CPU: [4]}}, 8))],
    ]
    (item,) = score([groups], serves("n1/e")).instances
    assert item.matched_tokens == 80
    assert item.ranks[0].through == (64, 80, 80, 80)


def test_best_part_counts_when_a_prompt_is_cut_into_other_blocks() -> None:
    wide = announced(block_tokens=64)
    parts = [
        [[Answered(FULL, answer({"n1/e": {GPU: [0]}, "n2/e": {GPU: [0, 1]}}, 4))]],
        [[Answered(wide, answer({"n1/e": {GPU: [0]}}, 1))]],
    ]
    assert matched(score(parts, serves("n1/e", "n2/e"))) == {"n1/e": 64, "n2/e": 32}


def test_names_are_refused_when_their_blocks_are_not_the_same() -> None:
    names = [Answered(FULL, answer({}, 4)), Answered(WINDOW, answer({}, 4))]
    with pytest.raises(InvalidInput, match="parts of their own"):
        score([[names]], NOBODY)


def test_engine_below_the_trust_asked_for_is_left_out_with_its_nodes_arena_when_scored() -> None:
    names = [Answered(EXAMPLE_NAMESPACE, answer({"n1": {CPU: [0]}}, 1))]
    doubtful = Engines([Serving("n1/e", frozenset({EXAMPLE_NAMESPACE.model}), admitted=False)])
    assert score([[names]], doubtful).instances == ()


def test_best_instances_come_first_when_there_are_more_than_asked_for() -> None:
    held = {f"n{number}/e": {GPU: range(number)} for number in range(1, 6)}
    part = [[Answered(FULL, answer(held, 8))]]
    scores = score([part], serves(*held), max_instances=2)
    assert matched(scores) == {"n5/e": 80, "n4/e": 64}
    assert [trust.node for trust in scores.nodes] == ["n5/e", "n4/e"]
    assert "n9/e" not in matched(score([part], serves("n9/e", *held)))


def test_weights_decide_the_order_when_the_caller_gives_them() -> None:
    part = [[Answered(FULL, answer({"n1/e": {GPU: range(2)}, "n2/e": {DISK: range(8)}}, 8))]]
    assert [item.instance for item in score([part], NOBODY, weights={GPU: 1.0}).instances] == ["n1/e", "n2/e"]
    assert [item.instance for item in score([part], NOBODY, weights={DISK: 1.0}).instances] == ["n2/e", "n1/e"]


def test_doubts_about_an_answer_are_said_when_any_lookup_had_them() -> None:
    names = [
        Answered(FULL, answer({}, 4, warming=True, below_trust=2)),
        Answered(EXAMPLE_NAMESPACE, answer({}, 4, incomplete=True)),
    ]
    scores = score([[names]], NOBODY)
    assert (scores.warming, scores.incomplete, scores.below_trust, scores.instances) == (True, True, 2, ())


def test_nothing_matches_when_nothing_is_asked() -> None:
    assert score([[[Answered(FULL, answer({"n1/e": {}}, 0))]]], serves("n1/e")).instances == ()


def test_engine_is_found_by_node_and_model_when_it_announced_it() -> None:
    engines = Engines(
        [Serving("n1", frozenset({"a"})), Serving("n1/e@0", frozenset({"a", "b"})), Serving("n2/e", frozenset({"b"}), False)]
    )
    assert engines.serving(frozenset({"a"})) == {"n1": [("n1/e@0", True)]}
    assert engines.serving(frozenset({"b", "none"})) == {"n1": [("n1/e@0", True)], "n2": [("n2/e", False)]}
    assert engines.serving(frozenset({"a", "b"}))["n2"] == [("n2/e", False)]
    assert not engines.serving(frozenset({"none"}))

"""Which blocks a load of several state groups asks for, round by round, and what decides in the end."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from kvdir.core.restore_points import restore_points
from kvdir.namespace import StateGroup
from peer_agent.core.state_load import StateLoad, hoped

FULL = StateGroup(kind="full", layers=1, kv_heads=1, head_dim=8)
WINDOW = StateGroup(kind="sliding_window", layers=1, kv_heads=1, head_dim=8, window_tokens=9)
RECURRENT = StateGroup(kind="recurrent", layers=1, state_bytes=8)
DRAFT = StateGroup(kind="draft", layers=1, kv_heads=1, head_dim=8)

Bools = npt.NDArray[np.bool_]


def flags(text: str) -> Bools:
    return np.array([character == "x" for character in text], np.bool_)


def lists(plan: StateLoad) -> list[list[int]]:
    return [positions.tolist() for positions in plan.wanted()]


def test_only_what_the_best_point_reads_is_asked_for() -> None:
    plan = StateLoad([FULL, WINDOW, RECURRENT], [flags("xxxxx."), flags("xxxxxx"), flags(".x.x.x")], block_tokens=4)
    assert lists(plan) == [[0, 1, 2, 3], [2, 3], [3]]


def test_lesser_point_is_chosen_when_a_block_did_not_come() -> None:
    plan = StateLoad([FULL, RECURRENT], [flags("xxxx"), flags("xx.x")], block_tokens=4)
    full, recurrent = plan.wanted()
    plan.took(0, full, flags("xxxx"))
    plan.took(1, recurrent, flags("."))
    assert plan.restored.best_tokens == 0
    assert lists(plan) == [[], [1]]  # what arrived is not asked for again
    plan.took(1, plan.wanted()[1], flags("x"))
    assert plan.restored.best_tokens == 8
    assert lists(plan) == [[], []]


def test_draft_blocks_are_asked_for_and_missed_without_harm() -> None:
    plan = StateLoad([FULL, DRAFT], [flags("xx"), flags("xx")], block_tokens=4)
    full, draft = plan.wanted()
    plan.took(0, full, flags("xx"))
    plan.took(1, draft, flags(".."))
    assert plan.restored.best_tokens == 8
    assert lists(plan) == [[], []]


def test_holes_are_hoped_for_when_a_node_is_not_trusted_whole() -> None:
    nominated = bytes([1, 0, 0, 2, 0])
    assert hoped(FULL, bytes(5), nominated, doubtful=False).tolist() == [True, False, False, True, False]
    assert hoped(FULL, bytes(5), nominated, doubtful=True).tolist() == [True, True, True, True, False]
    assert hoped(RECURRENT, bytes(5), nominated, doubtful=True).tolist() == [True, False, False, True, False]
    assert not hoped(FULL, bytes(5), bytes(5), doubtful=True).any()


hits = st.lists(st.booleans(), max_size=10)


@given(
    st.lists(st.tuples(st.sampled_from([FULL, WINDOW, RECURRENT, DRAFT]), hits, hits), min_size=1, max_size=3),
    st.integers(1, 44),
)
def test_load_ends_at_the_best_point_of_what_is_really_there(
    rows: list[tuple[StateGroup, list[bool], list[bool]]], prompt_tokens: int
) -> None:
    groups = [group for group, _, _ in rows]
    claimed = [np.array(claim, np.bool_) for _, claim, _ in rows]
    there = [np.resize(np.array([*truth, False], np.bool_), len(claim)) for _, claim, truth in rows]
    plan = StateLoad(groups, claimed, block_tokens=4, prompt_tokens=prompt_tokens)
    asked: list[set[int]] = [set() for _ in groups]
    rounds = 0
    while any(map(len, wanted := plan.wanted())):
        rounds += 1
        assert rounds <= 1 + sum(map(len, claimed))
        for group, positions in enumerate(wanted):
            assert not asked[group] & set(positions.tolist()), "a block was asked for twice"
            asked[group] |= set(positions.tolist())
            plan.took(group, positions, there[group][positions])
    possible = [claim & truth for claim, truth in zip(claimed, there, strict=True)]
    best = restore_points(groups, possible, block_tokens=4, prompt_tokens=prompt_tokens).best_tokens
    assert plan.restored.best_tokens == best

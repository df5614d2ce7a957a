"""Legal restore points, by worked examples. B = 4 tokens a block unless said otherwise; the model test has the rest."""

from __future__ import annotations

import numpy as np
import pytest

from kvdir.core.restore_points import intersection, restore_points, union
from kvdir.namespace import StateGroup

FULL = StateGroup(kind="full", layers=1, kv_heads=1, head_dim=8)
MLA = StateGroup(kind="mla", layers=1, kv_heads=1, head_dim=8, tensors=1)
WINDOW = StateGroup(kind="sliding_window", layers=1, kv_heads=1, head_dim=8, window_tokens=9)  # 8 tokens back: 2 blocks
RECURRENT = StateGroup(kind="recurrent", layers=1, state_bytes=8)
DRAFT = StateGroup(kind="draft", layers=1, kv_heads=1, head_dim=8)


def hits(text: str) -> bytes:
    return bytes(character == "x" for character in text)


def best(*groups: tuple[StateGroup, str], prompt_tokens: int | None = None) -> int:
    kinds, texts = zip(*groups, strict=True)
    return restore_points(kinds, [hits(text) for text in texts], block_tokens=4, prompt_tokens=prompt_tokens).best_tokens


@pytest.mark.parametrize("group", [FULL, MLA])
def test_hole_ends_the_prefix_when_every_block_is_needed(group: StateGroup) -> None:
    assert best((group, "xxx.xx")) == 12
    assert best((group, ".xxxxx")) == 0


def test_blocks_before_the_window_are_not_needed_when_only_a_window_is_seen() -> None:
    assert best((WINDOW, "..xx..")) == 16
    assert best((WINDOW, "..x.x.")) == 0
    assert best((WINDOW, "x.....")) == 4  # fewer tokens than the window: all of them


def test_window_reaches_one_block_less_when_its_last_token_is_the_one_computed() -> None:
    """A token sees W tokens, itself among them: W - 1 before it. W = 8 needs 7 of them, W = 9 needs 8, W = 10 needs 9."""
    for window_tokens, blocks in ((1, 0), (2, 1), (5, 1), (6, 2), (8, 2), (9, 2), (10, 3)):
        window = StateGroup(kind="sliding_window", layers=1, kv_heads=1, head_dim=8, window_tokens=window_tokens)
        points = restore_points([window], [hits("." * (9 - blocks) + "x" * blocks)], block_tokens=4)
        assert points.best_tokens == 36
        assert points.needs(0) == range(9 - blocks, 9)


def test_full_and_window_meet_at_the_largest_common_point() -> None:
    assert best((FULL, "xxxxx."), (WINDOW, "..xx.x")) == 16
    assert best((FULL, "xxx..."), (WINDOW, "...xxx")) == 0


def test_recurrent_state_counts_only_at_its_own_boundary() -> None:
    assert best((RECURRENT, ".x..x.")) == 20
    assert best((FULL, "xxxx.."), (RECURRENT, ".x..x.")) == 8


def test_state_at_the_end_of_the_prompt_is_of_no_use_when_a_group_is_recurrent() -> None:
    assert best((FULL, "xxxx"), (RECURRENT, "xxxx"), prompt_tokens=16) == 12
    assert best((FULL, "xxxx"), (RECURRENT, "xxxx"), prompt_tokens=17) == 16
    assert best((FULL, "xxxx"), (RECURRENT, "...x"), prompt_tokens=16) == 0


def test_whole_prompt_is_restored_and_its_last_token_computed_when_all_is_attention() -> None:
    points = restore_points([FULL], [hits("xxxx")], block_tokens=4, prompt_tokens=16)
    assert (points.best_tokens, points.computed_tokens) == (16, 15)
    assert restore_points([FULL], [hits("xxxx")], block_tokens=4, prompt_tokens=15).best_tokens == 12
    assert restore_points([FULL], [hits("xxxx")], block_tokens=4, prompt_tokens=16, can_trim=False).best_tokens == 12


def test_window_reaches_one_token_further_back_when_the_whole_prompt_is_restored() -> None:
    """The next token computed is P - 1, so 8 tokens back from there begin one block earlier."""
    assert best((WINDOW, "..xx"), prompt_tokens=17) == 16
    assert best((WINDOW, "..xx"), prompt_tokens=16) == 0
    assert best((WINDOW, ".xxx"), prompt_tokens=16) == 16


def test_draft_state_is_reported_and_costs_no_hit_when_it_is_missing() -> None:
    points = restore_points([FULL, DRAFT], [hits("xxxx"), hits("xx..")], block_tokens=4)
    assert points.best_tokens == 16
    assert points.partial[1].missing_blocks == 2
    assert restore_points([DRAFT], [hits("xx..")], block_tokens=4).best_tokens == 8  # nothing to follow: needed


def test_points_lie_on_every_groups_boundaries_when_block_sizes_differ() -> None:
    large = StateGroup(kind="recurrent", layers=1, state_bytes=8, block_tokens=12)
    odd = StateGroup(kind="full", layers=1, kv_heads=1, head_dim=8, block_tokens=8)
    points = restore_points([FULL, large, odd], [hits("x" * 14), hits("xxxx"), hits("x" * 7)], block_tokens=4)
    assert points.points.tolist() == [24, 48]
    assert [points.needs(group) for group in range(3)] == [range(12), range(3, 4), range(6)]


def test_partial_groups_are_reported_and_are_no_hit() -> None:
    points = restore_points([FULL, WINDOW], [hits("xx.xxx"), hits("....xx")], block_tokens=4)
    assert points.best_tokens == 0
    full, window = points.partial
    assert (full.held_blocks, full.prefix_tokens, full.reach_tokens) == (5, 8, 8)
    assert (window.held_blocks, window.prefix_tokens, window.reach_tokens) == (2, 0, 24)


def test_nothing_is_legal_when_a_group_has_no_block_or_the_prompt_is_too_short() -> None:
    assert best((FULL, "xxxx"), (WINDOW, "")) == 0
    assert best((FULL, "xxxx"), prompt_tokens=3) == 0
    assert best((FULL, "xxxx"), prompt_tokens=0) == 0


def test_hits_of_several_holders_combine() -> None:
    one, other = hits("xx.."), np.array([False, True, True, False])
    assert union([one, other]).tolist() == [True, True, True, False]
    assert intersection([one, other]).tolist() == [False, True, False, False]


def test_lists_that_do_not_match_the_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="1 lists of hits for 2 state groups"):
        restore_points([FULL, WINDOW], [hits("x")], block_tokens=4)
    with pytest.raises(ValueError, match="for 0 state groups"):
        restore_points([], [], block_tokens=4)

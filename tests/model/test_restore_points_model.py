"""restore_points against an oracle that asks, token by token, what the next token to be computed would look at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvdir.core.restore_points import RestorePoints, restore_points

KINDS = ("full", "mla", "index", "sliding_window", "recurrent", "draft")


@dataclass(frozen=True)
class Group:
    kind: str
    window_tokens: int
    block_tokens: int


@dataclass(frozen=True)
class Case:
    groups: tuple[Group, ...]
    hits: tuple[bytes, ...]
    prompt_tokens: int | None
    can_trim: bool

    def found(self, hits: Sequence[Any] | None = None) -> RestorePoints:
        return restore_points(
            self.groups,
            self.hits if hits is None else hits,
            block_tokens=BLOCK_TOKENS,
            prompt_tokens=self.prompt_tokens,
            can_trim=self.can_trim,
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    groups, hits = [], []
    for kind in draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=4)):
        window_tokens = draw(st.integers(1, 20)) if kind == "sliding_window" else 0
        groups.append(Group(kind, window_tokens, draw(st.sampled_from((0, 0, 1, 2, 4, 6)))))
        likely = draw(st.sampled_from((2, 9)))
        hits.append(bytes(draw(st.lists(st.integers(0, likely).map(bool), max_size=14))))
    return Case(tuple(groups), tuple(hits), draw(st.none() | st.integers(0, 40)), draw(st.booleans()))


BLOCK_TOKENS = 4


def size(group: Group) -> int:
    return group.block_tokens or BLOCK_TOKENS


def tokens_needed(group: Group, tokens: int, prompt_tokens: int | None) -> set[int] | None:
    """Tokens whose state must be there to restore at `tokens`; None: it cannot be restored there at all."""
    if tokens % size(group):
        return None
    next_token = tokens if prompt_tokens is None or tokens < prompt_tokens else prompt_tokens - 1
    match group.kind:
        case "recurrent":  # has seen everything before the boundary, so the next token must lie right behind it
            return None if next_token != tokens else {tokens - 1}
        case "sliding_window":
            return {token for token in range(tokens) if token > next_token - group.window_tokens}
        case _:
            return set(range(tokens))


def holds(group: Group, hits: bytes, needed: set[int] | None) -> bool:
    if needed is None:
        return False
    return all(token // size(group) < len(hits) and hits[token // size(group)] for token in needed)


def legal(case: Case) -> list[int]:
    required = [item for item in zip(case.groups, case.hits, strict=True) if item[0].kind != "draft"]
    required = required or list(zip(case.groups, case.hits, strict=True))
    end = (
        case.prompt_tokens
        if case.prompt_tokens is not None
        else max((size(group) * len(hits) for group, hits in required), default=0)
    )
    return [
        tokens
        for tokens in range(1, end + 1)
        if all(holds(group, hits, tokens_needed(group, tokens, case.prompt_tokens)) for group, hits in required)
        and all(tokens <= size(group) * len(hits) for group, hits in required)
        and (case.can_trim or tokens != case.prompt_tokens)
    ]


@given(cases())
def test_points_are_exactly_those_at_which_the_next_token_finds_all_that_it_looks_at(case: Case) -> None:
    found = case.found()
    expected = legal(case)
    assert found.points.tolist() == expected
    assert found.best_tokens == max(expected, default=0)


@given(cases())
def test_blocks_named_as_needed_suffice_and_none_is_superfluous(case: Case) -> None:
    found = case.found()
    optional = {at for at, group in enumerate(case.groups) if group.kind == "draft"}
    optional = set() if len(optional) == len(case.groups) else optional
    for tokens in found.points.tolist():
        only = [np.zeros(len(hits), np.bool_) for hits in case.hits]
        for at, held in enumerate(only):
            if at not in optional:
                held[list(found.needs(at, tokens))] = True
        again = case.found(only)
        assert tokens in again.points.tolist()
        for at, held in enumerate(only):
            for position in np.flatnonzero(held).tolist():
                held[position] = False
                fewer = case.found(only)
                assert tokens not in fewer.points.tolist(), f"group {at} does not need block {position} at {tokens}"
                held[position] = True


@given(cases(), st.data())
def test_more_blocks_never_cost_a_point(case: Case, data: st.DataObject) -> None:
    found = case.found()
    more = [bytes(one | data.draw(st.booleans()) for one in hits) for hits in case.hits]
    again = case.found(more)
    assert set(found.points.tolist()) <= set(again.points.tolist())


@given(cases())
def test_report_says_what_is_there_and_how_far_each_group_alone_would_reach(case: Case) -> None:
    found = case.found()
    for group, hits, report in zip(case.groups, case.hits, found.partial, strict=True):
        seen = hits if case.prompt_tokens is None else hits[: case.prompt_tokens // size(group)]
        alone = replace(case, groups=(group,), hits=(hits,)).found()
        assert report.held_blocks == sum(seen)
        assert report.prefix_tokens == size(group) * (seen.index(0) if 0 in seen else len(seen))
        assert report.reach_tokens == alone.best_tokens
        wanted = found.best_tokens // size(group) if group.kind == "draft" else 0
        follows = any(other.kind != "draft" for other in case.groups)
        assert report.missing_blocks == (wanted - sum(seen[:wanted]) if follows else 0)

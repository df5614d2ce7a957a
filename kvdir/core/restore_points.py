"""Where a prompt can be resumed from, when its state is kept in groups of different kinds: legal restore points.

A restore point N says: with what is held, tokens 0 .. N-1 need not be computed. It is legal when every required group can be
restored at N, so N is a multiple of every group's block_tokens. What a group of block_tokens B needs for N (docs/state.md):

    full, mla, index   every block of the prefix, 0 .. N/B - 1
    sliding_window     the blocks that hold the last W - 1 tokens before the next token that is computed: that one sees W
                       tokens, itself among them. The first N/B blocks where N < W
    recurrent          the one block that ends at N: a point state, valid at exactly that boundary
    draft              nothing: it follows the group that it drafts for, and what is missing of it costs drafts, never the hit

The end of the prompt (P tokens): its last token is always computed, since its logits are wanted. At N = P a recurrent group
cannot be restored, because its state has seen that token, and computing it again would count it twice (vLLM #51094): the
largest N is the last common boundary below P. Without recurrent groups N = P is legal: the next token that is computed is
P - 1, inside the last block, so that a window reaches one token further back. An engine that resumes at block boundaries only
(vLLM: kv_cache_manager.get_computed_blocks) says can_trim=False, and N = P is not legal for it.

Groups of one kind that are held by several ranks or nodes: combine their hits first (`union`, `intersection`). Checked
against a brute-force oracle (tests/model/test_restore_points_model.py). Pure.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvdir.namespace import StateKind

Bools = npt.NDArray[np.bool_]
Tokens = npt.NDArray[np.int64]
Hits = bytes | bytearray | memoryview | npt.NDArray[Any]
"""One byte or bool per block."""


class Group(Protocol):
    """What is asked of a state group; `kvdir.StateGroup` is one. block_tokens: 0 where the argument of that name counts."""

    @property
    def kind(self) -> str: ...
    @property
    def window_tokens(self) -> int: ...
    @property
    def block_tokens(self) -> int: ...


@dataclass(frozen=True, slots=True)
class GroupHits:
    """What of one group is there. For people and metrics: a partial group is reported, never a hit.

    held_blocks: of the prompt's, anywhere. prefix_tokens: covered by the first blocks without a hole. reach_tokens: the
    largest point at which this group alone could be restored. missing_blocks: of those that the best point of the whole
    asks of this group; 0 but for draft state.
    """

    kind: str
    block_tokens: int
    held_blocks: int
    prefix_tokens: int
    reach_tokens: int
    missing_blocks: int


@dataclass(frozen=True, slots=True, eq=False)
class RestorePoints:
    """best_tokens: the largest legal point, 0 for none. points: all of them, ascending, without 0. prompt_tokens: as asked."""

    best_tokens: int
    points: Tokens
    prompt_tokens: int | None
    _groups: Sequence[_Found] = field(repr=False)

    @property
    def computed_tokens(self) -> int:
        """How many tokens an engine that restores the best point need not compute: the last one of the prompt always is."""
        return self.best_tokens if self.prompt_tokens is None else max(0, min(self.best_tokens, self.prompt_tokens - 1))

    @property
    def partial(self) -> tuple[GroupHits, ...]:
        """Per group, what is there of it. Costs as much again as the answer itself."""
        return tuple(found.reported(self.best_tokens) for found in self._groups)

    def needs(self, group: int, tokens: int | None = None) -> range:
        """Positions of the blocks of `group` that a restore at `tokens` (default: the best point) reads. For a draft group:
        those that would save it from starting anew."""
        return self._groups[group].need.blocks(self.best_tokens if tokens is None else tokens, self.prompt_tokens)


def restore_points(
    groups: Sequence[Group],
    hits_by_group: Sequence[Hits],
    *,
    block_tokens: int,
    prompt_tokens: int | None = None,
    can_trim: bool = True,
) -> RestorePoints:
    """hits_by_group: per group one byte (or bool) per block from the start of the prompt, nonzero where it can be had; blocks
    beyond the end of the list, or of the prompt, do not count. block_tokens: of groups that do not say their own.
    prompt_tokens: where the prompt ends (P); None: nobody knows, and every boundary is an ordinary one. can_trim: whether the
    engine can resume inside a block, at the last token of the prompt. Raises ValueError: no groups, or not one list a group.
    """
    if not groups or len(groups) != len(hits_by_group):
        raise ValueError(f"{len(hits_by_group)} lists of hits for {len(groups)} state groups: pass one each, for one or more")
    needs = _needs(tuple((group.kind, group.window_tokens, group.block_tokens or block_tokens) for group in groups))
    found = [_Found.of(need, hits, prompt_tokens, can_trim) for need, hits in zip(needs, hits_by_group, strict=True)]
    required = [item for item in found if not item.need.optional]
    stride = math.lcm(*(item.need.block_tokens for item in required))
    common = _common([(item.legal, stride // item.need.block_tokens) for item in required])
    points = (common.nonzero()[0] + 1) * stride
    return RestorePoints(int(points[-1]) if len(points) else 0, points, prompt_tokens, found)


def union(hits: Sequence[Hits]) -> Bools:
    """Blocks that any of several holders has: a load may combine them. All lists of one length."""
    return np.asarray(np.logical_or.reduce([_as_bools(item) for item in hits]), np.bool_)


def intersection(hits: Sequence[Hits]) -> Bools:
    """Blocks that every one of several has: ranks of a split, each of which holds a part of every block. All of one length."""
    return np.asarray(np.logical_and.reduce([_as_bools(item) for item in hits]), np.bool_)


@dataclass(frozen=True, slots=True)
class _Need:
    """What a group needs for a restore: the module docstring, per group. window_tokens: 0 where the whole prefix is needed."""

    kind: str
    block_tokens: int
    window_tokens: int
    optional: bool

    @property
    def recurrent(self) -> bool:
        return self.kind == StateKind.RECURRENT

    def blocks(self, tokens: int, prompt_tokens: int | None) -> range:
        """Of a legal `tokens`."""
        end = tokens // self.block_tokens
        if self.recurrent:
            return range(max(0, end - 1), end)
        if not self.window_tokens:
            return range(end)
        next_token = tokens if prompt_tokens is None or tokens < prompt_tokens else prompt_tokens - 1
        first_token = max(0, next_token - (self.window_tokens - 1))
        return range(first_token // self.block_tokens, end)

    def legal(self, held: Bools, prompt_tokens: int | None, can_trim: bool) -> Bools:
        """By boundary, the first one at block_tokens: whether this group can be restored there."""
        blocks = len(held)
        if not blocks:
            return held
        if self.recurrent:
            ok = held.copy()
        elif not self.window_tokens:
            ok = np.zeros(blocks, np.bool_)
            ok[: _run(held)] = True
        else:
            ok = _window_held(held, -(-(self.window_tokens - 1) // self.block_tokens))
        if blocks * self.block_tokens == prompt_tokens:
            last = self.blocks(prompt_tokens, prompt_tokens)
            ok[-1] = can_trim and not self.recurrent and bool(held[last.start : last.stop].all())
        return ok


@functools.lru_cache(maxsize=256)
def _needs(groups: tuple[tuple[str, int, int], ...]) -> tuple[_Need, ...]:
    """Of (kind, window_tokens, block_tokens) each. Draft state is optional, unless there is nothing else."""
    optional = StateKind.DRAFT if any(kind != StateKind.DRAFT for kind, _, _ in groups) else ""
    return tuple(
        _Need(kind, block_tokens, window_tokens if kind == StateKind.SLIDING_WINDOW else 0, kind == optional)
        for kind, window_tokens, block_tokens in groups
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """A group with what is held of it, and where that lets it be restored."""

    need: _Need
    held: Bools
    legal: Bools

    @classmethod
    def of(cls, need: _Need, hits: Hits, prompt_tokens: int | None, can_trim: bool) -> _Found:
        held = _as_bools(hits)
        if prompt_tokens is not None:
            held = held[: max(0, prompt_tokens) // need.block_tokens]
        return cls(need, held, need.legal(held, prompt_tokens, can_trim))

    def reported(self, best_tokens: int) -> GroupHits:
        need, reach = self.need, self.legal.nonzero()[0]
        wanted = best_tokens // need.block_tokens if need.optional else 0  # a required group misses none, by definition
        return GroupHits(
            kind=need.kind,
            block_tokens=need.block_tokens,
            held_blocks=int(np.count_nonzero(self.held)),
            prefix_tokens=_run(self.held) * need.block_tokens,
            reach_tokens=(int(reach[-1]) + 1) * need.block_tokens if len(reach) else 0,
            missing_blocks=wanted - int(np.count_nonzero(self.held[:wanted])),
        )


def _window_held(held: Bools, blocks: int) -> Bools:
    """By boundary: whether the last `blocks` blocks before it are held, or all of them where there are fewer."""
    blocks = min(blocks, len(held))
    missing = np.zeros(blocks + len(held) + 1, np.int32)  # before the first block nothing is missing
    np.cumsum(~held, dtype=np.int32, out=missing[blocks + 1 :])
    return np.asarray(missing[blocks + 1 :] == missing[1 : len(held) + 1], np.bool_)


def _common(legal: Sequence[tuple[Bools, int]]) -> Bools:
    """By common boundary: whether every group is legal there. With each group's how many of its blocks lie between two."""
    chosen = [ok[every - 1 :: every] if every > 1 else ok for ok, every in legal]
    shortest = min(map(len, chosen))
    common = chosen[0][:shortest].copy()
    for ok in chosen[1:]:
        common &= ok[:shortest]
    return common


def _run(held: Bools) -> int:
    """Leading blocks without a hole."""
    first_hole = int(held.argmin()) if len(held) else 0
    return first_hole if len(held) and not held[first_hole] else len(held)


def _as_bools(hits: Hits) -> Bools:
    if isinstance(hits, np.ndarray):
        return np.asarray(hits, np.bool_)
    return np.frombuffer(hits, np.uint8).astype(np.bool_)

"""Of one prompt: the best tier that each stream has each block of a state group in, and what can be restored from that.

Kept by stretches of blocks with equal holders, so that a prompt of any length is a small matrix. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvdir.core.answer import Lookup
from kvdir.core.restore_points import restore_points
from kvdir.errors import InvalidInput
from kvdir.location import Tier
from kvdir.namespace import WHOLE, Namespace, StateKind

NONE = 255
"""In place of a tier: nobody has it."""
LEVELS = tuple(int(tier) for tier in Tier)
_WHOLE_PREFIX = frozenset((StateKind.FULL, StateKind.MLA, StateKind.INDEX))

Tiers = npt.NDArray[np.uint8]
Blocks = npt.NDArray[np.int64]


class Answered(NamedTuple):
    """What a sparse lookup said about one name."""

    namespace: Namespace
    answer: Lookup


class Kind(NamedTuple):
    """restore_points.Group."""

    kind: str
    window_tokens: int
    block_tokens: int

    @property
    def whole(self) -> bool:
        return self.kind in _WHOLE_PREFIX


class Held(NamedTuple):
    """Of one group: the best tier of each stream (the last one has nothing) and stretch of blocks, [cuts[i], cuts[i + 1])."""

    kind: Kind
    best: Tiers
    cuts: Blocks

    def either(self, one: Sequence[int], other: Sequence[int]) -> Tiers:
        """The better tier of two streams, pair by pair; -1 stands for none."""
        return np.minimum(self.best[list(one)], self.best[list(other)])


def held_of(names: Sequence[Answered], numbers: Mapping[str, int]) -> Held:
    """numbers: of the streams by name. Raises InvalidInput when the names are of different kinds or block sizes."""
    kinds = {kind_of(name.namespace) for name in names}
    if len(kinds) != 1:
        shown = " and ".join(sorted(name.namespace.short for name in names))
        raise InvalidInput(f"{shown} differ in kind, window or block size: give them as parts of their own")
    runs = [np.frombuffer(name.answer.runs, "<u4").reshape(-1, 3).astype(np.int64) for name in names]
    asked = max(name.answer.asked for name in names)
    cuts = np.unique(
        np.concatenate([np.array([0, asked]), *(edge for run in runs for edge in (run[:, 0], run[:, 0] + run[:, 1]))])
    )
    best = np.full((len(numbers) + 1, len(cuts) - 1), NONE, np.uint8)
    for name, run in zip(names, runs, strict=True):
        if len(run) and len(cuts) > 1:
            at = [numbers[trust.node] for trust in name.answer.nodes]
            best[at] = np.minimum(best[at], _spread(name.answer, run, cuts))
    return Held(kinds.pop(), best, cuts)


def _spread(answer: Lookup, runs: Blocks, cuts: Blocks) -> Tiers:
    """Best tier by node of the answer and stretch."""
    lengths = [len(packed) // 4 for packed in answer.sets]
    packed = b"".join(answer.sets)
    of_tier = np.frombuffer(packed, np.uint8)[::4].copy()
    of_tier[(of_tier < LEVELS[0]) | (of_tier > LEVELS[-1])] = NONE
    tiers = np.full((len(answer.nodes), len(lengths) + 1), NONE, np.uint8)
    at = (np.frombuffer(packed, "<u4") >> 8).astype(np.intp)
    at *= len(lengths) + 1
    at += np.repeat(np.arange(len(lengths)), lengths)
    tiers.reshape(-1)[at[::-1]] = of_tier[::-1]  # sets are in order, so a node's best tier is written last, and stays
    run = np.searchsorted(runs[:, 0], cuts[:-1], side="right") - 1
    inside = (run >= 0) & (cuts[:-1] < (runs[:, 0] + runs[:, 1])[run])
    spread: Tiers = tiers[:, np.where(inside, runs[run, 2], len(lengths))]
    return spread


def kind_of(namespace: Namespace) -> Kind:
    """A block that holds all state groups has what every one of them needs, and is needed by the most demanding."""
    if namespace.part == WHOLE and len(namespace.groups) > 1:
        return Kind(StateKind.FULL, 0, namespace.block_tokens)
    return Kind(namespace.group.kind, namespace.group.window_tokens, namespace.block_tokens)


def prefixes(held: Held, tiers: Tiers) -> Blocks:
    """[rows, levels] tokens up to the first block that is in none of the tiers up to that level."""
    out = np.zeros((len(tiers), len(LEVELS)), np.int64)
    for number, level in enumerate(LEVELS):
        ok = np.pad(tiers <= level, ((0, 0), (0, 1)))
        out[:, number] = held.cuts[ok.argmin(axis=1)] * held.kind.block_tokens
    return out


def points_of(held: Sequence[Held], by_group: Sequence[Tiers]) -> Blocks:
    """The same where groups of several kinds have to agree."""
    kinds = [item.kind for item in held]
    lengths = [np.diff(item.cuts) for item in held]
    known: dict[bytes, int] = {}
    out = np.zeros((len(by_group[0]), len(LEVELS)), np.int64)
    for row in range(len(out)):
        for number, level in enumerate(LEVELS):
            held_at = [tiers[row] <= level for tiers in by_group]
            key = b"".join(item.tobytes() for item in held_at)
            if key not in known:
                hits: list[Any] = [np.repeat(ok, length) for ok, length in zip(held_at, lengths, strict=True)]
                known[key] = restore_points(kinds, hits, block_tokens=kinds[0].block_tokens).best_tokens
            out[row, number] = known[key]
    return out


def matched_by_tier(held: Held, tiers: Tiers, matched: Blocks) -> Blocks:
    """[rows, tiers] of the matched tokens, by the group that keeps the whole prefix; without one, what nothing needs (before a
    window) counts with the slowest tier that is needed.
    """
    blocks, rows = matched // held.kind.block_tokens, np.arange(len(tiers))
    whole = np.searchsorted(held.cuts, blocks, side="right") - 1  # stretches that count as a whole; of the next one, a part may
    within = np.arange(tiers.shape[1]) < whole[:, None]
    lengths = np.diff(held.cuts).astype(np.float64)
    counted = [((tiers == level) & within).astype(np.float64) @ lengths for level in LEVELS]
    out = np.stack(counted, axis=1).astype(np.int64)
    for row in np.flatnonzero(held.cuts[whole] < blocks):
        level = tiers[row, whole[row]]
        if level != NONE:
            out[row, level - 1] += blocks[row] - held.cuts[whole[row]]
    out *= held.kind.block_tokens
    rest = matched - out.sum(axis=1)
    slowest = len(LEVELS) - 1 - np.argmax((out > 0)[:, ::-1], axis=1)
    out[rows, slowest] += rest
    return out

"""How much of one prompt each instance has: what a router weighs against load. A fold over lookup answers.

An instance (instance.py) can restore what its own streams announce and what its node's arena holds; of a data-parallel engine
each rank has its own blocks and shares the arena. Per rank: the best tier of every block, then the longest legal restore point
(restore_points.py). Rules:
- Names: a prompt's blocks are named differently by whoever computes fingerprints; a group lists all names, and a block counts
  when it is held under any of them. Only a namespace of the group's own kind and block size can be one of its names.
- Groups of one part are needed all together; parts are independent, and the best one counts (other block sizes, say).
- An engine counts for a model when it has announced blocks of it, so that an engine of another model does not inherit the
  arena of its node. A node of which no engine is known to serve the model counts under its own name.
- Every number is a hint with the trust of the streams it rests on; a hole in the answer ends the prefix, it is never bridged.

Cost: vectorised over ranks and over stretches of equal holders, so it hardly depends on the number of blocks, and not on how
many nodes have none of the prompt; parts with windows or recurrent state take one call of restore_points per distinct pattern
of blocks. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvdir.core.answer import Lookup
from kvdir.core.instance import parse
from kvdir.core.restore_points import restore_points
from kvdir.core.serving import Engine, Engines
from kvdir.errors import InvalidInput
from kvdir.fingerprint import Fingerprints
from kvdir.location import NodeTrust, Tier
from kvdir.namespace import WHOLE, Namespace, StateKind

WEIGHTS: Mapping[Tier, float] = {Tier.GPU: 1.0, Tier.CPU: 0.8, Tier.DISK: 0.5, Tier.REMOTE: 0.3}
"""What a token is worth by the best tier it is in, beside one that is computed (0). Routers may say their own."""
MAX_INSTANCES = 64
"""Named in an answer when the caller does not say how many."""

_NONE = 255
_WHOLE = frozenset((StateKind.FULL, StateKind.MLA, StateKind.INDEX))
_TIERS = tuple(Tier)
_LEVELS = tuple(int(tier) for tier in Tier)

Tiers = npt.NDArray[np.uint8]
Blocks = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ScoreName:
    """The prompt's blocks, from its start, as one namespace names them."""

    namespace_digest: bytes
    fingerprints: Fingerprints


@dataclass(frozen=True, slots=True)
class ScoreGroup:
    """One state group under every name that somebody may hold it by."""

    names: tuple[ScoreName, ...]


@dataclass(frozen=True, slots=True)
class ScorePart:
    """Groups that are needed all together."""

    groups: tuple[ScoreGroup, ...]

    @classmethod
    def of(cls, namespace_digest: bytes, fingerprints: Fingerprints) -> ScorePart:
        """One namespace, one group."""
        return cls((ScoreGroup((ScoreName(namespace_digest, fingerprints),)),))


class Answered(NamedTuple):
    """What a sparse lookup said about one name."""

    namespace: Namespace
    answer: Lookup


@dataclass(frozen=True, slots=True)
class RankScore:
    """One data-parallel rank. tokens: its longest legal restore point. through: the same with nothing slower than gpu, cpu,
    disk, remote, in that order; the last one is `tokens`.
    """

    dp_rank: int
    tokens: int
    through: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class InstanceScore:
    """score: matched tokens weighted by tier. matched_tokens: restorable at the rank and by the part with the highest score.
    tiers: of those, by best tier. nodes: index into Scores.nodes.
    """

    instance: str
    score: float
    matched_tokens: int
    tiers: tuple[tuple[Tier, int], ...]
    ranks: tuple[RankScore, ...]
    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Scores:
    """instances: best first. nodes: the streams they rest on. The rest as in Lookup. unknown_namespaces: digests asked for."""

    instances: tuple[InstanceScore, ...]
    nodes: tuple[NodeTrust, ...]
    warming: bool = False
    incomplete: bool = False
    unknown_namespaces: tuple[bytes, ...] = ()
    below_trust: int = 0


def score(
    parts: Iterable[Sequence[Sequence[Answered]]],
    engines: Engines,
    *,
    weights: Mapping[Tier, float] = WEIGHTS,
    max_instances: int = 0,
    keep_empty: bool = False,
    unknown_namespaces: tuple[bytes, ...] = (),
) -> Scores:
    """parts: groups of names, answered. keep_empty: also instances that serve a model of the parts and have nothing.

    Raises InvalidInput when names of one group are of different kinds or block sizes.
    """
    trusts: dict[str, NodeTrust] = {}
    answers: list[Lookup] = []
    best: dict[tuple[str, int], _Scored] = {}
    for groups in parts:
        answers += [name.answer for names in groups for name in names]
        for scored in _part(groups, engines, weights, trusts, keep_empty):
            known = best.get(scored.key)
            if known is None or (scored.score, scored.tokens) > (known.score, known.tokens):
                best[scored.key] = scored
    instances: dict[str, list[_Scored]] = {}
    for (instance, _), scored in best.items():
        if scored.tokens or keep_empty:
            instances.setdefault(instance, []).append(scored)
    ordered = sorted(instances.items(), key=_order)[: max_instances or MAX_INSTANCES]
    used = {
        stream: number
        for number, stream in enumerate(dict.fromkeys(s for _, ranks in ordered for r in ranks for s in r.streams))
    }
    return Scores(
        tuple(_instance(name, ranks, used) for name, ranks in ordered),
        tuple(trusts[stream] for stream in used),
        warming=any(answer.warming for answer in answers),
        incomplete=any(answer.incomplete for answer in answers),
        unknown_namespaces=unknown_namespaces,
        below_trust=max((answer.below_trust for answer in answers), default=0),
    )


class _Row(NamedTuple):
    """A rank of an instance; own and arena are columns of `_Held.best`, -1 for none."""

    instance: str
    dp_rank: int
    own: int
    arena: int


class _Scored(NamedTuple):
    key: tuple[str, int]
    score: float
    tokens: int
    through: tuple[int, ...]
    tiers: tuple[tuple[Tier, int], ...]
    streams: tuple[str, ...]


class _Kind(NamedTuple):
    """restore_points.Group."""

    kind: str
    window_tokens: int
    block_tokens: int

    @property
    def whole(self) -> bool:
        return self.kind in _WHOLE


class _Held(NamedTuple):
    """Of one group: the best tier of each stream (the last one has nothing) and stretch of blocks, [cuts[i], cuts[i + 1])."""

    kind: _Kind
    best: Tiers
    cuts: Blocks

    def rows(self, rows: Sequence[_Row]) -> Tiers:
        own = self.best[[row.own for row in rows]]
        return np.minimum(own, self.best[[row.arena for row in rows]])


def _part(
    groups: Sequence[Sequence[Answered]],
    engines: Engines,
    weights: Mapping[Tier, float],
    trusts: dict[str, NodeTrust],
    keep_empty: bool,
) -> list[_Scored]:
    numbers: dict[str, int] = {}
    for names in groups:
        for _, answer in names:
            for trust in answer.nodes:
                numbers.setdefault(trust.node, len(numbers))
                trusts[trust.node] = trust
    serving = engines.serving(frozenset(name.namespace.model for names in groups for name in names))
    rows = _rows(numbers, serving, keep_empty=keep_empty)
    held = [_held(names, numbers) for names in groups]
    if not rows:
        return []
    by_group = [item.rows(rows) for item in held]
    through = _prefixes(held[0], by_group[0]) if len(held) == 1 and held[0].kind.whole else _points(held, by_group)
    lead = next((number for number, item in enumerate(held) if item.kind.whole), 0)
    by_tier = _by_tier(held[lead], by_group[lead], through[:, -1])
    worths = np.array([weights.get(tier, 0.0) for tier in _TIERS])
    holds = np.logical_or.reduce([(item.best != _NONE).any(axis=1) for item in held]).tolist()
    names_of = tuple(numbers)
    return [
        _Scored(
            (row.instance, row.dp_rank),
            worth,
            reached[-1],
            tuple(reached),
            tuple([(tier, tokens) for tier, tokens in zip(_TIERS, matched, strict=True) if tokens]),
            tuple([names_of[at] for at in (row.own, row.arena) if at >= 0 and holds[at]]),
        )
        for row, worth, reached, matched in zip(
            rows, (by_tier @ worths).round(6).tolist(), through.tolist(), by_tier.tolist(), strict=True
        )
    ]


def _rows(numbers: Mapping[str, int], serving: Mapping[str, Sequence[Engine]], *, keep_empty: bool) -> list[_Row]:
    """Ranks of engines that hold something or whose node does; nodes that hold something and have no engine of the model.

    keep_empty: ranks of all engines of the model.
    """
    nodes = {parse(stream).node for stream in numbers}
    engines = {stream: True for stream in numbers if parse(stream).engine}
    for node in serving if keep_empty else nodes:
        engines |= {engine.stream: engine.admitted for engine in serving.get(node, ())}
    rows, carried = [], set()
    for stream, admitted in sorted(engines.items()):
        of = parse(stream)
        carried.add(of.node)
        own, arena = numbers.get(stream, -1), numbers.get(of.node, -1)
        if admitted and (keep_empty or max(own, arena) >= 0):
            rows.append(_Row(of.instance, of.dp_rank or 0, own, arena))
    rows += [_Row(node, 0, -1, at) for node, at in numbers.items() if not parse(node).engine and node not in carried]
    return rows


def _held(names: Sequence[Answered], numbers: Mapping[str, int]) -> _Held:
    kinds = {_kind(name.namespace) for name in names}
    if len(kinds) != 1:
        shown = " and ".join(sorted(name.namespace.short for name in names))
        raise InvalidInput(f"{shown} differ in kind, window or block size: give them as parts of their own")
    runs = [np.frombuffer(name.answer.runs, "<u4").reshape(-1, 3).astype(np.int64) for name in names]
    asked = max(name.answer.asked for name in names)
    cuts = np.unique(
        np.concatenate([np.array([0, asked]), *(edge for run in runs for edge in (run[:, 0], run[:, 0] + run[:, 1]))])
    )
    best = np.full((len(numbers) + 1, len(cuts) - 1), _NONE, np.uint8)
    for name, run in zip(names, runs, strict=True):
        if len(run) and len(cuts) > 1:
            at = [numbers[trust.node] for trust in name.answer.nodes]
            best[at] = np.minimum(best[at], _spread(name.answer, run, cuts))
    return _Held(kinds.pop(), best, cuts)


def _spread(answer: Lookup, runs: Blocks, cuts: Blocks) -> Tiers:
    """Best tier by node of the answer and stretch."""
    lengths = [len(packed) // 4 for packed in answer.sets]
    values = np.frombuffer(b"".join(answer.sets), "<u4")
    numbers = np.repeat(np.arange(len(lengths)), lengths)
    tiers = np.full((len(answer.nodes), len(lengths) + 1), _NONE, np.uint8)
    of_tier = (values & 0xFF).astype(np.uint8)
    of_tier[(of_tier < _LEVELS[0]) | (of_tier > _LEVELS[-1])] = _NONE
    at = (values >> 8).astype(np.int64) * (len(lengths) + 1) + numbers
    tiers.reshape(-1)[at[::-1]] = of_tier[::-1]  # sets are in order, so a node's best tier is written last, and stays
    run = np.searchsorted(runs[:, 0], cuts[:-1], side="right") - 1
    inside = (run >= 0) & (cuts[:-1] < (runs[:, 0] + runs[:, 1])[run])
    spread: Tiers = tiers[:, np.where(inside, runs[run, 2], len(lengths))]
    return spread


def _kind(namespace: Namespace) -> _Kind:
    """A block that holds all state groups has what every one of them needs, and is needed by the most demanding."""
    if namespace.part == WHOLE and len(namespace.groups) > 1:
        return _Kind(StateKind.FULL, 0, namespace.block_tokens)
    return _Kind(namespace.group.kind, namespace.group.window_tokens, namespace.block_tokens)


def _prefixes(held: _Held, tiers: Tiers) -> Blocks:
    """[rows, levels] tokens up to the first block that is in none of the tiers up to that level."""
    out = np.zeros((len(tiers), len(_LEVELS)), np.int64)
    for number, level in enumerate(_LEVELS):
        ok = np.pad(tiers <= level, ((0, 0), (0, 1)))
        out[:, number] = held.cuts[ok.argmin(axis=1)] * held.kind.block_tokens
    return out


def _points(held: Sequence[_Held], by_group: Sequence[Tiers]) -> Blocks:
    """The same where groups of several kinds have to agree."""
    kinds = [item.kind for item in held]
    lengths = [np.diff(item.cuts) for item in held]
    known: dict[bytes, int] = {}
    out = np.zeros((len(by_group[0]), len(_LEVELS)), np.int64)
    for row in range(len(out)):
        for number, level in enumerate(_LEVELS):
            held_at = [tiers[row] <= level for tiers in by_group]
            key = b"".join(item.tobytes() for item in held_at)
            if key not in known:
                hits: list[Any] = [np.repeat(ok, length) for ok, length in zip(held_at, lengths, strict=True)]
                known[key] = restore_points(kinds, hits, block_tokens=kinds[0].block_tokens).best_tokens
            out[row, number] = known[key]
    return out


def _by_tier(held: _Held, tiers: Tiers, matched: Blocks) -> Blocks:
    """[rows, tiers] of the matched tokens, by the group that keeps the whole prefix; without one, what nothing needs (before a
    window) counts with the slowest tier that is needed.
    """
    blocks, rows = matched // held.kind.block_tokens, np.arange(len(tiers))
    whole = np.searchsorted(held.cuts, blocks, side="right") - 1  # stretches that count as a whole; of the next one, a part may
    within = np.arange(tiers.shape[1]) < whole[:, None]
    lengths = np.diff(held.cuts).astype(np.float64)
    counted = [((tiers == level) & within).astype(np.float64) @ lengths for level in _LEVELS]
    out = np.stack(counted, axis=1).astype(np.int64)
    for row in np.flatnonzero(held.cuts[whole] < blocks):
        level = tiers[row, whole[row]]
        if level != _NONE:
            out[row, level - 1] += blocks[row] - held.cuts[whole[row]]
    out *= held.kind.block_tokens
    rest = matched - out.sum(axis=1)
    slowest = len(_LEVELS) - 1 - np.argmax((out > 0)[:, ::-1], axis=1)
    out[rows, slowest] += rest
    return out


def _order(item: tuple[str, list[_Scored]]) -> tuple[float, int, str]:
    best = max(item[1], key=_worth)
    return (-best.score, -best.tokens, item[0])


def _worth(scored: _Scored) -> tuple[float, int, int]:
    return (scored.score, scored.tokens, -scored.key[1])


def _instance(name: str, ranks: Sequence[_Scored], used: Mapping[str, int]) -> InstanceScore:
    best = max(ranks, key=_worth)
    return InstanceScore(
        name,
        best.score,
        best.tokens,
        best.tiers,
        tuple(
            RankScore(scored.key[1], scored.tokens, scored.through)
            for scored in sorted(ranks, key=lambda scored: scored.key[1])
        ),
        tuple(sorted({used[stream] for scored in ranks for stream in scored.streams})),
    )

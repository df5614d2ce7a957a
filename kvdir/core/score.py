"""How much of one prompt each instance has: what a router weighs against load. A fold over lookup answers.

An instance (instance.py) can restore what its own streams announce and what its node's arena holds; of a data-parallel engine
each rank has its own blocks and shares the arena. Per rank: the best tier of every block, then the longest legal restore point
(best_tiers.py, restore_points.py). Rules:
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
from typing import NamedTuple

import numpy as np

from kvdir.core.answer import Lookup
from kvdir.core.best_tiers import NONE, Answered, held_of, matched_by_tier, points_of, prefixes
from kvdir.core.instance import parse
from kvdir.core.serving import Engine, Engines
from kvdir.fingerprint import Fingerprints
from kvdir.location import NodeTrust, Tier

WEIGHTS: Mapping[Tier, float] = {Tier.GPU: 1.0, Tier.CPU: 0.8, Tier.DISK: 0.5, Tier.REMOTE: 0.3}
"""What a token is worth by the best tier it is in, beside one that is computed (0). Routers may say their own."""
MAX_INSTANCES = 64
"""Named in an answer when the caller does not say how many."""

_TIERS = tuple(Tier)


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
    unknown_namespaces: tuple[bytes, ...] = (),
) -> Scores:
    """parts: groups of names, answered. Instances that have nothing are left out.

    Raises InvalidInput when names of one group are of different kinds or block sizes.
    """
    trusts: dict[str, NodeTrust] = {}
    answers: list[Lookup] = []
    best: dict[tuple[str, int], _Scored] = {}
    for groups in parts:
        answers += [name.answer for names in groups for name in names]
        for scored in _part(groups, engines, weights, trusts):
            key = scored.row.instance, scored.row.dp_rank
            known = best.get(key)
            if known is None or (scored.score, scored.tokens) > (known.score, known.tokens):
                best[key] = scored
    instances: dict[str, list[_Scored]] = {}
    for (instance, _), scored in best.items():
        if scored.tokens:
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
    """A rank of an instance. own, arena: numbers of streams, -1 for none."""

    instance: str
    dp_rank: int
    own: int
    arena: int


class _Scored(NamedTuple):
    """A row with its numbers; few are ever shown. matched: tokens by tier. names, holds: of all streams, by number."""

    row: _Row
    score: float
    through: list[int]
    matched: list[int]
    names: Sequence[str]
    holds: Sequence[bool]

    @property
    def tokens(self) -> int:
        return self.through[-1]

    @property
    def tiers(self) -> tuple[tuple[Tier, int], ...]:
        return tuple((tier, tokens) for tier, tokens in zip(_TIERS, self.matched, strict=True) if tokens)

    @property
    def streams(self) -> tuple[str, ...]:
        return tuple(self.names[at] for at in (self.row.own, self.row.arena) if at >= 0 and self.holds[at])


def _part(
    groups: Sequence[Sequence[Answered]],
    engines: Engines,
    weights: Mapping[Tier, float],
    trusts: dict[str, NodeTrust],
) -> list[_Scored]:
    numbers: dict[str, int] = {}
    for names in groups:
        for _, answer in names:
            for trust in answer.nodes:
                numbers.setdefault(trust.node, len(numbers))
                trusts[trust.node] = trust
    serving = engines.serving(frozenset(name.namespace.model for names in groups for name in names))
    rows = _rows(numbers, serving)
    held = [held_of(names, numbers) for names in groups]
    if not rows:
        return []
    own, arena = [row.own for row in rows], [row.arena for row in rows]
    by_group = [item.either(own, arena) for item in held]
    through = prefixes(held[0], by_group[0]) if len(held) == 1 and held[0].kind.whole else points_of(held, by_group)
    lead = next((number for number, item in enumerate(held) if item.kind.whole), 0)
    by_tier = matched_by_tier(held[lead], by_group[lead], through[:, -1])
    worths = np.array([weights.get(tier, 0.0) for tier in _TIERS])
    holds = np.logical_or.reduce([(item.best != NONE).any(axis=1) for item in held]).tolist()
    columns = rows, (by_tier @ worths).round(6).tolist(), through.tolist(), by_tier.tolist()
    streams = tuple(numbers)
    return [_Scored(*column, streams, holds) for column in zip(*columns, strict=True)]


def _rows(numbers: Mapping[str, int], serving: Mapping[str, Sequence[Engine]]) -> list[_Row]:
    """Ranks of engines that hold something or whose node does; nodes that hold something and have no engine of the model."""
    engines = {stream: True for stream in numbers if parse(stream).engine}
    for node in {parse(stream).node for stream in numbers}:
        engines |= {engine.stream: engine.admitted for engine in serving.get(node, ())}
    rows, carried = [], set()
    for stream, admitted in sorted(engines.items()):
        of = parse(stream)
        carried.add(of.node)
        own, arena = numbers.get(stream, -1), numbers.get(of.node, -1)
        if admitted and max(own, arena) >= 0:
            rows.append(_Row(of.instance, of.dp_rank or 0, own, arena))
    rows += [_Row(node, 0, -1, at) for node, at in numbers.items() if not parse(node).engine and node not in carried]
    return rows


def _order(item: tuple[str, list[_Scored]]) -> tuple[float, int, str]:
    best = max(item[1], key=_worth)
    return (-best.score, -best.tokens, item[0])


def _worth(scored: _Scored) -> tuple[float, int, int]:
    return (scored.score, scored.tokens, -scored.row.dp_rank)


def _instance(name: str, ranks: Sequence[_Scored], used: Mapping[str, int]) -> InstanceScore:
    best = max(ranks, key=_worth)
    return InstanceScore(
        name,
        best.score,
        best.tokens,
        best.tiers,
        tuple(
            RankScore(scored.row.dp_rank, scored.tokens, tuple(scored.through))
            for scored in sorted(ranks, key=lambda scored: scored.row.dp_rank)
        ),
        tuple(sorted({used[stream] for scored in ranks for stream in scored.streams})),
    )

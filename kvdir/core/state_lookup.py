"""One prompt, asked of several namespaces: the state groups of a model, and the ranks of its split, folded into restore points.

A block of a group can be had at a node if every rank's part can be had there; together, nodes may complement one another: a
rank's part here, the next one's there (`points`), or all from one node (`at`). What was not answered counts as not there, and
`reasons` says so. Restore rule: restore_points.py. Pure.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvdir.core.answer import Lookup
from kvdir.core.restore_points import Bools, RestorePoints, intersection, restore_points
from kvdir.errors import InvalidInput
from kvdir.fingerprint import Fingerprints
from kvdir.location import NodeTrust, StreamState
from kvdir.namespace import Namespace

_RUN = struct.Struct("<III")


@dataclass(frozen=True, slots=True)
class Question:
    """One lookup. group: number of the state group; all ranks of one group are asked for the same blocks."""

    group: int
    namespace: Namespace
    fingerprints: Fingerprints


@dataclass(frozen=True, slots=True, eq=False)
class StateLookup:
    """points: where the prompt can be resumed from with what all nodes hold together; a hint, as every lookup.

    nodes: everybody named, by name, as the most doubtful answer has them. reasons: of questions that nobody answered, in words.
    warming, incomplete: as Lookup.
    """

    points: RestorePoints
    nodes: tuple[NodeTrust, ...]
    reasons: tuple[str, ...]
    warming: bool
    incomplete: bool
    _rule: Callable[[Sequence[Bools]], RestorePoints] = field(repr=False)
    _held: Mapping[str, tuple[Bools, ...]] = field(repr=False)

    def at(self, node: str) -> RestorePoints:
        """With what this node holds alone. KeyError: it was not named."""
        return self._rule(self._held[node])


def questions(namespace: Namespace, fingerprints: Fingerprints | Sequence[Fingerprints]) -> tuple[Question, ...]:
    """What to look up for a prompt: every state group of the namespace, every rank of its split.

    fingerprints: of the prompt's blocks from its start, a list for each group, or one for all if their blocks are of one size.
    InvalidInput: not one list a group, or one for blocks of several sizes.
    """
    parts = _parts(namespace)
    if isinstance(fingerprints, Fingerprints):
        if len({ranks[0].block_tokens for ranks in parts}) > 1:
            raise InvalidInput("one list of fingerprints for groups whose blocks differ in size: pass one list a group")
        fingerprints = [fingerprints] * len(parts)
    if len(fingerprints) != len(parts):
        raise InvalidInput(f"{len(fingerprints)} lists of fingerprints for {len(parts)} state groups: pass one a group")
    return tuple(
        Question(group, rank, asked)
        for group, (ranks, asked) in enumerate(zip(parts, fingerprints, strict=True))
        for rank in ranks
    )


def fold(
    asked: Sequence[Question],
    answers: Sequence[Lookup],
    namespace: Namespace,
    *,
    prompt_tokens: int | None = None,
    can_trim: bool = True,
) -> StateLookup:
    """The answers to `questions`, in their order, as one. prompt_tokens, can_trim: as restore_points."""
    groups = tuple(ranks[0].group for ranks in _parts(namespace))
    rule = functools.partial(
        restore_points, groups, block_tokens=namespace.block_tokens, prompt_tokens=prompt_tokens, can_trim=can_trim
    )
    together = [[np.zeros(len(question.fingerprints), np.bool_)] for question in asked]
    trust: dict[str, NodeTrust] = {}
    masks: dict[str, dict[int, Bools]] = {}
    for number, answer in enumerate(answers):
        for node, mask in _by_node(answer).items():
            told = answer.nodes[node]
            trust[told.node] = max(trust.get(told.node, told), told, key=_doubtfulness)
            masks.setdefault(answer.nodes[node].node, {})[number] = mask
            together[number].append(mask)
    nobody = [held[0] for held in together]
    all_nodes = [np.logical_or.reduce(held) for held in together]
    return StateLookup(
        points=rule(_by_group(asked, all_nodes, len(groups))),
        nodes=tuple(trust[name] for name in sorted(trust)),
        reasons=tuple(dict.fromkeys(answer.reason for answer in answers if answer.source == "none")),
        warming=any(answer.warming for answer in answers),
        incomplete=any(answer.incomplete for answer in answers),
        _rule=rule,
        _held={
            name: _by_group(asked, [held.get(number, nobody[number]) for number in range(len(asked))], len(groups))
            for name, held in masks.items()
        },
    )


@functools.lru_cache(maxsize=64)
def _parts(namespace: Namespace) -> tuple[tuple[Namespace, ...], ...]:
    """Of every state group, all ranks: once per namespace, since to make one costs more than to look up in a replica."""
    return tuple(part.family() for part in namespace.parts())


def _doubtfulness(trust: NodeTrust) -> tuple[bool, StreamState, int, float]:
    return not trust.state.trusted, trust.state, trust.missing_events, trust.age_s


def _by_group(asked: Sequence[Question], held: Sequence[Bools], groups: int) -> tuple[Bools, ...]:
    """Per group, the blocks of which every rank's part is held."""
    return tuple(
        intersection([mask for question, mask in zip(asked, held, strict=True) if question.group == group])
        for group in range(groups)
    )


def _by_node(answer: Lookup) -> dict[int, Bools]:
    """Positions held, in whatever tier, by index into the answer's nodes."""
    members = [{node for node, _ in answer.holders(number)} for number in range(len(answer.sets))]
    out: dict[int, Bools] = {}
    for start, count, number in _RUN.iter_unpack(answer.runs):
        for node in members[number]:
            out.setdefault(node, np.zeros(answer.asked, np.bool_))[start : start + count] = True
    return out

"""Orders the nodes of a lookup answer: whom to ask first for the remaining list.

Rules: coverage counts, weighted by the state of the stream: a gap says little about blocks the node was heard to hold, silence
says more. Then tier (fast first) and age. Equal nodes are ordered by a hash of their name with the caller's salt: the
same for one caller, spread over callers. Fenced nodes and unknown states are never nominated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass

from kvdir.core.answer import Lookup
from kvdir.location import NodeTrust, StreamState, Tier

_STATE_WEIGHT = {
    StreamState.SYNCED: 1.0,
    StreamState.GAP: 0.75,
    StreamState.REPAIRING: 0.75,
    StreamState.STALE: 0.5,
}


@dataclass(frozen=True, slots=True)
class Nominee:
    """A node to ask. covers: how many of the remaining positions it is said to hold. tier: its best one among them."""

    trust: NodeTrust
    covers: int
    tier: Tier


def rank(
    answer: Lookup, *, salt: bytes, remaining: Collection[int] | None = None, without: Collection[str] = ()
) -> list[Nominee]:
    """Nominees, best first. remaining: positions still wanted (None: all). without: names not to ask (self, dead peers)."""
    wanted = None if remaining is None else frozenset(remaining)
    covers: dict[int, int] = {}
    best: dict[int, Tier] = {}
    for run in answer:
        count = run.count if wanted is None else sum(at in wanted for at in range(run.start, run.start + run.count))
        if not count:
            continue
        for node in {node for node, _ in run.holders}:
            covers[node] = covers.get(node, 0) + count
        for node, tier in run.holders:
            best[node] = min(best.get(node, tier), tier)
    nominees = [
        Nominee(answer.nodes[node], count, best[node])
        for node, count in covers.items()
        if answer.nodes[node].node not in without and answer.nodes[node].state in _STATE_WEIGHT
    ]
    nominees.sort(key=lambda nominee: _key(nominee, salt))
    return nominees


def _key(nominee: Nominee, salt: bytes) -> tuple[float, int, int, int, bytes]:
    trust = nominee.trust
    weighted = nominee.covers * _STATE_WEIGHT[trust.state]
    tie = hashlib.blake2b(trust.node.encode(), digest_size=8, key=salt[:64]).digest()
    # Ages within a second are equal: they say when the heartbeat came, not how good the node is.
    return (-weighted, -nominee.covers, nominee.tier, int(trust.age_s), tie)

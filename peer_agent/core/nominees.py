"""Whom to ask: what the directory claims, ranked by trust, coverage, nearness and expected finish.

Rules:
- The directory is a hint, the owner decides: whoever is asked, is asked for everything that is not here yet.
- Nominees are asked in parallel, until every claimed block is covered. A trusted node's claim covers its blocks; an untrusted
  one is doubted: its claims are covered when a second node that claims them was asked as well.
- Beyond that a node is asked when its bandwidth would end the load clearly earlier, or when it is untrusted and blocks are
  left that nobody claims (a trusted claim list has no holes, an untrusted one may hide them). A second node on our own host
  ends nothing earlier: it is our threads that copy out of either.

Pure: numpy arrays in, a choice out. State is the plan's (peer_agent/core/plan.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvdir.location import NodeTrust, Tier
from peer_agent.core.blocks import Mask, Positions
from peer_agent.core.cost import Offer, Recompute, finish_s
from peer_agent.core.figures import UNKNOWN, PathFigures

CLEARLY_EARLIER = 0.9
"""A further source must bring the predicted finish below this share of what it is without it,"""
LOCK_COST_S = 1e-3
"""and save at least this: what one more lock costs its owner and us."""

_GPU, _CPU = int(Tier.GPU), int(Tier.CPU)
"""A block on a gpu is staged by its owner when it is asked for."""

CONNECT_ROUND_TRIPS = 4
"""A first lock takes so many: TCP, HTTP/2 and Hello, the data plane, and the lock itself."""

_RUN: np.dtype[Any] = np.dtype([("start", "<u4"), ("count", "<u4"), ("set", "<u4")])


@dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """What the directory says that one node holds: positions in the load's list, ascending, each once."""

    node: NodeTrust
    positions: Positions

    @classmethod
    def of(cls, node: NodeTrust, positions: Iterable[int]) -> Claim:
        return cls(node, np.array(sorted(set(positions)), np.intp))


@dataclass(frozen=True, slots=True)
class PeerFigures:
    """What is known about a peer now. queued_bytes: of our other loads, under way or waiting at it.

    skip_until_s: its circuit breaker is open until then (the caller's monotonic clock); 0 if it has not failed lately.
    """

    path: PathFigures = UNKNOWN
    plane: str = ""
    same_host: bool = False
    connected: bool = False
    skip_until_s: float = 0.0
    queued_bytes: int = 0

    @property
    def answer_s(self) -> float:
        """From asking it for a lock to its answer."""
        return self.path.round_trip_s * (1 if self.connected else CONNECT_ROUND_TRIPS)

    @property
    def first_byte_s(self) -> float:
        """From asking it for a lock to the first byte of a read."""
        return self.answer_s + self.path.latency_s + self.queued_bytes / self.path.bytes_per_s


UNMEASURED = PeerFigures()


@dataclass(slots=True, eq=False)
class Nominee:
    """One candidate for an ask. claimed: mask over the load's list."""

    node: NodeTrust
    claimed: Mask
    figures: PeerFigures

    @property
    def offer(self) -> Offer:
        return Offer(self.figures.first_byte_s, self.figures.path.bytes_per_s)


def claims(runs: bytes, sets: Sequence[bytes], nodes: Sequence[NodeTrust]) -> list[Claim]:
    """Claims per node, on the tiers that agents serve, from a lookup (LookupResponse.runs, HolderSet.holders, nodes).

    Nodes that are in the same sets share one array of positions.
    """
    table = np.frombuffer(runs, _RUN)
    number_of = np.repeat(table["set"], table["count"])  # per claimed position: which set claims it
    first = np.cumsum(table["count"], dtype=np.intp) - table["count"]
    claimed = np.arange(len(number_of), dtype=np.intp) + np.repeat(table["start"].astype(np.intp) - first, table["count"])
    sets_of: dict[int, list[int]] = {}
    for number, holders in enumerate(sets):
        packed = np.frombuffer(holders, "<u4")
        tiers = packed & 0xFF
        for index in np.unique(packed[(tiers == _GPU) | (tiers == _CPU)] >> 8).tolist():
            sets_of.setdefault(index, []).append(number)
    shared: dict[tuple[int, ...], Positions] = {}
    for numbers in {tuple(numbers) for numbers in sets_of.values()}:
        chosen, mask = np.zeros(len(sets), np.bool_), np.zeros(int(claimed.max(initial=-1)) + 1, np.bool_)
        chosen[list(numbers)] = True
        mask[claimed[chosen[number_of]]] = True
        shared[numbers] = np.flatnonzero(mask)
    return [Claim(nodes[index], shared[tuple(numbers)]) for index, numbers in sets_of.items()]


def choose(
    candidates: Iterable[Nominee],
    *,
    missing: Mask,
    uncovered: Mask,
    gaps: bool,
    helpers: Sequence[Offer],
    near: bool,
    block_bytes: int,
    room: int,
) -> list[Nominee]:
    """Whom to ask now, best first, at most `room`.

    missing: blocks that are not here. uncovered: of these, the claimed ones that no node asked before is trusted to hold.
    gaps: whether blocks are missing that nobody claims. helpers: terms of those asked before; a further one is measured
    against them. near: one of those is on our host.
    """
    left = list(candidates)
    chosen: list[Nominee] = []
    uncovered, doubted = uncovered.copy(), np.zeros_like(uncovered)
    offers = list(helpers)
    size_bytes = int(np.count_nonzero(missing)) * block_bytes
    while left and len(chosen) < room:
        # What a nominee adds changes only when another is chosen: until then one order holds, whether there are 4 or 4,000.
        covers = {nominee.node.node: int(np.count_nonzero(nominee.claimed & uncovered)) for nominee in left}
        left.sort(key=lambda nominee: _order(nominee, covers[nominee.node.node], size_bytes))
        while left:
            best = left.pop(0)
            trusted = best.node.state.trusted
            if covers[best.node.node] or (gaps and not trusted):
                break
            if not (near and best.figures.same_host) and _hastens(best, offers, missing, block_bytes):
                break
        else:
            break
        chosen.append(best)
        near |= best.figures.same_host
        offers.append(best.offer)
        uncovered &= ~best.claimed if trusted else ~(best.claimed & doubted)
        doubted |= best.claimed
    return chosen


def worthwhile(
    chosen: Iterable[Nominee], *, missing: Mask, helpers: Sequence[Offer], block_bytes: int, recompute: Recompute
) -> list[Nominee]:
    """Those whose blocks would take longer to recompute than they delay the end of the load; the quickest are tried first."""
    if not recompute.known:
        return list(chosen)
    kept: list[Nominee] = []
    covered = np.zeros_like(missing)
    offers, end_s = list(helpers), 0.0
    for nominee in sorted(chosen, key=lambda nominee: nominee.offer.start_s):
        wanted = nominee.claimed & missing
        adds = int(np.count_nonzero(wanted & ~covered))
        alone_s = nominee.offer.finish_s(adds * block_bytes)
        shared_s = finish_s((*offers, nominee.offer), int(np.count_nonzero(wanted | covered)) * block_bytes)
        with_s = max(alone_s, shared_s) if adds else end_s
        if recompute.worth(adds, cost_s=with_s - end_s) or (kept and not adds):
            kept.append(nominee)
            offers.append(nominee.offer)
            covered |= wanted
            end_s = max(end_s, with_s)
    return kept


def _order(nominee: Nominee, covers: int, size_bytes: int) -> tuple[bool, bool, bool, int, float, bool, str]:
    """Who failed and has not answered since comes after who has not: else a few dead nodes, each due again after its pause,
    would use up the asks of every load, and the living one behind them would never be reached."""
    figures = nominee.figures
    failed, doubted = figures.skip_until_s > 0, not nominee.node.state.trusted
    finish = figures.first_byte_s + size_bytes / figures.path.bytes_per_s
    return not covers, doubted, failed, -covers, finish, not figures.same_host, nominee.node.node


def _hastens(nominee: Nominee, offers: Sequence[Offer], missing: Mask, block_bytes: int) -> bool:
    size_bytes = int(np.count_nonzero(nominee.claimed & missing)) * block_bytes
    if not size_bytes:
        return False
    without_s = finish_s(offers, size_bytes)
    with_s = finish_s((*offers, nominee.offer), size_bytes)
    return with_s < CLEARLY_EARLIER * without_s and without_s - with_s > LOCK_COST_S

"""The decisions of one load: whom to ask, for what, how long, and what the answers make of each block.

Rules:
- The directory is a hint, the owner decides: every nominee is asked for the *whole remaining list*, because where events
  were lost the owner holds more than the directory knows.
- Nominees: nodes that claim most of what remains first, trusted before untrusted, near before far. A node whose claims are
  all served is asked again for the gaps only while its stream is not trusted (a trusted claim list has no holes).
- Stop when nothing remains, nobody is left, `max_nominees` were asked, or the time left is below the nominee's round trip.
- While others are left to ask, one nominee gets at most half of the time that remains, so a silent one cannot take it all.
- Corrupt or torn blocks are tried once more (elsewhere, else at the same node), then they are for the caller to recompute.

Pure: `now_s` and `deadline_s` are the caller's monotonic seconds. Runs no I/O (peer_agent/server/reader.py does).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvdir.location import NodeTrust, Tier
from peer_agent.core.effects import LoadStatus

MAX_NOMINEES = 4

_HITS = (LoadStatus.HIT_LOCAL, LoadStatus.HIT_PEER)
_WORSE = {status: rank for rank, status in enumerate((LoadStatus.MISS, LoadStatus.STALE, LoadStatus.LATE, LoadStatus.CORRUPT))}


@dataclass(frozen=True, slots=True)
class Claim:
    """What the directory says that one node holds: positions in the load's list."""

    node: NodeTrust
    positions: frozenset[int]


@dataclass(frozen=True, slots=True)
class PeerFigures:
    """What has been measured about a peer. skip_until_s: it failed recently and is not worth a try before then."""

    round_trip_s: float = 0.0
    same_host: bool = False
    skip_until_s: float = 0.0


UNMEASURED = PeerFigures()


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask this node which of `positions` it holds; have its answer and the bytes by until_s."""

    node: NodeTrust
    positions: tuple[int, ...]
    claimed: frozenset[int]
    until_s: float


def claims(runs: bytes, sets: Sequence[bytes], nodes: Sequence[NodeTrust]) -> list[Claim]:
    """Claims per node, on the tier that agents serve, from a lookup (LookupResponse.runs, HolderSet.holders, nodes)."""
    held: dict[int, set[int]] = {}
    for start, count, number in struct.iter_unpack("<III", runs):
        for (holder,) in struct.iter_unpack("<I", sets[number]):
            if holder & 0xFF == Tier.CPU:
                held.setdefault(holder >> 8, set()).update(range(start, start + count))
    return [Claim(nodes[index], frozenset(found)) for index, found in held.items()]


class ReadPlan:
    """State of one load of `count` blocks. Feed it what happened; it says what to do next and, at the end, `results`."""

    def __init__(self, count: int, *, max_nominees: int = MAX_NOMINEES) -> None:
        self._results = [LoadStatus.MISS] * count
        self._claims: dict[str, Claim] = {}
        self._figures: Mapping[str, PeerFigures] = {}
        self._asked: dict[str, int] = {}
        self._again: set[str] = set()
        self._budget = max_nominees

    @property
    def remaining(self) -> tuple[int, ...]:
        """Positions that are not hits yet, ascending."""
        return tuple(position for position, status in enumerate(self._results) if status not in _HITS)

    def hold(self, positions: Iterable[int], status: LoadStatus) -> None:
        """These blocks are here."""
        for position in positions:
            self._results[position] = status

    def nominate(self, found: Iterable[Claim], *, me: str, figures: Mapping[str, PeerFigures]) -> None:
        """What the directory answered, and what is known about the peers by name. Claims of this node itself are ignored."""
        self._claims = {claim.node.node: claim for claim in found if claim.node.node != me and claim.node.peer_address}
        self._figures = figures

    def next_ask(self, *, now_s: float, deadline_s: float) -> Ask | None:
        """The next nominee, or None when a stop rule applies."""
        remaining = self.remaining
        ranked = self._ranked(set(remaining), now_s)
        if not remaining or not ranked or len(self._asked) >= self._budget:
            return None
        claim, *others = ranked
        name = claim.node.node
        left_s = deadline_s - now_s
        if left_s <= self._figures.get(name, UNMEASURED).round_trip_s:
            self._worsen(claim.positions, LoadStatus.LATE)
            return None
        self._asked[name] = self._asked.get(name, 0) + 1
        until_s = now_s + (left_s / 2 if others else left_s)
        return Ask(claim.node, remaining, claim.positions & set(remaining), until_s)

    def answered(self, ask: Ask, present: Iterable[int]) -> tuple[int, ...]:
        """The owner holds these positions; returns those it was said to hold and does not: report them as stale."""
        stale = tuple(sorted(ask.claimed - set(present)))
        self._worsen(stale, LoadStatus.STALE)
        return stale

    def read(self, ask: Ask, outcome: Mapping[int, LoadStatus]) -> None:
        """What became of the blocks that were read. Corrupt ones make the nominee eligible once more."""
        for position, status in outcome.items():
            if status in _HITS:
                self._results[position] = status
            else:
                self._worsen((position,), status)
        if LoadStatus.CORRUPT in outcome.values():
            self.try_again(ask)

    def try_again(self, ask: Ask) -> None:
        """The nominee held blocks that could not be read because another load was at them and failed: once more."""
        if self._asked.get(ask.node.node) == 1:
            self._again.add(ask.node.node)

    def unreachable(self, ask: Ask, *, late: bool) -> None:
        """The nominee did not answer. late: time ran out, as opposed to a refused or broken connection (a miss)."""
        if late:
            self._worsen(ask.claimed, LoadStatus.LATE)

    def out_of_time(self) -> None:
        """The deadline came first: what is said to be somewhere and has not arrived is late."""
        for claim in self._claims.values():
            if claim.node.node not in self._asked:
                self._worsen(claim.positions, LoadStatus.LATE)

    @property
    def results(self) -> bytes:
        """One LoadStatus byte per block."""
        return bytes(self._results)

    def _ranked(self, remaining: set[int], now_s: float) -> list[Claim]:
        def eligible(claim: Claim) -> bool:
            name = claim.node.node
            if name in self._asked and name not in self._again:
                return False
            if self._figures.get(name, UNMEASURED).skip_until_s > now_s:
                return False
            return bool(claim.positions & remaining) or not claim.node.state.trusted

        def order(claim: Claim) -> tuple[bool, int, bool, bool, float, str]:
            figures = self._figures.get(claim.node.node, UNMEASURED)
            retried = claim.node.node in self._asked
            served = len(claim.positions & remaining)
            return retried, -served, not claim.node.state.trusted, not figures.same_host, figures.round_trip_s, claim.node.node

        ranked = sorted(filter(eligible, self._claims.values()), key=order)
        if ranked and ranked[0].node.node in self._asked:
            self._again.discard(ranked[0].node.node)
        return ranked

    def _worsen(self, positions: Iterable[int], status: LoadStatus) -> None:
        """Keeps the most telling reason of a block that is not here."""
        for position in positions:
            known = self._results[position]
            if known not in _HITS and _WORSE[status] > _WORSE[known]:
                self._results[position] = status

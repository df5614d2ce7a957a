"""The fetching half of a load: which source reads what next, what is read twice, what the outcomes mean.

Rules: see peer_agent/core/plan.py and sources.py. At most `fetches_per_source` reads at a source: the next one is on its way
while one arrives. The byte budget counts what arrived and what is under way; hedges have their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from peer_agent.core.asking import Asking
from peer_agent.core.blocks import Blocks, Mask, Positions
from peer_agent.core.cost import Offer, finish_s
from peer_agent.core.effects import LoadStatus
from peer_agent.core.explanation import FetchStory, runs_of
from peer_agent.core.orders import Fetch, Outcome, Terms
from peer_agent.core.sources import Flight, Source, share_blocks

OVERDUE_GRACE_S = 2e-3
"""Added to every prediction before a read is overdue: scheduling noise of two event loops."""


class Fetching:
    """Reads of one load. Methods: see ReadPlan."""

    def __init__(self, blocks: Blocks, terms: Terms, asking: Asking) -> None:
        self._blocks = blocks
        self._terms = terms
        self._asking = asking
        self._begun = 0
        self._bytes = 0  # arrived or under way, hedges apart
        self._hedged_bytes = 0
        self._ended: list[tuple[Flight, bytes, float]] = []  # outcome, took_s
        self.hedges = 0
        self.hedges_won = 0

    def next_fetches(self, now_s: float, *, last: bool) -> tuple[Fetch, ...]:
        """last: nobody is left to ask, so a block that was corrupt may be tried where it was corrupt."""
        live = [source for source in self._asking.sources.values() if source.live]
        offers = {source.ask.number: source.offer(self._asking.figures(source.name), now_s) for source in live}
        fetches: list[Fetch] = []
        for source in sorted(live, key=lambda source: offers[source.ask.number].finish_s(self._terms.block_bytes)):
            if last:
                self._allow_retry(source, live)
            while (fetch := self._next_fetch(source, now_s)) is not None:
                fetches.append(fetch)
        return tuple(fetches)

    def fetched(self, fetch: Fetch, outcome: bytes, now_s: float) -> tuple[Fetch, ...]:
        blocks, source = self._blocks, self._asking.sources[fetch.ask.number]
        flight = source.flights.pop(fetch.number)
        blocks.taken[flight.positions] -= 1
        codes = np.frombuffer(outcome, np.uint8)
        here = flight.positions[codes == Outcome.HERE]
        fresh = int(np.count_nonzero(blocks.open[here]))
        blocks.hold(here, LoadStatus.HIT_PEER)
        source.served += fresh
        self.hedges_won += bool(fetch.hedges is not None and fresh)
        if fetch.hedges is None:
            self._bytes -= (len(codes) - len(here)) * self._terms.block_bytes
        if len(here) < len(codes):
            self._failed(source, flight.positions, codes)
        self._ended.append((flight, outcome, now_s - flight.began_s))
        return self._needless()

    def _failed(self, source: Source, positions: Positions, codes: np.ndarray[Any, Any]) -> None:
        """What follows from every outcome but HERE."""
        blocks = self._blocks
        at = {code: positions[codes == code] for code in Outcome}
        blocks.worsen(at[Outcome.STALE], LoadStatus.STALE)
        blocks.worsen(at[Outcome.LATE], LoadStatus.LATE)
        for code in (Outcome.STALE, Outcome.LATE, Outcome.CORRUPT):
            source.holds[at[code]] = False
        source.retry[blocks.corrupt(at[Outcome.CORRUPT])] = True
        blocks.aside[at[Outcome.BUSY]] = True
        blocks.give_up(at[Outcome.NO_ROOM])
        if len(at[Outcome.LOST]):
            self._asking.lost(source.ask)

    def overdue(self, now_s: float) -> tuple[Fetch, ...]:
        found = []
        for source in self._asking.sources.values():
            for flight in source.flights.values():
                if flight.tell_s <= now_s:
                    flight.tell_s = now_s + (now_s - flight.began_s)
                    found.append(flight.fetch)
        return tuple(found)

    def stories(self) -> tuple[FetchStory, ...]:
        """Every read, those under way last."""
        under_way = [flight for source in self._asking.sources.values() for flight in source.flights.values()]
        ended = [_story(flight, outcome, took_s, self._terms.began_s) for flight, outcome, took_s in self._ended]
        return (*ended, *(_story(flight, b"", None, self._terms.began_s) for flight in under_way))

    # which blocks next

    def _next_fetch(self, source: Source, now_s: float) -> Fetch | None:
        if len(source.flights) >= self._terms.limits.fetches_per_source:
            return None
        own = source.offer(self._asking.figures(source.name), now_s)
        takeable = self._blocks.takeable & source.holds
        if not takeable.any():
            return self._hedge(source, own, now_s)
        size = self._terms.block_bytes
        in_time = int(own.bytes_by(self._terms.deadline_s - now_s) / size)
        room = (self._terms.limits.max_read_bytes - self._bytes) // size
        if in_time <= 0:
            source.remark = "what is left would arrive after the deadline"
            self._blocks.worsen(takeable, LoadStatus.LATE)
            return None
        if room <= 0:
            source.remark = "the load's byte budget was spent"
            return None
        pool, rivals = self._pool(source, own, takeable, now_s)
        blocks = int(np.count_nonzero(pool))
        end_s = finish_s((own, *rivals), blocks * size)
        want = blocks
        if rivals:
            least = self._terms.limits.min_chunk_bytes
            want = share_blocks(own, rivals, end_s=end_s, block_bytes=size, min_chunk_bytes=least)
        if not want:
            return None
        if not self._worth(blocks, end_s, now_s):
            source.remark = "recomputing what is left is faster"
            self._blocks.worsen(pool, LoadStatus.SKIPPED)
            return None
        unmeasured = rivals and not self._asking.figures(source.name).path.reads
        if unmeasured and source.flights:
            return None
        chunk_bytes = self._terms.limits.min_chunk_bytes if unmeasured else self._terms.limits.max_chunk_bytes
        positions = np.flatnonzero(pool)[: min(want, in_time, room, max(1, chunk_bytes // size))]
        return self._begin(source, own, positions, now_s, hedges=None)

    def _pool(self, source: Source, own: Offer, takeable: Mask, now_s: float) -> tuple[Mask, list[Offer]]:
        """What this source takes from: all it can take, with the rivals for it, or only what nobody else may serve."""
        rivals, alone = [], takeable
        for rival in self._asking.sources.values():
            if rival is not source and rival.useful and not rival.stalled(now_s) and (rival.may_serve & takeable).any():
                rivals.append(rival.offer(self._asking.figures(rival.name), now_s))
                alone = alone & ~rival.may_serve
        if not rivals or (not alone.any() and not source.stalled(now_s)):
            return takeable, rivals
        end_s = finish_s((own, *rivals), int(np.count_nonzero(takeable)) * self._terms.block_bytes)
        ample = end_s < (self._terms.deadline_s - now_s) / 2
        return (alone, []) if ample or source.stalled(now_s) else (takeable, rivals)

    def _worth(self, blocks: int, end_s: float, now_s: float) -> bool:
        """Whether bringing so many blocks by end_s delays the load by less than they take to recompute."""
        if not self._terms.recompute.known:
            return True
        busy_s = max(source.busy_until_s for source in self._asking.sources.values()) - now_s
        return self._terms.recompute.worth(blocks, cost_s=max(0.0, end_s - max(0.0, busy_s)))

    def _allow_retry(self, source: Source, live: Sequence[Source]) -> None:
        again = source.retry & self._blocks.takeable
        for other in live:
            again &= ~other.holds
        source.holds |= again
        source.retry &= ~again

    # twice

    def _hedge(self, source: Source, own: Offer, now_s: float) -> Fetch | None:
        """Doubles the read that has been overdue for longest, if this source holds what is missing of it."""
        if not self._terms.limits.hedge_share:
            return None
        overdue = [
            flight
            for other in self._asking.sources.values()
            if other is not source
            for flight in other.flights.values()
            if flight.due_s <= now_s and not flight.hedged and flight.fetch.hedges is None
        ]
        size = self._terms.block_bytes
        in_time = int(own.bytes_by(self._terms.deadline_s - now_s) / size)
        limits = self._terms.limits
        budget = max(limits.hedge_share * len(self._blocks) * size, limits.fetches_per_source * limits.max_chunk_bytes)
        room = int(budget - self._hedged_bytes) // size
        for flight in sorted(overdue, key=lambda flight: flight.due_s):
            wanted = flight.positions[(self._blocks.open & source.holds)[flight.positions]]
            positions = wanted[: max(0, min(in_time, room))]
            if len(positions):
                flight.hedged = True
                self.hedges += 1
                self._hedged_bytes += len(positions) * size
                return self._begin(source, own, positions, now_s, hedges=flight.fetch.number)
        return None

    def _needless(self) -> tuple[Fetch, ...]:
        return tuple(
            flight.fetch
            for source in self._asking.sources.values()
            for flight in source.flights.values()
            if not self._blocks.open[flight.positions].any()
        )

    # book-keeping

    def _begin(self, source: Source, own: Offer, positions: Positions, now_s: float, *, hedges: int | None) -> Fetch:
        size_bytes = len(positions) * self._terms.block_bytes
        predicted_s = own.finish_s(size_bytes)
        number, self._begun = self._begun, self._begun + 1
        fetch = Fetch(number, source.ask, tuple(positions.tolist()), size_bytes, self._terms.deadline_s, predicted_s, hedges)
        ratio = self._asking.figures(source.name).path.overdue_ratio
        due_s = now_s + ratio * predicted_s + OVERDUE_GRACE_S
        source.flights[number] = Flight(fetch, positions, now_s, now_s + predicted_s, due_s, due_s)
        self._blocks.taken[positions] += 1
        if hedges is None:
            self._bytes += size_bytes
        return fetch


def _story(flight: Flight, outcome: bytes, took_s: float | None, began_s: float) -> FetchStory:
    fetch = flight.fetch
    return FetchStory(
        number=fetch.number,
        node=fetch.ask.node.node,
        runs=runs_of(fetch.positions),
        size_bytes=fetch.size_bytes,
        began_s=flight.began_s - began_s,
        predicted_s=fetch.predicted_s,
        took_s=took_s,
        hedges=fetch.hedges,
        outcome={code.name.lower(): outcome.count(code) for code in Outcome if code in outcome},
    )

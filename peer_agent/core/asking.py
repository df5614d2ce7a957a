"""The asking half of a load: which nominees are asked when, what their answers mean, which sources there are.

Rules: nominees.py says who is worth an ask; here is what counts as covered meanwhile. A block is covered while a source that is
not overdue holds it or brings it, or an ask that is not overdue was sent to a node that claims it. So a silent node costs its
blocks a few round trips, and not the deadline. While others are left to ask, an ask may take half of the time that remains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from peer_agent.core.blocks import Blocks, Mask, as_positions
from peer_agent.core.cost import finish_s
from peer_agent.core.effects import LoadStatus
from peer_agent.core.nominees import UNMEASURED, Claim, Nominee, PeerFigures, choose, worthwhile
from peer_agent.core.orders import Ask, Terms
from peer_agent.core.sources import Source, Verdict

OVERDUE_ROUND_TRIPS = 8.0
CONNECT_S = 0.05
"""A lock answer is overdue after so many round trips, and CONNECT_S later where there was no connection yet."""


class Asking:
    """Nominees of one load, and the sources that they became, by ask number, in the order asked. Methods: see ReadPlan."""

    def __init__(self, blocks: Blocks, terms: Terms) -> None:
        self._blocks = blocks
        self._terms = terms
        self._claimed = np.zeros(len(blocks), np.bool_)
        self.figures: Callable[[str], PeerFigures] = lambda _: UNMEASURED
        self.sources: dict[int, Source] = {}
        self.passed: dict[str, tuple[Nominee, Verdict]] = {}
        """Not asked (yet), and why."""
        self.predicted_s = 0.0

    def nominate(self, found: Iterable[Claim], *, me: str, figures: Callable[[str], PeerFigures]) -> None:
        self.figures = figures
        masks: dict[int, Mask] = {}  # many nodes may share an array of positions
        for claim in found:
            if claim.node.node != me and claim.node.peer_address:
                mask = masks.get(id(claim.positions))
                if mask is None:
                    mask = masks[id(claim.positions)] = self._blocks.mask(claim.positions)
                    self._claimed |= mask
                nominee = Nominee(claim.node, mask, figures(claim.node.node))
                self.passed[claim.node.node] = nominee, Verdict.NOT_NEEDED

    def next_asks(self, now_s: float) -> tuple[Ask, ...]:
        missing = self._blocks.open & ~self._blocks.aside
        if not self.passed or not missing.any():
            return ()
        helping = [source for source in self.sources.values() if source.useful and not source.stalled(now_s)]
        covered = self._covered(helping)
        uncovered = missing & self._claimed & ~covered
        gaps = bool((missing & ~self._claimed & ~covered).any())
        if self.sources and not gaps and not uncovered.any():
            return ()  # who would have hastened the load was asked with the first
        limits = self._terms.limits
        room = min(limits.parallel_asks - sum(source.waiting for source in helping), limits.max_asks - len(self.sources))
        candidates = self._candidates(missing, now_s)
        if not candidates or room <= 0:
            return ()
        helpers = [source.offer(self.figures(source.name), now_s) for source in helping]
        size = self._terms.block_bytes
        chosen = choose(
            candidates,
            missing=missing,
            uncovered=uncovered,
            gaps=gaps,
            helpers=helpers,
            near=any(source.nominee.figures.same_host for source in helping),
            block_bytes=size,
            room=room,
        )
        kept = worthwhile(chosen, missing=missing, helpers=helpers, block_bytes=size, recompute=self._terms.recompute)
        for nominee in chosen:
            if nominee not in kept:
                self._pass(nominee, Verdict.NOT_WORTH, LoadStatus.SKIPPED)
        if kept and not self.sources:
            claimed = int(np.count_nonzero(missing & self._claimed))
            self.predicted_s = finish_s([nominee.offer for nominee in kept], claimed * size)
        left_s = self._terms.deadline_s - now_s
        until_s = now_s + (left_s / 2 if len(candidates) > len(chosen) else left_s)
        if not kept:
            return ()
        asked = self._blocks.mask(self._blocks.missing)
        positions = tuple(self._blocks.missing.tolist())
        return tuple(self._ask(nominee, asked, positions, now_s, until_s) for nominee in kept)

    def answered(self, ask: Ask, present: Iterable[int], refused: Iterable[int], now_s: float) -> tuple[int, ...]:
        source = self.sources[ask.number]
        source.verdict, source.answered_s = Verdict.ANSWERED, now_s
        held, bad = as_positions(present), as_positions(refused)
        source.holds[held] = True
        source.held = len(held)
        gone = source.asked & source.nominee.claimed & ~source.holds
        gone[bad] = False
        source.stale = int(np.count_nonzero(gone))
        self._blocks.worsen(gone, LoadStatus.STALE)
        self._blocks.worsen(bad, LoadStatus.CORRUPT)
        return tuple(np.flatnonzero(gone).tolist())

    def unreachable(self, ask: Ask, *, late: bool, now_s: float) -> None:
        source = self.sources[ask.number]
        source.verdict, source.answered_s = Verdict.LATE if late else Verdict.UNREACHABLE, now_s
        if late:
            self._blocks.worsen(source.nominee.claimed, LoadStatus.LATE)

    def lost(self, ask: Ask) -> None:
        source = self.sources[ask.number]
        if source.live:
            source.verdict = Verdict.LOST
            source.holds[:] = False

    @property
    def promised(self) -> Mask:
        """Blocks that somebody is said to hold, or says that it holds, and that were not declined as not worth it."""
        promised = np.zeros(len(self._blocks), np.bool_)
        for nominee, verdict in self.passed.values():
            if verdict is not Verdict.NOT_WORTH:
                promised |= nominee.claimed
        for source in self.sources.values():
            promised |= source.may_serve
        return promised

    def expects(self, source: Source, now_s: float) -> bool:
        """Whether the source's answer is outstanding and worth waiting for."""
        if not source.waiting or not source.stalled(now_s):
            return source.waiting
        return bool((source.nominee.claimed & self._blocks.open).any())

    def _candidates(self, missing: Mask, now_s: float) -> list[Nominee]:
        """Nominees that may be asked now, with their figures of now."""
        found = []
        for name, (nominee, verdict) in list(self.passed.items()):
            figures = nominee.figures = self.figures(name)
            arrives_s = now_s + figures.first_byte_s + self._terms.block_bytes / figures.path.bytes_per_s
            if figures.skip_until_s > now_s:
                self._pass(nominee, Verdict.BREAKER)
            elif arrives_s >= self._terms.deadline_s:
                self._pass(nominee, Verdict.NO_TIME, LoadStatus.LATE)
            elif verdict is not Verdict.NOT_WORTH:
                full = len(self.sources) >= self._terms.limits.max_asks
                self._pass(nominee, Verdict.TOO_MANY if full else Verdict.NOT_NEEDED)
                if not nominee.node.state.trusted or (nominee.claimed & missing).any():
                    found.append(nominee)
        return found

    def _pass(self, nominee: Nominee, verdict: Verdict, status: LoadStatus | None = None) -> None:
        self.passed[nominee.node.node] = nominee, verdict
        if status is not None:
            self._blocks.worsen(nominee.claimed & self._blocks.open, status)

    def _covered(self, helping: Iterable[Source]) -> Mask:
        covered = np.zeros(len(self._blocks), np.bool_)
        for source in helping:
            covered |= source.may_serve
            for flight in source.flights.values():
                covered[flight.positions] = True
        return covered

    def _ask(self, nominee: Nominee, asked: Mask, positions: tuple[int, ...], now_s: float, until_s: float) -> Ask:
        del self.passed[nominee.node.node]
        ask = Ask(len(self.sources), nominee.node, positions, int(np.count_nonzero(nominee.claimed & asked)), until_s)
        figures = nominee.figures
        patience_s = OVERDUE_ROUND_TRIPS * figures.path.round_trip_s + (0.0 if figures.connected else CONNECT_S)
        due_s = min(now_s + patience_s, until_s)
        self.sources[ask.number] = Source(ask, nominee, now_s, due_s, asked, np.zeros_like(asked), np.zeros_like(asked))
        return ask

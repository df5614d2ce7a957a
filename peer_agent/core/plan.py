"""The decisions of one load: whom to ask, who serves which blocks, what is not worth it, what is read twice.

Rules:
- The directory is a hint, the owner decides (nominees.py). Owners are asked in parallel, and one that has answered is a
  *source* at once: nobody waits for the slowest answer (asking.py).
- Sources pull: one with room for a read gets its share of what nobody has taken (sources.py), so that all would end together.
  While time is ample a source begins with what only it holds; else with the head of the list (fetching.py).
- Never planned: what would arrive after the deadline, beyond the byte budget, or later than the engine recomputes it (cost.py).
- Hedge: a read beyond the 99th percentile of its prediction is *overdue*. A source with nothing left to take reads its blocks
  a second time, once, within a budget of bytes. The first copy wins; a read whose blocks are all here is named to be aborted.
- A corrupt block is tried once more, elsewhere, or at the same source when nobody else is left; then it is to be recomputed.
- An overdue ask no longer counts as cover, and while others are left to ask, none may take more than half of the time.
- Every position ends with exactly one status, the most telling one; every decision is in `explain`.

Calls: `hold` what is here and `nominate`; then after every event `overdue`, `next_asks`, `next_fetches`, and sleep until the
next event or `next_wake_s`, until it is `over`; then answers that are still outstanding are for the shell to await and unlock.

Pure: `now_s` is the caller's monotonic clock. Runs no I/O and holds no slots (peer_agent/server/reader.py does).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from peer_agent.core.asking import Asking
from peer_agent.core.blocks import Blocks, as_positions
from peer_agent.core.effects import LoadStatus
from peer_agent.core.explanation import Explanation, nominee_stories
from peer_agent.core.fetching import Fetching
from peer_agent.core.nominees import Claim, PeerFigures
from peer_agent.core.orders import Ask, Fetch, Terms


class ReadPlan:
    """State of one load of `count` blocks. See the module docstring for the order of calls."""

    def __init__(self, count: int, terms: Terms) -> None:
        self._terms = terms
        self._blocks = Blocks(count)
        self._asking = Asking(self._blocks, terms)
        self._fetching = Fetching(self._blocks, terms, self._asking)
        self._last_s = terms.began_s
        self._last_round = False

    # what is here

    @property
    def remaining(self) -> tuple[int, ...]:
        """Positions that are not hits yet, ascending."""
        return tuple(self._blocks.missing.tolist())

    @property
    def set_aside(self) -> tuple[int, ...]:
        """Positions that somebody else here is writing."""
        return tuple(np.flatnonzero(self._blocks.aside & self._blocks.open).tolist())

    @property
    def idle(self) -> bool:
        """Whether neither an answer nor a read is outstanding."""
        return not any(source.waiting or source.flights for source in self._asking.sources.values())

    def over(self, now_s: float) -> bool:
        """Whether nothing is left worth waiting for, once `next_asks` and `next_fetches` gave nothing.

        An overdue answer is worth waiting for only if that node claims a block that is still open; what is `set_aside` is.
        """
        if not self._blocks.open.any():
            return True
        sources = self._asking.sources.values()
        return not self.set_aside and not any(source.flights or self._asking.expects(source, now_s) for source in sources)

    @property
    def results(self) -> bytes:
        """One LoadStatus byte per block."""
        return self._blocks.statuses

    def hold(self, positions: Iterable[int], status: LoadStatus) -> None:
        """These blocks are here. status: HIT_LOCAL or HIT_PEER; the first one stays."""
        self._blocks.hold(as_positions(positions), status)

    def released(self, positions: Iterable[int]) -> None:
        """Nobody is writing these any more; those that are still not here may be taken again."""
        self._blocks.aside[as_positions(positions)] = False

    # ask

    def nominate(self, found: Iterable[Claim], *, me: str, figures: Callable[[str], PeerFigures]) -> None:
        """What the directory answered. figures: what is known about a node by name, called whenever a decision needs it.

        Claims of this node itself, and of nodes without an address, are ignored.
        """
        self._asking.nominate(found, me=me, figures=figures)

    def next_asks(self, now_s: float) -> tuple[Ask, ...]:
        """Whom to ask now, all at once."""
        self._last_s = now_s
        asks = self._asking.next_asks(now_s)
        self._last_round = not any(source.waiting for source in self._asking.sources.values())
        return asks

    def answered(self, ask: Ask, present: Iterable[int], *, now_s: float, refused: Iterable[int] = ()) -> tuple[int, ...]:
        """The owner locked these positions. refused: what it says about those cannot be right (a wrong length).

        Returns those it was said to hold and does not: report them as stale.
        """
        self._last_s = now_s
        return self._asking.answered(ask, present, refused, now_s)

    def unreachable(self, ask: Ask, *, late: bool, now_s: float) -> None:
        """The nominee did not answer. late: time ran out, as opposed to a refused or broken connection (a miss)."""
        self._last_s = now_s
        self._asking.unreachable(ask, late=late, now_s=now_s)

    def lost(self, ask: Ask) -> None:
        """The source's connection broke: nothing more from it. Reads under way at it are still reported with `fetched`.

        An Outcome.LOST says the same.
        """
        self._asking.lost(ask)

    # fetch

    def next_fetches(self, now_s: float) -> tuple[Fetch, ...]:
        """Reads to begin now, at all sources. Call it after `next_asks`."""
        self._last_s = now_s
        return self._fetching.next_fetches(now_s, last=self._last_round)

    def fetched(self, fetch: Fetch, outcome: bytes, *, now_s: float) -> tuple[Fetch, ...]:
        """What became of its blocks, an Outcome byte each. Returns reads that nobody needs any more: abort them.

        An aborted read is reported like any other when it has ended.
        """
        self._last_s = now_s
        return self._fetching.fetched(fetch, outcome, now_s)

    # time

    def overdue(self, now_s: float) -> tuple[Fetch, ...]:
        """Reads that have become overdue, and again whenever they have taken twice as long.

        Tell the figures of those that were let fly (`Figures.observe` with complete=False): then other loads need not find out.
        """
        return self._fetching.overdue(now_s)

    def next_wake_s(self, now_s: float) -> float:
        """When to look again although nothing has happened; the deadline at the latest."""
        sources = self._asking.sources.values()
        dues = [flight.tell_s for source in sources for flight in source.flights.values()]
        dues += [source.due_s for source in sources if source.waiting]
        return min([self._terms.deadline_s, *(due_s for due_s in dues if due_s > now_s)])

    def out_of_time(self) -> None:
        """The deadline came first: what is said to be somewhere and has not arrived is late."""
        self._blocks.worsen(self._asking.promised & self._blocks.open, LoadStatus.LATE)

    # figures

    @property
    def predicted_s(self) -> float:
        """From the first asks to the last byte, as seen then; 0 when nobody was asked."""
        return self._asking.predicted_s

    @property
    def hedges(self) -> int:
        """Reads begun a second time."""
        return self._fetching.hedges

    @property
    def hedges_won(self) -> int:
        """Of those, the ones that brought a block before the read that they double."""
        return self._fetching.hedges_won

    def net_gain_s(self, spent_s: float) -> float:
        """Recompute time that hits from peers save, minus the time spent on the load; 0 while the prefill rate is not known."""
        if not self._asking.sources:
            return 0.0
        return self._terms.recompute.net_gain_s(self._blocks.count()[LoadStatus.HIT_PEER], spent_s=spent_s)

    def explain(self) -> Explanation:
        """Every decision so far."""
        took_s = self._last_s - self._terms.began_s
        return Explanation(
            blocks=self._blocks.count(),
            predicted_s=self.predicted_s,
            took_s=took_s,
            net_gain_s=self.net_gain_s(took_s),
            nominees=nominee_stories(self._asking.sources.values(), self._asking.passed.values(), self._terms.began_s),
            fetches=self._fetching.stories(),
        )

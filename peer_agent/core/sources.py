"""One owner that was asked, what it can still serve, and how much of the rest is its share.

Rules:
- Shares: if all sources that hold the candidates began now, and ended together, this one would serve `share` blocks of them
  (cost.finish_s). Its next read is a quarter of that (guided self-scheduling, Polychronopoulos and Kuck, IEEE Trans. Computers
  36, 1987), so that with two reads under way less than half is committed to a figure that may be wrong; the last small part
  is given whole.
- A source that would end even one block later than the others end all, gets none.
- Whoever is overdue (`Source.stalled`) is no rival: others take what it might have served, and it keeps what only it holds.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from peer_agent.core.blocks import Mask, Positions
from peer_agent.core.cost import Offer
from peer_agent.core.nominees import Nominee, PeerFigures
from peer_agent.core.orders import Ask, Fetch

MIN_SLICE_S = 1e-3
"""A read shorter than this is not split: what a read costs beside its bytes would show."""


class Verdict(enum.Enum):
    """What became of a nominee. The value is for people."""

    ASKED = "asked, no answer yet"
    ANSWERED = "answered"
    LATE = "did not answer in time"
    UNREACHABLE = "could not be reached"
    LOST = "answered, then its connection broke"
    BREAKER = "not asked: it failed lately"
    NOT_NEEDED = "not asked: others cover its blocks and it would not make the load faster"
    NO_TIME = "not asked: its answer and bytes would come after the deadline"
    TOO_MANY = "not asked: enough nodes were asked"
    NOT_WORTH = "not asked: recomputing is faster"


@dataclass(slots=True, eq=False)
class Flight:
    """A read under way. end_s: predicted; due_s: beyond it, it is overdue; tell_s: when to say so (again).

    hedged: a second read of its blocks was begun.
    """

    fetch: Fetch
    positions: Positions
    began_s: float
    end_s: float
    due_s: float
    tell_s: float
    hedged: bool = False


@dataclass(slots=True, eq=False)
class Source:
    """One ask and, once answered, what may be read from it. holds: can still be tried there; retry: was corrupt there once."""

    ask: Ask
    nominee: Nominee
    asked_s: float
    due_s: float
    asked: Mask
    holds: Mask
    retry: Mask
    verdict: Verdict = Verdict.ASKED
    answered_s: float | None = None
    held: int = 0
    stale: int = 0
    served: int = 0
    remark: str = ""
    flights: dict[int, Flight] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.ask.node.node

    @property
    def waiting(self) -> bool:
        """Its answer is outstanding."""
        return self.verdict is Verdict.ASKED

    @property
    def live(self) -> bool:
        return self.verdict is Verdict.ANSWERED

    @property
    def useful(self) -> bool:
        """It may still bring something."""
        return self.waiting or self.live

    @property
    def may_serve(self) -> Mask:
        """What it says it holds; while its answer is outstanding, what the directory says."""
        return self.nominee.claimed if self.waiting else self.holds

    @property
    def busy_until_s(self) -> float:
        return max((flight.end_s for flight in self.flights.values()), default=0.0)

    def stalled(self, now_s: float) -> bool:
        """Overdue: with its answer, or with a read."""
        if self.waiting:
            return self.due_s <= now_s
        return any(flight.due_s <= now_s for flight in self.flights.values())

    def offer(self, figures: PeerFigures, now_s: float) -> Offer:
        """Its terms for the next read, seconds from now: behind our own reads there, and behind those of other loads."""
        path = figures.path
        idle_s = path.latency_s + figures.queued_bytes / path.bytes_per_s
        if self.waiting:
            idle_s += max(0.0, self.asked_s + figures.answer_s - now_s)
        return Offer(max(idle_s, self.busy_until_s - now_s), path.bytes_per_s)


def share_blocks(own: Offer, rivals: Sequence[Offer], *, end_s: float, block_bytes: int, min_chunk_bytes: int) -> int:
    """How many blocks this source reads next, when all of them together would end in end_s. The rules above."""
    share = int(own.bytes_by(end_s) / block_bytes + 1e-6)
    if share == 0:
        return int(own.finish_s(block_bytes) <= min(rival.finish_s(block_bytes) for rival in rivals))
    floor = max(1, int(max(min_chunk_bytes, own.bytes_per_s * MIN_SLICE_S) / block_bytes))
    return max(min(share, floor), -(-share // 4))

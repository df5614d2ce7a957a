"""What a plan orders and hears back: asks, fetches and their outcomes. Values between peer_agent/core/plan.py and the shell."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from kvdir.location import NodeTrust
from peer_agent.core.cost import UNKNOWN_PRICE, Recompute
from peer_agent.core.schedule import BACKGROUND_CHUNK_BYTES


class Outcome(enum.IntEnum):
    """What became of one block of a fetch; one byte each in `ReadPlan.fetched`."""

    HERE = 0  # verified and held for the caller
    BUSY = 1  # somebody else here is writing it: set aside until `ReadPlan.released`
    NO_ROOM = 2  # no slot for it: not tried again
    STALE = 3  # the source does not have it (any more)
    CORRUPT = 4  # torn, or failed verification
    LATE = 5  # not complete in time
    LOST = 6  # the source's connection broke: nothing more from it
    UNREAD = 7  # never begun, or aborted: anybody may take it


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one load; a prefetch takes BACKGROUND_LIMITS. max_asks: over the whole load.

    hedge_share: of the load's bytes that may be read twice, at least what may be under way at one source; 0: none.
    """

    max_asks: int = 8
    parallel_asks: int = 4
    fetches_per_source: int = 2
    min_chunk_bytes: int = 1 << 20
    max_chunk_bytes: int = 16 << 20
    max_read_bytes: int = 1 << 30
    hedge_share: float = 0.25


BACKGROUND_LIMITS = Limits(max_chunk_bytes=BACKGROUND_CHUNK_BYTES, hedge_share=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What one load has to keep to. began_s, deadline_s: the caller's monotonic clock."""

    block_bytes: int
    began_s: float
    deadline_s: float
    recompute: Recompute = UNKNOWN_PRICE
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask this node which of `positions` (ascending) it holds, and lock them; have its answer by until_s.

    claimed: how many of them the directory says it holds.
    """

    number: int
    node: NodeTrust
    positions: tuple[int, ...]
    claimed: int
    until_s: float


@dataclass(frozen=True, slots=True)
class Fetch:
    """Read `positions` (ascending) from the owner that answered `ask`, and have them by until_s.

    predicted_s: how long it will take. hedges: the number of the overdue fetch that it doubles (whose blocks are under way into
    other slots); None for a first read.
    """

    number: int
    ask: Ask
    positions: tuple[int, ...]
    size_bytes: int
    until_s: float
    predicted_s: float
    hedges: int | None = None

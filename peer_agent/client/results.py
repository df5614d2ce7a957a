"""What store and load answer. Values: nothing here is an error, because whatever did not work is recomputed or not stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvdir.location import NodeTrust
from peer_agent.core.effects import BlockState, LoadStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Microseconds. The agent's share: lookup_us (directory), lock_us (owners), read_us (data planes). copy_us: into `into`."""

    total_us: int = 0
    lookup_us: int = 0
    lock_us: int = 0
    read_us: int = 0
    copy_us: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """statuses: one LoadStatus byte per fingerprint. Only blocks that are hits have their bytes in `into`, verified; the
    bytes of other blocks are unspecified. trust: of each node that the directory named, and so how far its hint went.
    reason: why nothing could be asked, "" normally.

    predicted_us: what the agent expected lock and read to take. net_gain_us: recompute time that blocks from peers saved, less
    the time that was spent on them; negative when they cost more than they saved, 0 when the agent does not know how fast this
    engine prefills. explanation: on request, as told in docs/planner.md. trace_id: 32 hex digits, or "".
    """

    statuses: bytes
    timings: Timings = Timings()
    peer_bytes: int = 0
    directory_reached: bool = False
    trust: tuple[NodeTrust, ...] = ()
    reason: str = ""
    predicted_us: int = 0
    net_gain_us: int = 0
    explanation: Mapping[str, Any] | None = None
    trace_id: str = ""

    def __len__(self) -> int:
        return len(self.statuses)

    def __str__(self) -> str:
        counts = ", ".join(f"{n} {status.name.lower()}" for status in LoadStatus if (n := self.count(status)))
        alone = not self.directory_reached and self.hits < len(self)
        why = self.reason or ("no directory was asked, or none answered" if alone else "")
        return (
            f"{len(self)} blocks: {counts or 'none'}{f' ({why})' if why else ''}; {self.peer_bytes:,} bytes from peers, "
            f"{self.timings.total_us:,} us"
        )

    def __getitem__(self, position: int) -> LoadStatus:
        return LoadStatus(self.statuses[position])

    @property
    def hits(self) -> int:
        return self.count(LoadStatus.HIT_LOCAL) + self.count(LoadStatus.HIT_PEER)

    @property
    def recompute(self) -> tuple[int, ...]:
        """Positions whose bytes are not there."""
        return tuple(position for position, status in enumerate(self.statuses) if not LoadStatus(status).hit)

    @property
    def prefix_hits(self) -> int:
        """Consecutive hits from the first position: what an engine with prefix caching can use."""
        return next(
            (position for position, status in enumerate(self.statuses) if not LoadStatus(status).hit), len(self.statuses)
        )

    def count(self, status: LoadStatus) -> int:
        return self.statuses.count(bytes([status]))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreResult:
    """stored: blocks committed by this call. states: one BlockState byte per fingerprint as Reserve answered (PRESENT: was
    here already; BUSY: someone else is writing it; NO_SPACE: everything is locked or pinned). reason: why less than granted
    was stored, "" normally.
    """

    stored: int
    states: bytes
    reason: str = ""

    @property
    def present(self) -> int:
        """Blocks that were here already."""
        return self.states.count(bytes([BlockState.PRESENT]))

    @property
    def refused(self) -> int:
        """Blocks for which there was no slot now."""
        return self.states.count(bytes([BlockState.BUSY])) + self.states.count(bytes([BlockState.NO_SPACE]))


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupResult:
    """local: one byte per fingerprint, 1 if this node has it. nominated: peers said to hold it (a hint), capped at 255.
    trust: of each node that the directory named.
    """

    local: bytes
    nominated: bytes
    directory_reached: bool = False
    trust: tuple[NodeTrust, ...] = ()
    reason: str = ""


def missed(count: int, reason: str) -> LoadResult:
    """Nothing could be asked: everything is to be recomputed."""
    return LoadResult(statuses=bytes([LoadStatus.MISS]) * count, reason=reason)


def not_stored(count: int, reason: str) -> StoreResult:
    return StoreResult(stored=0, states=bytes([BlockState.ABSENT]) * count, reason=reason)

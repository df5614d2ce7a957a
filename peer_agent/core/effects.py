"""What the inventory answers: values that the shell (peer_agent/server/store.py) turns into header writes, events and RPCs.

Packed where there is one item per block. Nothing here does anything.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from kvdir.core.event import Event
from kvdir.fingerprint import Fingerprints

BLOCK_RECORD_BYTES = 32
ABSENT_RECORD = bytes(BLOCK_RECORD_BYTES)
"""A LockResponse.blocks record with state 0: the block is not here."""


class BlockState(enum.IntEnum):
    """State of one block in an answer; the numbers are those of peer_agent.v1.BlockState."""

    ABSENT = 0
    PRESENT = 1
    RESERVED = 2
    NO_SPACE = 3
    BUSY = 4


class LoadStatus(enum.IntEnum):
    """Result of a load for one block; the numbers are those of peer_agent.v1.LoadResult."""

    MISS = 0
    HIT_LOCAL = 1
    HIT_PEER = 2
    STALE = 3  # the directory named an owner, the owner did not have it (any more)
    CORRUPT = 4  # bytes arrived and failed verification
    LATE = 5  # not here by the deadline
    SKIPPED = 6  # a peer has it, and recomputing it is cheaper than fetching it

    @property
    def hit(self) -> bool:
        """Whether verified bytes are here; everything else is for the caller to recompute."""
        return self in (LoadStatus.HIT_LOCAL, LoadStatus.HIT_PEER)


@dataclass(frozen=True, slots=True)
class Reserved:
    """Answer of `reserve`.

    states: one BlockState byte per fingerprint asked. positions: of the granted ones, ascending; offsets: their slot
    headers, u64 LE, same order. The shell makes these slots odd (so what was
    evicted is out of sight), then publishes `events`, then hands the slots to the writer.
    """

    reservation: int
    states: bytes
    positions: tuple[int, ...]
    offsets: bytes
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class Granted:
    """What an open reservation may commit: the slots and the fingerprints of the chosen positions, in list order.

    contested: another reservation is, or was, writing some of these blocks as well (writers.py).
    """

    namespace_digest: bytes
    positions: tuple[int, ...]
    offsets: bytes
    fingerprints: Fingerprints
    contested: bool = False


@dataclass(frozen=True, slots=True)
class Locked:
    """Answer of `lock`: one 32-byte record per fingerprint asked (LockResponse.blocks), state 0 where absent.

    lock: 0 when nothing was present. expires_s: on the caller's monotonic clock. capability: for peers, from the store.
    """

    lock: int
    records: bytes
    present: int
    expires_s: float
    capability: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class Ended:
    """Locks that ended: `revoked` are those whose grants the transports must take back; `unknown` had ended before."""

    revoked: tuple[int, ...] = ()
    unknown: int = 0


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Slots of one size class by state, and what is locked and pinned among them. All counts are slots."""

    namespace_digest: bytes
    block_bytes: int
    slots: int
    free: int
    reserved: int
    committed: int
    retired: int
    quarantined: int
    locked: int
    pinned: int
    evicted: int

"""The transport port: one sparse, verified, deadline-bound read, whatever moves the bytes.

Rules that every plane keeps (contract suite: `peer_agent.transport.check`):
- A payload counts as read (`OK`) only if, after its bytes arrived, the owner's slot header said: same namespace, same
  full fingerprint, same length, same even generation before and after; and, where the plane cannot see the owner's memory
  after the copy (tcp), the xxh3-64 checksum of the payload matched as well. Anything else is a status, never data.
- `read` returns by its deadline (plus scheduling), whatever the peer does: blocks not there by then are `LATE`.
- After `read` returned, the destination slots may be reused only when `ReadOutcome.settled` is done: until then a late
  transfer might still write, and the caller quarantines them.
- One peer's failure is a status of that peer's blocks, never an exception, and never touches other peers' reads.
- Addresses never travel: a slot is named by its offset in the owner's region and is served only under a lock that
  covers it, to who shows that lock's capability (peer_agent/core/capability.py), where the owner is asked at all.

Does not: choose peers, retry, reserve or commit slots (peer_agent/server/reader.py does). Design: 05, ARCHITECTURE.md.
"""

from __future__ import annotations

import asyncio
import enum
from dataclasses import dataclass, field
from typing import Protocol

BLOCK_RECORD_BYTES = 32
"""Size of one LockResponse.blocks record: u64 offset, u64 generation, u64 checksum, u32 length, u32 state."""


class ReadStatus(enum.IntEnum):
    """What happened to one block. One byte each in `ReadOutcome.statuses`."""

    OK = 0
    ABSENT = 1  # the owner does not serve this slot under this lock
    STALE = 2  # the slot holds another block or generation than the lock said
    TORN = 3  # it changed while it was copied
    CORRUPT = 4  # checksum or header wrong
    LATE = 5  # not complete by the deadline
    PEER_LOST = 6  # connection refused, reset, closed, or the peer broke the protocol


@dataclass(frozen=True, slots=True)
class ReadList:
    """Blocks to read from one owner under one lock; packed, n blocks in the same order everywhere."""

    lock: int
    epoch: int
    namespace_digest: bytes  # 32 bytes
    fingerprints: bytes  # n * width
    width: int  # 8, 16 or 32
    records: bytes  # n * BLOCK_RECORD_BYTES, as the owner answered in LockResponse.blocks
    destinations: bytes  # n * u64 LE: offsets of slot headers in our own region; payloads land 128 bytes further
    # LockResponse.capability. Planes whose owner checks the lock read nothing without it; a secret, so no repr.
    capability: bytes = field(default=b"", repr=False)

    def __len__(self) -> int:
        return len(self.destinations) // 8


@dataclass(frozen=True, slots=True)
class ReadOutcome:
    """statuses: n bytes of ReadStatus. settled: done once nothing can write to the destinations any more."""

    statuses: bytes
    settled: asyncio.Future[None]
    bytes_read: int


@dataclass(frozen=True, slots=True)
class Capabilities:
    same_host_only: bool
    gpu: bool
    verifies: str  # "generation" or "checksum"
    owner_checks_lock: bool  # False: the owner's memory is read without it; only generations protect (shm)


class Connection(Protocol):
    """To one peer. Several reads may run at once; `close` ends them as PEER_LOST and settles them."""

    async def read(self, blocks: ReadList, *, deadline_s: float) -> ReadOutcome:
        """Reads into our region; the destinations are reserved (odd) slots. `deadline_s` is relative, seconds.

        Cancelling waits until nothing writes any more, then raises. ValueError: the list contradicts itself or names
        destinations that are not reserved slots of ours.
        """

    async def close(self) -> None: ...


class Transport(Protocol):
    """One data plane of one agent: the owner's side (export, grant, revoke) and the reader's (connect)."""

    name: str

    def capabilities(self) -> Capabilities: ...

    async def export(self) -> bytes:
        """Starts serving our region; returns the descriptor for Peer.Hello (first byte: layout version)."""

    def grant(self, lock: int, records: bytes, *, expires_s: float, capability: bytes) -> None:
        """Owner: the slots of these LockResponse.blocks records may be read under `lock` until CLOCK_MONOTONIC expires_s, by
        who shows `capability`, which was made for exactly that (CapabilityMint). Planes that cannot check ignore it.
        """

    def revoke(self, lock: int) -> None:
        """Owner: ends a grant; reads in flight finish what is on its way (one group of wire.hpp, a block on other planes).

        The slots may be rewritten at once: a reader that was still copying sees the generation change.
        """

    async def connect(self, descriptor: bytes, *, deadline_s: float) -> Connection:
        """Raises ConnectionError (cannot reach, with the reason and what to do) or ValueError (garbage descriptor)."""

    async def close(self) -> None: ...

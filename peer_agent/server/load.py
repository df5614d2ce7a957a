"""One load while it runs, and what the read path needs of a directory. Values and ports; reader.py and fetch.py act."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from kvdir.fingerprint import Fingerprints
from kvdir.location import NodeTrust
from peer_agent.core.effects import LoadStatus
from peer_agent.core.records import BLOCK_RECORD
from peer_agent.core.serial_plan import Ask, Claim, ReadPlan


@dataclass(frozen=True, slots=True)
class Nominations:
    """The directory's answer for a list: who is said to hold which positions (of the list asked)."""

    claims: Sequence[Claim]
    nodes: Sequence[NodeTrust]


class Directory(Protocol):
    """What the reader needs of a directory. Both raise KvdirError when it cannot be reached in time."""

    async def nominate(self, namespace_digest: bytes, fingerprints: Fingerprints, *, timeout_s: float) -> Nominations: ...

    def report_stale(
        self, namespace_digest: bytes, fingerprints: Fingerprints, *, node: str, epoch: int, owner_seq: int
    ) -> Coroutine[Any, Any, None]: ...


@dataclass(slots=True, kw_only=True)
class ReaderCounters:
    """Since start. Blocks unless the name says otherwise."""

    loads: int = 0
    refused: int = 0
    blocks: dict[LoadStatus, int] = field(default_factory=lambda: dict.fromkeys(LoadStatus, 0))
    peer_bytes: int = 0
    read_bytes_per_s: float = 0.0  # of the newest reads from peers, smoothed; a convergent figure
    directory_failures: int = 0
    peer_failures: int = 0
    stale_reported: int = 0
    stale_unreported: int = 0
    quarantined: int = 0
    no_space: int = 0
    waited: int = 0


@dataclass(slots=True, kw_only=True)
class Load:
    """One load: what is asked, and what has become of it. session 0: nobody locks the blocks (prefetch)."""

    namespace_digest: bytes
    block_bytes: int
    fingerprints: Fingerprints
    session: int
    until_s: float
    lease_s: float
    plan: ReadPlan
    records: bytearray
    lock: int = 0
    lock_expires_s: float = 0.0
    peer_bytes: int = 0
    lookup_s: float = 0.0
    lock_s: float = 0.0
    read_s: float = 0.0
    nodes: Sequence[NodeTrust] = ()
    directory_reached: bool = False
    writers: dict[int, Ask] = field(default_factory=dict)  # positions that somebody else is writing, and whom we had asked

    def answer(self) -> bytes:
        """LoadResponse.blocks: a BLOCK_RECORD per fingerprint, state = LoadStatus."""
        records = np.frombuffer(bytes(self.records), BLOCK_RECORD).copy()
        records["state"] = np.frombuffer(self.plan.results, np.uint8)
        return records.tobytes()

"""One load while it runs, and what the read path needs of a directory. Values and ports; reader.py and fetch.py act."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from kvdir.core.event import READ_SOURCES, ReadFigures
from kvdir.fingerprint import Fingerprints
from kvdir.location import NodeTrust
from kvdir.obs.definition import Histogram
from kvdir.obs.labels import RATIO_BUCKETS
from peer_agent.core.cost import Recompute
from peer_agent.core.effects import LoadStatus
from peer_agent.core.nominees import Claim
from peer_agent.core.plan import ReadPlan
from peer_agent.core.read_sources import ReadSources
from peer_agent.core.records import BLOCK_RECORD
from peer_agent.core.schedule import Priority
from peer_agent.server.load_tally import LoadTally


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
    """Since start. Blocks unless the name says otherwise.

    saved_s, spent_s: of loads that asked peers and whose engine's prefill rate is known. Prefetches are left out: nobody waits
    for them, and nobody knows yet whether their blocks will be used.
    """

    loads: int = 0
    refused: int = 0
    blocks: dict[LoadStatus, int] = field(default_factory=lambda: dict.fromkeys(LoadStatus, 0))
    peer_bytes: int = 0
    hedged_bytes: int = 0  # that arrived a second time
    hedges: int = 0  # reads
    hedges_won: int = 0
    read_bytes_per_s: float = 0.0  # of the newest reads from peers, smoothed; a convergent figure
    directory_failures: int = 0
    peer_failures: int = 0
    stale_reported: int = 0
    stale_unreported: int = 0
    quarantined: int = 0
    no_space: int = 0
    waited: int = 0
    saved_s: float = 0.0
    spent_s: float = 0.0
    predictions: Histogram = field(default_factory=lambda: Histogram(RATIO_BUCKETS))  # of whole loads: took / predicted
    tally: LoadTally = field(default_factory=LoadTally)
    sources: ReadSources = field(default_factory=ReadSources)

    def figures(self) -> ReadFigures:
        """For a heartbeat."""
        return ReadFigures(
            **{status.name.lower(): count for status, count in self.blocks.items()},
            read_bytes=self.peer_bytes,
            sources=self.sources.most(READ_SOURCES),
        )


@dataclass(slots=True, kw_only=True, eq=False)
class Load:
    """One load: what is asked, and what has become of it. session 0: nobody locks the blocks (prefetch). number: the agent's.

    until_s: when it is answered at the latest; reads_until_s: when reads end, a moment before, to be part of the answer.
    asked_s, answered_s: when the first owner was asked, and had answered; read_from_s, read_to_s: when the first read began,
    and the last one ended; 0 when that did not happen.
    """

    namespace_digest: bytes
    block_bytes: int
    fingerprints: Fingerprints
    session: int
    until_s: float
    reads_until_s: float
    lease_s: float
    number: int
    priority: Priority
    recompute: Recompute
    plan: ReadPlan
    records: bytearray
    lock: int = 0
    peer_bytes: int = 0
    lookup_s: float = 0.0
    asked_s: float = 0.0
    answered_s: float = 0.0
    read_from_s: float = 0.0
    read_to_s: float = 0.0
    net_gain_s: float = 0.0
    nodes: Sequence[NodeTrust] = ()
    directory_reached: bool = False

    @property
    def lock_s(self) -> float:
        """From the first ask to the first answer; a slower owner's answer is waited for while others are read."""
        return max(0.0, self.answered_s - self.asked_s)

    @property
    def read_s(self) -> float:
        return max(0.0, self.read_to_s - self.read_from_s)

    def answer(self) -> bytes:
        """LoadResponse.blocks: a BLOCK_RECORD per fingerprint, state = LoadStatus."""
        records = np.frombuffer(bytes(self.records), BLOCK_RECORD).copy()
        records["state"] = np.frombuffer(self.plan.results, np.uint8)
        return records.tobytes()

"""What the two halves of the connector tell each other, and the plan of one KV cache group. Values only, no vLLM in it.

The scheduler half sends a StepPlan with each step; every worker answers with a StepReport when something ended. A job has one
number in all workers and is reported by each of them exactly once, whatever became of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvdir.fingerprint import Fingerprints
from kvdir.namespace import Namespace, StateGroup

NULL_BLOCK = 0
"""vLLM's block that stands for "nothing here", such as tokens that left a sliding window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """One KV cache group as the connector shares it.

    state: what kind of state its blocks are. namespaces: one per part of a parallel split, in order of the part; a single one
    where every rank holds the same. block_tokens: tokens of one block. hashes_per_block: the engine's own hashes that cover one
    block; the last one names it.
    """

    state: StateGroup
    namespaces: tuple[Namespace, ...]
    block_tokens: int
    hashes_per_block: int = 1

    def names(self, hashes: Sequence[bytes], start: int, end: int) -> Sequence[bytes]:
        """Of blocks [start, end): the hash at the end of each, which covers the whole prefix up to there."""
        step = self.hashes_per_block
        return hashes[(start + 1) * step - 1 : end * step : step]


def packed(names: Sequence[bytes]) -> Fingerprints:
    """Of hashes of one width, as an engine has them."""
    return Fingerprints(b"".join(names), len(names[0]) if names else 32)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of one group and where they are in the engine's pages; as many of each."""

    group: int
    fingerprints: Fingerprints
    block_ids: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.block_ids)

    def pieces(self, most: int) -> list[Blocks]:
        """The same blocks in lists of at most `most`; 0: no limit."""
        if not most or len(self) <= most:
            return [self]
        return [
            Blocks(self.group, self.fingerprints.slice(at, most), self.block_ids[at : at + most])
            for at in range(0, len(self), most)
        ]


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Blocks that a waiting request needs, all groups; the request cannot go on before the job was reported."""

    request_id: str
    groups: tuple[Blocks, ...]

    @property
    def block_ids(self) -> set[int]:
        return {block_id for blocks in self.groups for block_id in blocks.block_ids}


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Full blocks, held by the scheduler half until every worker has reported the job."""

    number: int
    groups: tuple[Blocks, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """idle: nothing is computed in this step, so it may wait a moment for jobs to end."""

    loads: tuple[LoadJob, ...] = ()
    saves: tuple[SaveJob, ...] = ()
    idle: bool = False


@dataclass(slots=True)
class StepReport:
    """saved: how many workers ended each save job. failed: requests whose load did not bring everything. silent: loads that
    got no answer at all. counts: see COUNTERS.
    """

    saved: Counter[int] = field(default_factory=Counter)
    failed: set[str] = field(default_factory=set)
    silent: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def __bool__(self) -> bool:
        return bool(self.saved or self.failed or self.silent or self.counts)

    def add(self, other: StepReport) -> StepReport:
        """The reports of two workers, or of two steps, as one."""
        self.saved.update(other.saved)
        self.failed |= other.failed
        self.silent += other.silent
        self.counts.update(other.counts)
        return self


COUNTERS = {
    "loaded_blocks": "blocks copied into the engine's pages, verified",
    "loaded_bytes": "their bytes",
    "peer_bytes": "bytes among them that came from other nodes for this",
    "failed_blocks": "blocks that were promised and did not come: stale, corrupt, late",
    "failed_loads": "loads that did not bring everything; their requests recompute the rest",
    "load_us": "time of loads, microseconds, in the worker",
    "saved_blocks": "blocks copied into the node's arena",
    "present_blocks": "blocks that were there already",
    "unsaved_blocks": "blocks for which there was no room, no agent, or no time",
    "save_us": "time of saves, microseconds, in the worker",
}
"""Of workers, counted since the last report."""

"""What operators see: nodes, holdings and the directory as a whole. Values, made on demand, never on a hot path."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvdir.core.event import ReadFigures
from kvdir.core.trust import Convergent, Cumulative
from kvdir.location import NodeTrust


@dataclass(frozen=True, slots=True)
class HoldingView:
    """Blocks of one namespace in one tier of a node. owner_blocks: what the owner last said itself, as of owner_at_seq."""

    namespace_digest: bytes
    tier: int
    blocks: Cumulative
    bytes: Cumulative
    owner_blocks: int
    owner_at_seq: int


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node. Sequence numbers and counts are of the current epoch. namespaces: digests of all that it announced.

    reads: what its newest heartbeat said of its own loads; None: it has not.
    """

    trust: NodeTrust
    last_seq: int
    announced_seq: int
    gaps: int
    replays: int
    snapshots: int
    used_bytes: Convergent
    capacity_bytes: Convergent
    dropped_events: int
    holdings: tuple[HoldingView, ...]
    untrusted_s: float
    started_unix_ms: int
    sketches: int = 0
    missed_events: int = 0
    namespaces: tuple[bytes, ...] = ()
    reads: ReadFigures | None = None


class ViewScope(enum.IntEnum):
    """Over what a sum goes; the numbers are those of kvdir.v1.ViewScope."""

    NODE = 1
    TIER = 2
    NAMESPACE = 3
    TENANT = 4


@dataclass(frozen=True, slots=True)
class TotalView:
    """A sum over live streams. subject: node name, tier name, namespace digest in hex, or tenant."""

    scope: ViewScope
    subject: str
    blocks: Cumulative
    bytes: Cumulative


@dataclass(frozen=True, slots=True)
class LoadView:
    """What a node said about itself in its last heartbeat."""

    node: str
    used_bytes: Convergent
    capacity_bytes: Convergent
    oldest_use_ms: Convergent
    read_bytes_per_s: Convergent


@dataclass(frozen=True, slots=True)
class SumsView:
    """All sums, by scope and subject, and all loads, by node."""

    totals: tuple[TotalView, ...]
    loads: tuple[LoadView, ...]

    def find(self, scope: ViewScope, subject: str) -> TotalView | None:
        """The sum about `subject`; None when no live stream contributes to it."""
        return next((view for view in self.totals if (view.scope, view.subject) == (scope, subject)), None)


@dataclass(frozen=True, slots=True)
class NamespaceView:
    """A namespace some stream announced."""

    digest: bytes
    canonical_json: str
    block_bytes: int
    block_tokens: int


@dataclass(frozen=True, slots=True)
class StatusView:
    """The directory as a whole. Counters are since the start of the process.

    partial: warming ended at its limit without some live node. restored_blocks: from a checkpoint, not confirmed yet.
    evicted_blocks: pairs of block and holder that went for max_index_bytes (0: no bound). store: "memory", or the address of
    the one that coordinators share, without its password; then blocks counts a block once per holder, and index_bytes is the
    servers' memory. store_fault: why that does not answer, in words.
    """

    version: str
    coordinator: str
    uptime_s: float
    warming: bool
    blocks: int
    index_bytes: int
    streams_synced: int
    streams_total: int
    namespaces: tuple[NamespaceView, ...]
    lookups: int
    lookup_blocks: int
    lookup_hits: int
    events_applied: int
    events_rejected: Mapping[str, int] = field(default_factory=dict)
    stale_reports: int = 0
    stale_reports_ignored: int = 0
    partial: bool = False
    restored_blocks: int = 0
    evicted_blocks: int = 0
    max_index_bytes: int = 0
    store: str = "memory"
    store_fault: str = ""


@dataclass(frozen=True, slots=True)
class DumpPart:
    """keys: u64 little-endian. sets: u32 per key into holder_sets. holder_sets: packed node_index << 8 | tier, into nodes."""

    keys: bytes
    sets: bytes
    holder_sets: tuple[bytes, ...]
    nodes: tuple[str, ...]

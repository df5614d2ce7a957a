"""What goes into a directory and comes out of its door: its bounds, an owner's introduction and the answer, and its counters.

Values only; the rules are in directory.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvdir.core.event import NO_DOUBT, Doubt
from kvdir.core.namespaces import Announced
from kvdir.core.node import Stream
from kvdir.core.repair import RepairPolicy
from kvdir.core.sketches import SKETCH_CELLS


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one directory. Times are in seconds since a node was last heard. forget: False only says who would be.

    max_index_bytes: the bound that the index was opened with, 0 for none.
    """

    stale_after_s: float = 5.0
    expire_after_s: float = 60.0
    forget_after_s: float = 600.0
    forget: bool = True
    warm_up_s: float = 1.0
    warm_limit_s: float = 30.0
    max_fingerprints: int = 65_536
    max_streams: int = 4_096
    max_namespaces: int = 1_024
    max_sketches: int = 32
    max_snapshots: int = 4
    max_index_bytes: int = 0
    sketch_cells: int = SKETCH_CELLS
    sweep_blocks: int = 65_536
    repair: RepairPolicy = field(default_factory=RepairPolicy)


@dataclass(frozen=True, slots=True)
class Hello:
    """An owner introduces one epoch of its stream. last_seq: highest number it has used."""

    node: str
    epoch: int
    last_seq: int
    peer_address: str = ""
    started_unix_ms: int = 0
    namespaces: tuple[Announced, ...] = ()
    doubt: Doubt = NO_DOUBT


@dataclass(frozen=True, slots=True)
class Welcomed:
    """The owner goes on after resume_seq, or after its last_seq when that is 0. connection: for `disconnected`."""

    stream: Stream
    connection: int
    resume_seq: int
    refused_namespaces: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Refused:
    """This epoch may not publish."""

    newer_epoch: int
    reason: str


@dataclass(slots=True)
class Counters:
    """Since the start. lookup_*: blocks asked for and found."""

    lookups: int = 0
    lookup_blocks: int = 0
    lookup_hits: int = 0
    lookup_nodes_below_trust: int = 0
    batches: int = 0
    stale_reports: int = 0
    stale_reports_ignored: int = 0
    stale_blocks: int = 0
    snapshots_applied: int = 0
    snapshots_refused: int = 0
    fenced: int = 0
    namespaces_refused: int = 0


def fence_words(node: str, newer_epoch: int) -> str:
    return (
        f"epoch {newer_epoch:016x} of node {node} registered later: two agents have this name, or this one was replaced. "
        "Give each agent its own node name"
    )

"""Effects: what the core wants done. Values; the shell (kvdir/server) executes them, in order, and drops what it cannot.

Dropping a request for repair is safe: its deadline passes and `tick` asks again.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvdir.core.event import EvictRequest
from kvdir.location import StreamState


@dataclass(frozen=True, slots=True)
class RequestReplay:
    """Ask the owner to go back to first_seq and send everything from there on again, in order."""

    node: str
    epoch: int
    first_seq: int
    last_seq: int


@dataclass(frozen=True, slots=True)
class RequestSketch:
    """Ask the owner for sketches of these (namespace digest, tier) parts, or of all if none is named, folded to `cells`."""

    node: str
    epoch: int
    request_id: int
    reason: str
    cells: int
    parts: tuple[tuple[bytes, int], ...]


@dataclass(frozen=True, slots=True)
class SketchApplied:
    """A sketch repaired a stream. blocks: how many differed."""

    node: str
    epoch: int
    request_id: int
    blocks: int


@dataclass(frozen=True, slots=True)
class RequestSnapshot:
    """Ask the owner for an absolute statement."""

    node: str
    epoch: int
    snapshot_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class Fence:
    """Tell the connection of this epoch that it may not publish any more, and end it."""

    node: str
    epoch: int
    newer_epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class SnapshotApplied:
    """An absolute statement replaced what was known; wakes whoever asked for it."""

    node: str
    epoch: int
    snapshot_id: int
    blocks: int


@dataclass(frozen=True, slots=True)
class StateChanged:
    """For the log: what the state of a stream was at the last tick, and what it is now."""

    node: str
    epoch: int
    before: StreamState | None
    after: StreamState
    reason: str


@dataclass(frozen=True, slots=True)
class AskEvict:
    """Ask the owner to evict for a quota."""

    node: str
    epoch: int
    request: EvictRequest


Effect = AskEvict | RequestReplay | RequestSketch | SketchApplied | RequestSnapshot | Fence | SnapshotApplied | StateChanged

"""What can be counted of a replica (replica.py), for metrics and tests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplicaFigures:
    """What there is now, and counters since the start. lag_s: infinite before the first copy is whole.

    source: the coordinator that the served copy came from. faults: feeds that made no sense. lost_blocks: for want of room.
    """

    complete: bool
    connected: bool
    source: str
    lag_s: float
    blocks: int
    bytes: int
    nodes: int
    position: int
    incomplete: bool
    warming: bool
    calls: int
    snapshots: int
    resumes: int
    ends: int
    faults: int
    received_bytes: int
    applied_blocks: int
    lost_blocks: int
    last_error: str


@dataclass(slots=True)
class ReplicaCounters:
    """Since the start, but for what the copies that live now have counted themselves."""

    calls: int = 0
    snapshots: int = 0
    resumes: int = 0
    ends: int = 0
    faults: int = 0
    received_bytes: int = 0
    applied_blocks: int = 0
    lost_blocks: int = 0

"""Where a block is: tier, location, node epoch, and the states of a stream. Small frozen values, standard library only."""

from __future__ import annotations

import enum
from dataclasses import dataclass

PROTOCOL_VERSION = 1
"""Version of kvdir.v1 and peer_agent.v1 as spoken here; every answer carries it."""


class Tier(enum.IntEnum):
    """Memory tier inside a node; the numbers are those of kvdir.v1.Tier."""

    GPU = 1
    CPU = 2
    DISK = 3
    REMOTE = 4


class StreamState(enum.IntEnum):
    """State of one stream (node, epoch); the numbers are those of kvdir.v1.StreamState. Design 04."""

    SYNCED = 1
    GAP = 2
    REPAIRING = 3
    STALE = 4
    FENCED = 5

    @property
    def trusted(self) -> bool:
        """Whether cumulative figures of the stream may be trusted."""
        return self is StreamState.SYNCED


class MinTrust(enum.IntEnum):
    """How far a node must be trusted to be named in an answer; the numbers are those of kvdir.v1.MinTrust."""

    ANY = 1
    NOT_STALE = 2
    SYNCED = 3

    def admits(self, state: StreamState) -> bool:
        """Whether a node whose stream is in this state may be named."""
        match self:
            case MinTrust.SYNCED:
                return state is StreamState.SYNCED
            case MinTrust.NOT_STALE:
                return state not in (StreamState.STALE, StreamState.FENCED)
            case MinTrust.ANY:
                return True


@dataclass(frozen=True, slots=True)
class Location:
    """One node's tier."""

    node: str
    tier: Tier


@dataclass(frozen=True, slots=True)
class NodeTrust:
    """What is known about one node and how far it can be trusted; goes with every answer that names the node.

    epoch: random 64 bits of the node's current stream. age_s: since it was last heard, monotonic seconds.
    missing_events: known lost and not yet repaired. peer_address: gRPC "host:port" of its agent.
    confirmed: share (0 to 1) of its entries that the owner has confirmed in sum; the rest came by single events since, or from
    a checkpoint.
    """

    node: str
    epoch: int
    state: StreamState
    reason: str
    age_s: float
    missing_events: int
    peer_address: str
    confirmed: float = 0.0

"""Events and heartbeats as values: what an owner says about its blocks.

Rules: an event is about many blocks of one namespace and tier; applying it twice changes nothing. Kind and tier are kept as
plain ints, because an unknown number from a newer sender must reach the place that skips and counts it. Values only.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from kvdir.fingerprint import Fingerprints
from kvdir.location import Tier

EVENT_OVERHEAD_BYTES = 64
"""What one event costs on the wire and in the ring beside its fingerprints: digest, width, kind, tier, framing."""


EVENT_WIDTH = 16
"""Events carry no more of a fingerprint than this: the directory keys by 8 bytes and its sketches by 16, and the owner, who
decides, has the whole. Half the bytes on the wire and in the ring."""


class EventKind(enum.IntEnum):
    """What happened to the blocks; the numbers are those of kvdir.v1.EventKind."""

    STORED = 1
    REMOVED = 2
    CLEARED = 3


class Event(NamedTuple):
    """One event. packed: n * width bytes, empty for CLEARED. An empty digest is allowed only there: every namespace."""

    kind: int
    tier: int
    namespace_digest: bytes
    packed: bytes = b""
    width: int = 32

    @classmethod
    def stored(cls, tier: Tier, namespace_digest: bytes, fingerprints: Fingerprints) -> Event:
        """The node holds these blocks from now on."""
        narrow = fingerprints.narrowed(EVENT_WIDTH)
        return cls(EventKind.STORED, tier, namespace_digest, narrow.packed, narrow.width)

    @classmethod
    def removed(cls, tier: Tier, namespace_digest: bytes, fingerprints: Fingerprints) -> Event:
        """The node holds these blocks no more."""
        narrow = fingerprints.narrowed(EVENT_WIDTH)
        return cls(EventKind.REMOVED, tier, namespace_digest, narrow.packed, narrow.width)

    @classmethod
    def cleared(cls, tier: Tier, namespace_digest: bytes = b"") -> Event:
        """The node holds nothing of the namespace (of any, if empty) in this tier any more."""
        return cls(EventKind.CLEARED, tier, namespace_digest)

    @property
    def blocks(self) -> int:
        return len(self.packed) // self.width

    @property
    def size_bytes(self) -> int:
        return len(self.packed) + EVENT_OVERHEAD_BYTES


class Batch(NamedTuple):
    """Events with the numbers first_seq, first_seq + 1, ... replay: sent before, and asked for again."""

    first_seq: int
    events: tuple[Event, ...]
    replay: bool = False

    @property
    def last_seq(self) -> int:
        return self.first_seq + len(self.events) - 1


@dataclass(frozen=True, slots=True)
class OwnerCount:
    """The owner's own number of blocks of one namespace in one tier. digest: of their set, 16 bytes; empty: not stated."""

    namespace_digest: bytes
    tier: int
    blocks: int
    digest: bytes = b""


class ReadSource(NamedTuple):
    """What a peer gave, of which every byte was verified."""

    node: str
    blocks: int
    bytes: int


READ_SOURCES = 8
"""Peers that a heartbeat names at most."""
MAX_SOURCE_NAME = 253
"""Characters; a peer of a longer name is not told of."""


@dataclass(frozen=True, slots=True)
class ReadFigures:
    """What became of the blocks that a node's engines asked it for, since its epoch began. Blocks where no unit is named.

    read_bytes: from peers, verified. sources: of these, the peers that gave most, most first, at most READ_SOURCES.
    """

    hit_local: int = 0
    hit_peer: int = 0
    miss: int = 0
    stale: int = 0
    corrupt: int = 0
    late: int = 0
    skipped: int = 0
    read_bytes: int = 0
    sources: tuple[ReadSource, ...] = ()


@dataclass(frozen=True, slots=True)
class HeartbeatFigures:
    """What the agent adds to a heartbeat.

    counts: complete (what is not named is not held), as of the outbox's `last_seq` at the moment of the call; None: not stated.
    oldest_use_ms: since the block that would be evicted next was last used; 0: none would be. read_bytes_per_s: rate of the
    newest reads from peers; 0: none yet. reads: None: not stated.
    """

    used_bytes: int = 0
    capacity_bytes: int = 0
    counts: tuple[OwnerCount, ...] | None = None
    oldest_use_ms: int = 0
    read_bytes_per_s: int = 0
    reads: ReadFigures | None = None


class Doubt(NamedTuple):
    """Why an owner cannot vouch for what it says it holds, or no longer than until now could not.

    number: how often that has changed, so that a statement that comes late undoes no newer one. lasts: it still cannot.
    """

    number: int = 0
    words: str = ""
    lasts: bool = False

    def begun(self, words: str) -> Doubt:
        """From now on, for this reason."""
        return self if self.lasts and self.words == words else Doubt(self.number + 1, words, True)

    def ended(self) -> Doubt:
        """It vouches again."""
        return Doubt(self.number + 1, self.words) if self.lasts else self


NO_DOUBT = Doubt()


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """last_seq: everything up to it was sent before this heartbeat, or is lost. figures.counts are as of last_seq."""

    last_seq: int
    figures: HeartbeatFigures
    dropped_events: int = 0
    doubt: Doubt = NO_DOUBT


@dataclass(frozen=True, slots=True)
class EvictRequest:
    """Asks an owner to evict: at most max_blocks, never below keep_blocks of the namespace in this tier, nothing used later
    than older_than_s ago. Absolute where it matters: late, twice or on a wrong count it takes no more than was meant.
    """

    request_id: int
    namespace_digest: bytes
    tier: int
    max_blocks: int
    keep_blocks: int
    older_than_s: float


@dataclass(frozen=True, slots=True)
class EvictResult:
    """owner_seq: of the last event when the eviction was done. reason: why fewer than max_blocks."""

    request_id: int
    evicted_blocks: int
    owner_seq: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SnapshotChunk:
    """Part `index` of the absolute statement `snapshot_id`, true as of at_seq. total_blocks counts with `last`."""

    snapshot_id: int
    at_seq: int
    index: int
    entries: tuple[Event, ...]
    last: bool = False
    total_blocks: int = 0

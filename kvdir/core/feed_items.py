"""What a coordinator says to a watcher, and a watcher to a coordinator, as values. Wire form: proto/kvdir/v1/directory.proto.

An *item* is one change of what lookups may answer, or a piece of a snapshot. A response is any mix, applied in the order
welcome, items, position, beat, end. Times are durations only: no clock of one machine means anything on another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvdir.core.namespaces import Announced
from kvdir.location import NodeTrust

BLOCK_BYTES = 8
"""Of a fingerprint as it goes over the feed: what makes its key."""


class NodeItem(NamedTuple):
    """A node as the coordinator sees it. slot stands for it in this log; trust.age_s: when the item was made."""

    slot: int
    trust: NodeTrust
    hidden: bool


class NodeGone(NamedTuple):
    """Forgotten; the slot may name another node later."""

    slot: int


class HolderItem(NamedTuple):
    """A holder was created, without blocks, or made visible."""

    number: int
    slot: int
    digest: bytes
    tier: int
    visible: bool


class Stored(NamedTuple):
    """The holder has these blocks from now on. packed: n * 8 bytes."""

    holder: int
    packed: bytes


class Removed(NamedTuple):
    """And these no more."""

    holder: int
    packed: bytes


class Dropped(NamedTuple):
    """The holder is gone, with all its blocks; its number may name another one later."""

    holder: int


class NamespaceItem(NamedTuple):
    """Known from now on."""

    announced: Announced


class NamespaceGone(NamedTuple):
    digest: bytes


class Heard(NamedTuple):
    """Nodes heard again. packed: u32 pairs (slot, age in ms)."""

    packed: bytes


class Page(NamedTuple):
    """Blocks in the order of their keys. keys: u64; ages: u32 seconds since last access; sets: u32 into holder_sets, each
    packed u32 holder numbers. All little-endian. done: blocks in pages of the snapshot so far, this one included; 0: not of a
    snapshot, but of a checkpoint that the coordinator has read.
    """

    keys: bytes
    ages: bytes
    sets: bytes
    holder_sets: tuple[bytes, ...]
    done: int


class SnapshotEnd(NamedTuple):
    """Everything was sent. blocks: in pages."""

    blocks: int


Item = (
    NodeItem | NodeGone | HolderItem | Stored | Removed | Dropped | NamespaceItem | NamespaceGone | Heard | Page | SnapshotEnd
)


@dataclass(frozen=True, slots=True)
class Start:
    """How a watcher begins. position: everything of log `log_id` up to here was applied. digests: only these; empty: all."""

    watcher: str
    log_id: int = 0
    position: int = 0
    digests: frozenset[bytes] = frozenset()
    credit_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """snapshot: begin with nothing; otherwise go on where you were. seed: of the index. blocks: about as many come."""

    coordinator: str
    log_id: int
    seed: int
    blocks: int
    beat_interval_s: float
    stale_after_s: float
    expire_after_s: float
    snapshot: bool = True


@dataclass(frozen=True, slots=True)
class Beat:
    """head: newest position of the log. behind_s: so long at most the oldest item not sent yet has waited; 0: all were sent.

    credit_bytes: the newest credit that the coordinator had heard.
    """

    head: int
    behind_s: float
    warming: bool
    incomplete: bool
    credit_bytes: int


@dataclass(frozen=True, slots=True)
class End:
    """The last word of a call. begin_anew: position and log are of no use any more."""

    reason: str
    begin_anew: bool = False


@dataclass(frozen=True, slots=True)
class Response:
    """One message. position: everything up to here is in what was sent in this call so far; 0: unchanged."""

    welcome: Welcome | None = None
    items: tuple[Item, ...] = ()
    position: int = 0
    beat: Beat | None = None
    end: End | None = None

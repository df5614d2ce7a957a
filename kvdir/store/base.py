"""The port of a shared block store: where a directory lies that several coordinators write and read, and that outlives them.

Owns the contract (`BlockStore`), its values and its errors. `kvdir.testing.check_directory_store` runs it against any
implementation: memory.py keeps blocks in the native index of one process, redis.py in Redis or Valkey (docs/redis.md, ADR 13).

Rules
- Blocks are kept per *holder*: a number that the store gives to one (node, epoch, namespace, tier), and to no other later.
- The *roster* lists the holders. A lookup answers only holders that are listed and visible, so dropping a holder, a node or an
  epoch is one change of the roster, whatever it holds; blocks under numbers that are not listed are swept later.
- One *writer* per node: `take` gives the node to the caller and fences whoever had it. A write of a fenced writer, and a write
  that was overtaken by a later one of the same writer, change nothing, however late they arrive.
- Nothing is atomic across blocks. A write that failed may have been done in part; writing the same again is harmless.
- Every call ends by its deadline (`deadline_s`, seconds from now): StoreUnavailable then, or earlier if there is no hope.
- No clock of ours is in the store: ages come from the store's own clock, as durations.
Does not: know events, gaps or trust. What `record` bytes mean is the caller's.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvdir.errors import KvdirError, NoSpace, StaleEpoch, Unavailable
from kvdir.index import Packed


class StoreUnavailable(Unavailable):
    """The store does not answer now, or not in time: down, failing over, loading, or slow. The cause is in the message."""

    code = "store-unavailable"


class StoreFull(NoSpace):
    """The store's memory bound is reached and it evicts nothing: writes fail, lookups and removals go on."""

    code = "store-full"


class StoreRefused(KvdirError):
    """Will not work until somebody changes something: credentials, server version, schema version, missing slots."""

    code = "store-refused"


class StoreLost(KvdirError):
    """The store has forgotten what the caller built on (flushed, evicted, or lost in a fail-over).

    `take` the node again, then compare `counts` with the owner's. When `store_id` has changed, everything is gone.
    """

    code = "store-lost"


class Fenced(StaleEpoch):
    """Another writer has taken the node. Nothing was changed."""

    code = "fenced"


class Position(NamedTuple):
    """Every event of the epoch up to and including `seq` is in the store."""

    epoch: int
    seq: int


@dataclass(frozen=True, slots=True)
class HolderRecord:
    """One line of the roster. tier: a kvdir.v1.Tier number."""

    number: int
    node: str
    epoch: int
    namespace: bytes
    tier: int
    visible: bool


@dataclass(frozen=True, slots=True)
class Roster:
    """Every listed holder, visible or not, as of `version` (equal versions are equal rosters). A change makes another one."""

    version: int
    holders: Mapping[int, HolderRecord]


@dataclass(slots=True, eq=False)
class Writer:
    """The right to write what `node` holds; from `take`. token: larger than that of every earlier writer of the node.

    writes: how many writes were begun; later ones fence earlier ones that are still under way. acknowledged: the newest that
    each part of the store has confirmed, so that a part that went back in time is found out. changes, changes_acknowledged: the
    same of `create` and `swap`. All are the store's business. The caller awaits one call before it begins the next.
    """

    node: str
    epoch: int
    token: int
    writes: int = 0
    acknowledged: dict[int, int] = field(default_factory=dict)
    changes: int = 0
    changes_acknowledged: int = 0


class ChangeKind(enum.IntEnum):
    """What a change does to its blocks."""

    STORE = 1
    REMOVE = 2


class Change(NamedTuple):
    """Adds a holder to blocks or takes it from them. packed: fingerprints of `width` bytes (8, 16 or 32)."""

    kind: ChangeKind
    holder: int
    scope: int
    packed: Packed
    width: int


@dataclass(frozen=True, slots=True)
class NodeEntry:
    """What is kept of a node. age_s: since `save` last wrote it, by the store's clock. record: the caller's."""

    node: str
    epoch: int
    token: int
    position: Position | None
    record: bytes
    age_s: float


@dataclass(frozen=True, slots=True)
class Taken:
    """position: where the former writer of the same epoch stopped; None if there is none or nothing was applied.

    holders: those of this epoch, visible or not. Those of other epochs are gone.
    """

    writer: Writer
    position: Position | None
    record: bytes
    holders: tuple[HolderRecord, ...]


class Found(NamedTuple):
    """Answer of `lookup`, as kvdir.index.Lookup, and the roster it was made with.

    runs: u32 little-endian triples (start, count, set). sets: visible holders as packed u32 little-endian, ascending, never
    empty. hits: positions found. lost_buckets: how many places the lookup came to whose blocks the store has evicted; the
    blocks there are misses that may be untrue.
    """

    runs: bytes
    sets: list[bytes]
    hits: int
    roster: Roster
    lost_buckets: int = 0


@dataclass(frozen=True, slots=True)
class Counts:
    """blocks: per holder asked for; 0 if unknown. lost_buckets: parts of the store found missing since it was made.

    As long as lost_buckets stays, a holder's blocks are exact; whatever was evicted is still counted in blocks.
    """

    blocks: Mapping[int, int]
    lost_buckets: int


@dataclass(frozen=True, slots=True)
class Health:
    """What the servers say. evicts: the memory policy takes blocks away when full. evicted: keys they evicted so far.

    max_bytes: sum over masters, 0 when any is unbounded. used_bytes: the same sum. servers: "address version".
    """

    evicts: bool = False
    evicted: int = 0
    used_bytes: int = 0
    max_bytes: int = 0
    servers: tuple[str, ...] = ()


@dataclass(slots=True)
class Figures:
    """Counts since start, for metrics. Whole calls of the port: calls, failures; single retries inside them by reason."""

    calls: int = 0
    failures: int = 0
    retries: dict[str, int] = field(default_factory=dict)
    pending: int = 0

    def retried(self, reason: str) -> None:
        self.retries[reason] = self.retries.get(reason, 0) + 1


class BlockStore(Protocol):
    """See the module docstring. Any call raises StoreUnavailable, StoreRefused, StoreLost, and what its docstring names."""

    figures: Figures

    @property
    def store_id(self) -> int:
        """Random, not 0; the same for everybody who uses this store, until it is emptied. Known once `open` returned."""

    async def open(self, *, deadline_s: float) -> None:
        """Connects, makes the store if there is none, and checks what it needs. Again after StoreLost: learns the new store."""

    async def close(self) -> None:
        """Ends what `open` began; idempotent. Calls under way raise StoreUnavailable."""

    # -- nodes -----------------------------------------------------------------------------------------------------------

    async def take(self, node: str, epoch: int, *, deadline_s: float) -> Taken:
        """The caller is the node's writer from now on; holders of its other epochs are dropped."""

    async def save(
        self, writer: Writer, *, position: Position | None = None, record: bytes | None = None, deadline_s: float
    ) -> None:
        """Writes what is given and the time; what is None stays. Raises Fenced.

        A position is saved only after the writes below it have returned.
        """

    async def nodes(self, *, deadline_s: float) -> tuple[NodeEntry, ...]:
        """Everything that was saved."""

    async def forget(self, node: str, token: int, *, deadline_s: float) -> bool:
        """Drops the node's holders and its entry if `token` is still that of its writer; False if it is not."""

    # -- holders ---------------------------------------------------------------------------------------------------------

    async def create(
        self, writer: Writer, parts: Sequence[tuple[bytes, int]], *, visible: bool, deadline_s: float
    ) -> tuple[int, ...]:
        """New holder numbers for the writer's node and epoch, one per (namespace digest, tier), listed. Raises Fenced.

        A call that failed may have listed some; `take` or `roster` shows them, `swap` drops them.
        """

    async def swap(self, writer: Writer, *, show: Collection[int] = (), drop: Collection[int] = (), deadline_s: float) -> None:
        """Makes holders visible and drops others in one step; both may be empty or repeated. Raises Fenced.

        StoreLost if one to show is not listed as the writer's: then nothing was changed.
        """

    async def roster(self, *, deadline_s: float) -> Roster:
        """The holders as of now. Costs little when nothing changed."""

    # -- blocks ----------------------------------------------------------------------------------------------------------

    async def write(self, writer: Writer, changes: Sequence[Change], *, deadline_s: float) -> tuple[int, ...]:
        """Applies the changes in order. Returns per change how many blocks it changed. Raises Fenced, StoreFull, ValueError.

        StoreLost when writes that were acknowledged to this writer are gone, or the store is. Without changes it only looks
        for that. After StoreUnavailable or StoreFull the same changes may be written again; what the first attempt did is
        then not counted.
        """

    async def retract(self, holder: int, packed: Packed, width: int, *, scope: int, deadline_s: float) -> int:
        """Takes blocks from a holder although the caller is not its writer (an owner said that it lacks them)."""

    async def lookup(self, packed: Packed, width: int, *, scope: int, prefix: bool = False, deadline_s: float) -> Found:
        """Sparse: every position. Prefix: from position 0 for as long as one holder has every block (as BlockIndex).

        A prefix may be found by looking at some positions, and where two of them have the same holders taking those between to
        have them, too: fingerprints are chained. A block that its owner evicted from the middle of a prompt is then named.
        """

    async def counts(self, holders: Collection[int], *, deadline_s: float) -> Counts:
        """How many blocks each holder has."""

    # -- upkeep ----------------------------------------------------------------------------------------------------------

    async def put_namespace(self, digest: bytes, record: bytes, *, deadline_s: float) -> None:
        """Remembers a namespace's description for all coordinators; writing it again is harmless."""

    async def namespaces(self, *, deadline_s: float) -> dict[bytes, bytes]:
        """digest -> record."""

    async def sweep(self, max_buckets: int, *, deadline_s: float) -> int:
        """One step of freeing blocks whose holder is not listed. Returns how many (holder, block) pairs it freed; 0: no more.

        Looks at max_buckets buckets, and at as many again for as long as it has found nothing. The next call, by whoever, goes
        on from there. Any coordinator may call it.
        """

    async def health(self, *, deadline_s: float) -> Health:
        """What the servers say about memory and eviction."""

"""The block store over the native index of one process: the contract without a server, for tests and as the oracle.

Several stores over one `Blocks` are what several coordinators over one Redis are. `Blocks.fault` makes every call fail, as a
store that is away does. Nothing outlives the process; `now_s` is the only clock.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from kvdir.index import BlockIndex, Packed, open_index
from kvdir.store.base import (
    Change,
    ChangeKind,
    Counts,
    Fenced,
    Figures,
    Found,
    Health,
    HolderRecord,
    NodeEntry,
    Position,
    Roster,
    StoreLost,
    StoreUnavailable,
    Taken,
    Writer,
)
from kvdir.store.layout import Picture, Visible


@dataclass(slots=True)
class _Node:
    epoch: int
    token: int = 0
    seq: int = -1
    record: bytes = b""
    saved_s: float = 0.0
    fenced: tuple[int, ...] = ()


@dataclass(slots=True)
class Blocks:
    """What several stores share. unlisted: holders that were dropped and whose blocks are not freed yet."""

    now_s: Callable[[], float] = time.monotonic
    index: BlockIndex = field(default_factory=open_index)
    store_id: int = field(default_factory=lambda: secrets.randbits(63) | 1)
    nodes: dict[str, _Node] = field(default_factory=dict)
    roster: Roster = field(default_factory=lambda: Roster(0, {}))
    namespaces: dict[bytes, bytes] = field(default_factory=dict)
    unlisted: list[int] = field(default_factory=list)
    numbers: int = 0
    tokens: int = 0
    fault: Exception | None = None

    def relist(self, changed: Mapping[int, HolderRecord | None]) -> None:
        """Lists, changes or (None) drops holders."""
        holders = dict(self.roster.holders)
        for number, record in changed.items():
            if record is not None:
                holders[number] = record
            elif holders.pop(number, None) is not None:
                self.unlisted.append(number)
        self.roster = Roster(self.roster.version + 1, holders)


class MemoryBlockStore:
    """See the module docstring; the contract is kvdir.store.base.BlockStore."""

    def __init__(self, blocks: Blocks | None = None) -> None:
        self.blocks = blocks or Blocks()
        self.figures = Figures()
        self._is_open = False

    @property
    def store_id(self) -> int:
        return self.blocks.store_id

    async def open(self, *, deadline_s: float) -> None:
        self._is_open = True
        with self._call(deadline_s):
            pass

    async def close(self) -> None:
        self._is_open = False

    @contextmanager
    def _call(self, deadline_s: float) -> Iterator[Blocks]:
        self.figures.calls += 1
        try:
            if not self._is_open:
                raise StoreUnavailable("the store is not open")
            if deadline_s <= 0:
                raise StoreUnavailable("not in time: the deadline is over")
            if self.blocks.fault is not None:
                raise self.blocks.fault
            yield self.blocks
        except BaseException:
            self.figures.failures += 1
            raise

    # -- nodes -----------------------------------------------------------------------------------------------------------

    async def take(self, node: str, epoch: int, *, deadline_s: float) -> Taken:
        with self._call(deadline_s) as blocks:
            entry = blocks.nodes.setdefault(node, _Node(epoch, saved_s=blocks.now_s()))
            if epoch in entry.fenced:
                raise Fenced(f"a newer epoch of node {node!r} is known")
            if entry.epoch != epoch:
                blocks.relist(dict.fromkeys(self._held(node)))
                fenced = (entry.epoch, *entry.fenced)[:16]
                entry = blocks.nodes[node] = _Node(epoch, saved_s=entry.saved_s, fenced=fenced)
            blocks.tokens += 1
            entry.token = blocks.tokens
            held = tuple(self._held(node).values())
            return Taken(Writer(node, epoch, entry.token), _position(entry), entry.record, held)

    def _held(self, node: str) -> dict[int, HolderRecord]:
        return {number: record for number, record in self.blocks.roster.holders.items() if record.node == node}

    def _own(self, writer: Writer) -> _Node:
        entry = self.blocks.nodes.get(writer.node)
        if entry is None:
            raise StoreLost(f"node {writer.node!r} is not known: take it again")
        if entry.token != writer.token:
            raise Fenced(f"a newer writer has node {writer.node!r}")
        return entry

    async def save(
        self, writer: Writer, *, position: Position | None = None, record: bytes | None = None, deadline_s: float
    ) -> None:
        if position is not None and position.epoch != writer.epoch:
            raise ValueError(f"position of epoch {position.epoch:#x}, but the writer is of epoch {writer.epoch:#x}")
        with self._call(deadline_s) as blocks:
            entry = self._own(writer)
            entry.seq = entry.seq if position is None else position.seq
            entry.record = entry.record if record is None else record
            entry.saved_s = blocks.now_s()

    async def nodes(self, *, deadline_s: float) -> tuple[NodeEntry, ...]:
        with self._call(deadline_s) as blocks:
            now_s = blocks.now_s()
            return tuple(
                NodeEntry(node, entry.epoch, entry.token, _position(entry), entry.record, now_s - entry.saved_s)
                for node, entry in blocks.nodes.items()
            )

    async def forget(self, node: str, token: int, *, deadline_s: float) -> bool:
        with self._call(deadline_s) as blocks:
            entry = blocks.nodes.get(node)
            if entry is None or entry.token != token:
                return False
            blocks.relist(dict.fromkeys(self._held(node)))
            del blocks.nodes[node]
            return True

    # -- holders ---------------------------------------------------------------------------------------------------------

    async def create(
        self, writer: Writer, parts: Sequence[tuple[bytes, int]], *, visible: bool, deadline_s: float
    ) -> tuple[int, ...]:
        with self._call(deadline_s) as blocks:
            self._own(writer)
            made: dict[int, HolderRecord | None] = {}
            for digest, tier in parts:
                blocks.numbers += 1
                made[blocks.numbers] = HolderRecord(blocks.numbers, writer.node, writer.epoch, digest, tier, visible)
            blocks.relist(made)
            return tuple(made)

    async def swap(self, writer: Writer, *, show: Collection[int] = (), drop: Collection[int] = (), deadline_s: float) -> None:
        with self._call(deadline_s) as blocks:
            self._own(writer)
            held = self._held(writer.node)
            if not held.keys() >= set(show):
                raise StoreLost("a holder to show is not listed")
            changed: dict[int, HolderRecord | None] = {number: replace(held[number], visible=True) for number in show}
            blocks.relist(changed | dict.fromkeys(number for number in drop if number in held))

    async def roster(self, *, deadline_s: float) -> Roster:
        with self._call(deadline_s) as blocks:
            return blocks.roster

    # -- blocks ----------------------------------------------------------------------------------------------------------

    async def write(self, writer: Writer, changes: Sequence[Change], *, deadline_s: float) -> tuple[int, ...]:
        with self._call(deadline_s):
            self._own(writer)
            return tuple([self._apply(change) for change in changes])

    def _apply(self, change: Change) -> int:
        kind, holder, scope, packed, width = change
        if kind is ChangeKind.STORE:
            return self.blocks.index.store(packed, width, scope=scope, holder=holder, now_s=0)
        return self.blocks.index.remove(packed, width, scope=scope, holder=holder)

    async def retract(self, holder: int, packed: Packed, width: int, *, scope: int, deadline_s: float) -> int:
        with self._call(deadline_s):
            return self._apply(Change(ChangeKind.REMOVE, holder, scope, packed, width))

    async def lookup(self, packed: Packed, width: int, *, scope: int, prefix: bool = False, deadline_s: float) -> Found:
        """Looks at every position itself: unlisted holders would end a prefix of the index too late."""
        with self._call(deadline_s) as blocks:
            found = blocks.index.lookup(packed, width, scope=scope)
            picture = Picture(len(packed) // width)
            picture.fill(found.runs, found.sets, Visible(blocks.roster.holders))
            return Found(*picture.answer(prefix=prefix), blocks.roster)

    async def counts(self, holders: Collection[int], *, deadline_s: float) -> Counts:
        with self._call(deadline_s) as blocks:
            return Counts({number: blocks.index.holder_blocks(number) for number in holders}, 0)

    # -- upkeep ----------------------------------------------------------------------------------------------------------

    async def put_namespace(self, digest: bytes, record: bytes, *, deadline_s: float) -> None:
        with self._call(deadline_s) as blocks:
            blocks.namespaces[digest] = record

    async def namespaces(self, *, deadline_s: float) -> dict[bytes, bytes]:
        with self._call(deadline_s) as blocks:
            return dict(blocks.namespaces)

    async def sweep(self, max_buckets: int, *, deadline_s: float) -> int:
        """A step is one holder here: the index drops it as a whole."""
        with self._call(deadline_s) as blocks:
            return blocks.index.drop(blocks.unlisted.pop()) if blocks.unlisted and max_buckets > 0 else 0

    async def health(self, *, deadline_s: float) -> Health:
        with self._call(deadline_s) as blocks:
            return Health(used_bytes=blocks.index.stats().bytes, servers=("memory",))


def _position(entry: _Node) -> Position | None:
    return Position(entry.epoch, entry.seq) if entry.seq >= 0 else None

"""A writer and readers of one region in processes of their own, and a book by which every answer can be judged.

Blocks come in batches; a batch is stored at most once by each *life* (one use of a node slot and its holder number, ended by a
drop). Before a change the writer notes in the book (a file that both map) since when a pair (batch, life) may be answered, or
need not be any more; after it, since when it must be, or must not. Times are of the monotonic clock, which all processes of a
host share; a row is written in the order in which a reader may learn of it, and the machine keeps that order (x86).

A reader's answer is wrong if it names a pair outside of its life during the call, or lacks one that was there throughout and
does not say `torn`. Wrong answers raise; nothing here waits longer than its deadline.
"""

from __future__ import annotations

import random
import struct
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvdir.errors import KvdirError
from kvdir.index import RegionIndex, RegionReader, create_region

__all__ = ["Judged", "book_of", "read", "write"]

BATCHES = 240
BATCH_BLOCKS = 300
LIVES = 200
HOLDERS = 6
SCOPE = 7
MAY_FROM, SURE_FROM, SURE_TO, MAY_TO = range(4)

Book = npt.NDArray[np.int64]  # shape (4, BATCHES, LIVES): monotonic ns, 0 = not yet
_BLOCKS = (np.arange(BATCHES * BATCH_BLOCKS, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
_LIFE = struct.Struct("<I")


def book_of(path: str, generation: int, *, create: bool = False) -> Book:
    """The book that belongs to one region, in a file beside it."""
    return np.memmap(f"{path}.book.{generation:x}", dtype=np.int64, mode="w+" if create else "r", shape=(4, BATCHES, LIVES))


def _packed(first: int, count: int) -> memoryview:
    """`count` blocks from number `first` on."""
    return _BLOCKS[first : first + count].data.cast("B")


# --- writer -----------------------------------------------------------------------------------------------------------------


def write(path: str, seed: int, turns: int) -> None:
    """Stores, removes, drops and sweeps until killed, after so many turns, or when every life is spent; then closes."""
    region = create_region(path, seed=seed, publish=False)
    _Writer(region, book_of(path, region.generation, create=True), random.Random(seed)).run(turns)
    region.close()


class _Writer:
    def __init__(self, region: RegionIndex, book: Book, rng: random.Random) -> None:
        self._region = region
        self._book = book
        self._rng = rng
        self._lives: list[int] = []
        self._next_life = 0

    def run(self, turns: int) -> None:
        for holder in range(HOLDERS):
            self._lives.append(0)
            self._begin_life(holder)
        self._region.publish()
        for turn in range(turns):
            self._turn()
            self._region.beat(_LIFE.pack(turn))
            if self._next_life == LIVES:
                return

    def _turn(self) -> None:
        holder = self._rng.randrange(HOLDERS)
        choice = self._rng.random()
        if choice < 0.02:
            self._drop(holder)
        elif choice < 0.05:
            self._region.sweep(self._rng.randrange(20_000))
        else:
            first = self._rng.randrange(BATCHES)
            batches = range(first, min(BATCHES, first + self._rng.choice((1, 2, 12))))
            (self._store if choice < 0.65 else self._remove)(
                holder, [b for b in batches if self._usable(holder, b, choice < 0.65)]
            )

    def _usable(self, holder: int, batch: int, fresh: bool) -> bool:
        row = self._book[:, batch, self._lives[holder]]
        return not row[MAY_FROM] if fresh else bool(row[SURE_FROM]) and not row[SURE_TO]

    def _note(self, what: int, batches: list[int], holder: int) -> None:
        self._book[what, batches, self._lives[holder]] = time.monotonic_ns()

    def _store(self, holder: int, batches: list[int]) -> None:
        self._note(MAY_FROM, batches, holder)
        self._region.store(self._blocks(batches), 8, scope=SCOPE, holder=holder, now_s=1)
        self._note(SURE_FROM, batches, holder)

    def _remove(self, holder: int, batches: list[int]) -> None:
        self._note(SURE_TO, batches, holder)
        self._region.remove(self._blocks(batches), 8, scope=SCOPE, holder=holder)
        self._note(MAY_TO, batches, holder)

    def _blocks(self, batches: list[int]) -> bytes:
        return b"".join(_packed(batch * BATCH_BLOCKS, BATCH_BLOCKS) for batch in batches)

    def _drop(self, holder: int) -> None:
        """As a directory forgets a node: its blocks, its holder, its slot; then another node gets both numbers."""
        held = [batch for batch in range(BATCHES) if self._usable(holder, batch, False)]
        self._note(SURE_TO, held, holder)
        self._region.drop(holder)
        self._region.clear_holder(holder)
        self._region.clear_node(holder)
        self._note(MAY_TO, held, holder)
        self._begin_life(holder)

    def _begin_life(self, holder: int) -> None:
        self._lives[holder] = self._next_life
        self._next_life += 1
        self._region.set_node(holder, _LIFE.pack(self._lives[holder]))
        self._region.set_holder(holder, node=holder, tier=2)


# --- readers ----------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Judged:
    """What one reader has seen; every answer in it was right."""

    answers: int = 0
    torn: int = 0
    hits: int = 0
    regions: int = 0
    longest_s: float = 0.0


def read(path: str, seed: int, until: str, deadline_s: float) -> Judged:
    """Looks up and judges until a file `until` exists. AssertionError for a wrong answer, TimeoutError at the deadline."""
    judge, rng = Judged(), random.Random(seed)
    end_s = time.monotonic() + deadline_s
    reader: RegionReader | None = None
    book = np.zeros((4, BATCHES, LIVES), dtype=np.int64)
    while not Path(until).exists():
        if time.monotonic() > end_s:
            raise TimeoutError(f"nobody made {until} within {deadline_s:g} s")
        if reader is None or reader.stale:
            reader = _open(path, reader)
            if reader is None:
                time.sleep(0.001)
                continue
            book = book_of(path, reader.generation)
            judge.regions += 1
        _judge(reader, book, rng, judge)
    return judge


def _open(path: str, before: RegionReader | None) -> RegionReader | None:
    if before is not None:
        before.close()
    try:
        return RegionReader(path)
    except KvdirError:  # none yet, or closed: the next one comes
        return None


def _judge(reader: RegionReader, book: Book, rng: random.Random, judge: Judged) -> None:
    first = rng.randrange(len(_BLOCKS) - 900)
    asked, prefix = rng.randrange(1, 900), rng.random() < 0.3
    begin_ns = time.monotonic_ns()
    runs, sets, nodes, hits, torn = reader.lookup(_packed(first, asked), 8, scope=SCOPE, prefix=prefix)
    end_ns = time.monotonic_ns()
    judge.answers, judge.torn, judge.hits = judge.answers + 1, judge.torn + torn, judge.hits + hits
    judge.longest_s = max(judge.longest_s, (end_ns - begin_ns) / 1e9)

    lives = [_LIFE.unpack(record)[0] if record else -1 for _, record in (reader.node(n) for n in memoryview(nodes).cast("I"))]
    named = np.zeros((asked, LIVES), dtype=bool)
    for start, count, number in struct.iter_unpack("<III", runs):
        for member in memoryview(sets[number]).cast("I"):
            assert member & 0xFF == 2, f"tier {member & 0xFF} was never given"
            if lives[member >> 8] >= 0:
                named[start : start + count, lives[member >> 8]] = True
    batch_of = (first + np.arange(asked)) // BATCH_BLOCKS
    may_from, sure_from, sure_to, may_to = np.array(book[:, batch_of[0] : batch_of[-1] + 1])  # read after the answer
    batch_of -= batch_of[0]
    allowed = ((may_from != 0) & (may_from <= end_ns) & ((may_to == 0) | (may_to >= begin_ns)))[batch_of]
    assert not (named & ~allowed).any(), f"{_pair(named & ~allowed)} named outside of its life"
    there = (sure_from != 0) & (sure_from <= begin_ns) & ((sure_to == 0) | (sure_to >= end_ns))
    if torn:
        return
    if -1 in lives:  # a node that was named has gone since, and nobody can say which life it was
        there &= sure_to == 0
    required = there[batch_of]
    if prefix:
        whole = required.all(axis=0).any()
        assert not whole or hits == asked, "a prefix that one node has in full was cut"
        return
    assert not (required & ~named).any(), f"{_pair(required & ~named)} missed though it was there"


def _pair(wrong: npt.NDArray[np.bool_]) -> str:
    """The first wrong pair, in words."""
    position, life = np.argwhere(wrong)[0]
    return f"position {position} of life {life}"

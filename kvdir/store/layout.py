"""Where a block lies in Redis, and how the answers of shards become one answer. Pure.

Owns: the split of keys into (shard, tail), runs and prefixes. docs/redis.md draws the layout, slots.py has the shards' names.

A block's 64-bit key is that of `kvdir.index` with the store's seed. Its high half picks the shard (multiply-shift), its low 7
bytes, the *tail*, name it inside the shard: with 64 shards an absent block is taken for one of n others with probability
n / 2**62, which a hint can bear, as the owner compares the whole fingerprint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvdir.store.base import HolderRecord

TAIL_BYTES = 7
MOST_SHARDS = 1024
STRIDE = 32
"""Every how many positions a prefix lookup probes; where neighbouring probes differ it looks at all between."""

_HALF = np.uint64(32)
_MISS = -1


@dataclass(frozen=True, slots=True)
class Part:
    """What of a batch lies in one shard. positions: into the batch, ascending. tails: as many, packed."""

    shard: int
    positions: NDArray[np.intp]
    tails: bytes

    def cut(self, most: int) -> Iterator[Part]:
        """The same in parts of so many positions at most."""
        for at in range(0, len(self.positions), most):
            yield Part(self.shard, self.positions[at : at + most], self.tails[at * TAIL_BYTES : (at + most) * TAIL_BYTES])


def split(keys: bytes, shards: int, at: NDArray[np.intp] | None = None) -> Iterator[Part]:
    """The keys (u64 little-endian), or those at the given positions, by shard; inside a shard in the order of the batch."""
    all_keys = np.frombuffer(keys, dtype="<u8")
    positions = np.arange(len(all_keys)) if at is None else at
    chosen = all_keys[positions]
    shard = ((chosen >> _HALF) * np.uint64(shards) >> _HALF).astype(np.intp)
    order = np.argsort(shard, kind="stable")
    tails = chosen[order].view(np.uint8).reshape(-1, 8)[:, :TAIL_BYTES].tobytes()
    positions = positions[order]
    counts = np.bincount(shard, minlength=shards)
    start = 0
    for number in np.flatnonzero(counts):
        end = start + int(counts[number])
        yield Part(int(number), positions[start:end], tails[start * TAIL_BYTES : end * TAIL_BYTES])
        start = end


class Visible:
    """Translates holders as the store keeps them (packed u32, any order) into those that may be answered, ascending."""

    def __init__(self, holders: Mapping[int, HolderRecord]) -> None:
        self._shown = np.array(sorted(number for number, holder in holders.items() if holder.visible), dtype="<u4")
        self._cache: dict[bytes, bytes] = {}

    def __call__(self, packed: bytes) -> bytes:
        known = self._cache.get(packed)
        if known is None:
            if len(self._cache) >= 4096:
                self._cache.clear()
            held = np.unique(np.frombuffer(packed, dtype="<u4"))
            known = self._cache[packed] = held[np.isin(held, self._shown, assume_unique=True)].tobytes()
        return known


class Picture:
    """What is known of the positions of one lookup: per position the number of its set, or a miss.

    sets: distinct, never empty; in the order in which they were met.
    """

    def __init__(self, asked: int) -> None:
        self.sets: list[bytes] = []
        self._numbers: dict[bytes, int] = {b"": _MISS}
        self._at = np.full(asked, _MISS, dtype=np.int64)

    def add(self, part: Part, ids: bytes, sets: Sequence[bytes], visible: Visible) -> None:
        """A shard's answer: u16 per tail, 0 or the number (from 1) of one of its sets."""
        local = np.array([_MISS, *(self._number(visible(packed)) for packed in sets)], dtype=np.int64)
        self._at[part.positions] = local[np.frombuffer(ids, dtype="<u2")]

    def fill(self, runs: bytes, sets: Sequence[bytes], visible: Visible) -> None:
        """An answer of kvdir.index to the whole question."""
        numbers = [self._number(visible(packed)) for packed in sets]
        for start, count, number in np.frombuffer(runs, dtype="<u4").reshape(-1, 3).tolist():
            self._at[start : start + count] = numbers[number]

    def _number(self, holders: bytes) -> int:
        number = self._numbers.get(holders)
        if number is None:
            number = self._numbers[holders] = len(self.sets)
            self.sets.append(holders)
        return number

    def open_strides(self, probes: NDArray[np.intp]) -> NDArray[np.intp]:
        """Positions to look at after a prefix lookup saw its probes; those between equal probes are taken to be like them.

        Nothing beyond the first probe at which nobody has everything so far: the prefix ends before it.
        """
        common: frozenset[bytes] | None = None
        wanted: list[NDArray[np.intp]] = []
        previous = -1
        for probe in probes.tolist():
            number = int(self._at[probe])
            common = self._common(common, number)
            if previous >= 0 and number == self._at[previous]:
                self._at[previous + 1 : probe] = number
            else:
                wanted.append(np.arange(previous + 1, probe))
            if not common:
                break
            previous = probe
        return np.concatenate(wanted) if wanted else np.empty(0, dtype=np.intp)

    def _common(self, so_far: frozenset[bytes] | None, number: int) -> frozenset[bytes]:
        if number == _MISS:
            return frozenset()
        packed = self.sets[number]
        held = frozenset(packed[at : at + 4] for at in range(0, len(packed), 4))
        return held if so_far is None else so_far & held

    def answer(self, *, prefix: bool) -> tuple[bytes, list[bytes], int]:
        """(runs, sets, hits) as kvdir.index.Lookup has them; sets that no run names are left out."""
        at = self._at
        if not len(at):
            return b"", [], 0
        starts = np.flatnonzero(np.diff(at, prepend=_MISS - 1))
        ends = np.append(starts[1:], len(at))
        runs = [(s, e - s, n) for s, e, n in zip(starts.tolist(), ends.tolist(), at[starts].tolist(), strict=True)]
        kept = list(self._prefix(runs)) if prefix else [run for run in runs if run[2] != _MISS]
        return self._renumbered(kept)

    def _prefix(self, runs: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
        common: frozenset[bytes] | None = None
        for run in runs:
            common = self._common(common, run[2])
            if not common:
                return
            yield run

    def _renumbered(self, runs: list[tuple[int, int, int]]) -> tuple[bytes, list[bytes], int]:
        used = {number: index for index, number in enumerate(dict.fromkeys(run[2] for run in runs))}
        packed = np.array([(start, count, used[number]) for start, count, number in runs], dtype="<u4").tobytes()
        return packed, [self.sets[number] for number in used], sum(run[1] for run in runs)


def probes_of(asked: int) -> NDArray[np.intp]:
    """Where a prefix lookup looks first: everywhere if it is short, else at 0, at every STRIDE-th position, and at the last."""
    if asked <= 2 * STRIDE:
        return np.arange(asked)
    return np.union1d(np.arange(0, asked, STRIDE), [asked - 1]).astype(np.intp)

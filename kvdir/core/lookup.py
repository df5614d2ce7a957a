"""Turns what the index found into an answer: holder sets become (node, tier) sets, fenced and silent nodes vanish.

Cost: the translation of a list of holder sets is cached, keyed by the sets themselves, for as long as the visibility of holders
does not change; a lookup that meets known sets pays one dictionary access, however many holders they have. One that meets new
ones pays some 50 ns a member of a set where there are many.
"""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvdir.core.answer import Lookup
from kvdir.core.holders import HolderTable
from kvdir.core.node import Stream
from kvdir.core.recode import recode
from kvdir.location import MinTrust

if TYPE_CHECKING:
    from kvdir.index import Lookup as Found

_RUN = struct.Struct("<III")
_CACHED = 4096
_CACHED_BYTES = 32 * 2**20
"""Of the sets in all lists that are cached, before and after translation."""


@dataclass(frozen=True, slots=True)
class Translation:
    """sets: packed (node index << 8 | tier), only those with a visible holder. renumber: old set -> new one or -1; None when
    every set stayed.
    """

    sets: tuple[bytes, ...]
    streams: tuple[Stream, ...]
    renumber: tuple[int, ...] | None


class Answers:
    """Builds answers from what the index found."""

    def __init__(self, holders: HolderTable[Stream]) -> None:
        self._holders = holders
        self._cache: dict[tuple[bytes, ...], Translation] = {}
        self._cached_bytes = 0
        self._generation = -1

    def build(
        self, found: Found, asked: int, *, prefix: bool, warming: bool, now_s: float, min_trust: MinTrust = MinTrust.ANY
    ) -> Lookup:
        """The answer as of now_s. Nodes below min_trust are left out as if they were hidden."""
        if not found.hits:
            return Lookup(b"", (), (), 0, asked, warming, incomplete=self._holders.partial > 0)
        sets = tuple(found.sets)
        translation = self._translate(sets)
        below = 0
        if min_trust is not MinTrust.ANY:
            below = sum(not min_trust.admits(stream.cursor.state) for stream in translation.streams)
        if below:  # rare, and not cached: states change more often than what is visible
            translation = translate(self._holders, sets, min_trust=min_trust)
        runs, hits = found.runs, found.hits
        if translation.renumber is not None:
            runs, hits = _renumber(runs, translation.renumber, prefix=prefix)
        nodes = tuple([stream.trust(now_s) for stream in translation.streams])
        return Lookup(runs, translation.sets, nodes, hits, asked, warming, below, incomplete=self._holders.partial > 0)

    def _translate(self, sets: tuple[bytes, ...]) -> Translation:
        full = len(self._cache) >= _CACHED or self._cached_bytes >= _CACHED_BYTES
        if full or self._generation != self._holders.generation:
            self._cache.clear()
            self._cached_bytes, self._generation = 0, self._holders.generation
        cached = self._cache.get(sets)
        if cached is None:
            cached = self._cache[sets] = translate(self._holders, sets)
            self._cached_bytes += sum(map(len, sets)) + sum(map(len, cached.sets))
        return cached


def translate(holders: HolderTable[Stream], sets: tuple[bytes, ...], *, min_trust: MinTrust = MinTrust.ANY) -> Translation:
    """Packed holder numbers -> packed (node index << 8 | tier) with the streams so numbered, in the order of their holders."""
    streams: dict[Stream, int] = {}

    def code_of(number: int) -> int | None:
        holder = holders.get(number)
        if holder is None or not holder.visible or holder.owner.hidden or not min_trust.admits(holder.owner.cursor.state):
            return None
        return streams.setdefault(holder.owner, len(streams)) << 8 | holder.tier

    recoded = recode(sets, code_of)
    kept = tuple(packed for packed in recoded if packed)
    if len(kept) == len(sets):
        return Translation(kept, tuple(streams), None)
    at = itertools.count()
    return Translation(kept, tuple(streams), tuple(next(at) if packed else -1 for packed in recoded))


def _renumber(runs: bytes, renumber: tuple[int, ...], *, prefix: bool) -> tuple[bytes, int]:
    """Leaves out runs that nobody visible holds; a prefix ends at the first of them."""
    kept, hits = bytearray(), 0
    for start, count, number in _RUN.iter_unpack(runs):
        if renumber[number] < 0:
            if prefix:
                break
            continue
        kept += _RUN.pack(start, count, renumber[number])
        hits += count
    return bytes(kept), hits

"""Turns what a shared store found into an answer: holder numbers become (node, tier), nodes nobody may name vanish.

Cost: the translation of a list of holder sets is cached for as long as the roster it was made with is current.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvdir.core.answer import Lookup
from kvdir.core.fleet import Fleet
from kvdir.core.recode import recode
from kvdir.core.region_directory import without
from kvdir.location import MinTrust, NodeTrust, StreamState

_CACHED = 4096
_CACHED_BYTES = 32 * 2**20
"""Of the sets in all lists that are cached, before and after translation."""


class Line(Protocol):
    """A holder as the store lists it (kvdir.store.HolderRecord)."""

    @property
    def node(self) -> str: ...
    @property
    def epoch(self) -> int: ...
    @property
    def tier(self) -> int: ...
    @property
    def visible(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class _Translation:
    """sets: packed (node index << 8 | tier). nodes: (name, epoch) by index."""

    sets: tuple[bytes, ...]
    nodes: tuple[tuple[str, int], ...]


class SharedAnswers:
    """Builds answers from what the store found."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._cache: dict[tuple[bytes, ...], _Translation] = {}
        self._cached_bytes = 0
        self._version: int | None = None

    def build(
        self,
        found: tuple[bytes, Sequence[bytes], int],
        lines: Mapping[int, Line],
        *,
        version: int,
        asked: int,
        prefix: bool,
        warming: bool,
        incomplete: bool,
        min_trust: MinTrust,
        now_s: float,
    ) -> Lookup:
        """found: (runs, sets, hits), as BlockIndex.lookup. lines: the roster of that version."""
        runs, sets, hits = found
        if not hits:
            return Lookup(b"", (), (), 0, asked, warming, incomplete=incomplete)
        full = len(self._cache) >= _CACHED or self._cached_bytes >= _CACHED_BYTES
        if full or self._version != version:
            self._cache.clear()
            self._version, self._cached_bytes = version, 0
        key = tuple(sets)
        translation = self._cache.get(key)
        if translation is None:
            translation = self._cache[key] = _translate(key, lines)
            self._cached_bytes += sum(map(len, key)) + sum(map(len, translation.sets))
        trusts = [self._fleet.trust(node, epoch, now_s) for node, epoch in translation.nodes]
        nobody = frozenset(index for index, trust in enumerate(trusts) if trust is None)
        nodes = tuple(trust or _NOBODY for trust in trusts)
        answer = Lookup(runs, translation.sets, nodes, hits, asked, warming, incomplete=incomplete)
        if not nobody and min_trust is MinTrust.ANY and all(translation.sets):
            return answer
        return without(answer, nobody, min_trust, prefix=prefix)


_NOBODY = NodeTrust("", 0, StreamState.FENCED, "not to be named", 0.0, 0, "")


def _translate(sets: tuple[bytes, ...], lines: Mapping[int, Line]) -> _Translation:
    numbers: dict[tuple[str, int], int] = {}

    def code_of(number: int) -> int | None:
        line = lines.get(number)
        if line is None or not line.visible:
            return None
        return numbers.setdefault((line.node, line.epoch), len(numbers)) << 8 | line.tier

    return _Translation(tuple(recode(sets, code_of)), tuple(numbers))

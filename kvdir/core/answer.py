"""The answer to a lookup: packed runs, the holder sets they name, and how far each node can be trusted.

Rules: nothing per block but packed integers; positions in no run are misses; a hit is a hint, the owner decides.
Layouts are those of kvdir.v1.LookupResponse (little-endian). Standard library only.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from kvdir.location import NodeTrust, Tier

_RUN = struct.Struct("<III")
_HOLDER = struct.Struct("<I")

Source = Literal["coordinator", "replica", "none"]
"""Of an answer: a coordinator over the network, a region in shared memory, or nobody in time."""


class LookupMode(enum.IntEnum):
    """SPARSE: every position on its own. PREFIX: one run from position 0, chained fingerprints only. As kvdir.v1.LookupMode."""

    SPARSE = 1
    PREFIX = 2


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring positions [start, start + count) with the same holders, in no particular order."""

    start: int
    count: int
    holders: tuple[tuple[int, Tier], ...]
    """(index into Lookup.nodes, tier)"""


@dataclass(frozen=True, slots=True)
class Lookup:
    """runs: u32 triples (start, count, set). sets: packed u32, node_index << 8 | tier. hits, asked: positions.

    warming: the coordinator has not heard an absolute statement of every known stream since it started. below_trust: how many
    nodes hold some of the blocks but are not named, because the caller asked for more trust. lag_s: how far the answer may be
    behind the directory, 0 from the directory itself. incomplete: entries were evicted for want of memory, so that a position
    in no run is unknown rather than absent. source: who answered. reason: why nobody did, when source is "none", or why a
    replica's answer is not whole.
    """

    runs: bytes
    sets: tuple[bytes, ...]
    nodes: tuple[NodeTrust, ...]
    hits: int
    asked: int
    warming: bool = False
    below_trust: int = 0
    lag_s: float = 0.0
    incomplete: bool = False
    source: Source = "coordinator"
    reason: str = ""

    def __iter__(self) -> Iterator[Run]:
        """The runs, unpacked."""
        unpacked = [self.holders(number) for number in range(len(self.sets))]
        for start, count, number in _RUN.iter_unpack(self.runs):
            yield Run(start, count, unpacked[number])

    def holders(self, number: int) -> tuple[tuple[int, Tier], ...]:
        """Set `number` as (index into nodes, tier); tiers unknown to this release are left out."""
        values = (value for (value,) in _HOLDER.iter_unpack(self.sets[number]))
        return tuple((value >> 8, Tier(value & 0xFF)) for value in values if value & 0xFF in _TIERS)

    def fault(self) -> str:
        """Why runs, sets and nodes do not fit together, in words; empty when they do. For answers from elsewhere."""
        if len(self.runs) % _RUN.size or any(len(packed) % _HOLDER.size for packed in self.sets):
            return "runs or sets are cut short"
        end = 0
        for start, count, number in _RUN.iter_unpack(self.runs):
            if start < end or start + count > self.asked or number >= len(self.sets):
                return f"run ({start}, {count}, {number}) is out of range"
            end = start + count
        for packed in self.sets:
            if any(value >> 8 >= len(self.nodes) for (value,) in _HOLDER.iter_unpack(packed)):
                return "a set names a node that is not listed"
        return ""

    def coverage(self) -> dict[int, int]:
        """How many of the positions asked for each node is said to hold, in whatever tier; by index into nodes."""
        members = [{node for node, _ in self.holders(number)} for number in range(len(self.sets))]
        out: dict[int, int] = {}
        for _, count, number in _RUN.iter_unpack(self.runs):
            for node in members[number]:
                out[node] = out.get(node, 0) + count
        return out


_TIERS = frozenset(Tier)

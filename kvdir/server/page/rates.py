"""What happened between two copies: differences of figures that only grow, over all nodes. Pure.

Rules: a node's figures begin anew with its epoch, so differences are taken node by node and never across epochs; a node seen
for the first time contributes from the next copy on. What the agents say comes with their heartbeats, so a point is up to one
behind.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, fields
from typing import NamedTuple

from kvdir.core.event import ReadFigures
from kvdir.core.views import NodeView
from kvdir.server.page.copies import Copy

POINTS = 900
GAP_S = 5.0
"""Nobody watched for so long: the next copy is a new beginning."""
_RESULTS = tuple(item.name for item in fields(ReadFigures) if item.name != "sources")


class Point(NamedTuple):
    """An interval of took_s that ended at unix_ms. lookups, asked, named: at the coordinator, in lists and blocks; refuted:
    blocks that it had named and their owners did not hold. The others: blocks of the agents' loads, by result, and bytes from
    peers.
    """

    unix_ms: int
    took_s: float
    lookups: int = 0
    asked: int = 0
    named: int = 0
    refuted: int = 0
    hit_local: int = 0
    hit_peer: int = 0
    miss: int = 0
    stale: int = 0
    corrupt: int = 0
    late: int = 0
    skipped: int = 0
    read_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Before:
    now_s: float
    lookups: int
    asked: int
    named: int
    refuted: int
    reads: dict[tuple[str, int], ReadFigures]


class Rates:
    """Keeps the newest POINTS points."""

    def __init__(self) -> None:
        self.points: deque[Point] = deque(maxlen=POINTS)
        self._before: _Before | None = None

    def add(self, copy: Copy) -> Point | None:
        """The point that ends with this copy; None after a gap."""
        status, before = copy.status, self._before
        now = _Before(
            copy.now_s, status.lookups, status.lookup_blocks, status.lookup_hits, copy.stale_blocks, _reads(copy.nodes)
        )
        self._before = now
        if before is None or not 0 < now.now_s - before.now_s <= GAP_S:
            return None
        sums = dict.fromkeys(_RESULTS, 0)
        for key, reads in now.reads.items():
            old = before.reads.get(key)
            if old is not None:
                for name in _RESULTS:
                    sums[name] += max(0, getattr(reads, name) - getattr(old, name))
        point = Point(
            copy.unix_ms,
            round(now.now_s - before.now_s, 3),
            max(0, now.lookups - before.lookups),
            max(0, now.asked - before.asked),
            max(0, now.named - before.named),
            max(0, now.refuted - before.refuted),
            **sums,
        )
        self.points.append(point)
        return point


def _reads(nodes: tuple[NodeView, ...]) -> dict[tuple[str, int], ReadFigures]:
    return {(view.trust.node, view.trust.epoch): view.reads for view in nodes if view.reads is not None}

"""From which peers this node has read, and how much: for people, in heartbeats. Pure.

Bounded: a newcomer that finds the table full takes the place of the peer that gave least.
"""

from __future__ import annotations

import heapq

from kvdir.core.event import ReadSource

MAX_PEERS = 1024


class ReadSources:
    """Sums since start."""

    def __init__(self, *, max_peers: int = MAX_PEERS) -> None:
        self._max_peers = max_peers
        self._by_node: dict[str, ReadSource] = {}

    def add(self, node: str, *, blocks: int, bytes: int) -> None:
        """The peer gave so much, verified."""
        known = self._by_node.get(node)
        if known is None and len(self._by_node) >= self._max_peers:
            del self._by_node[min(self._by_node.values(), key=_bytes).node]
        before = known or ReadSource(node, 0, 0)
        self._by_node[node] = ReadSource(node, before.blocks + blocks, before.bytes + bytes)

    def most(self, count: int) -> tuple[ReadSource, ...]:
        """Those that gave most, most first."""
        return tuple(heapq.nlargest(count, self._by_node.values(), key=_bytes))


def _bytes(source: ReadSource) -> int:
    return source.bytes

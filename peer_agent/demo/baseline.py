"""The same run without peers: what the nodes' own memory alone would have hit.

How, honestly: every request of the real run is also counted against a model of its node, an LRU of the arena's capacity: its
hits when it begins, its blocks when it ends, so routing and concurrency are those of the real run. The model of a killed
agent is emptied. It is a model, not a second run: after a request its blocks are on its node either way (read from a peer
or recomputed), so the local contents are those of the real run up to the order inside a request.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvdir.testing.lru import LruBlocks


class WithoutPeers:
    """Counts hits of local memory only."""

    def __init__(self, *, nodes: int, blocks_per_node: int) -> None:
        self._nodes = [LruBlocks(blocks_per_node) for _ in range(nodes)]
        self.blocks = 0
        self.hits = 0

    def begin(self, node: int, blocks: Sequence[int]) -> None:
        """A request begins on a node: what is there now are its hits."""
        self.blocks += len(blocks)
        self.hits += self._nodes[node].touch(blocks)

    def end(self, node: int, blocks: Sequence[int]) -> None:
        """The request has ended: its blocks are there."""
        memory = self._nodes[node]
        memory.store([block for block in blocks if block not in memory])

    def lose(self, node: int) -> None:
        """The node's memory is gone."""
        self._nodes[node].clear()

    @property
    def hit_ratio(self) -> float:
        """Hits over blocks, 0 when nothing was served."""
        return self.hits / self.blocks if self.blocks else 0.0

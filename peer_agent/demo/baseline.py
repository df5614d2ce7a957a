"""The same run without peers: what the nodes' own memory alone would have hit.

How, honestly: every request is counted against a model of its node, an LRU of the arena's capacity, in the order in which the
real run began the requests and with the routing decisions of the real run. A restarted agent's model is emptied when the
real agent was killed. It is a model, not a second run: after a request its blocks are on its node either way (read from
a peer or recomputed), so the local contents are those of the real run up to the order within and between requests that
are in flight together.
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

    def serve(self, node: int, blocks: Sequence[int]) -> None:
        """One request on one node."""
        memory = self._nodes[node]
        missing = [block for block in blocks if block not in memory]
        self.blocks += len(blocks)
        self.hits += memory.touch(blocks)
        memory.store(missing)  # after the hits, as the agent does: what is held is locked before anything is brought in

    def lose(self, node: int) -> None:
        """The node's memory is gone."""
        self._nodes[node].clear()

    @property
    def hit_ratio(self) -> float:
        """Hits over blocks, 0 when nothing was served."""
        return self.hits / self.blocks if self.blocks else 0.0

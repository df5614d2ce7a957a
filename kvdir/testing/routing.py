"""Which node gets a request: the routing policies of the replay and the demo.

Rules: a policy sees the outstanding work per node and the request's blocks, and returns a node number; randomness comes from
the `random.Random` handed in, so equal seeds give equal choices. Does not: know the directory or what a node holds.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Sequence


class Policy(enum.StrEnum):
    """p2c: the less busy of two random nodes (Mitzenmacher 2001). random: any. affinity: by the first blocks of the prompt."""

    P2C = "p2c"
    RANDOM = "random"
    AFFINITY = "affinity"


class Router:
    """Chooses nodes 0 .. nodes-1.

    affinity hashes the first `affinity_blocks` blocks (a system prompt all requests share is why one is not enough) and
    leaves the node for a p2c choice when it has more than `spill_factor` times the mean work, plus `spill_blocks`.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        nodes: int,
        rng: random.Random,
        affinity_blocks: int = 2,
        spill_factor: float = 1.5,
        spill_blocks: float = 64.0,
    ) -> None:
        self._policy = policy
        self._nodes = nodes
        self._rng = rng
        self._affinity_blocks = affinity_blocks
        self._spill_factor = spill_factor
        self._spill_blocks = spill_blocks

    def choose(self, outstanding_blocks: Sequence[float], blocks: Sequence[int]) -> int:
        """The node for a request. outstanding_blocks: per node, work given and not yet done."""
        match self._policy:
            case Policy.RANDOM:
                return self._rng.randrange(self._nodes)
            case Policy.P2C:
                return self._less_busy(outstanding_blocks)
            case Policy.AFFINITY:
                return self._by_prefix(outstanding_blocks, blocks)

    def _less_busy(self, outstanding_blocks: Sequence[float]) -> int:
        if self._nodes == 1:
            return 0
        first, second = self._rng.sample(range(self._nodes), 2)
        return first if outstanding_blocks[first] <= outstanding_blocks[second] else second

    def _by_prefix(self, outstanding_blocks: Sequence[float], blocks: Sequence[int]) -> int:
        home = hash(tuple(blocks[: self._affinity_blocks])) % self._nodes
        limit = self._spill_factor * sum(outstanding_blocks) / self._nodes + self._spill_blocks
        return home if outstanding_blocks[home] <= limit else self._less_busy(outstanding_blocks)

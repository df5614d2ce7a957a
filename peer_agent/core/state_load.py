"""Loading a prompt's state group by group: which blocks to ask for next, and what point can be restored with what arrived.

Rules:
- The first goal is the best point by what the directory hopes for; of every group only what that point reads is asked for.
- What arrived decides: a block that did not come is hoped for no more, and the goal is chosen anew, until a point is reached
  or nothing better is left. Every round reaches its goal or gives up a block, so rounds end.
- A block is asked for once: memory that holds verified bytes is never written to again.
- Draft blocks are asked for along with the others, and what is missing of them changes nothing.

Pure. The shell is peer_agent/client/state.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from kvdir.core.restore_points import Bools, Group, RestorePoints, restore_points
from kvdir.namespace import StateKind

Positions = npt.NDArray[np.intp]


class StateLoad:
    """hoped: per group, which blocks of the prompt may be had at all. The rest as for restore_points."""

    def __init__(
        self,
        groups: Sequence[Group],
        hoped: Sequence[Bools],
        *,
        block_tokens: int,
        prompt_tokens: int | None = None,
        can_trim: bool = True,
    ) -> None:
        self._rule = partial(restore_points, groups, block_tokens=block_tokens, prompt_tokens=prompt_tokens, can_trim=can_trim)
        self._hoped = [np.array(hits, np.bool_) for hits in hoped]
        self._arrived = [np.zeros(len(hits), np.bool_) for hits in self._hoped]

    @property
    def restored(self) -> RestorePoints:
        """What can be restored with what arrived so far."""
        return self._rule(self._arrived)

    @property
    def goal(self) -> RestorePoints:
        """What could be restored if all came that is still hoped for."""
        return self._rule(self._hoped)

    def wanted(self) -> tuple[Positions, ...]:
        """Positions to load now, per group; empty lists: there is nothing better to be had."""
        goal = self.goal
        nothing = np.zeros(0, np.intp)
        if goal.best_tokens <= self.restored.best_tokens:
            return (nothing,) * len(self._hoped)
        return tuple(self._missing(goal, group) for group in range(len(self._hoped)))

    def took(self, group: int, positions: Positions, arrived: Bools) -> None:
        """Of the positions asked for, these arrived, verified; the others are given up."""
        self._arrived[group][positions[arrived]] = True
        self._hoped[group][positions[~arrived]] = False

    def _missing(self, goal: RestorePoints, group: int) -> Positions:
        needs = goal.needs(group)
        still = (self._hoped[group] & ~self._arrived[group])[needs.start : needs.stop]
        return np.flatnonzero(still) + needs.start


def hoped(group: Group, local: bytes, nominated: bytes, *, doubtful: bool) -> Bools:
    """Which blocks of a group may be had, by a lookup's answer. doubtful: a node that was named is not trusted whole, so that
    holes before the last block named may be lost events, and its owner, who decides, is asked for those blocks, too. Not of
    recurrent state, of which there are few points: hoping for each would try one after the other.
    """
    held: Bools = (np.frombuffer(local, np.uint8) | np.frombuffer(nominated, np.uint8)).astype(np.bool_)
    if doubtful and held.any() and group.kind != StateKind.RECURRENT:
        held[: int(np.flatnonzero(held)[-1])] = True
    return held

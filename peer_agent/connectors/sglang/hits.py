"""SGLang's rule for hybrid models: up to which page can a prefix be restored, given what is there of every pool. Pure.

The policies are those of HiCache (`PoolHitPolicy`, SGLang 0.5.23), by their text:

    all_pages        every page of the prefix is needed
    trailing_pages   the last `pages` of the prefix are needed (all of it where it is shorter): a window, or a recurrent state
    block_groups     never needed; what its leading complete groups cover is reported. group_pages keys make a group, and a
                     group stands for block_pages of the prefix. No caller in 0.5.23: this reading is ours

A prefix is restorable when every pool that needs pages has them. Those lengths may have holes (a state exists at 4 and at 8
pages, not at 6), so the caller gets all of them: it intersects the sets of its ranks, since the largest of one may be illegal
on another. Our own restore rule (kvdir/core/restore_points.py) is not used here: in SGLang the engine says what a pool needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

ALL_PAGES = "all_pages"
TRAILING_PAGES = "trailing_pages"
BLOCK_GROUPS = "block_groups"
POLICIES = (ALL_PAGES, TRAILING_PAGES, BLOCK_GROUPS)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolHits:
    """What is there of one pool. present: one byte per page of the prefix; for block_groups, per key of the groups, in order.

    pages: how many trailing pages are needed. block_pages, group_pages: of block_groups.
    """

    name: str
    policy: str
    present: bytes
    pages: int = 1
    block_pages: int = 0
    group_pages: int = 0


@dataclass(frozen=True, slots=True)
class Usable:
    """pages: the longest restorable prefix, 0 for none. reached: per pool, the pages it could serve on its own, without those
    that could serve none. restorable: every restorable length, ascending.
    """

    pages: int
    reached: dict[str, int]
    restorable: list[int]


def leading(present: bytes) -> int:
    """How many are there before the first that is not."""
    at = present.find(0)
    return len(present) if at < 0 else at


def usable(kv_pages: int, pools: Sequence[PoolHits]) -> Usable:
    """Folds the pools of one prefix, of which the first kv_pages are there. Raises ValueError for a policy we do not know."""
    legal = np.ones(kv_pages + 1, np.bool_)
    legal[0] = False
    reached = {}
    for pool in pools:
        match pool.policy:
            case "all_pages":
                boundary = min(leading(pool.present), kv_pages)
                legal[boundary + 1 :] = False
            case "trailing_pages":
                able = _windows(pool.present[:kv_pages], kv_pages, max(1, pool.pages))
                legal &= able
                boundary = _last(able)
            case "block_groups":
                boundary = _groups(pool)
            case _:
                raise ValueError(f"pool {pool.name}: hit policy {pool.policy!r} is unknown; known: {', '.join(POLICIES)}")
        if boundary:
            reached[pool.name] = boundary
    return Usable(_last(legal), reached, np.flatnonzero(legal).tolist())


def _windows(present: bytes, kv_pages: int, pages: int) -> npt.NDArray[np.bool_]:
    """For each length 0 .. kv_pages: whether its last `pages` pages are there."""
    missing = np.ones(kv_pages, np.int64)
    known = np.frombuffer(present, np.uint8)
    missing[: len(known)] = known == 0
    before = np.concatenate(([0], np.cumsum(missing)))
    lengths = np.arange(kv_pages + 1)
    able: npt.NDArray[np.bool_] = before[lengths] == before[np.maximum(lengths - pages, 0)]
    able[0] = False
    return able


def _groups(pool: PoolHits) -> int:
    if pool.block_pages <= 0 or pool.group_pages <= 0:
        raise ValueError(f"pool {pool.name}: block_groups needs block_pages and group_pages of at least 1")
    return leading(pool.present) // pool.group_pages * pool.block_pages


def _last(able: npt.NDArray[np.bool_]) -> int:
    found = np.flatnonzero(able)
    return int(found[-1]) if len(found) else 0

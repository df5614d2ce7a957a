"""The words of `Namespace.parallel`: which part of the heads or layers a holder has, and who has the others.

    "replicated"        every rank has the same bytes
    "tp=0/2"            rank 0 of 2 that split the heads
    "tp=0/2,pp=1/4"     and rank 1 of 4 that split the layers

Rules: text that is written otherwise is allowed, as a name that only equals itself: such a holder has no family. Standard
library only.
"""

from __future__ import annotations

import itertools
import re

REPLICATED = "replicated"
MAX_RANKS = 1024
_AXIS = re.compile(r"([a-z]+)=(0|[1-9][0-9]{0,4})/([1-9][0-9]{0,4})")


def ranks(parallel: str) -> tuple[str, ...]:
    """All ranks of the split that `parallel` is one of, itself among them, in order; only itself where it names none."""
    axes = _axes(parallel)
    if not axes:
        return (parallel,)
    choices = [[f"{name}={rank}/{size}" for rank in range(size)] for name, _, size in axes]
    return tuple(",".join(chosen) for chosen in itertools.product(*choices))


def without(parallel: str, axis: str) -> str:
    """For state that is the same on every rank of `axis`: what is left of the split; all of it if it has no such axis."""
    axes = _axes(parallel)
    if all(name != axis for name, _, _ in axes):
        return parallel
    return ",".join(f"{name}={rank}/{size}" for name, rank, size in axes if name != axis) or REPLICATED


def _axes(parallel: str) -> list[tuple[str, int, int]]:
    """(name, rank, size) each; empty where the text is no split, or a senseless one."""
    found = [_AXIS.fullmatch(item) for item in parallel.split(",")]
    axes = [(item[1], int(item[2]), int(item[3])) for item in found if item is not None]
    total = 1
    for _, rank, size in axes:
        total *= size
        if rank >= size or total > MAX_RANKS:
            return []
    names = {name for name, _, _ in axes}
    return axes if len(axes) == len(found) == len(names) else []

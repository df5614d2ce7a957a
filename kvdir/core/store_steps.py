"""What a shared store has to do for a stream, as values: blocks to write under a holder, holders to drop. Pure.

Order is everything: steps are done one after the other, and only neighbours of one kind are joined.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvdir.core.namespaces import KnownNamespace
from kvdir.core.node import HolderKey


@dataclass(frozen=True, slots=True)
class Write:
    """Blocks of one (namespace digest, tier) that the node holds from now on (`stored`), or holds no more."""

    stored: bool
    key: HolderKey
    packed: bytes
    width: int


@dataclass(frozen=True, slots=True)
class Clear:
    """The node holds nothing under these keys any more."""

    keys: tuple[HolderKey, ...]


Step = Write | Clear


@dataclass(slots=True, eq=False)
class Held:
    """A holder number of the store. blocks: as the store last counted, and what it said it changed since."""

    number: int
    namespace: KnownNamespace
    tier: int
    blocks: int = 0


def rounds(writes: Iterable[tuple[Write, Held]], *, max_blocks: int) -> Iterator[list[tuple[Write, Held]]]:
    """The writes in order, cut into rounds of at most max_blocks blocks: what one call of the store has time for."""
    out: list[tuple[Write, Held]] = []
    room = max_blocks
    for write, held in writes:
        at = 0
        while at < len(write.packed):
            piece = write.packed[at : at + room * write.width]
            out.append((Write(write.stored, write.key, piece, write.width), held))
            at += len(piece)
            room -= len(piece) // write.width
            if room == 0:
                yield out
                out, room = [], max_blocks
    if out:
        yield out


def join(steps: list[Step], step: Step) -> None:
    """Appends, as part of the last step where that is of the same kind: a round trip costs more than a longer list."""
    last = steps[-1] if steps else None
    if (
        isinstance(step, Write)
        and isinstance(last, Write)
        and (last.stored, last.key, last.width) == (step.stored, step.key, step.width)
    ):
        steps[-1] = Write(last.stored, last.key, last.packed + step.packed, last.width)
    else:
        steps.append(step)

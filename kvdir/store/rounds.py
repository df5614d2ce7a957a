"""Cuts a batch of changes into what each shard is sent at once. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from kvdir.store.base import Change, ChangeKind
from kvdir.store.layout import TAIL_BYTES
from kvdir.store.records import number_bytes
from kvdir.store.reply import Argument

ROUND_BLOCKS = 1024
"""Most blocks a shard is sent at once: some milliseconds in which the server does nothing else."""

_SIGNS = {ChangeKind.STORE: b"+", ChangeKind.REMOVE: b"-"}


class Op(NamedTuple):
    """What one change does in one shard. change: which of the batch. sign: b"+" or b"-". tails: of its blocks, packed."""

    change: int
    sign: bytes
    holder: bytes
    tails: bytes

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """As the function `write` takes them."""
        return self.sign, self.holder, self.tails


def ops_of(index: int, change: Change, tails: bytes) -> list[Op]:
    """What change number `index` does to the blocks with these tails; none bigger than a round."""
    sign, holder, step = _SIGNS[change.kind], number_bytes(change.holder), ROUND_BLOCKS * TAIL_BYTES
    return [Op(index, sign, holder, tails[at : at + step]) for at in range(0, len(tails), step)]


def rounds(queues: Mapping[int, Sequence[Op]]) -> Iterator[dict[int, list[Op]]]:
    """shard -> ops, with at most ROUND_BLOCKS a shard, each shard in its order."""
    left = {shard: deque(ops) for shard, ops in queues.items()}
    while left:
        yield {shard: list(_some(ops)) for shard, ops in left.items()}
        left = {shard: ops for shard, ops in left.items() if ops}


def _some(ops: deque[Op]) -> Iterator[Op]:
    room = ROUND_BLOCKS * TAIL_BYTES
    while ops and len(ops[0].tails) <= room:
        op = ops.popleft()
        room -= len(op.tails)
        yield op

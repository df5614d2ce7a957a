"""The block memory of one node as a model: least recently used out first. The yardstick for real arenas."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator


class LruBlocks:
    """At most `capacity_blocks` block numbers. Storing or touching makes a block the newest."""

    def __init__(self, capacity_blocks: int) -> None:
        if capacity_blocks < 1:
            raise ValueError(f"capacity is {capacity_blocks} blocks, must be at least 1")
        self.capacity_blocks = capacity_blocks
        self._held: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._held

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[int]:
        """Oldest first."""
        return iter(self._held)

    def touch(self, blocks: Iterable[int]) -> int:
        """Makes the blocks that are held the newest; returns how many are."""
        found = 0
        for block in blocks:
            if block in self._held:
                self._held.move_to_end(block)
                found += 1
        return found

    def store(self, blocks: Iterable[int]) -> tuple[list[int], list[int]]:
        """Adds blocks; returns (added, evicted). A block may be in both when more come than fit."""
        added, evicted = [], []
        for block in blocks:
            if block in self._held:
                self._held.move_to_end(block)
                continue
            self._held[block] = None
            added.append(block)
            if len(self._held) > self.capacity_blocks:
                evicted.append(self._held.popitem(last=False)[0])
        return added, evicted

    def clear(self) -> None:
        self._held.clear()

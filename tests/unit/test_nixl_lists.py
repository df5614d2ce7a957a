"""Prepared lists name exactly the bytes that were asked for, or say that they cannot."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from peer_agent.memory.layout import HEADER_BYTES, SizeClass, lay_out
from peer_agent.mover import nixl_lists
from peer_agent.mover.nixl_lists import Grid

BASE = 1 << 40
DIGESTS = [bytes([number]) * 32 for number in range(2)]
CLASSES, SIZE = lay_out([SizeClass(DIGESTS[0], 4096, 50), SizeClass(DIGESTS[1], 100_000, 20)])


class RecordingAgent:
    """Keeps strided rows as NIXL does, and tells where an index points."""

    def __init__(self) -> None:
        self.rows: dict[int, tuple[int, int, int, int]] = {}

    def prepare(self, name: str, row: tuple[int, int, int, int]) -> int:
        first, length, stride, count = row
        assert stride >= length, "NIXL refuses strides that overlap"
        assert first >= BASE
        assert first + (count - 1) * stride + length <= BASE + SIZE, "beyond the region"
        self.rows[len(self.rows) + 1] = row
        return len(self.rows)

    def release_list(self, prepared: int) -> None:
        del self.rows[prepared]

    def places(self, found: tuple[int, Any]) -> list[tuple[int, int]]:
        """(offset, length) of every index."""
        handle, indices = found
        first, length, stride, count = self.rows[handle]
        assert indices.dtype == np.int32
        assert all(0 <= index < count for index in indices.tolist())
        return [(first - BASE + index * stride, length) for index in indices.tolist()]


@pytest.fixture
def agent() -> RecordingAgent:
    return RecordingAgent()


@pytest.fixture
def grid(agent: RecordingAgent) -> Grid:
    return Grid(agent, "peer", BASE, SIZE)


@pytest.mark.parametrize("size_class", CLASSES, ids=lambda c: str(c.block_bytes))
@pytest.mark.parametrize("header", [False, True])
def test_indices_point_at_every_slot_when_all_are_of_one_class(
    size_class: SizeClass, header: bool, grid: Grid, agent: RecordingAgent
) -> None:
    length, at = (HEADER_BYTES, 0) if header else (size_class.block_bytes, HEADER_BYTES)
    offsets = [size_class.offset(slot) + at for slot in range(size_class.slots)][::-1]
    found = grid.find(np.array(offsets, "<u8"), length)
    assert found is not None
    assert agent.places(found) == [(offset, length) for offset in offsets]


def test_one_list_is_prepared_when_reads_repeat(grid: Grid, agent: RecordingAgent) -> None:
    for slot in range(5):
        assert grid.find(np.array([CLASSES[0].offset(slot) + HEADER_BYTES], "<u8"), 4096) is not None
    assert len(agent.rows) == 1
    grid.close()
    assert agent.rows == {}


def test_nothing_is_found_when_the_places_are_on_no_common_grid(grid: Grid) -> None:
    first = CLASSES[0].offset(0) + HEADER_BYTES
    assert grid.find(np.array([first, first + 128], "<u8"), 4096) is None


def test_lists_stay_few_when_a_peer_asks_for_any_length(grid: Grid, agent: RecordingAgent) -> None:
    found = [grid.find(np.array([CLASSES[1].offset(0)], "<u8"), length) for length in range(1, 200)]
    assert len(agent.rows) == nixl_lists.MAX_LISTS
    assert found[: nixl_lists.MAX_LISTS].count(None) == 0
    assert set(found[nixl_lists.MAX_LISTS :]) == {None}


def test_nothing_is_found_when_an_index_needs_more_than_32_bits(agent: RecordingAgent) -> None:
    far = Grid(agent, "peer", BASE, 1 << 50)
    assert far.find(np.array([1 << 40], "<u8"), HEADER_BYTES) is None

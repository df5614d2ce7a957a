"""NIXL's prepared descriptor lists over one region: every place where a payload or a header can lie, made once.

Slots of one class lie `stride_bytes(length)` apart, so all payloads of one length in one class have the same phase (offset
modulo stride): a single strided descriptor names them all, and a read is a pair of index arrays. Headers are as long as the
alignment of slots: one dense list has them all. NIXL keeps a strided list as it is given, so that a list costs the same for ten
blocks or a million (measured: 0.1 ms, no memory).

Rules: lists are few, as size classes are; beyond MAX_LISTS nothing more is prepared (lengths and offsets come from peers). What
is on no grid, or too far for 32-bit indices, is not found, and the caller describes it one by one.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from peer_agent.memory.layout import HEADER_BYTES, stride_bytes

MAX_LISTS = 128
_MAX_INDEX = (1 << 31) - 1

Handle = int


class Grid:
    """owner: NIXL's name of the agent whose memory it is, or NIXL_INIT_AGENT for ours. base, size: of the region, bytes."""

    def __init__(self, bindings: ModuleType, agent: Any, owner: str, base: int, size: int) -> None:
        self.base = base
        self._bindings = bindings
        self._agent = agent
        self._owner = owner
        self._size = size
        self._lists: dict[tuple[int, int], Handle] = {}

    def holds(self, address: int) -> bool:
        return self.base <= address < self.base + self._size

    def find(self, offsets: Any, length: int) -> tuple[Handle, Any] | None:
        """A prepared list with all of these places (u64 offsets in the region, `length` bytes each), and their indices."""
        stride = HEADER_BYTES if length == HEADER_BYTES else stride_bytes(length)
        phase = int(offsets[0]) % stride
        indices, rest = np.divmod(offsets, np.uint64(stride))
        if (rest != phase).any() or int(indices.max()) > _MAX_INDEX:
            return None
        prepared = self._lists.get((length, phase))
        if prepared is None:
            if len(self._lists) >= MAX_LISTS:
                return None
            prepared = self._lists[length, phase] = self._prepare(length, stride, phase)
        return prepared, indices.astype(np.int32)

    def close(self) -> None:
        for prepared in self._lists.values():
            self._agent.releasedDlistH(prepared)
        self._lists.clear()

    def _prepare(self, length: int, stride: int, phase: int) -> Handle:
        count = min((self._size - phase - length) // stride + 1, _MAX_INDEX + 1)
        row = np.array([[self.base + phase, length, 0, stride, count]], np.uint64)
        return int(self._agent.prepXferDlist(self._owner, self._bindings.DRAM_SEG, row, []))


def rows(addresses: Any, lengths: Any) -> Any:
    """Descriptors one by one: n x (address, length, device 0), u64."""
    out = np.zeros((len(addresses), 3), np.uint64)
    out[:, 0] = addresses
    out[:, 1] = lengths
    return out

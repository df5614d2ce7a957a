"""NIXL's prepared descriptor lists over one region: every place where a payload or a header can lie, made once.

Slots of one class lie `stride_bytes(length)` apart, so all payloads of one length in one class have the same phase (offset
modulo stride): a single strided descriptor names them all, and a read is a pair of index arrays. Headers are as long as the
alignment of slots: one dense list has them all. NIXL keeps a strided list as it is given, so that a list costs the same for ten
blocks or a million (measured: 0.1 ms, no memory).

Rules: lists are few, as size classes are; beyond MAX_LISTS nothing more is prepared (lengths and offsets come from peers). What
is on no grid, or too far for 32-bit indices, is not found, and the caller describes it one by one.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from peer_agent.memory.layout import HEADER_BYTES, stride_bytes
from peer_agent.mover.nixl_agent import Handle, Places

MAX_LISTS = 128
_MAX_INDEX = (1 << 31) - 1


class Lister(Protocol):
    """What of NixlAgent makes lists."""

    def prepare(self, name: str, row: tuple[int, int, int, int]) -> Handle: ...

    def release_list(self, prepared: Handle) -> None: ...


class Grid:
    """Of a region of the agent `name`, "" for ours. base, size: address and length of the region."""

    def __init__(self, agent: Lister, name: str, base: int, size: int) -> None:
        self.base = base
        self._agent = agent
        self._name = name
        self._size = size
        self._lists: dict[tuple[int, int], Handle] = {}

    def holds(self, address: int) -> bool:
        return self.base <= address < self.base + self._size

    def find(self, offsets: Places, length: int) -> tuple[Handle, Places] | None:
        """A prepared list with all of these places (u64 offsets in the region, `length` bytes each), and their indices.

        Raises NixlError when a peer has less memory than it says.
        """
        stride = HEADER_BYTES if length == HEADER_BYTES else stride_bytes(length)
        phase = int(offsets[0]) % stride
        indices, rest = np.divmod(offsets, np.uint64(stride))
        if (rest != phase).any() or int(indices.max()) > _MAX_INDEX:
            return None
        prepared = self._lists.get((length, phase))
        if prepared is None:
            if len(self._lists) >= MAX_LISTS:
                return None
            count = min((self._size - phase - length) // stride + 1, _MAX_INDEX + 1)
            prepared = self._lists[length, phase] = self._agent.prepare(self._name, (self.base + phase, length, stride, count))
        return prepared, indices.astype(np.int32)

    def close(self) -> None:
        for prepared in self._lists.values():
            self._agent.release_list(prepared)
        self._lists.clear()

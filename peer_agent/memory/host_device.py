"""Host memory behind the device port: pools are pages of an engine's own memory, and a copy that was begun has ended.

    device = HostDevice()
    pool = DevicePool(device, slots=blocks, segments=(Segment(address, stride_bytes, size_bytes), ...), owner=tensors)

So an engine on the CPU stores and loads paged blocks as one with a GPU does (peer_agent/client/device.py), with one copy
between its pages and the arena. Rules: those of memory/device.py, but for handles: these pools are nobody else's to open.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from peer_agent import _native
from peer_agent.memory.device import Array, DeviceError, DevicePool, Segment


class HostEvent:
    """Done from the beginning: whoever records it has done the work before."""

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float) -> bool:
        return True


class HostStream:
    def record(self) -> HostEvent:
        return HostEvent()


class HostDevice:
    """See the module docstring. Thread-safe; copies release the GIL."""

    name = identity = "host"

    def allocate(self, *, slots: int, segment_bytes: Sequence[int]) -> DevicePool:
        try:
            memory = np.zeros(max(1, slots * sum(segment_bytes)), np.uint8)
        except MemoryError as error:
            raise DeviceError(f"no room for a pool of {slots} slots: allocate fewer") from error
        starts = [memory.ctypes.data + slots * sum(segment_bytes[:at]) for at in range(len(segment_bytes))]
        segments = tuple(Segment(start, size, size) for start, size in zip(starts, segment_bytes, strict=True))
        return DevicePool(self, slots, segments, owner=memory)

    def stream(self) -> HostStream:
        return HostStream()

    def copy_to_host(self, pool: DevicePool, slots: Array, host: Array, *, stream: Any) -> HostEvent:
        pages, addresses, lengths = pool.spans(slots, host)
        return _copy(addresses, pages, lengths)

    def copy_from_host(self, pool: DevicePool, slots: Array, host: Array, *, stream: Any) -> HostEvent:
        pages, addresses, lengths = pool.spans(slots, host)
        return _copy(pages, addresses, lengths)

    def pin(self, region: memoryview) -> None:
        """Nothing to do: a processor copies from any memory."""

    def unpin(self, region: memoryview) -> None:
        pass

    def export_handle(self, pool: DevicePool) -> bytes:
        raise DeviceError("pages of the host are private to their engine: store them, others read the arena")

    def open_handle(self, handle: bytes) -> DevicePool:
        raise DeviceError("pages of the host have no handles")

    def close_pool(self, pool: DevicePool) -> None:
        pass


def _copy(to: Array, source: Array, lengths: Array) -> HostEvent:
    _native.copy_spans(_packed(to), _packed(source), _packed(lengths))
    return HostEvent()


def _packed(numbers: Array) -> bytes:
    return np.ascontiguousarray(numbers, "<u8").tobytes()

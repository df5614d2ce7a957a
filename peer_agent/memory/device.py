"""The port to memory that only a device's own copy engine moves, such as that of a GPU: pools, streams, events, copies.

Rules, which memory/device_check.py checks:
- A copy is only *begun* by the call. When it reads and writes is known when its event is done, observed on the host; until then
  its source must not change and its destination holds anything.
- Copies of one stream run in order, those of two streams in any order. Nobody waits for a stream that is not named: a
  producer's kernels are awaited by the event that the producer recorded behind them, before the copy is begun.
- A pool is dedicated memory of its own, and another process of this host can open it by its handle. What cannot be
  exported is refused when the pool is made, with what to do, never at the first transfer.
- An event that failed raises at `done` and `wait`: the bytes of everything behind it on that stream are void.

Implementations: memory/gpu.py (CUDA), memory/device_fake.py (tests). Does not: know blocks, arenas or agents.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from kvdir.errors import InvalidInput, KvdirError

Array = np.ndarray[Any, Any]


class DeviceError(KvdirError):
    """The device or its driver refused or failed; the message says what and what to do."""

    code = "device"


class Event(Protocol):
    """A mark in a stream."""

    def done(self) -> bool:
        """Whether everything queued before it has ended. DeviceError if it failed."""

    def wait(self, timeout_s: float) -> bool:
        """Blocks this thread until it is done (True), at most timeout_s (False). DeviceError if it failed."""


class Stream(Protocol):
    """A queue of the device. Copies begun on it run in order, and behind nothing else."""

    def record(self) -> Event:
        """A mark behind everything queued so far."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One array of a pool: slot i's part is `size_bytes` at address + i * stride_bytes."""

    address: int
    stride_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class DevicePool:
    """`slots` equal pieces of device memory. A block is the parts of one slot in all segments (one a layer, say), in order.

    owner: keeps the memory alive as long as the pool is referenced.
    """

    device: Device
    slots: int
    segments: tuple[Segment, ...]
    owner: object = field(default=None, repr=False)

    @property
    def block_bytes(self) -> int:
        return sum(segment.size_bytes for segment in self.segments)

    def checked(self, slots: Sequence[int] | Array) -> Array:
        """The slot numbers as int64. InvalidInput if one is not of this pool or comes twice."""
        chosen = np.asarray(slots, np.int64).reshape(-1)
        if chosen.size and not 0 <= int(chosen.min()) <= int(chosen.max()) < self.slots:
            raise InvalidInput(f"slots {chosen.min()} to {chosen.max()} of a pool of {self.slots}: pass numbers below that")
        if np.unique(chosen).size != chosen.size:
            raise InvalidInput("a device slot comes twice in one list: each block needs a slot of its own")
        return chosen

    def spans(self, slots: Array, host: Array) -> tuple[Array, Array, Array]:
        """(device addresses, host addresses, lengths), u64, of the copies that blocks at `slots` and `host` consist of.

        host: address of each block's bytes, contiguous, block_bytes long.
        """
        sizes = np.array([segment.size_bytes for segment in self.segments], np.uint64)
        bases = np.array([segment.address for segment in self.segments], np.uint64)
        strides = np.array([segment.stride_bytes for segment in self.segments], np.uint64)
        parts = np.concatenate([np.zeros(1, np.uint64), np.cumsum(sizes)[:-1]])
        device = bases + slots.astype(np.uint64)[:, None] * strides
        return device.reshape(-1), (host[:, None] + parts).reshape(-1), np.tile(sizes, len(slots))


class Device(Protocol):
    """One device as this process uses it. Thread-safe."""

    @property
    def name(self) -> str:
        """For people, such as "cuda:0"."""

    @property
    def identity(self) -> str:
        """What another process of this host gives to `make_device` to have the same device; "KIND:WHICH"."""

    def allocate(self, *, slots: int, segment_bytes: Sequence[int]) -> DevicePool:
        """A new dedicated pool with one segment per entry. DeviceError when there is no room."""

    def stream(self) -> Stream:
        """A new stream, ordered behind no other."""

    def copy_to_host(self, pool: DevicePool, slots: Array, host: Array, *, stream: Stream) -> Event:
        """Begins to copy blocks (numbers from `pool.checked`) to host addresses (u64, block_bytes each); done: all are there.

        The host memory stays mapped until the event is done. DeviceError: nothing was begun; whatever fails later, the event
        says.
        """

    def copy_from_host(self, pool: DevicePool, slots: Array, host: Array, *, stream: Stream) -> Event:
        """The other direction."""

    def pin(self, region: memoryview) -> None:
        """Host memory that copies will use: page-locks it, so that they are asynchronous and fast. DeviceError: and why."""

    def unpin(self, region: memoryview) -> None:
        """Before it is unmapped, and once no copy uses it any more. Unknown memory is ignored."""

    def export_handle(self, pool: DevicePool) -> bytes:
        """What another process of this host needs to open the pool. At most HANDLE_BYTES."""

    def open_handle(self, handle: bytes) -> DevicePool:
        """Somebody's pool, in our process. DeviceError: garbage, another host, a device not visible here, its owner gone.

        The memory stays for as long as we have it open, whatever becomes of its owner.
        """

    def close_pool(self, pool: DevicePool) -> None:
        """Ends our use of a pool, once no copy uses it; frees it if it is ours and nobody else has it open. Idempotent."""


HANDLE_BYTES = 64 << 10
"""The largest handle that anybody has to accept; some 100 bytes a segment."""

KINDS = {"cuda": "peer_agent.memory.gpu:CudaDevice", "fake": "peer_agent.memory.device_fake:FakeDevice"}
"""Kinds of devices and where they are; imported only when one is made."""


def make_device(identity: str) -> Device:
    """The device that another process means. DeviceError: an unknown kind, or not to be had here, and why."""
    kind, _, which = identity.partition(":")
    if kind not in KINDS:
        raise DeviceError(f"unknown kind of device {kind!r}; known are {', '.join(KINDS)}")
    module, _, name = KINDS[kind].partition(":")
    made: Device = getattr(importlib.import_module(module), name).at(which)
    return made

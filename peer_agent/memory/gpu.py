"""CUDA memory behind the device port: pools of our own or made from torch tensors, copies, events, handles. The only place that
imports torch.

    device = CudaDevice(0)
    pool = device.adopt([layer[0], layer[1], ...])      # tensors (slots, ...), of whatever allocator, checked
    pool = device.allocate(slots=4096, segment_bytes=[...]); tensors = device.tensors(pool, ...)
    blocks = DeviceBlocks(pool, slots, ready=device.event(torch_event))

Rules beyond those of memory/device.py:
- A pool must be memory that another process can open: of cudaMalloc, not of virtual memory management or a memory pool
  (`expandable_segments`, cudaMallocAsync). `adopt` asks the driver about the very addresses and refuses the rest.
- Streams are non-blocking: the default stream does not wait for them, nor they for it.
- A copy that was begun in part (the driver refused the rest) ends like any other, and its event fails only then.

Written against cuda.h; the calls are exercised on a driver of our own that copies host memory (tests/native/fake_cuda.cpp), and
by `pytest -m gpu` where there is a device.
"""

from __future__ import annotations

import ctypes
import struct
import time
import weakref
from collections.abc import Sequence
from ctypes import c_size_t, c_uint64, c_void_p
from typing import Any, Self

import numpy as np

from peer_agent import _native
from peer_agent.memory import cuda_driver as cuda
from peer_agent.memory.device import HANDLE_BYTES, Array, DeviceError, DevicePool, Segment

ALIGN_BYTES = 512
LOOK_S = 20e-6
LOOK_MAX_S = 500e-6
"""Events are asked for in pauses that double: the driver's own wait has no deadline."""

_HANDLE = struct.Struct("<4sHHI")  # magic, version, segments, slots
_SEGMENT = struct.Struct("<64sQQQQ")  # IPC handle of the allocation, its size, offset in it, stride, size
_MAGIC, _VERSION = b"KVCU", 1
_NOT_SHAREABLE = (
    "cannot be opened by another process: allocate it with cudaMalloc (CudaDevice.allocate, or PyTorch without "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True and without the cudaMallocAsync backend)"
)


class CudaEvent:
    """An event of the driver. failure: why part of the work before it was never begun."""

    def __init__(self, driver: cuda.Driver, handle: int, *, owner: object = None, failure: str = "") -> None:
        self._driver = driver
        self._handle = handle
        self._owner = owner
        self._failure = failure
        self._done = False
        if owner is None:
            weakref.finalize(self, _destroy, driver, "cuEventDestroy_v2", handle)

    @classmethod
    def made(cls, driver: cuda.Driver) -> Self:
        handle = c_void_p()
        driver.call("make an event", "cuEventCreate", ctypes.byref(handle), cuda.EVENT_DISABLE_TIMING)
        return cls(driver, handle.value or 0)

    def record(self, stream: CudaStream) -> None:
        self._driver.call("record an event", "cuEventRecord", self._handle, stream.handle)

    def record_behind(self, stream: CudaStream, *, failure: str) -> None:
        """Behind copies that were begun, which no error may hide: if there is one, this event fails, and so does the device."""
        self._failure = failure
        try:
            self.record(stream)
        except DeviceError as error:
            self._failure = str(error)

    def done(self) -> bool:
        if not self._done:
            with self._driver.current():
                code = self._driver.code("cuEventQuery", self._handle)
            if code == cuda.NOT_READY:
                return False
            self._driver.check(code, "finish the work of a stream")
            self._done = True
        if self._failure:
            raise DeviceError(self._failure)
        return True

    def wait(self, timeout_s: float) -> bool:
        until_s, pause_s = time.monotonic() + timeout_s, LOOK_S
        while not self.done():
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return False
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, LOOK_MAX_S)
        return True


class CudaStream:
    """owner: whoever made the stream, if not we."""

    def __init__(self, driver: cuda.Driver, handle: int, *, owner: object = None) -> None:
        self.handle = handle
        self._driver = driver
        self._owner = owner
        if owner is None:
            weakref.finalize(self, _destroy, driver, "cuStreamDestroy_v2", handle)

    def record(self) -> CudaEvent:
        event = CudaEvent.made(self._driver)
        event.record(self)
        return event


class CudaDevice:
    """One GPU. ordinal: as this process numbers them. DeviceError when there is none, with what to do."""

    def __init__(self, ordinal: int = 0, *, library: str = "") -> None:
        """library: of the driver; "": the system's, see cuda_driver.py."""
        self._driver = cuda.Driver(library)
        self._driver.open(ordinal)
        self._ordinal = ordinal
        self.name = f"cuda:{ordinal}"
        self.identity = f"cuda:{self._driver.uuids()[ordinal]}"

    @classmethod
    def at(cls, which: str) -> Self:
        """See memory/device.py make_device; which: the device's UUID, or its ordinal."""
        if which.isdigit():
            return cls(int(which))
        uuids = cuda.Driver().uuids()
        if which not in uuids:
            raise DeviceError(f"{which} is not visible here; visible are {', '.join(uuids) or 'none'} (CUDA_VISIBLE_DEVICES)")
        return cls(uuids.index(which))

    # pools

    def allocate(self, *, slots: int, segment_bytes: Sequence[int]) -> DevicePool:
        sizes = [-(-slots * size // ALIGN_BYTES) * ALIGN_BYTES for size in segment_bytes]
        memory = _Allocation(self._driver, sum(sizes))
        starts = [memory.address + sum(sizes[:at]) for at in range(len(sizes))]
        segments = tuple(Segment(start, size, size) for start, size in zip(starts, segment_bytes, strict=True))
        return DevicePool(self, slots, segments, owner=memory)

    def adopt(self, tensors: Sequence[Any]) -> DevicePool:
        """A pool of torch tensors (slots, ...), such as the K and V arrays of each layer; slot i is row i of each, in order.

        The tensors stay the caller's, and alive with the pool. DeviceError for memory that will not do, and why: not on this
        device, rows not contiguous, or not shareable with the agent's mover.
        """
        import torch

        if not tensors:
            raise DeviceError("no tensors: pass one for each part of a block")
        for at, tensor in enumerate(tensors):
            if not isinstance(tensor, torch.Tensor) or tensor.device != torch.device("cuda", self._ordinal):
                raise DeviceError(f"tensor {at} is not a torch tensor on {self.name}: move it there first")
            if tensor.dim() < 2 or tensor.shape[0] != tensors[0].shape[0] or not tensor[0].is_contiguous():
                raise DeviceError(
                    f"tensor {at} has shape {tuple(tensor.shape)}: pass (slots, ...) with contiguous rows, as many each"
                )
        segments = [_rows(tensor) for tensor in tensors]
        for at, segment in enumerate(segments):
            if segment.stride_bytes < segment.size_bytes:
                raise DeviceError(f"rows of tensor {at} overlap (expanded?): each slot needs memory of its own")
            if not self._driver.attribute(segment.address, cuda.LEGACY_IPC_CAPABLE):
                raise DeviceError(f"tensor {at} {_NOT_SHAREABLE}")
        return DevicePool(self, tensors[0].shape[0], tuple(segments), owner=tuple(tensors))

    def tensors(self, pool: DevicePool, dtype: Any) -> tuple[Any, ...]:
        """The segments of a pool as torch tensors (slots, elements of a slot) that share its memory and keep it alive."""
        import torch

        made = []
        for segment in pool.segments:
            shape, strides = (pool.slots, segment.size_bytes), (segment.stride_bytes, 1)
            raw = torch.as_tensor(_CudaArray(segment.address, shape, strides, pool), device=f"cuda:{self._ordinal}")
            made.append(raw.view(dtype))
        return tuple(made)

    def close_pool(self, pool: DevicePool) -> None:
        """Memory of our own goes with its last reference, tensors included."""
        if isinstance(pool.owner, _Mappings):
            pool.owner.close()

    # streams and copies

    def stream(self) -> CudaStream:
        handle = c_void_p()
        self._driver.call("make a stream", "cuStreamCreate", ctypes.byref(handle), cuda.STREAM_NON_BLOCKING)
        return CudaStream(self._driver, handle.value or 0)

    def stream_of(self, stream: Any) -> CudaStream:
        """A torch.cuda.Stream, such as torch.cuda.current_stream(): `stream_of(it).record()` marks what was queued on it."""
        return CudaStream(self._driver, stream.cuda_stream, owner=stream)

    def event(self, event: Any) -> CudaEvent:
        """A recorded torch.cuda.Event."""
        if not event.cuda_event:
            raise DeviceError("this event was not recorded: record it behind the kernels first")
        return CudaEvent(self._driver, event.cuda_event, owner=event)

    def copy_to_host(self, pool: DevicePool, slots: Array, host: Array, *, stream: Any) -> CudaEvent:
        device, addresses, lengths = pool.spans(slots, host)
        return self._copy("cuMemcpyDtoHAsync_v2", addresses, device, lengths, stream)

    def copy_from_host(self, pool: DevicePool, slots: Array, host: Array, *, stream: Any) -> CudaEvent:
        device, addresses, lengths = pool.spans(slots, host)
        return self._copy("cuMemcpyHtoDAsync_v2", device, addresses, lengths, stream)

    def pin(self, region: memoryview) -> None:
        address = np.frombuffer(region, np.uint8).ctypes.data
        what = f"page-lock {region.nbytes:,} bytes for {self.name}"
        with self._driver.current():
            code = self._driver.code("cuMemHostRegister_v2", address, c_size_t(region.nbytes), cuda.HOST_REGISTER_PORTABLE)
        if code == cuda.ALREADY_REGISTERED:
            raise DeviceError(f"cannot {what}: it is page-locked already, pin a mapping once")
        self._driver.check(code, what)

    def unpin(self, region: memoryview) -> None:
        address = np.frombuffer(region, np.uint8).ctypes.data
        with self._driver.current():
            code = self._driver.code("cuMemHostUnregister", address)
        if code != cuda.NOT_REGISTERED:
            self._driver.check(code, "release page-locked memory")

    # handles

    def export_handle(self, pool: DevicePool) -> bytes:
        body = _HANDLE.pack(_MAGIC, _VERSION, len(pool.segments), pool.slots)
        for segment in pool.segments:
            body += self._export(segment)
        if len(body) + 8 > HANDLE_BYTES:
            raise DeviceError(f"{len(pool.segments)} segments are too many to export: use fewer, larger tensors")
        return body + _native.xxh3_64(body).to_bytes(8, "little")

    def open_handle(self, handle: bytes) -> DevicePool:
        slots, parts = _parse(handle)
        mappings = _Mappings(self._driver)
        try:
            segments = tuple(_placed(mappings.open(part[0], part[1]), slots, part) for part in parts)
        except BaseException:
            mappings.close()
            raise
        return DevicePool(self, slots, segments, owner=mappings)

    # internals

    def _copy(self, function: str, to: Array, source: Array, lengths: Array, stream: CudaStream) -> CudaEvent:
        """DeviceError: nothing was begun."""
        event = CudaEvent.made(self._driver)
        with self._driver.current():
            code, begun = _native.begin_copies(
                self._driver.address(function), _packed(to), _packed(source), _packed(lengths), stream.handle
            )
        if code and not begun:
            raise DeviceError(f"cannot begin a copy: {self._driver.words(code)}")
        failure = f"a copy was refused after {begun} others: {self._driver.words(code)}" if code else ""
        event.record_behind(stream, failure=failure)
        return event

    def _export(self, segment: Segment) -> bytes:
        start = self._driver.attribute(segment.address, cuda.RANGE_START)
        size = self._driver.attribute(segment.address, cuda.RANGE_SIZE)
        made = cuda.IpcHandle()
        if not start or not size:
            raise DeviceError(f"this pool is no CUDA memory, or was freed; it {_NOT_SHAREABLE}")
        with self._driver.current():
            code = self._driver.code("cuIpcGetMemHandle", ctypes.byref(made), start)
        if code:
            raise DeviceError(f"this pool {_NOT_SHAREABLE}; {self._driver.words(code)}")
        raw = bytes(memoryview(made).cast("B"))
        return _SEGMENT.pack(raw, size, segment.address - start, segment.stride_bytes, segment.size_bytes)


class _Allocation:
    """Device memory that goes with its last reference."""

    def __init__(self, driver: cuda.Driver, size: int) -> None:
        address = c_uint64()
        driver.call(f"allocate {size:,} bytes of device memory", "cuMemAlloc_v2", ctypes.byref(address), c_size_t(max(1, size)))
        self.address = address.value
        weakref.finalize(self, _destroy, driver, "cuMemFree_v2", address.value)


class _Mappings:
    """Allocations of another process, each opened once."""

    def __init__(self, driver: cuda.Driver) -> None:
        self._driver = driver
        self._open: dict[bytes, int] = {}

    def open(self, handle: bytes, size: int) -> int:
        if handle not in self._open:
            address, raw = c_uint64(), cuda.IpcHandle.from_buffer_copy(handle)
            what = "open a pool of another process (is it alive, and does this process see its device?)"
            self._driver.call(what, "cuIpcOpenMemHandle_v2", ctypes.byref(address), raw, cuda.IPC_LAZY_PEER_ACCESS)
            self._open[handle] = address.value
        if (self._driver.attribute(self._open[handle], cuda.RANGE_SIZE) or 0) < size:
            raise DeviceError("the allocation behind this handle is smaller than it says")
        return self._open[handle]

    def close(self) -> None:
        while self._open:
            _destroy(self._driver, "cuIpcCloseMemHandle", self._open.popitem()[1])


class _CudaArray:
    """What torch.as_tensor takes (the CUDA array interface, version 3). owner: stays alive with the tensor."""

    def __init__(self, address: int, shape: tuple[int, int], strides: tuple[int, int], owner: object) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape, "strides": strides, "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip
        self._owner = owner


def _packed(numbers: Array) -> bytes:
    return np.ascontiguousarray(numbers, "<u8").tobytes()


def _rows(tensor: Any) -> Segment:
    size = tensor[0].numel() * tensor.element_size()
    return Segment(tensor.data_ptr(), tensor.stride(0) * tensor.element_size(), size)


def _parse(handle: bytes) -> tuple[int, list[tuple[bytes, int, int, int, int]]]:
    """(slots, segments). DeviceError for anything that `export_handle` did not make."""
    body = handle[:-8]
    if len(body) < _HANDLE.size or _native.xxh3_64(body) != int.from_bytes(handle[-8:], "little"):
        raise DeviceError("not a handle of a CUDA pool, or damaged")
    magic, version, count, slots = _HANDLE.unpack_from(body)
    if (magic, version) != (_MAGIC, _VERSION) or len(body) != _HANDLE.size + count * _SEGMENT.size or not slots:
        raise DeviceError("not a handle of a CUDA pool of this release")
    return slots, [_SEGMENT.unpack_from(body, _HANDLE.size + at * _SEGMENT.size) for at in range(count)]


def _placed(base: int, slots: int, part: tuple[bytes, int, int, int, int]) -> Segment:
    _, allocation, offset, stride, size = part
    if not size or stride < size or offset + (slots - 1) * stride + size > allocation:
        raise DeviceError("this handle names memory outside its allocation")
    return Segment(base + offset, stride, size)


def _destroy(driver: cuda.Driver, function: str, handle: int) -> None:
    """Of something that nobody uses any more; a driver that is shutting down has done it already."""
    try:
        with driver.current():
            driver.code(function, handle)
    except DeviceError:
        return

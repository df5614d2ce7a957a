"""The caller's memory: anything with blocks in it becomes addresses for the native copies.

Accepts one contiguous object of n * block_bytes bytes, a list or tuple of n objects of block_bytes each, or BlockRows; an
object is a numpy array, a torch CPU tensor, anything with the buffer protocol, or anything with DLPack on the CPU. torch is
never imported here: if the caller has a tensor, the caller has imported it. Nothing is copied, converted or kept.
Memory of a device is peer_agent/client/device.py's. Does not: know sessions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np

from kvdir.errors import InvalidInput
from peer_agent import _native

DLPACK_CPU = 1

Array = np.ndarray[Any, Any]
Keep = Callable[[], Callable[[], None]]
"""Says that the arena is used beyond this call, until what is returned is called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Blocks that a load found in the arena: BLOCK_RECORDs with state 1, whose they should be, and which of the caller's
    blocks they are (positions). check: compare checksums, too.
    """

    records: bytes
    namespace_digest: bytes
    fingerprints: bytes
    width: int
    positions: Array
    check: bool


class CallerMemory(Protocol):
    """Where a store's bytes come from and a load's bytes go. until_s: time.monotonic()."""

    @property
    def waits(self) -> bool:
        """Whether the copies wait for something, and so want a thread however small they are."""

    @property
    def late(self) -> bool:
        """Whether a copy has, or may have, outlasted its call."""

    def copy_in(
        self, region: memoryview, offsets: bytes, positions: Array, *, block_bytes: int, until_s: float, keep: Keep
    ) -> bytes:
        """Copies blocks into reserved slots, both in the same order; returns the checksums of what is then there, u64 LE.

        KvdirError when they are not all there by until_s.
        """

    def copy_out(self, region: memoryview, wanted: Wanted, *, until_s: float, keep: Keep) -> bytes:
        """Copies blocks out, verified before and after; one ReadStatus each, LATE for those not there by until_s."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Host memory. addresses: one u64 LE per block, packed. owners: keep them referenced while the addresses are in use."""

    waits: ClassVar[bool] = False
    late: ClassVar[bool] = False

    addresses: bytes
    owners: tuple[object, ...]

    def copy_in(
        self, region: memoryview, offsets: bytes, positions: Array, *, block_bytes: int, until_s: float, keep: Keep
    ) -> bytes:
        return _native.write_blocks(region, offsets, self._at(positions), block_bytes)

    def copy_out(self, region: memoryview, wanted: Wanted, *, until_s: float, keep: Keep) -> bytes:
        return _native.read_blocks(
            region,
            wanted.records,
            wanted.namespace_digest,
            wanted.fingerprints,
            wanted.width,
            self._at(wanted.positions),
            wanted.check,
        )

    def _at(self, positions: Array) -> bytes:
        return np.frombuffer(self.addresses, "<u8")[positions].tobytes()


@dataclass(frozen=True, slots=True)
class BlockRows:
    """Blocks that are rows of one array, such as an engine's pool on the host. array: (rows, block_bytes) uint8, whatever lies
    between rows. rows: which of them, in the order of the fingerprints.
    """

    array: Array
    rows: Array


def memory_of(blocks: Any, *, count: int, block_bytes: int, writable: bool) -> Memory:
    """Addresses of `count` blocks of block_bytes each. InvalidInput says which buffer is wrong, how, and what to do."""
    if isinstance(blocks, BlockRows):
        return _rows(blocks, count=count, block_bytes=block_bytes, writable=writable)
    if isinstance(blocks, list | tuple):
        return _separate(blocks, count=count, block_bytes=block_bytes, writable=writable)
    address, size, owner = _span(blocks, writable=writable, where="the buffer")
    if size != count * block_bytes:
        raise InvalidInput(
            f"the buffer has {size} bytes; {count} blocks of {block_bytes} bytes need {count * block_bytes}: "
            "pass one contiguous buffer of exactly that size, or a list with one buffer a block"
        )
    steps = np.arange(count, dtype="<u8") * np.uint64(block_bytes) + np.uint64(address)
    return Memory(steps.tobytes(), (owner,))


def _rows(blocks: BlockRows, *, count: int, block_bytes: int, writable: bool) -> Memory:
    array, rows = blocks.array, np.asarray(blocks.rows)
    if len(rows) != count:
        raise InvalidInput(f"{len(rows)} rows for {count} fingerprints: name one row a block")
    if array.ndim != 2 or array.dtype != np.uint8 or array.shape[1] != block_bytes or array.strides[1] != 1:
        raise InvalidInput(f"rows of {array.dtype}{array.shape}; a block of this namespace is a row of {block_bytes} uint8")
    if writable and not array.flags.writeable:
        raise InvalidInput("the array is read-only: load writes into it, pass a writable one")
    if count and not 0 <= rows.min() <= rows.max() < len(array):
        raise InvalidInput(f"rows {rows.min()} to {rows.max()} of an array of {len(array)}")
    addresses = np.uint64(array.ctypes.data) + rows.astype("<u8") * np.uint64(array.strides[0])
    return Memory(addresses.astype("<u8").tobytes(), (array,))


def _separate(blocks: Sequence[Any], *, count: int, block_bytes: int, writable: bool) -> Memory:
    if len(blocks) != count:
        raise InvalidInput(f"{len(blocks)} buffers for {count} fingerprints: pass one buffer a block")
    addresses = np.empty(count, dtype="<u8")
    owners = []
    for position, block in enumerate(blocks):
        address, size, owner = _span(block, writable=writable, where=f"buffer {position}")
        if size != block_bytes:
            raise InvalidInput(f"buffer {position} has {size} bytes; a block of this namespace has {block_bytes}")
        addresses[position] = address
        owners.append(owner)
    return Memory(addresses.tobytes(), tuple(owners))


def _span(item: Any, *, writable: bool, where: str) -> tuple[int, int, object]:
    """(address, bytes, what to keep alive)."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(item, torch.Tensor):
        return _tensor_span(item, where=where)
    if isinstance(item, np.ndarray):
        return _array_span(item, writable=writable, where=where)
    try:
        view = memoryview(item)
    except TypeError:
        return _array_span(_from_dlpack(item, where=where), writable=writable, where=where)
    if not view.c_contiguous:
        raise InvalidInput(f"{where} is not contiguous: pass a contiguous copy of it")
    if writable and view.readonly:
        raise InvalidInput(f"{where} is read-only: load writes into it, pass a bytearray, a writable array or a tensor")
    flat = view.cast("B") if view.nbytes else view
    array = np.frombuffer(flat, dtype=np.uint8) if view.nbytes else np.empty(0, np.uint8)
    return array.ctypes.data, view.nbytes, (item, view, array)


def _array_span(array: np.ndarray[Any, Any], *, writable: bool, where: str) -> tuple[int, int, object]:
    if array.dtype.hasobject:
        raise InvalidInput(f"{where} holds Python objects (dtype {array.dtype}): pass an array of plain numbers")
    if not array.flags.c_contiguous:
        raise InvalidInput(f"{where} is not C-contiguous (strides {array.strides}): use numpy.ascontiguousarray")
    if writable and not array.flags.writeable:
        raise InvalidInput(f"{where} is read-only: load writes into it, pass a writable array")
    return array.ctypes.data, array.nbytes, array


def _tensor_span(tensor: Any, *, where: str) -> tuple[int, int, object]:
    if tensor.device.type != "cpu":
        raise InvalidInput(
            f"{where} is on {tensor.device}: pass DeviceBlocks of a pool (peer_agent/client/device.py), or a CPU tensor"
        )
    if not tensor.is_contiguous():
        raise InvalidInput(f"{where} is not contiguous: use .contiguous()")
    return tensor.data_ptr(), tensor.numel() * tensor.element_size(), tensor


def _from_dlpack(item: Any, *, where: str) -> np.ndarray[Any, Any]:
    if not hasattr(item, "__dlpack__") or not hasattr(item, "__dlpack_device__"):
        raise InvalidInput(
            f"{where} is a {type(item).__name__}: "
            "pass a numpy array, a torch CPU tensor, or an object with the buffer protocol or DLPack"
        )
    device, _ = item.__dlpack_device__()
    if device != DLPACK_CPU:
        raise InvalidInput(f"{where} is on DLPack device type {int(device)}: host memory only (type {DLPACK_CPU})")
    try:
        array: np.ndarray[Any, Any] = np.from_dlpack(item)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidInput(f"{where} cannot be used through DLPack: {error}; pass a view of its bytes (uint8)") from error
    return array

"""The few functions of the CUDA driver API that gpu.py needs, through ctypes: no CUDA at build time, no runtime of any version.

libcuda.so.1 comes with the kernel driver, and its functions keep their ABI (cuda.h, CUDA 11 to 13). Every call runs in the
primary context of its device, which is also PyTorch's, pushed and popped around it: the caller's current device stays.
ctypes releases the GIL. Does not: know pools or events (gpu.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from ctypes import c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p

from peer_agent.memory.device import DeviceError

LIBRARY_VARIABLE = "KVDIR_CUDA_LIBRARY"
"""Environment variable, as the mover inherits it: path of the driver where it is not found by itself."""

NOT_READY = 600
ALREADY_REGISTERED = 712
NOT_REGISTERED = 713
STREAM_NON_BLOCKING = 1
EVENT_DISABLE_TIMING = 2
HOST_REGISTER_PORTABLE = 1
IPC_LAZY_PEER_ACCESS = 1
IPC_HANDLE_BYTES = 64

DEVICE_ORDINAL, LEGACY_IPC_CAPABLE, RANGE_START, RANGE_SIZE = 9, 10, 11, 12
"""CUpointer_attribute."""


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle; passed by value."""

    _fields_ = (("reserved", ctypes.c_char * IPC_HANDLE_BYTES),)


_POINTER = ctypes.POINTER
_SIGNATURES = {
    "cuInit": (c_uint,),
    "cuGetErrorString": (c_int, _POINTER(c_char_p)),
    "cuDeviceGetCount": (_POINTER(c_int),),
    "cuDeviceGet": (_POINTER(c_int), c_int),
    "cuDeviceGetUuid": (c_void_p, c_int),
    "cuDevicePrimaryCtxRetain": (_POINTER(c_void_p), c_int),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (_POINTER(c_void_p),),
    "cuMemAlloc_v2": (_POINTER(c_uint64), c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemcpyHtoDAsync_v2": (c_uint64, c_void_p, c_size_t, c_void_p),
    "cuMemcpyDtoHAsync_v2": (c_void_p, c_uint64, c_size_t, c_void_p),
    "cuStreamCreate": (_POINTER(c_void_p), c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuEventCreate": (_POINTER(c_void_p), c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventQuery": (c_void_p,),
    "cuEventDestroy_v2": (c_void_p,),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuIpcGetMemHandle": (_POINTER(IpcHandle), c_uint64),
    "cuIpcOpenMemHandle_v2": (_POINTER(c_uint64), IpcHandle, c_uint),
    "cuIpcCloseMemHandle": (c_uint64,),
    "cuPointerGetAttribute": (c_void_p, c_int, c_uint64),
}


class Driver:
    """The library, and the primary context of one device. `call` raises DeviceError; `code` answers what the driver says."""

    def __init__(self, library: str = "") -> None:
        library = library or os.environ.get(LIBRARY_VARIABLE) or "libcuda.so.1"
        try:
            self._library = ctypes.CDLL(library)
        except OSError as error:
            raise DeviceError(
                f"no CUDA driver: {error}; install the NVIDIA driver, or give the container access to it"
            ) from error
        for name, arguments in _SIGNATURES.items():
            function = getattr(self._library, name, None)
            if function is None:
                raise DeviceError(f"{library} lacks {name}: a driver of CUDA 11 or newer is needed")
            function.argtypes, function.restype = arguments, c_int
        self._context = c_void_p()
        self.check(self.code("cuInit", 0), "start the CUDA driver")

    def open(self, ordinal: int) -> None:
        """Takes the device's primary context, for the life of this process. DeviceError: no such device, or none at all."""
        device, count = c_int(), c_int()
        self.check(self.code("cuDeviceGetCount", ctypes.byref(count)), "count devices")
        if not 0 <= ordinal < count.value:
            raise DeviceError(f"no CUDA device {ordinal}: {count.value} are visible (CUDA_VISIBLE_DEVICES)")
        self.check(self.code("cuDeviceGet", ctypes.byref(device), ordinal), f"open CUDA device {ordinal}")
        self.check(self.code("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device), f"use CUDA device {ordinal}")

    def uuids(self) -> list[str]:
        """Of the devices that this process sees, by ordinal; as nvidia-smi writes them."""
        count = c_int()
        self.check(self.code("cuDeviceGetCount", ctypes.byref(count)), "count devices")
        return [self._uuid(ordinal) for ordinal in range(count.value)]

    def address(self, name: str) -> int:
        """Of a function, for native code."""
        return ctypes.cast(getattr(self._library, name), c_void_p).value or 0

    def code(self, name: str, *arguments: object) -> int:
        """What the function answers. Where a context is needed, within `current`."""
        answer: int = getattr(self._library, name)(*arguments)
        return answer

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Our context is this thread's while the block runs."""
        self.check(self.code("cuCtxPushCurrent_v2", self._context), "enter the CUDA context")
        try:
            yield
        finally:
            self.code("cuCtxPopCurrent_v2", ctypes.byref(c_void_p()))

    def call(self, what: str, name: str, *arguments: object) -> None:
        """In our context. DeviceError says what could not be done, and the driver's reason."""
        with self.current():
            self.check(self.code(name, *arguments), what)

    def check(self, code: int, what: str) -> None:
        if code:
            raise DeviceError(f"cannot {what}: {self.words(code)}")

    def words(self, code: int) -> str:
        text = c_char_p()
        self._library.cuGetErrorString(code, ctypes.byref(text))
        return f"{text.value.decode() if text.value else 'unknown error'} (CUDA error {code})"

    def attribute(self, address: int, attribute: int) -> int | None:
        """Of device memory; None if this is not the driver's memory."""
        value = c_uint64()
        with self.current():
            code = self.code("cuPointerGetAttribute", ctypes.byref(value), attribute, address)
        return None if code else value.value

    def _uuid(self, ordinal: int) -> str:
        device, raw = c_int(), (ctypes.c_ubyte * 16)()
        self.check(self.code("cuDeviceGet", ctypes.byref(device), ordinal), f"open CUDA device {ordinal}")
        self.check(self.code("cuDeviceGetUuid", raw, device), "read a device's UUID")
        text = bytes(raw).hex()
        return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"

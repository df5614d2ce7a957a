"""Which memory store and load accept, and what they say about the rest."""

from __future__ import annotations

import array
import struct
import sys
import types

import numpy as np
import pytest

from kvdir.errors import InvalidInput
from peer_agent.client.buffers import Memory, memory_of


def addresses(memory: Memory) -> list[int]:
    return list(struct.unpack(f"<{len(memory.addresses) // 8}Q", memory.addresses))


def test_one_buffer_gives_equally_spaced_addresses():
    blocks = np.zeros((3, 16), np.float32)
    base = blocks.ctypes.data
    assert addresses(memory_of(blocks, count=3, block_bytes=64, writable=True)) == [base, base + 64, base + 128]


def test_list_of_buffers_gives_their_addresses_whatever_their_kind():
    first, second, third = np.zeros(8, np.uint8), bytearray(8), array.array("d", [0.0])
    memory = memory_of([first, second, third], count=3, block_bytes=8, writable=True)
    assert addresses(memory)[0] == first.ctypes.data
    assert len(set(addresses(memory))) == 3


def test_read_only_memory_is_accepted_only_for_reading():
    assert len(memory_of(bytes(16), count=2, block_bytes=8, writable=False).addresses) == 16
    with pytest.raises(InvalidInput, match="read-only"):
        memory_of(bytes(16), count=2, block_bytes=8, writable=True)
    frozen = np.zeros(16, np.uint8)
    frozen.flags.writeable = False
    with pytest.raises(InvalidInput, match="read-only"):
        memory_of(frozen, count=2, block_bytes=8, writable=True)


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (bytearray(17), "17 bytes; 2 blocks of 8 bytes need 16"),
        ([bytearray(8)], "1 buffers for 2 fingerprints"),
        ([bytearray(8), bytearray(9)], "buffer 1 has 9 bytes"),
        (np.zeros((2, 16), np.uint8)[:, ::2], "not C-contiguous"),
        (np.array([None, None]), "holds Python objects"),
        (memoryview(bytearray(32))[::2], "not contiguous"),
        (["text", "text"], "is a str"),
        (5, "is a int"),
    ],
)
def test_refused_with_the_fix_when_the_memory_cannot_be_used(blocks: object, message: str):
    with pytest.raises(InvalidInput, match=message):
        memory_of(blocks, count=2, block_bytes=8, writable=False)


class OnlyDlpack:
    """An array library without the buffer protocol."""

    def __init__(self, values: np.ndarray, device: int = 1) -> None:
        self.values = values
        self.device = device

    def __dlpack__(self, **options: object) -> object:
        return self.values.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device, 0


def test_dlpack_on_the_cpu_is_used_in_place():
    values = np.arange(16, dtype=np.uint8)
    assert addresses(memory_of(OnlyDlpack(values), count=2, block_bytes=8, writable=False))[0] == values.ctypes.data


def test_dlpack_elsewhere_is_refused():
    with pytest.raises(InvalidInput, match="device type 2"):
        memory_of(OnlyDlpack(np.zeros(16, np.uint8), device=2), count=2, block_bytes=8, writable=False)


class FakeTensor:
    """The five members of torch.Tensor that are used."""

    def __init__(self, *, device: str = "cpu", contiguous: bool = True) -> None:
        self.values = np.zeros(16, np.uint8)
        self.device = types.SimpleNamespace(type=device)
        self.contiguous = contiguous

    def is_contiguous(self) -> bool:
        return self.contiguous

    def data_ptr(self) -> int:
        return self.values.ctypes.data

    def numel(self) -> int:
        return 4

    def element_size(self) -> int:
        return 4


def test_tensor_is_used_in_place_without_importing_torch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(Tensor=FakeTensor))
    tensor = FakeTensor()
    assert addresses(memory_of(tensor, count=2, block_bytes=8, writable=True))[0] == tensor.data_ptr()
    with pytest.raises(InvalidInput, match="pass DeviceBlocks"):
        memory_of(FakeTensor(device="cuda"), count=2, block_bytes=8, writable=True)
    with pytest.raises(InvalidInput, match=r"\.contiguous\(\)"):
        memory_of(FakeTensor(contiguous=False), count=2, block_bytes=8, writable=True)

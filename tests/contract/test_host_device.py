"""Host memory keeps the contract of devices, and a strided pool of it moves exactly the named pages."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from peer_agent import _native
from peer_agent.memory.device import Device, DeviceError, DevicePool, Segment
from peer_agent.memory.device_check import CHECKS, refuses_handles_that_are_garbage
from peer_agent.memory.host_device import HostDevice


@pytest.mark.parametrize("check", [check for check in CHECKS if check is not refuses_handles_that_are_garbage])
def test_host_device_keeps_the_contract_when_nobody_wants_handles(check: Callable[[Device], None]):
    check(HostDevice())


def test_pages_between_others_are_left_alone_when_a_block_is_loaded():
    device, layers = HostDevice(), np.zeros((2, 5, 3, 16), np.uint8)  # layer, block, (ours and two neighbours), bytes
    segments = tuple(Segment(layer[:, 1].ctypes.data, layer.strides[0], 16) for layer in layers)
    pool = DevicePool(device, 5, segments, owner=layers)
    block = np.arange(32, dtype=np.uint8)
    device.copy_from_host(pool, pool.checked([3]), np.array([block.ctypes.data], np.uint64), stream=device.stream())
    assert layers[:, 3, 1].tobytes() == block.tobytes()
    layers[:, 3, 1] = 0
    assert not layers.any()


def test_pool_is_refused_when_somebody_wants_its_handle():
    device = HostDevice()
    pool = device.allocate(slots=1, segment_bytes=[8])
    with pytest.raises(DeviceError, match="private to their engine"):
        device.export_handle(pool)


def test_copies_are_refused_when_the_lists_do_not_match():
    with pytest.raises(ValueError, match="2 destinations, 1 sources and 1 lengths"):
        _native.copy_spans(bytes(16), bytes(8), bytes(8))

"""The fake device keeps the port's contract, and is really asynchronous: nothing is there before its event."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from peer_agent.memory.device import DeviceError
from peer_agent.memory.device_check import check_device
from peer_agent.memory.device_fake import FakeDevice

BLOCK_BYTES = 3 * 4096


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    with FakeDevice(seed=1, stepped=True) as made:
        yield made
        assert made.faults == []


def block(value: int, count: int = 1):
    return np.full((count, BLOCK_BYTES), value, np.uint8)


def address(array: np.ndarray) -> np.ndarray:
    return np.array([array.ctypes.data], np.uint64)


@pytest.mark.parametrize("seed", range(3))
def test_fake_device_keeps_the_contract(seed: int):
    with FakeDevice(seed=seed) as device:
        check_device(device, make=FakeDevice if seed == 0 else None)
        assert device.faults == []


def test_destination_is_mixed_when_read_before_the_event(device: FakeDevice):
    pool = device.allocate(slots=2, segment_bytes=[BLOCK_BYTES])
    event = device.fill(pool, [1], block(7), stream=device.stream())
    seen = set()
    while not event.done():
        seen.add(frozenset(np.unique(device.content(pool, [1])).tolist()))
        device.step()
    assert seen == {frozenset({0}), frozenset({0, 7}), frozenset({7})}, "old, mixed and new, in that order"


def test_source_is_read_late_when_it_changes_before_the_event(device: FakeDevice):
    pool = device.allocate(slots=1, segment_bytes=[BLOCK_BYTES])
    source = block(1)
    event = device.copy_from_host(pool, pool.checked([0]), address(source), stream=device.stream())
    source[:] = 2
    device.drain()
    assert event.done()
    assert (device.content(pool, [0]) == 2).all()


def test_streams_overtake_each_other_when_nobody_orders_them(device: FakeDevice):
    pool = device.allocate(slots=1, segment_bytes=[BLOCK_BYTES])
    first, second = device.stream(), device.stream()
    winners = set()
    for _ in range(40):
        device.fill(pool, [0], block(1), stream=first)
        device.fill(pool, [0], block(2), stream=second)
        device.drain()
        winners.add(int(device.content(pool, [0])[0, 0]))
    assert winners == {1, 2}


def test_nothing_proceeds_when_the_device_is_held(device: FakeDevice):
    event = device.stream().record()
    device.hold()
    assert not device.step()
    assert not event.wait(0.01)
    device.resume()
    device.drain()
    assert event.wait(0.0)


def test_everything_behind_a_failure_fails(device: FakeDevice):
    pool = device.allocate(slots=1, segment_bytes=[BLOCK_BYTES])
    stream, host = device.stream(), block(1)
    before = stream.record()
    device.drain()
    device.fail_next_copy()
    failed = device.copy_from_host(pool, pool.checked([0]), address(host), stream=stream)
    assert before.done()
    for event in (failed, stream.record()):
        with pytest.raises(DeviceError, match="illegal address"):
            event.done()


def test_unpinning_under_a_copy_is_a_fault(device: FakeDevice):
    pool = device.allocate(slots=1, segment_bytes=[BLOCK_BYTES])
    host = block(1)
    region = memoryview(host).cast("B")
    device.pin(region)
    device.copy_from_host(pool, pool.checked([0]), address(host), stream=device.stream())
    device.unpin(region)
    assert len(device.faults) == 1
    device.faults.clear()
    device.drain()


def test_handle_of_a_closed_pool_opens_nothing(device: FakeDevice):
    pool = device.allocate(slots=1, segment_bytes=[BLOCK_BYTES])
    handle = device.export_handle(pool)
    device.close_pool(pool)
    with pytest.raises(DeviceError, match="is its owner alive"):
        device.open_handle(handle)

"""The contract suite of devices: `check_device(device)` passes for the fake one, for CUDA, and for a third party's.

    def test_my_device() -> None:
        check_device(MyDevice(0))

Raises AssertionError with what was broken. The rules are those of memory/device.py. It relies on nothing before an event; that
the fake device really is asynchronous has tests of its own.
"""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvdir.errors import InvalidInput
from peer_agent.memory.device import HANDLE_BYTES, Array, Device, DeviceError, DevicePool, Event

TIMEOUT_S = 20.0

SLOTS = 8
SEGMENT_BYTES = (4096, 65536, 512)
"""Three of unequal size, so that a part in the wrong place shows."""

MakeDevice = Callable[[], Device]


def check_device(device: Device, *, make: MakeDevice | None = None) -> None:
    """Runs every check. make: the same device in a child process, importable by `spawn`; None leaves that check out."""
    for check in CHECKS:
        check(device)
    if make is not None:
        opens_a_pool_of_another_process(device, make)


def round_trip_keeps_every_byte(device: Device) -> None:
    pool, blocks = _pool(device), _blocks(SLOTS)
    stream = device.stream()
    _done(device.copy_from_host(pool, pool.checked(range(SLOTS)), _addresses(blocks), stream=stream))
    back = np.zeros_like(blocks)
    _done(device.copy_to_host(pool, pool.checked(range(SLOTS)), _addresses(back), stream=stream))
    assert (back == blocks).all(), "bytes changed on the way to the device and back"
    device.close_pool(pool)


def touches_the_named_slots_only(device: Device) -> None:
    pool, blocks, others = _pool(device), _blocks(SLOTS), _blocks(3, seed=2)
    stream = device.stream()
    device.copy_from_host(pool, pool.checked(range(SLOTS)), _addresses(blocks), stream=stream)
    _done(device.copy_from_host(pool, pool.checked([6, 0, 3]), _addresses(others), stream=stream))
    back = np.zeros_like(blocks)
    _done(device.copy_to_host(pool, pool.checked(range(SLOTS)), _addresses(back), stream=stream))
    blocks[[6, 0, 3]] = others
    assert (back == blocks).all(), "a copy wrote to a slot that it does not name, or in another order than asked"
    device.close_pool(pool)


def keeps_the_order_of_a_stream(device: Device) -> None:
    """Many overwrites of one slot, then a read, all queued before any has ended."""
    pool, stream = _pool(device), device.stream()
    writes = [_blocks(1, seed=seed) for seed in range(16)]
    for block in writes:
        device.copy_from_host(pool, pool.checked([1]), _addresses(block), stream=stream)
    back = np.zeros_like(writes[0])
    _done(device.copy_to_host(pool, pool.checked([1]), _addresses(back), stream=stream))
    assert (back == writes[-1]).all(), "copies of one stream overtook each other"
    device.close_pool(pool)


def an_event_marks_what_was_queued_before(device: Device) -> None:
    pool, stream, blocks = _pool(device), device.stream(), _blocks(SLOTS)
    device.copy_from_host(pool, pool.checked(range(SLOTS)), _addresses(blocks), stream=stream)
    mark = stream.record()
    _done(mark)
    assert mark.done(), "an event went back"
    back = np.zeros_like(blocks)
    _done(device.copy_to_host(pool, pool.checked(range(SLOTS)), _addresses(back), stream=device.stream()))
    assert (back == blocks).all(), "an event was done before the copies in front of it"
    device.close_pool(pool)


def an_empty_copy_is_done(device: Device) -> None:
    pool = _pool(device)
    nothing = np.zeros(0, np.uint64)
    _done(device.copy_to_host(pool, pool.checked([]), nothing, stream=device.stream()))
    device.close_pool(pool)


def refuses_slots_that_are_not_there(device: Device) -> None:
    pool = _pool(device)
    for wrong in ([SLOTS], [-1], [2, 2]):
        _refused(lambda wrong=wrong: pool.checked(wrong), InvalidInput)  # type: ignore[misc]
    device.close_pool(pool)


def pins_and_unpins_host_memory(device: Device) -> None:
    pool, blocks = _pool(device), np.zeros((4, sum(SEGMENT_BYTES)), np.uint8)
    region = blocks.data.cast("B")
    device.pin(region)
    blocks[:] = _blocks(4)
    _done(device.copy_from_host(pool, pool.checked(range(4)), _addresses(blocks), stream=device.stream()))
    device.unpin(region)
    device.unpin(region)
    device.pin(region)
    device.unpin(region)
    device.close_pool(pool)


def refuses_handles_that_are_garbage(device: Device) -> None:
    pool = _pool(device)
    handle = device.export_handle(pool)
    assert len(handle) <= HANDLE_BYTES
    for garbage in (b"", b"garbage", handle[:-3], handle[: len(handle) // 2], b"\0" * len(handle), b"[" * 5000):
        _refused(lambda garbage=garbage: device.open_handle(garbage), DeviceError)  # type: ignore[misc]
    device.close_pool(pool)


def works_from_many_threads(device: Device) -> None:
    pool = _pool(device)
    failures: list[BaseException] = []

    def work(slot: int) -> None:
        try:
            stream, block = device.stream(), _blocks(1, seed=slot)
            for _ in range(8):
                _done(device.copy_from_host(pool, pool.checked([slot]), _addresses(block), stream=stream))
                back = np.zeros_like(block)
                _done(device.copy_to_host(pool, pool.checked([slot]), _addresses(back), stream=stream))
                assert (back == block).all(), f"slot {slot} holds another thread's bytes"
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(slot,)) for slot in range(SLOTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    if failures:
        raise failures[0]
    assert not any(thread.is_alive() for thread in threads), f"a thread did not end within {TIMEOUT_S} s"
    device.close_pool(pool)


def opens_a_pool_of_another_process(device: Device, make: MakeDevice) -> None:
    """A child reads what we wrote and writes what we then read; the memory outlives our closing it."""
    pool, blocks = _pool(device), _blocks(SLOTS)
    _done(device.copy_from_host(pool, pool.checked(range(SLOTS)), _addresses(blocks), stream=device.stream()))
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=_child, args=(make, device.export_handle(pool), theirs))
    child.start()
    try:
        assert ours.poll(TIMEOUT_S), "the child did not open the pool"
        assert ours.recv() == blocks.tobytes(), "another process sees other bytes"
        back = np.zeros_like(blocks)
        _done(device.copy_to_host(pool, pool.checked(range(SLOTS)), _addresses(back), stream=device.stream()))
        assert (back == blocks[::-1]).all(), "what another process wrote is not here"
        device.close_pool(pool)
        ours.send(b"closed")
        assert ours.poll(TIMEOUT_S)
        assert ours.recv() == blocks[::-1].tobytes(), "memory went while another process had it open"
    finally:
        child.join(TIMEOUT_S)
        assert child.exitcode == 0


def _child(make: MakeDevice, handle: bytes, pipe: Connection[Any, Any]) -> None:
    device = make()
    pool = device.open_handle(handle)
    blocks = np.zeros((pool.slots, pool.block_bytes), np.uint8)
    stream, slots = device.stream(), pool.checked(range(pool.slots))
    _done(device.copy_to_host(pool, slots, _addresses(blocks), stream=stream))
    turned = np.ascontiguousarray(blocks[::-1])
    _done(device.copy_from_host(pool, slots, _addresses(turned), stream=stream))
    pipe.send(blocks.tobytes())
    pipe.recv()
    _done(device.copy_to_host(pool, slots, _addresses(blocks), stream=stream))
    pipe.send(blocks.tobytes())
    device.close_pool(pool)


def _pool(device: Device) -> DevicePool:
    pool = device.allocate(slots=SLOTS, segment_bytes=SEGMENT_BYTES)
    assert (pool.slots, pool.block_bytes) == (SLOTS, sum(SEGMENT_BYTES))
    return pool


def _blocks(count: int, *, seed: int = 1) -> Array:
    return np.random.default_rng(seed).integers(0, 256, (count, sum(SEGMENT_BYTES)), np.uint8)


def _addresses(blocks: Array) -> Array:
    return np.arange(len(blocks), dtype=np.uint64) * np.uint64(blocks.shape[1]) + np.uint64(blocks.ctypes.data)


def _done(event: Event) -> None:
    assert event.wait(TIMEOUT_S), f"an event was not done within {TIMEOUT_S} s"


def _refused(call: Callable[[], object], error: type[Exception]) -> None:
    try:
        call()
    except error:
        return
    raise AssertionError(f"was not refused with {error.__name__}")


CHECKS: Sequence[Callable[[Device], None]] = (
    round_trip_keeps_every_byte,
    touches_the_named_slots_only,
    keeps_the_order_of_a_stream,
    an_event_marks_what_was_queued_before,
    an_empty_copy_is_done,
    refuses_slots_that_are_not_there,
    pins_and_unpins_host_memory,
    refuses_handles_that_are_garbage,
    works_from_many_threads,
)

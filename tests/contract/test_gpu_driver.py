"""memory/gpu.py against a driver of our own (tests/native/cuda/fake_cuda.cpp): calls, structs, lifetimes, refusals.

What it cannot show is what real hardware does; tests/gpu does that where there is a device.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvdir.testing.wait import eventually
from peer_agent.client.device import DeviceBlocks
from peer_agent.memory.device import DeviceError, make_device
from peer_agent.memory.device_check import check_device
from peer_agent.memory.gpu import CudaDevice
from peer_agent.testing import local_cluster

SOURCE = Path(__file__).parents[1] / "native" / "cuda" / "fake_cuda.cpp"
BLOCK_BYTES = 4096


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("cuda") / "libfakecuda.so"
    subprocess.run(["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-pthread", "-o", path, SOURCE, "-lrt"], check=True)
    return str(path)


async def test_blocks_go_through_agent_and_mover_with_the_cuda_device(library: str, monkeypatch: pytest.MonkeyPatch):
    """Store, load, and tier gpu with the mover opening the pool by its IPC handle: gpu.py on both sides."""
    monkeypatch.setenv("KVDIR_CUDA_LIBRARY", library)
    device = CudaDevice(1)
    with tempfile.TemporaryDirectory(prefix="kvdir-") as directory:
        async with local_cluster(Path(directory), "a", "b") as cluster:
            engine, reader = await cluster.engine("a", device=device), await cluster.engine("b")
            memory = device.allocate(slots=16, segment_bytes=[1024, 3072])
            stored, published = cluster.blocks.chain(4), cluster.blocks.chain(6, root="published")
            data = cluster.blocks.data(published)
            stream = device.stream()
            filled = device.copy_from_host(memory, memory.checked(range(6)), address(data), stream=stream)
            pool = await engine.register_pool(memory)
            assert await pool.publish(published, DeviceBlocks(memory, range(6), ready=filled)) == ""
            await eventually(lambda: cluster.known_blocks("a") == 6, what="published")
            into = cluster.blocks.room(published)
            result = await reader.load(published, into=into)
            cluster.blocks.check(published, into, result)
            assert result.hits == 6
            await engine.store(stored, cluster.blocks.data(stored))
            slots = DeviceBlocks(memory, range(8, 12), ready=stream.record())
            assert (await engine.load(stored, into=slots)).hits == 4
            again = await engine.store(cluster.blocks.chain(4, root="again"), slots)
            assert again.stored == 4


@pytest.fixture
def knobs(library: str) -> Iterator[ctypes.CDLL]:
    loaded = ctypes.CDLL(library)
    gc.collect()
    before = loaded.fake_live()
    yield loaded
    loaded.fake_hold(0)
    loaded.fake_refuse_copies(-1)
    loaded.fake_refuse_records(0)
    gc.collect()
    assert loaded.fake_live() == before, "streams, events, memory or page locks are left"


@pytest.fixture
def device(library: str, knobs: ctypes.CDLL) -> CudaDevice:
    return CudaDevice(1, library=library)


def address(array: np.ndarray) -> np.ndarray:
    return np.arange(len(array), dtype=np.uint64) * np.uint64(array.shape[1]) + np.uint64(array.ctypes.data)


def test_cuda_device_keeps_the_contract(device: CudaDevice, library: str):
    check_device(device, make=functools.partial(CudaDevice, 1, library=library))


def test_names_itself_so_that_another_process_finds_it(device: CudaDevice):
    assert (device.name, device.identity) == ("cuda:1", "cuda:GPU-11111111-1111-1111-1111-111111111111")


def test_no_driver_is_a_reason_with_what_to_do():
    with pytest.raises(DeviceError, match="install the NVIDIA driver"):
        CudaDevice(0, library="libnothing.so.1")
    with pytest.raises(DeviceError, match="unknown kind"):
        make_device("abacus:0")


def test_device_that_is_not_there_is_refused(library: str):
    with pytest.raises(DeviceError, match="2 are visible"):
        CudaDevice(2, library=library)


def test_event_is_not_done_while_the_device_stands_still(device: CudaDevice, knobs: ctypes.CDLL):
    pool, block = device.allocate(slots=1, segment_bytes=[BLOCK_BYTES]), np.ones((1, BLOCK_BYTES), np.uint8)
    stream = device.stream()
    knobs.fake_hold(1)
    event = device.copy_from_host(pool, pool.checked([0]), address(block), stream=stream)
    assert not event.wait(0.02)
    assert not event.done()
    knobs.fake_hold(0)
    assert event.wait(5)


def test_copy_refused_in_the_middle_ends_before_it_fails(device: CudaDevice, knobs: ctypes.CDLL):
    """What was queued still moves bytes: the event says so until it has ended."""
    pool, blocks = device.allocate(slots=4, segment_bytes=[BLOCK_BYTES]), np.ones((4, BLOCK_BYTES), np.uint8)
    stream = device.stream()
    knobs.fake_hold(1)
    knobs.fake_refuse_copies(2)
    event = device.copy_from_host(pool, pool.checked(range(4)), address(blocks), stream=stream)
    assert not event.wait(0.02)
    knobs.fake_hold(0)
    with pytest.raises(DeviceError, match="refused after 2 others: invalid argument"):
        event.wait(5)
    with pytest.raises(DeviceError, match="cannot begin a copy"):
        device.copy_from_host(pool, pool.checked(range(4)), address(blocks), stream=stream)


def test_copy_is_begun_and_fails_when_nothing_can_be_marked_behind_it(device: CudaDevice, knobs: ctypes.CDLL):
    """Not refused: whoever is told so gives the slots away, to which the copy still writes."""
    pool, block = device.allocate(slots=1, segment_bytes=[BLOCK_BYTES]), np.ones((1, BLOCK_BYTES), np.uint8)
    stream = device.stream()
    knobs.fake_refuse_records(1)
    event = device.copy_from_host(pool, pool.checked([0]), address(block), stream=stream)
    with pytest.raises(DeviceError, match="cannot record an event: out of memory"):
        event.wait(5)
    with pytest.raises(DeviceError, match="cannot record an event"):
        stream.record()
    knobs.fake_refuse_records(0)
    assert stream.record().wait(5)


def test_memory_that_is_not_to_be_had_is_a_reason(device: CudaDevice):
    with pytest.raises(DeviceError, match="out of memory"):
        device.allocate(slots=1 << 20, segment_bytes=[1 << 30])


def test_memory_of_nobody_is_not_exported(device: CudaDevice):
    from peer_agent.memory.device import DevicePool, Segment

    array = np.zeros(BLOCK_BYTES, np.uint8)
    pool = DevicePool(device, 1, (Segment(array.ctypes.data, BLOCK_BYTES, BLOCK_BYTES),))
    with pytest.raises(DeviceError, match="allocate it with cudaMalloc"):
        device.export_handle(pool)


def test_handle_that_names_memory_outside_its_allocation_is_refused(device: CudaDevice, monkeypatch: pytest.MonkeyPatch):
    from dataclasses import replace

    from peer_agent.memory.device import DevicePool, Segment
    from peer_agent.memory.gpu import _SEGMENT

    pool = device.allocate(slots=4, segment_bytes=[BLOCK_BYTES])
    export = device._export

    def lying(segment: Segment) -> bytes:
        handle, size, *rest = _SEGMENT.unpack(export(segment))
        return _SEGMENT.pack(handle, 2 * size, *rest)

    wide = replace(pool.segments[0], size_bytes=BLOCK_BYTES + 512, stride_bytes=BLOCK_BYTES + 512)
    with pytest.raises(DeviceError, match="outside its allocation"):
        device.open_handle(device.export_handle(DevicePool(device, 4, (wide,), owner=pool)))
    monkeypatch.setattr(device, "_export", lambda segment: lying(segment) if segment is wide else export(segment))
    with pytest.raises(DeviceError, match="smaller than it says"):
        device.open_handle(device.export_handle(DevicePool(device, 4, (pool.segments[0], wide), owner=pool)))

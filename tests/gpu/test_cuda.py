"""On a real GPU with PyTorch: `pytest -m gpu tests/gpu`. Deselected elsewhere, because it needs the hardware.

The same rules as tests/contract/test_device.py, test_engine_device.py and test_tier_gpu.py check on the fake device.
"""

from __future__ import annotations

import asyncio
import functools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvdir.fingerprint import Fingerprints
from peer_agent.client import aio
from peer_agent.client.device import DeviceBlocks
from peer_agent.core.effects import LoadStatus
from peer_agent.memory.device import DeviceError, DevicePool
from peer_agent.memory.device_check import check_device
from peer_agent.memory.gpu import CudaDevice
from peer_agent.testing import LocalCluster, local_cluster, sample_namespace

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

LAYERS = 4
ROW_BYTES = 64 << 10
BLOCK_BYTES = 2 * LAYERS * ROW_BYTES
SLOTS = 64


@pytest.fixture(scope="module")
def torch() -> Any:
    import torch

    return torch


@pytest.fixture(scope="module")
def device(torch: Any) -> CudaDevice:
    torch.cuda.init()
    return CudaDevice(0)


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvdir-") as path:
        yield Path(path)


def engine_tensors(torch: Any, slots: int = SLOTS) -> list[Any]:
    """As an engine holds them: per layer one (2, slots, row) tensor for K and V."""
    layers = [torch.zeros((2, slots, ROW_BYTES), dtype=torch.uint8, device="cuda:0") for _ in range(LAYERS)]
    return [half for layer in layers for half in (layer[0], layer[1])]


def put(torch: Any, tensors: list[Any], slots: range, data: np.ndarray) -> Any:
    """Begins to write blocks behind a long kernel on the current stream; returns the event behind it."""
    source = torch.from_numpy(data).cuda().view(len(slots), len(tensors), ROW_BYTES)
    a = torch.ones((4096, 4096), device="cuda:0")
    for _ in range(8):
        a = a @ a * 1e-4
    for at, tensor in enumerate(tensors):
        tensor[slots.start : slots.stop] = source[:, at] + (a[0, 0] * 0).to(torch.uint8)
    event = torch.cuda.Event()
    event.record()
    return event


def take(torch: Any, tensors: list[Any], slots: range) -> np.ndarray:
    torch.cuda.synchronize()
    rows: np.ndarray = torch.stack([tensor[slots.start : slots.stop] for tensor in tensors], dim=1).cpu().numpy()
    return rows.reshape(len(slots), -1)


def test_cuda_device_keeps_the_contract(device: CudaDevice):
    check_device(device, make=functools.partial(CudaDevice, 0))


def test_expandable_segments_are_refused_at_registration():
    code = (
        "import torch\nfrom peer_agent.memory.gpu import CudaDevice\n"
        "tensor = torch.zeros((64, 1 << 20), dtype=torch.uint8, device='cuda:0')\nCudaDevice(0).adopt([tensor])"
    )
    environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert "DeviceError" in ended.stderr
    assert "allocate it with cudaMalloc" in ended.stderr


def test_tensors_that_will_not_do_are_refused(torch: Any, device: CudaDevice):
    overlapping = torch.zeros((1, 8), device="cuda:0").expand(4, 8)
    for wrong in ([], [torch.zeros((4, 8))], [torch.zeros((4, 8, 2), device="cuda:0").transpose(1, 2)], [overlapping]):
        with pytest.raises(DeviceError):
            device.adopt(wrong)


def test_own_pool_is_seen_by_torch_and_outlives_its_registration(torch: Any, device: CudaDevice):
    pool = device.allocate(slots=4, segment_bytes=[ROW_BYTES])
    (view,) = device.tensors(pool, torch.uint8)
    view.fill_(7)
    event = torch.cuda.Event()
    event.record()
    assert device.event(event).wait(10)
    host = np.zeros((1, ROW_BYTES), np.uint8)
    at = np.array([host.ctypes.data], np.uint64)
    assert device.copy_to_host(pool, pool.checked([3]), at, stream=device.stream()).wait(10)
    assert (host == 7).all()
    device.close_pool(pool)
    del pool
    assert int(view.sum()) == 4 * ROW_BYTES * 7


async def in_cluster(directory: Path, device: CudaDevice, work: Callable[[LocalCluster, aio.Engine], Any]) -> None:
    namespace = sample_namespace(block_bytes=BLOCK_BYTES)
    async with local_cluster(directory, "a", "b", namespace=namespace, arena_bytes=256 << 20) as cluster:
        await work(cluster, await cluster.engine("a", device=device, deadline_s=10))


async def test_store_and_load_wait_for_events_when_kernels_are_slow(torch: Any, device: CudaDevice, directory: Path):
    tensors = engine_tensors(torch)
    pool = device.adopt(tensors)

    async def work(cluster: LocalCluster, engine: aio.Engine) -> None:
        fingerprints = cluster.blocks.chain(16)
        data = cluster.blocks.data(fingerprints)
        ready = device.event(put(torch, tensors, range(16), data))
        assert not ready.done(), "the kernels were too fast to show anything: make them longer"
        assert (await engine.store(fingerprints, DeviceBlocks(pool, range(16), ready=ready))).stored == 16
        idle = device.stream_of(torch.cuda.current_stream()).record()
        result = await engine.load(fingerprints, into=DeviceBlocks(pool, range(32, 48), ready=idle))
        assert result.count(LoadStatus.HIT_LOCAL) == 16
        assert (take(torch, tensors, range(32, 48)) == data).all()

    await in_cluster(directory, device, work)


async def test_overwritten_under_a_staging_is_absent_never_wrong(torch: Any, device: CudaDevice, directory: Path):
    tensors = engine_tensors(torch)
    memory = device.adopt(tensors)

    async def work(cluster: LocalCluster, engine: aio.Engine) -> None:
        pool, reader = await engine.register_pool(memory), await cluster.engine("b", deadline_s=10)
        chains = [cluster.blocks.chain(16, root=str(number)) for number in range(4)]
        hits = 0
        for number in range(40):
            fingerprints, slots = chains[number % 4], range(16)
            await pool.withdraw(slots)
            event = put(torch, tensors, slots, cluster.blocks.data(fingerprints))
            blocks = DeviceBlocks(memory, slots, ready=device.event(event))
            assert await pool.publish(fingerprints, blocks, deadline_s=10) == ""
            loading = asyncio.ensure_future(checked_load(cluster, reader, fingerprints))
            if number % 2:
                await asyncio.sleep(0)
                pool._table.make_odd(slots)
                put(torch, tensors, slots, cluster.blocks.data(chains[(number + 1) % 4]))
            hits += await loading
        assert hits

    await in_cluster(directory, device, work)


async def checked_load(cluster: LocalCluster, engine: aio.Engine, fingerprints: Fingerprints) -> int:
    into = cluster.blocks.room(fingerprints)
    result = await engine.load(fingerprints, into=into, deadline_s=2)
    cluster.blocks.check(fingerprints, into, result)
    return result.hits


def test_scattered_copies_reach_most_of_one_large_copy(
    torch: Any, device: CudaDevice, record_property: Callable[[str, object], None]
):
    """Both ways, page-locked, 256 blocks of 512 KiB against one copy of 128 MiB in the same rounds."""
    blocks, size = 256, 512 << 10
    pool = device.allocate(slots=2 * blocks, segment_bytes=[size])
    host = torch.empty(blocks * size, dtype=torch.uint8, pin_memory=True)
    base = np.uint64(host.data_ptr())
    scattered = np.arange(blocks, dtype=np.uint64) * np.uint64(size) + base
    slots = pool.checked(np.random.default_rng(1).permutation(2 * blocks)[:blocks])
    whole = DevicePool(device, 1, (type(pool.segments[0])(pool.segments[0].address, blocks * size, blocks * size),), owner=pool)
    stream = device.stream()
    for copy in (device.copy_to_host, device.copy_from_host):
        ratios = []
        for _ in range(7):
            one = timed(lambda copy=copy: copy(whole, whole.checked([0]), scattered[:1], stream=stream))
            many = timed(lambda copy=copy: copy(pool, slots, scattered, stream=stream))
            ratios.append(one / many)
        rate = blocks * size / many / 1e9
        record_property(copy.__name__, f"{rate:.1f} GB/s, {np.median(ratios):.2f} of one copy")
        assert np.median(ratios) > 0.8


def timed(begin: Callable[[], Any]) -> float:
    began_s = time.perf_counter()
    assert begin().wait(30)
    return time.perf_counter() - began_s

"""What SGLang's storage threads get from kvdir on this machine: two agents, pages of 1 MiB, beside memcpy in the same run.

    python bench/hicache.py            one line a step; needs 2 GiB of /dev/shm

SGLang itself is not needed: the backend runs over a copy of its signatures (peer_agent/testing/sglang_contract.py).
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from peer_agent.testing import sample_namespace, sglang_contract
from peer_agent.testing.processes import ProcessCluster
from peer_agent.testing.sglang_pools import FakeHostPool, FakeLatentPool, page_keys, slots, storage_config

sglang_contract.use()
from peer_agent.connectors.sglang import KvdirHiCache  # noqa: E402

PAGES = 128  # SGLang's batch of one storage call
ROUNDS = 5
SHAPE: dict[str, Any] = {"pages": PAGES, "page_size": 64, "layers": 32, "heads": 1, "head_dim": 128}


def rate(pool: FakeHostPool, seconds: list[float]) -> str:
    return f"{PAGES * len(pool.page_bytes(0)) / statistics.median(seconds) / 1e9:5.2f} GB/s"


def timed(work: Callable[[], Any]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def backend(cluster: ProcessCluster, node: str, pool: FakeHostPool, *, mla: bool) -> Any:
    made = KvdirHiCache(storage_config({"agent": cluster.children[node].ready["engine"]}, is_mla_model=mla), {})
    made.register_mem_pool_host(pool)
    return made


def measure(cluster: ProcessCluster, name: str, pool_type: type[FakeHostPool], *, mla: bool, **shape: Any) -> None:
    here, there = pool_type(**(SHAPE | shape)), pool_type(**(SHAPE | shape))
    here.fill([page * 64 for page in range(PAGES)], seed=1)
    writer, reader = backend(cluster, "a", here, mla=mla), backend(cluster, "b", there, mla=mla)
    where = slots(here, range(PAGES))
    target = np.empty_like(here.kv_buffer)
    steps: dict[str, list[float]] = {"memcpy": [], "store": [], "load, here": [], "load, peer": []}
    for turn in range(ROUNDS):
        keys = page_keys(PAGES, root=f"{name}{turn}")
        steps["memcpy"].append(timed(partial(np.copyto, target, here.kv_buffer)))
        steps["store"].append(timed(partial(writer.batch_set_v1, keys, where)))
        assert all(writer.batch_get_v1(keys, where)), "not all were stored: what a peer has just read is locked for a moment"
        steps["load, here"].append(timed(partial(writer.batch_get_v1, keys, where)))
        while reader.batch_exists(keys) < PAGES:
            time.sleep(0.01)
        steps["load, peer"].append(timed(partial(reader.batch_get_v1, keys, where)))
        assert all(there.page_bytes(page * 64) == here.page_bytes(page * 64) for page in (0, PAGES - 1))
    known = page_keys(PAGES, root=f"{name}{ROUNDS - 1}")
    told = ", ".join(f"{step} {rate(here, seconds)}" for step, seconds in steps.items())
    print(f"{name:24} {told}")
    for words, asked in (("all there", known), ("one is not", [*known, *page_keys(1)])):
        looks = sorted(timed(partial(reader.batch_exists, asked)) for _ in range(200))
        print(f"{'':24} exists of {PAGES} pages, {words}: p50 {looks[100] * 1e6:,.0f} us, p99 {looks[198] * 1e6:,.0f} us")
    writer.close()
    reader.close()


async def main() -> None:
    with tempfile.TemporaryDirectory(prefix="kvdir-bench-", dir="/dev/shm") as path:
        cluster = ProcessCluster(Path(path), sample_namespace())
        try:
            coordinator = await cluster.start_coordinator()
            for node in ("a", "b"):
                more = ("--arena-bytes", "1MiB", "--accept-bytes", "300MiB", "--accept-namespaces", "3", "--replica")
                await cluster.start_agent(node, coordinator, *more)
            for name, pool_type, mla, shape in (
                ("page_first, one run", FakeLatentPool, True, {"heads": 2}),
                ("page_first, two runs", FakeHostPool, False, {}),
                ("layer_first, 64 runs", FakeHostPool, False, {"layout": "layer_first"}),
            ):
                await asyncio.to_thread(measure, cluster, name, pool_type, mla=mla, **shape)
        finally:
            await cluster.close()


if __name__ == "__main__":
    asyncio.run(main())

"""Figures of KvdirConnector that docs/engines/vllm-connector.md quotes. Needs the environment of `make test-vllm`:

    $(tests/vllm/install.sh .venv/bin/python) bench/vllm_connector.py [lookup] [saves]

lookup: the scheduler half's answer for 1,024 blocks, from a real replica. saves: what saving costs the request that
computes, behind the step (as it is) and within it.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

BLOCKS = 1024
ROUNDS = 2000


async def lookup() -> None:
    from kvdir.fingerprint import Fingerprints
    from kvdir.testing.wait import eventually
    from peer_agent.client.engine import connect
    from peer_agent.connectors.vllm.connector_lookup import Lookups
    from peer_agent.connectors.vllm.connector_scheduler import SchedulerHalf
    from peer_agent.connectors.vllm.connector_values import CacheGroup
    from peer_agent.testing import local_cluster

    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        async with local_cluster(Path(directory), "a", arena_bytes=8 << 20, replica=True) as cluster:
            namespace = cluster.namespace
            names = list(cluster.blocks.chain(BLOCKS))
            engine = await asyncio.to_thread(connect, cluster.agents["a"].ready.engine, namespace=namespace)
            stored = cluster.blocks.data(Fingerprints.of(names))
            await asyncio.to_thread(engine.store, Fingerprints.of(names), stored, deadline_s=10.0)
            group = CacheGroup(state=namespace.groups[0], namespaces=(namespace,), block_tokens=16)
            lookups = Lookups([[engine]], deadline_s=0.01)
            half = SchedulerHalf(
                [group], lookups, block_tokens=16, hold=lambda _: None, release=lambda _: None, clock_s=time.monotonic
            )
            numbers = itertools.count()

            def ask() -> int | None:
                request = str(next(numbers))
                found = half.matched(request, names, tokens=BLOCKS * 16 + 1, computed=0)
                half.finished(request)
                return found

            await eventually(lambda: ask() == BLOCKS * 16, what="the replica has all blocks")
            wall_us, cpu_us = map(sorted, zip(*(timed_us(ask) for _ in range(ROUNDS)), strict=True))
            for name, took_us in (("wall", wall_us), ("processor", cpu_us)):
                p50, p99 = took_us[ROUNDS // 2], took_us[ROUNDS * 99 // 100]
                print(f"lookup of {BLOCKS} blocks, {name} time: p50 {p50:.0f} us, p99 {p99:.0f} us")
            lookups.close()
            await asyncio.to_thread(engine.close)


def timed_us(call: Callable[[], Any]) -> tuple[float, float]:
    """(wall, processor): on a busy machine only the latter says what a call costs."""
    began_s, began_cpu_ns = time.perf_counter(), time.thread_time_ns()
    call()
    return (time.perf_counter() - began_s) * 1e6, (time.thread_time_ns() - began_cpu_ns) / 1e3


def saves() -> None:
    import tests.vllm.conftest  # noqa: F401  what has to be set before vLLM is imported
    from peer_agent.memory.host_device import HostEvent
    from tests.vllm.connectors import connector, settle, worker_half
    from tests.vllm.engines import Engine
    from tests.vllm.models import make_llama
    from tests.vllm.nodes import Nodes

    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        nodes = Nodes(Path(directory))
        try:
            nodes.start_coordinator()
            nodes.start_agent("a", "--accept-bytes", "256MiB")
            engine = Engine(make_llama(Path(directory) / "model", layers=16), connector=connector(nodes.engine("a")))
            half = worker_half()
            behind, block_tokens = half.start_saves, 32

            def within(plan: Any, *, ready: Any) -> None:
                for job in plan.saves:
                    half._save(job, HostEvent(), time.monotonic() + 5)

            took: dict[str, list[float]] = {"behind the step": [], "within the step": []}
            for number in range(60):
                name = list(took)[number % 2]
                half.start_saves = behind if name == "behind the step" else within  # type: ignore[method-assign]
                prompt = [(number * 7 + n * n) % 256 + 4 for n in range(900)]
                took[name].append(engine.generate(prompt, tokens=1)[0].took_s)
                settle(engine)
            saved = engine.connector.totals
            for name, values in took.items():
                print(f"prompt of 900 tokens, saves {name}: median {statistics.median(values[5:]) * 1e3:.1f} ms")
            blocks = saved["saved_blocks"]
            print(f"one save: {saved['save_us'] / 60 / 1e3:.2f} ms for {blocks // 60} blocks of {block_tokens} tokens")
            engine.close()
        finally:
            nodes.close()


if __name__ == "__main__":
    wanted = sys.argv[1:] or ["lookup", "saves"]
    if "lookup" in wanted:
        asyncio.run(lookup())
    if "saves" in wanted:
        saves()

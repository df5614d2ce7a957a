"""`peer-agent bench fairness` and `bench idle`: what a prefetch costs a load beside it, and what peers cost an idle agent.

fairness: a foreground load of 2 MiB from one peer, alone and while prefetches from the same peer go on; all of it moves
through one reader agent in a process of its own, whose arena is smaller than what it is asked for, so nothing is found at home.
The prefetched gigabytes need not be resident at once: 1 GiB at the owner is prefetched over and over.

idle: CPU time of an agent that is connected to 64 peers and asked for nothing.

Does not: judge a figure.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import numpy as np
import uvloop

from kvdir.fingerprint import Fingerprints
from kvdir.rpc.tls import PLAINTEXT
from peer_agent.cli.bench_nodes import Nodes, bench_nodes, blocks_of, cpu_s
from peer_agent.client import aio
from peer_agent.core.effects import LoadStatus
from peer_agent.server.app import Agent
from peer_agent.server.config import AgentConfig
from peer_agent.v1 import engine_pb2, engine_pb2_grpc

BLOCK_BYTES = 256 << 10
LOAD_BLOCKS = 8
LISTS = 80
ROOM_BLOCKS = 512
"""Of the reader: fewer than LISTS * LOAD_BLOCKS, so that the lists push each other out."""
DEADLINE_S = 10.0
PATIENCE_S = 2.0
"""With the coordinator, which is as busy as the rest of this machine: a miss would be no measurement."""
PREFETCH_POLL_S = 0.01


def run_fairness_bench(
    *, plane: str = "tcp", loads: int = 150, prefetch_bytes: int = 1 << 30, progress: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """{plane, alone_ms, alone_p99_ms, beside_ms, beside_p99_ms, ratio, prefetched_gib, prefetch_gb_per_s, cpu_s_per_gb}."""
    return uvloop.run(_fairness(plane, loads, prefetch_bytes // BLOCK_BYTES, progress))


async def _fairness(plane: str, loads: int, prefetch_blocks: int, progress: Callable[[str], None]) -> dict[str, Any]:
    async with bench_nodes(block_bytes=BLOCK_BYTES) as nodes:
        progress("filling the owner")
        await nodes.start("owner", blocks=prefetch_blocks + LISTS * LOAD_BLOCKS, transports=plane)
        large, small = blocks_of("prefetched", prefetch_blocks), blocks_of("loaded", LISTS * LOAD_BLOCKS)
        await nodes.fill("owner", large)
        await nodes.fill("owner", small)
        await nodes.until_known("owner", len(large) + len(small))
        reader = await nodes.start("reader", blocks=ROOM_BLOCKS, transports=plane, directory_timeout_s=PATIENCE_S)
        lists = itertools.cycle(small.slice(LOAD_BLOCKS * number, LOAD_BLOCKS) for number in range(LISTS))
        engine = await nodes.engine("reader")
        progress("alone")
        await _loads(engine, lists, LISTS)
        alone = await _loads(engine, lists, loads)
        progress("beside prefetches")
        async with _prefetching(nodes, large) as moved:
            spent_s, before, began_s = cpu_s(reader.pid), moved(), time.monotonic()
            beside = await _loads(engine, lists, loads)
            took_s, gone_bytes = time.monotonic() - began_s, (moved() - before) * BLOCK_BYTES
            spent_s = cpu_s(reader.pid) - spent_s
    return {
        "plane": plane,
        "alone_ms": _ms(statistics.median(alone)),
        "alone_p99_ms": _ms(_p99(alone)),
        "beside_ms": _ms(statistics.median(beside)),
        "beside_p99_ms": _ms(_p99(beside)),
        "ratio": round(statistics.median(beside) / statistics.median(alone), 2),
        "prefetched_gib": round(gone_bytes / 2**30, 2),
        "prefetch_gb_per_s": round(gone_bytes / took_s / 1e9, 2),
        "reader_cpu_s_per_gb": round(spent_s / max(gone_bytes / 1e9, 1e-9), 3),
    }


async def _loads(engine: aio.Engine, lists: Iterator[Fingerprints], count: int) -> list[float]:
    """Seconds of each of `count` loads; all of them go to the peer, since what was loaded longest ago has been pushed out."""
    into = np.zeros((LOAD_BLOCKS, BLOCK_BYTES), np.uint8)
    times = []
    for wanted in itertools.islice(lists, count):
        began_s = time.perf_counter()
        result = await engine.load(wanted, into=into, deadline_s=DEADLINE_S)
        times.append(time.perf_counter() - began_s)
        if result.count(LoadStatus.HIT_PEER) < LOAD_BLOCKS:
            raise RuntimeError(f"not everything came from the peer: {result}")
    return times


@contextlib.asynccontextmanager
async def _prefetching(nodes: Nodes, wanted: Fingerprints) -> AsyncIterator[Callable[[], int]]:
    """Prefetches `wanted` again and again while the block runs; yields how many blocks have come so far."""
    engine = await nodes.engine("reader")
    arrived, moving = 0, asyncio.Event()

    async def again_and_again() -> None:
        nonlocal arrived
        async with PLAINTEXT.aio(str(nodes.agents["reader"].ready["engine"]), options=()) as channel:
            stub = engine_pb2_grpc.EngineStub(channel)
            begun = await _came(stub)
            while True:
                await engine.prefetch(wanted, deadline_s=DEADLINE_S)
                until = begun + arrived + len(wanted)
                while (now := await _came(stub)) < until - ROOM_BLOCKS:
                    arrived = now - begun
                    if arrived:
                        moving.set()
                    await asyncio.sleep(PREFETCH_POLL_S)

    running = asyncio.create_task(again_and_again())
    try:
        async with asyncio.timeout(DEADLINE_S):
            await moving.wait()
        yield lambda: arrived
    finally:
        running.cancel()
        await asyncio.wait({running})
        if not running.cancelled():
            running.result()  # it failed


async def _came(stub: engine_pb2_grpc.EngineStub) -> int:
    """Blocks that have ever been made visible at the reader."""
    answer = await stub.Inventory(engine_pb2.InventoryRequest(), timeout=DEADLINE_S)
    return int(answer.namespaces[0].evicted + answer.namespaces[0].committed)


def run_idle_bench(
    *, peers: int = 64, seconds: float = 10.0, plane: str = "tcp", progress: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """{peers, connected, seconds, core_percent}: CPU time of one idle agent, in percent of a core."""
    return uvloop.run(_idle(peers, seconds, plane, progress))


async def _idle(peers: int, seconds: float, plane: str, progress: Callable[[str], None]) -> dict[str, Any]:
    """The peers are agents of this process: what they cost counts for nobody."""
    async with bench_nodes(block_bytes=4096) as nodes, contextlib.AsyncExitStack() as stack:
        progress(f"starting {peers} peers")
        blocks = blocks_of("idle", peers)
        for number in range(peers):
            await _start_peer(nodes, stack, f"peer-{number}", blocks.slice(number, 1), plane)
        agent = await nodes.start("idle", blocks=peers, transports=plane)
        engine = await nodes.engine("idle")
        into = np.zeros((1, 4096), np.uint8)
        connected = 0
        for number in range(peers):
            await nodes.until_known(f"peer-{number}", 1)
            result = await engine.load(blocks.slice(number, 1), into=into, deadline_s=DEADLINE_S)
            connected += result.count(LoadStatus.HIT_PEER)
        progress(f"idle for {seconds:g} s")
        began_s, spent_s = time.monotonic(), cpu_s(agent.pid)
        await asyncio.sleep(seconds)
        share = (cpu_s(agent.pid) - spent_s) / (time.monotonic() - began_s)
    return {"peers": peers, "connected": connected, "seconds": seconds, "core_percent": round(100 * share, 2)}


async def _start_peer(nodes: Nodes, stack: contextlib.AsyncExitStack, name: str, held: Fingerprints, plane: str) -> None:
    config = AgentConfig(
        node=name,
        namespaces=(str(nodes.namespace_file),),
        arena_path=str(nodes.arenas / name),
        arena_bytes=1 << 20,
        coordinators=(nodes.coordinator,),
        listen="127.0.0.1:0",
        http_listen="",
        transports=(plane,),
    )
    agent = await Agent.start(config)
    stack.push_async_callback(agent.close)
    async with await aio.connect(agent.ready.engine, namespace=nodes.namespace) as engine:
        await engine.store(held, bytes(len(held) * nodes.namespace.block_bytes))


def _p99(times: Sequence[float]) -> float:
    return sorted(times)[min(len(times) - 1, int(len(times) * 0.99))]


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)

"""Figures of lookups over gRPC: latency, CPU a call, and where the time goes.

Owns the measuring; `kvdir bench lookup` and bench/lookup.py print it. A real coordinator process holds BLOCKS blocks on each
of a number of nodes; our own client asks for 1,024 of them, half of them unknown, one call at a time. The parts (index, core,
codec) are timed in this process on the same request against the same content; `grpc` is what remains of the
coordinator's CPU time. Does not: judge a figure.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable, Iterable, Sequence
from statistics import median, quantiles
from typing import Any

from kvdir.cli.bench_process import BENCH_NAMESPACE, coordinator_process
from kvdir.client.aio import DirectoryClient
from kvdir.client.publisher import HeartbeatFigures, Publisher, PublisherIdentity
from kvdir.core.answer import LookupMode
from kvdir.core.directory import Directory, Hello, Welcomed
from kvdir.core.event import Event
from kvdir.core.namespaces import Announced
from kvdir.core.outbox import OwnerOutbox
from kvdir.fingerprint import Fingerprints
from kvdir.index import Sketch, open_index
from kvdir.location import StreamState, Tier
from kvdir.rpc.lookup_codec import decode_fingerprints, encode_lookup, encode_lookup_request
from kvdir.testing.wait import eventually
from kvdir.v1 import directory_pb2

__all__ = ["run_lookup_bench"]

DIGEST = BENCH_NAMESPACE.digest
WIDTH = 32
BLOCKS = 65_536
ASKED = 1_024
NODES = (1, 8)
CALLS = 1_500
WARM_CALLS = 100
PART_ROUNDS = 30
_LOADED_S = 30.0

Advance = Callable[..., None]


def run_lookup_bench(*, advance: Advance = lambda n=1.0, text=None: None) -> dict[str, Any]:
    """rows: one per number of nodes: p50_us, p99_us (client), cpu_us_per_call (coordinator) = index + core + codec + grpc."""
    return asyncio.run(_rounds(advance))  # one loop for all: gRPC's poller does not like several in one process


async def _rounds(advance: Advance) -> dict[str, Any]:
    rows = []
    rng = random.Random(1)
    fingerprints = Fingerprints(rng.randbytes(BLOCKS * WIDTH), WIDTH)
    questions = [_question(fingerprints, rng) for _ in range(64)]
    for nodes in NODES:
        advance(0.0, f"{nodes} nodes")
        parts = _parts(fingerprints, questions, nodes)
        with coordinator_process() as coordinator:
            seconds, cpu_s = await _ask(coordinator.address, coordinator.cpu_s, fingerprints, questions, nodes)
        cpu_us = cpu_s / CALLS * 1e6
        rows.append(
            {
                "nodes": nodes,
                "asked_blocks": ASKED,
                "p50_us": median(seconds) * 1e6,
                "p99_us": quantiles(seconds, n=100)[98] * 1e6,
                "cpu_us_per_call": cpu_us,
                **parts,
                "grpc_us": cpu_us - sum(parts.values()),
            }
        )
        advance(1 / len(NODES), f"{nodes} nodes")
    return {"calls": CALLS, "width_bytes": WIDTH, "rows": rows}


def _question(fingerprints: Fingerprints, rng: random.Random) -> Fingerprints:
    """1,024 positions: known stretches of 16 between unknown ones."""
    parts = []
    for _ in range(ASKED // 32):
        start = rng.randrange(BLOCKS - 16)
        parts += [fingerprints.slice(start, 16).packed, rng.randbytes(16 * WIDTH)]
    return Fingerprints(b"".join(parts), WIDTH)


async def _ask(
    address: str, cpu_s: Callable[[], float], fingerprints: Fingerprints, questions: list[Fingerprints], nodes: int
) -> tuple[list[float], float]:
    publishers = [_publisher(address, f"node-{number}", fingerprints) for number in range(nodes)]
    running = [asyncio.create_task(publisher.run()) for publisher in publishers]
    try:
        async with DirectoryClient(address) as client, asyncio.timeout(_LOADED_S + CALLS * 0.05):
            synced = StreamState.SYNCED
            await eventually(lambda: all(item.stats().state is synced for item in publishers), within_s=_LOADED_S)
            for number in range(WARM_CALLS):
                await client.lookup(DIGEST, questions[number % len(questions)])
            seconds, started_cpu_s = [], cpu_s()
            for number in range(CALLS):
                started_s = time.perf_counter()
                answer = await client.lookup(DIGEST, questions[number % len(questions)])
                seconds.append(time.perf_counter() - started_s)
                assert answer.hits >= ASKED // 2
            return seconds, cpu_s() - started_cpu_s
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _publisher(address: str, node: str, fingerprints: Fingerprints) -> Publisher:
    def snapshot() -> tuple[int, Iterable[Event]]:
        return outbox.last_seq, [Event.stored(Tier.CPU, DIGEST, fingerprints)]

    outbox = OwnerOutbox()
    outbox.lose()  # the stream begins with a hole, so the coordinator asks for the snapshot that holds everything
    identity = PublisherIdentity(node, int.from_bytes(os.urandom(8), "big"), "127.0.0.1:1", 0, (BENCH_NAMESPACE,), "bench")
    return Publisher(address, identity, outbox, snapshot=snapshot, heartbeat=HeartbeatFigures)


def _parts(fingerprints: Fingerprints, questions: list[Fingerprints], nodes: int) -> dict[str, float]:
    """Microseconds of each part of one call, in this process."""
    directory = Directory(open_index(), Sketch, now_s=0.0)
    announced = Announced(DIGEST, BENCH_NAMESPACE.canonical().encode(), BENCH_NAMESPACE.block_bytes)
    for number in range(nodes):
        welcomed = directory.hello(Hello(f"node-{number}", number + 1, 0, "127.0.0.1:1", 0, (announced,)), now_s=0.0)
        assert isinstance(welcomed, Welcomed)
        stored = Event.stored(Tier.CPU, DIGEST, fingerprints)
        directory.batch(welcomed.stream, 1, [stored], now_s=0.0)
    scope = directory.namespaces.require(DIGEST).scope
    wire = [
        encode_lookup_request(DIGEST, question, mode=LookupMode.SPARSE, touch=False).SerializeToString()
        for question in questions
    ]
    pairs = list(zip(questions, wire, strict=True))
    answers = [directory.lookup(DIGEST, question, now_s=0.0) for question in questions]
    index_us = _best_us(lambda: [directory.index.lookup(q.packed, q.width, scope=scope) for q, _ in pairs])
    lookup_us = _best_us(lambda: [directory.lookup(DIGEST, q, now_s=0.0) for q, _ in pairs])
    parse = directory_pb2.LookupRequest.FromString
    decode_us = _best_us(lambda: [decode_fingerprints(parse(item).fingerprints) for _, item in pairs])
    encode_us = _best_us(lambda: [encode_lookup(answer).SerializeToString() for answer in answers])
    return {"index_us": index_us, "core_us": max(0.0, lookup_us - index_us), "codec_us": decode_us + encode_us}


def _best_us(work: Callable[[], Sequence[object]]) -> float:
    """Microseconds per item of the fastest of PART_ROUNDS rounds: what the code costs when nothing disturbs it."""
    best_s = float("inf")
    for _ in range(PART_ROUNDS):
        started_s = time.perf_counter()
        done = work()
        best_s = min(best_s, (time.perf_counter() - started_s) / len(done))
    return best_s * 1e6

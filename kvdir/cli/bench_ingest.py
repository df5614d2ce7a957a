"""Figures of ingest: a real coordinator process, fed over gRPC by a client that only writes bytes made before.

Owns the measuring; `kvdir bench ingest` and bench/ingest.py print it. Blocks are new to the index (nothing is a duplicate),
so it grows as it does after a start. The figure that counts is blocks per CPU-second of the coordinator, all its threads: on a
busy machine the wall clock says little, and the best round says more about the code than the median, which is beside it.
`core_*` is the same batches decoded and applied in this process, without gRPC.
Does not: judge a figure.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import grpc.aio

from kvdir.cli.bench_process import BENCH_NAMESPACE, CoordinatorProcess, coordinator_process
from kvdir.core.directory import Directory, Hello, Welcomed
from kvdir.core.event import EVENT_WIDTH, Batch, Event
from kvdir.core.namespaces import Announced
from kvdir.fingerprint import Fingerprints
from kvdir.index import Sketch, open_index
from kvdir.location import Tier
from kvdir.rpc.channel import client_options, wait_ready
from kvdir.rpc.event_codec import decode_events, encode_batch, encode_hello
from kvdir.rpc.tls import PLAINTEXT
from kvdir.v1 import events_pb2

__all__ = ["run_ingest_bench"]

DIGEST = BENCH_NAMESPACE.digest
WIDTH = EVENT_WIDTH
BATCH_BLOCKS = (128, 1024)
BLOCKS_PER_ROUND = {128: 768_000, 1024: 2_048_000}
ROUNDS = 5
EPOCH = 1
CREDIT_EVENTS = 8_192
_ACKED_S = 60.0

Advance = Callable[..., None]


def run_ingest_bench(*, advance: Advance = lambda n=1.0, text=None: None) -> dict[str, Any]:
    """rows: one per batch size: blocks_per_s, blocks_per_cpu_s (coordinator), cpu_us_per_batch, core_us_per_batch."""
    return asyncio.run(_rounds(advance))  # one loop for all: gRPC's poller does not like several in one process


async def _rounds(advance: Advance) -> dict[str, Any]:
    rows = []
    for size in BATCH_BLOCKS:
        advance(0.0, f"{size} blocks a batch")
        rounds = [await _round(size, number, advance) for number in range(ROUNDS)]
        batches = BLOCKS_PER_ROUND[size] // size
        core_us = _core_us_per_batch(size)
        cpu_s, best_cpu_s = median(cpu for _, cpu, _ in rounds), min(cpu for _, cpu, _ in rounds)
        rows.append(
            {
                "batch_blocks": size,
                "width_bytes": WIDTH,
                "blocks_per_s": median(BLOCKS_PER_ROUND[size] / wall for wall, _, _ in rounds),
                "blocks_per_cpu_s": BLOCKS_PER_ROUND[size] / cpu_s,
                "blocks_per_cpu_s_best": BLOCKS_PER_ROUND[size] / best_cpu_s,
                "cpu_us_per_batch": cpu_s / batches * 1e6,
                "core_us_per_batch": core_us,
                "coordinator_rss_mib": max(rss for _, _, rss in rounds) / 2**20,
            }
        )
    return {"rounds": ROUNDS, "rows": rows}


async def _round(size: int, number: int, advance: Advance) -> tuple[float, float, int]:
    """(wall seconds, coordinator CPU seconds, its resident bytes) for one fresh coordinator."""
    messages = _messages(BLOCKS_PER_ROUND[size], size)
    with coordinator_process("--credit-events", str(CREDIT_EVENTS)) as coordinator:
        wall_s, cpu_s = await _feed(coordinator, messages)
        rss_bytes = coordinator.rss_bytes()
    advance(1 / (len(BATCH_BLOCKS) * ROUNDS), f"{size} blocks a batch, round {number + 1}")
    return wall_s, cpu_s, rss_bytes


async def _feed(coordinator: CoordinatorProcess, messages: list[bytes]) -> tuple[float, float]:
    async with PLAINTEXT.aio(coordinator.address, options=client_options()) as channel:
        await wait_ready(channel, target=coordinator.address, timeout_s=5.0)
        call: Any = channel.stream_stream(
            "/kvdir.v1.Events/Publish",
            request_serializer=None,
            response_deserializer=events_pb2.PublishResponse.FromString,
        )()
        await call.write(hello_message())
        assert (await call.read()).WhichOneof("message") == "welcome"
        acked = Acked()
        reader = asyncio.create_task(acked.read(call, len(messages)))
        cpu_s, started_s = coordinator.cpu_s(), time.perf_counter()
        async with asyncio.timeout(_ACKED_S):
            for number, message in enumerate(messages):
                await acked.wait(number - CREDIT_EVENTS)
                await call.write(message)
            await reader
        wall_s = time.perf_counter() - started_s
        cpu_s = coordinator.cpu_s() - cpu_s
        call.cancel()
    return wall_s, cpu_s


class Acked:
    """What the coordinator has acknowledged, one event per message."""

    def __init__(self) -> None:
        self._seq = 0
        self._more = asyncio.Event()

    async def read(self, call: Any, last_seq: int) -> None:
        while self._seq < last_seq:
            response = await call.read()
            if response is grpc.aio.EOF:
                raise RuntimeError("the coordinator ended the call")
            self._seq = max(self._seq, response.ack.seq)
            self._more.set()

    async def wait(self, seq: int) -> None:
        while self._seq < seq:
            self._more.clear()
            await self._more.wait()


def hello_message() -> bytes:
    return encode_hello(
        node="bench",
        epoch=EPOCH,
        last_seq=0,
        peer_address="127.0.0.1:1",
        started_unix_ms=0,
        namespaces=[BENCH_NAMESPACE],
        agent_version="bench",
    ).SerializeToString()


def _messages(blocks: int, size: int) -> list[bytes]:
    """Batches of one event with `size` random fingerprints each, as they go over the wire."""
    return [
        encode_batch(
            EPOCH,
            Batch(
                number + 1,
                (Event.stored(Tier.CPU, DIGEST, Fingerprints(os.urandom(size * WIDTH), WIDTH)),),
            ),
        ).SerializeToString()
        for number in range(blocks // size)
    ]


def _core_us_per_batch(size: int) -> float:
    """Decoding and applying alone, in this process."""
    messages = _messages(256_000, size)
    directory = Directory(open_index(), Sketch, now_s=0.0)
    namespace = Announced(DIGEST, BENCH_NAMESPACE.canonical().encode(), BENCH_NAMESPACE.block_bytes)
    welcomed = directory.hello(Hello("bench", EPOCH, 0, namespaces=(namespace,)), now_s=0.0)
    assert isinstance(welcomed, Welcomed)
    started_s = time.perf_counter()
    for message in messages:
        batch = events_pb2.PublishRequest.FromString(message).batch
        directory.batch(welcomed.stream, batch.first_seq, decode_events(batch.events), now_s=1.0)
    return (time.perf_counter() - started_s) / len(messages) * 1e6

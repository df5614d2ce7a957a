"""Figures of lookups over gRPC: by which call, from which client, by how many processes; latency, rate, and CPU at both ends.

Owns the measuring; `kvdir bench lookup` and bench/lookup.py print it. A real coordinator process holds BLOCKS blocks on each of
NODES nodes; our own clients ask for 1,024 of them, half of them unknown, by turns each way (so that whatever else the machine
does hits all of them). Then load generators in processes of their own saturate one lookup worker, two, and the main process.
The parts of a lookup (index, core, codec) are timed in this process against the same content. Does not: judge a figure.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

import msgspec

from kvdir.cli.bench_lookup_load import Plan
from kvdir.cli.bench_process import BENCH_NAMESPACE, CoordinatorProcess, coordinator_process
from kvdir.cli.output import CommandFailed, Exit
from kvdir.client.aio import DirectoryClient
from kvdir.client.publisher import HeartbeatFigures, Publisher, PublisherIdentity
from kvdir.client.sync import Client
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
NODES = 8
ROUNDS = 6
CALLS = 200
"""Lookups of one way in one round."""
PART_ROUNDS = 30
WORKERS = 2
LOAD_ROUNDS = 3
LOAD_S = 2.0
_LOADED_S = 30.0

Advance = Callable[..., None]


def run_lookup_bench(*, advance: Advance = lambda n=1.0, text=None: None) -> dict[str, Any]:
    """rows: by way, latencies and rates; by processes, rates when saturated. `*_cpu_us`: per lookup.

    of_unary: p50 beside that of the same client's unary calls with as many under way; of_one: rate beside one worker's.
    """
    return asyncio.run(_run(advance))  # one loop for all: gRPC's poller does not like several in one process


async def _run(advance: Advance) -> dict[str, Any]:
    rng = random.Random(1)
    blocks = Fingerprints(rng.randbytes(BLOCKS * WIDTH), WIDTH)
    questions = [_question(blocks, rng) for _ in range(64)]
    document: dict[str, Any] = {"blocks": BLOCKS, "nodes": NODES, "asked_blocks": ASKED, **_parts(blocks, questions)}
    with coordinator_process("--lookup-workers", str(WORKERS)) as coordinator:
        async with _published(coordinator.address, blocks):
            rows = await _saturate(coordinator, questions[0], advance)
    with coordinator_process() as coordinator:
        async with _published(coordinator.address, blocks):
            rows = await _latencies(coordinator, questions, advance) + rows
    return {**document, "rows": rows}


def _question(fingerprints: Fingerprints, rng: random.Random) -> Fingerprints:
    """1,024 positions: known stretches of 16 between unknown ones."""
    parts = []
    for _ in range(ASKED // 32):
        start = rng.randrange(BLOCKS - 16)
        parts += [fingerprints.slice(start, 16).packed, rng.randbytes(16 * WIDTH)]
    return Fingerprints(b"".join(parts), WIDTH)


# -- one client, each way ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Tally:
    """What one way took so far. wall_s, server_s, client_s: of all its rounds."""

    seconds: list[float] = field(default_factory=list)
    wall_s: float = 0.0
    server_s: float = 0.0
    client_s: float = 0.0


async def _latencies(coordinator: CoordinatorProcess, questions: list[Fingerprints], advance: Advance) -> list[dict[str, Any]]:
    address = coordinator.address
    with Client(address, stream=False) as blocking_unary, Client(address) as blocking:
        async with DirectoryClient(address, stream=False) as unary, DirectoryClient(address) as stream:
            ways: dict[tuple[str, str, int], Callable[[list[float]], Awaitable[object]]] = {
                ("asyncio", "unary", 1): lambda out: _ask(unary, questions, 1, out),
                ("asyncio", "stream", 1): lambda out: _ask(stream, questions, 1, out),
                ("asyncio", "unary", 16): lambda out: _ask(unary, questions, 16, out),
                ("asyncio", "stream", 16): lambda out: _ask(stream, questions, 16, out),
                ("blocking", "unary", 1): lambda out: asyncio.to_thread(_ask_blocking, blocking_unary, questions, 1, out),
                ("blocking", "stream", 1): lambda out: asyncio.to_thread(_ask_blocking, blocking, questions, 1, out),
                ("blocking", "unary", 16): lambda out: asyncio.to_thread(_ask_blocking, blocking_unary, questions, 16, out),
                ("blocking", "stream", 16): lambda out: asyncio.to_thread(_ask_blocking, blocking, questions, 16, out),
            }
            tallies = {way: _Tally() for way in ways}
            for number in range(ROUNDS + 1):
                for way, ask in ways.items():
                    await _round(coordinator, ask, tallies[way] if number else _Tally())  # the first one connects and warms up
                advance(0.7 / (ROUNDS + 1), "clients")
    return [_row(way, tally, tallies[way[0], "unary", way[2]]) for way, tally in tallies.items()]


async def _round(coordinator: CoordinatorProcess, ask: Callable[[list[float]], Awaitable[object]], tally: _Tally) -> None:
    started_s, server_s, client_s = time.perf_counter(), coordinator.cpu_s(), time.process_time()
    await ask(tally.seconds)
    tally.wall_s += time.perf_counter() - started_s
    tally.server_s += coordinator.cpu_s() - server_s
    tally.client_s += time.process_time() - client_s


async def _ask(client: DirectoryClient, questions: list[Fingerprints], under_way: int, out: list[float]) -> None:
    async def one(count: int) -> None:
        for number in range(count):
            started_s = time.perf_counter()
            answer = await client.lookup(DIGEST, questions[number % len(questions)])
            out.append(time.perf_counter() - started_s)
            assert answer.hits >= ASKED // 2

    await asyncio.gather(*(one(CALLS // under_way) for _ in range(under_way)))


def _ask_blocking(client: Client, questions: list[Fingerprints], under_way: int, out: list[float]) -> None:
    def one() -> None:
        for number in range(CALLS // under_way):
            started_s = time.perf_counter()
            client.lookup(DIGEST, questions[number % len(questions)])
            out.append(time.perf_counter() - started_s)

    threads = [threading.Thread(target=one) for _ in range(under_way)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _row(way: tuple[str, str, int], tally: _Tally, unary: _Tally) -> dict[str, Any]:
    count, (client, call, under_way) = len(tally.seconds), way
    return {
        "client": client,
        "call": call,
        "under_way": under_way,
        "p50_us": median(tally.seconds) * 1e6,
        "p99_us": quantiles(tally.seconds, n=100)[98] * 1e6,
        "of_unary": median(tally.seconds) / median(unary.seconds),
        "lookups_per_s": count / tally.wall_s,
        "of_one": None,
        "server_cpu_us": tally.server_s / count * 1e6,
        "client_cpu_us": tally.client_s / count * 1e6,
        "server_cores": None,
    }


# -- many processes, saturated -------------------------------------------------------------------------------------------


async def _saturate(coordinator: CoordinatorProcess, question: Fingerprints, advance: Advance) -> list[dict[str, Any]]:
    """Two load generators in any case, so that what differs is who answers."""
    settings = {
        "main": ({"main": 1}, {"main": 1}),
        "1 worker": ({"worker-0": 1}, {"worker-0": 1}),
        "2 workers": ({"worker-0": 1}, {"worker-1": 1}),
    }
    sums: dict[str, list[dict[str, float]]] = {name: [] for name in settings}
    for _ in range(LOAD_ROUNDS):
        for name, generators in settings.items():
            sums[name].append(await asyncio.to_thread(_load, coordinator, question, generators))
            advance(0.3 / LOAD_ROUNDS / len(settings), name)
    rate = {name: median(item["per_s"] for item in found) for name, found in sums.items()}
    return [
        {
            "client": "generator",
            "call": f"stream, {name}",
            "under_way": 64,
            "p50_us": None,
            "p99_us": None,
            "of_unary": None,
            "lookups_per_s": rate[name],
            "of_one": rate[name] / rate["1 worker"],
            "server_cpu_us": median(item["server_us"] for item in found),
            "client_cpu_us": median(item["client_us"] for item in found),
            "server_cores": median(item["cores"] for item in found),
        }
        for name, found in sums.items()
    ]


def _load(coordinator: CoordinatorProcess, question: Fingerprints, generators: Iterable[dict[str, int]]) -> dict[str, float]:
    servers = [coordinator.pid, *coordinator.children()]
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(_generator()) for _ in generators]
        for process, wanted in zip(processes, generators, strict=True):
            plan = Plan(coordinator.address, DIGEST, question.packed, question.width, wanted, LOAD_S, servers)
            _say(process, msgspec.json.encode(plan))
        for process in processes:
            _hear(process)
        for process in processes:  # all are connected
            _say(process, b"go")
        figures = [_hear(process) for process in processes]
    per_s = sum(item["lookups"] / item["seconds"] for item in figures)
    cores = median(item["server_cpu_s"] / item["seconds"] for item in figures)
    client_cores = sum(item["cpu_s"] / item["seconds"] for item in figures)
    return {"per_s": per_s, "cores": cores, "server_us": cores / per_s * 1e6, "client_us": client_cores / per_s * 1e6}


@contextlib.contextmanager
def _generator() -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "kvdir.cli.bench_lookup_load"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (entry or os.getcwd() for entry in sys.path)))}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _say(process: subprocess.Popen[bytes], line: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(line + b"\n")
    process.stdin.flush()


def _hear(process: subprocess.Popen[bytes]) -> dict[str, float]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise CommandFailed("a load generator ended early; its words are above", exit=Exit.START)
    said: dict[str, float] = msgspec.json.decode(line)
    return said


# -- the coordinator's content, and the parts of a lookup ----------------------------------------------------------------


@contextlib.asynccontextmanager
async def _published(address: str, blocks: Fingerprints) -> AsyncIterator[None]:
    """NODES nodes that hold all of them, for as long as this is entered."""
    publishers = [_publisher(address, f"node-{number}", blocks) for number in range(NODES)]
    running = [asyncio.create_task(publisher.run()) for publisher in publishers]
    try:
        synced = StreamState.SYNCED
        await eventually(lambda: all(item.stats().state is synced for item in publishers), within_s=_LOADED_S)
        yield
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


def _parts(fingerprints: Fingerprints, questions: list[Fingerprints]) -> dict[str, float]:
    """Microseconds of each part of one call, in this process."""
    directory = Directory(open_index(), Sketch, now_s=0.0)
    announced = Announced(DIGEST, BENCH_NAMESPACE.canonical().encode(), BENCH_NAMESPACE.block_bytes)
    for number in range(NODES):
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

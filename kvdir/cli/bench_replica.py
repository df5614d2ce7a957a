"""Figures of lookups in shared memory beside the same lookups over gRPC, in one run.

Owns the measuring; `kvdir bench replica` prints it. A coordinator process holds BLOCKS blocks on each of NODES nodes; another
process follows it and keeps the region; this one asks for 1,024 blocks, one lookup at a time, by turns each way: the native
reader alone, `kvdir.attach` (all of Python), LookupStream, and the unary call, the last two blocking and from asyncio. Once
while nothing is written, once while a further process publishes CHURN_BLOCKS a second. Does not: judge a figure.

    python -m kvdir.cli.bench_replica keep PATH ADDRESS         the process that keeps the region
    python -m kvdir.cli.bench_replica churn ADDRESS             the one that publishes
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from kvdir.cli.bench_process import BENCH_NAMESPACE, coordinator_process
from kvdir.client.aio import DirectoryClient
from kvdir.client.attached import Attached, attach
from kvdir.client.publisher import HeartbeatFigures, Publisher, PublisherIdentity
from kvdir.client.replica import Replica
from kvdir.client.sync import Client
from kvdir.core.event import Event
from kvdir.core.outbox import OwnerOutbox
from kvdir.fingerprint import Fingerprints
from kvdir.index import RegionReader
from kvdir.location import Tier
from kvdir.testing.wait import eventually

__all__ = ["run_replica_bench"]

DIGEST = BENCH_NAMESPACE.digest
WIDTH = 32
BLOCKS = 65_536
NODES = 8
ASKED = 1_024
ROUNDS = 30
REPLICA_CALLS = 100
RPC_CALLS = 20
NO_CALL = ("native reader", "kvdir.attach")
CHURN_BLOCKS = 200_000
CHURN_EVENT_BLOCKS = 1_000
CHURN_HELD = 100
_READY_S = 60.0
_END_S = 10.0

Advance = Callable[..., None]
Ask = Callable[[Fingerprints], Any]


def run_replica_bench(*, advance: Advance = lambda n=1.0, text=None: None) -> dict[str, Any]:
    """rows: by load, question and way: p50_us, p99_us, and times: p50 of the quickest call over gRPC over p50 of this one.

    torn: share of lookups that were not whole, because the writer was at it; an agent asks a coordinator then.
    """
    return asyncio.run(_run(advance))


async def _run(advance: Advance) -> dict[str, Any]:
    rng = random.Random(1)
    blocks = Fingerprints(rng.randbytes(BLOCKS * WIDTH), WIDTH)
    questions = {
        "one prompt": [_prompt(blocks, rng) for _ in range(16)],
        "half unknown": [_mixed(blocks, rng) for _ in range(16)],
    }
    with coordinator_process() as coordinator, tempfile.TemporaryDirectory(prefix="kvdir-bench-", dir="/dev/shm") as place:
        path, address = str(Path(place) / "replica"), coordinator.address
        async with _published(address, blocks):
            with _child("keep", path, address), attach(path) as attached:
                await _until_replicated(attached, blocks)
                rows = await _measure(attached, path, address, "idle", questions)
                advance(0.5, "idle")
                with _child("churn", address):
                    blocks_per_s = await _churning(address)
                    rows += await _measure(attached, path, address, "churn", questions)
                    blocks_per_s = (blocks_per_s + await _churning(address)) / 2
                advance(0.5, "churn")
    return {"blocks": BLOCKS, "nodes": NODES, "asked_blocks": ASKED, "churn_blocks_per_s": blocks_per_s, "rows": rows}


def _prompt(blocks: Fingerprints, rng: random.Random) -> Fingerprints:
    """Neighbours, as a prompt asks for them."""
    return blocks.slice(rng.randrange(BLOCKS - ASKED), ASKED)


def _mixed(blocks: Fingerprints, rng: random.Random) -> Fingerprints:
    """Known stretches of 16 between unknown ones."""
    parts = []
    for _ in range(ASKED // 32):
        parts += [blocks.slice(rng.randrange(BLOCKS - 16), 16).packed, rng.randbytes(16 * WIDTH)]
    return Fingerprints(b"".join(parts), WIDTH)


# -- what is asked, and who answers --------------------------------------------------------------------------------------


async def _measure(
    attached: Attached, path: str, address: str, load: str, questions: dict[str, list[Fingerprints]]
) -> list[dict[str, Any]]:
    """All ways by turns, so that whatever else the machine does hits all of them."""
    reader, scope = RegionReader(path), int.from_bytes(DIGEST[:8], "little")
    with Client(address) as client, Client(address, stream=False) as unary:
        async with DirectoryClient(address) as aio_client, DirectoryClient(address, stream=False) as aio_unary:
            ways: dict[str, Ask] = {
                "native reader": lambda asked: reader.lookup(asked.packed, asked.width, scope=scope),
                "kvdir.attach": lambda asked: attached.lookup(DIGEST, asked),
                "stream": lambda asked: client.lookup(DIGEST, asked),
                "unary": lambda asked: unary.lookup(DIGEST, asked),
                "stream, asyncio": lambda asked: aio_client.lookup(DIGEST, asked),
                "unary, asyncio": lambda asked: aio_unary.lookup(DIGEST, asked),
            }
            tallies = {(name, way): _Tally() for name in questions for way in ways}
            for number in range(ROUNDS + 1):
                for (name, way), tally in tallies.items():  # the first round connects
                    await _round(ways[way], questions[name], way, tally if number else _Tally())
    reader.close()
    return [row for name in questions for row in _rows(load, name, {way: tallies[name, way] for way in ways})]


@dataclass(slots=True)
class _Tally:
    """seconds: of each lookup. torn: how many were not whole."""

    seconds: list[float] = field(default_factory=list)
    torn: int = 0

    def add(self, seconds: float, hits: int) -> None:
        self.seconds.append(seconds)
        self.torn += hits < ASKED // 2


def _rows(load: str, question: str, tallies: dict[str, _Tally]) -> list[dict[str, Any]]:
    p50_s = {way: median(tally.seconds) for way, tally in tallies.items()}
    best_call_s = min(p50_s[way] for way in tallies if way not in NO_CALL)
    return [
        {
            "load": load,
            "question": question,
            "way": way,
            "p50_us": p50_s[way] * 1e6,
            "p99_us": quantiles(tally.seconds, n=100)[98] * 1e6,
            "times": best_call_s / p50_s[way],
            "torn": tally.torn / len(tally.seconds),
        }
        for way, tally in tallies.items()
    ]


async def _round(ask: Ask, questions: list[Fingerprints], way: str, tally: _Tally) -> None:
    calls = REPLICA_CALLS if way in NO_CALL else RPC_CALLS
    if "asyncio" not in way:  # in a thread: the publishers of this process go on
        await asyncio.to_thread(_timed, ask, questions, calls, tally)
        return
    for number in range(calls):
        began_s = time.perf_counter()
        answer = await ask(questions[number % len(questions)])
        tally.add(time.perf_counter() - began_s, answer.hits)


def _timed(ask: Ask, questions: list[Fingerprints], calls: int, tally: _Tally) -> None:
    for number in range(calls):
        began_s = time.perf_counter()
        answer = ask(questions[number % len(questions)])
        tally.add(time.perf_counter() - began_s, answer.hits)


# -- processes around it -------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _published(address: str, blocks: Fingerprints) -> AsyncIterator[None]:
    """NODES streams of this process, each with all the blocks."""
    publishers = [_publisher(address, f"node-{number}", OwnerOutbox(), blocks) for number in range(NODES)]
    running = [asyncio.create_task(publisher.run()) for publisher in publishers]
    try:
        yield
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _publisher(address: str, node: str, outbox: OwnerOutbox, blocks: Fingerprints | None = None) -> Publisher:
    def snapshot() -> tuple[int, Iterable[Event]]:
        return outbox.last_seq, [Event.stored(Tier.CPU, DIGEST, blocks)] if blocks is not None else []

    if blocks is not None:
        outbox.lose()  # the stream begins with a hole, so the coordinator asks for the snapshot that holds everything
    identity = PublisherIdentity(node, int.from_bytes(os.urandom(8), "big"), "127.0.0.1:1", 0, (BENCH_NAMESPACE,), "bench")
    return Publisher(address, identity, outbox, snapshot=snapshot, heartbeat=HeartbeatFigures)


async def _until_replicated(attached: Attached, blocks: Fingerprints) -> None:
    last = blocks.slice(BLOCKS - 64, 64)

    def everywhere() -> bool:
        return list(attached.lookup(DIGEST, last).coverage().values()) == [64] * NODES

    await eventually(everywhere, within_s=_READY_S, what="the replica knows every block of every node")


async def _churning(address: str) -> float:
    """Blocks a second that the coordinator takes in now."""
    async with DirectoryClient(address) as client:
        began_s, before = time.monotonic(), (await client.status()).events_applied
        await asyncio.sleep(1.0)
        events = (await client.status()).events_applied - before
        return events * CHURN_EVENT_BLOCKS / (time.monotonic() - began_s)


@contextlib.contextmanager
def _child(*arguments: str) -> Iterator[None]:
    """This module as a process, ended by its pid whatever happens."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (entry or os.getcwd() for entry in sys.path)))}
    process = subprocess.Popen([sys.executable, "-m", "kvdir.cli.bench_replica", *arguments], env=env)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def _keep(path: str, address: str) -> None:
    await Replica(address, path=path, name="bench").run()


async def _churn(address: str) -> None:
    """Stores new blocks and removes as many old ones, CHURN_BLOCKS a second in all, in events of CHURN_EVENT_BLOCKS."""
    outbox, rng = OwnerOutbox(), random.Random()
    publisher = asyncio.create_task(_publisher(address, "churn", outbox).run())
    held: deque[Fingerprints] = deque()
    due_s = time.monotonic()
    while not publisher.done():
        held.append(Fingerprints(rng.randbytes(CHURN_EVENT_BLOCKS * WIDTH), WIDTH))
        outbox.append(Event.stored(Tier.CPU, DIGEST, held[-1]))
        if len(held) > CHURN_HELD:
            outbox.append(Event.removed(Tier.CPU, DIGEST, held.popleft()))
        due_s += 2 * CHURN_EVENT_BLOCKS / CHURN_BLOCKS
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    asyncio.run(_keep(*sys.argv[2:]) if sys.argv[1] == "keep" else _churn(*sys.argv[2:]))

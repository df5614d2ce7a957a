"""Figures of the block store in Redis: blocks stored a second, lookups, bytes a block, beside memory and the naive layout.

Owns the measuring; `kvdir bench redis` prints it. One run starts its own servers (kvdir.testing.redis_servers): the store in
one Redis, one Valkey and a six-process cluster, the same contract over the native index of this process, and what most others
do: a hash per block, HSET block:<namespace>:<fingerprint> <node>:<tier> 1. Bytes are the growth of used_memory of the masters
(their replication backlogs are kept small: some megabytes that do not depend on the number of blocks). Client and servers share
the machine's cores. Does not: judge a figure.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from statistics import median
from typing import Any, Protocol

import numpy as np

from kvdir.store import BlockStore, make_store
from kvdir.store.base import Change, ChangeKind, Writer
from kvdir.store.memory import MemoryBlockStore
from kvdir.store.resp import Argument, Connection, Credentials
from kvdir.testing.redis_servers import redis_cluster, redis_server, valkey_program

__all__ = ["run_redis_bench"]

BATCH_BLOCKS = 2048
ASKED_BLOCKS = 1024
HOLDERS = 4
WIDTH = 16
LOOKUPS = 100
ASKERS = 8
_D = 60.0
_NAMESPACE = bytes(range(32))

Advance = Callable[..., None]


class Subject(Protocol):
    """What is measured: blocks go in for holder number 0, 1, ..., lookups come out."""

    async def store(self, holder: int, packed: bytes) -> None: ...
    async def lookup(self, packed: bytes, *, prefix: bool) -> int: ...
    async def used_bytes(self) -> int: ...


def run_redis_bench(blocks: int, *, advance: Advance = lambda n=1.0, text=None: None) -> dict[str, Any]:
    """rows: one per store. Raises NotInstalled without redis-server or a Valkey."""
    return asyncio.run(_rounds(blocks, advance))


async def _rounds(blocks: int, advance: Advance) -> dict[str, Any]:
    fingerprints = np.random.default_rng(1).bytes(blocks * WIDTH)
    rows = []

    async def row(name: str, subject: Subject) -> None:
        rows.append(await _row(name, subject, fingerprints))
        advance(1 / 5, name)

    memory = MemoryBlockStore()
    await row("memory, this process", await StoreSubject.opened(memory))
    for name, program in (("redis", ""), ("valkey", valkey_program())):
        with redis_server(program=program) as server:
            store = make_store(server.url)
            await row(name, await StoreSubject.opened(store))
            await store.close()
    with redis_cluster("--repl-backlog-size", "16kb") as cluster:
        store = make_store(cluster.url)
        await row("redis cluster, 3 masters", await StoreSubject.opened(store))
        await store.close()
    with redis_server() as server:
        connection = await Connection.connect(server.address, credentials=Credentials())
        await row("redis, a hash per block", NaiveSubject(connection))
        connection.abort("done")
        await connection.wait_closed()
    naive = rows[-1]
    for each in rows:
        for column in ("bytes_1_holder", "bytes_4_holders"):
            each[f"x_fewer_{column}"] = naive[column] / each[column] if each[column] else None
    return {"blocks": blocks, "batch_blocks": BATCH_BLOCKS, "asked_blocks": ASKED_BLOCKS, "width_bytes": WIDTH, "rows": rows}


async def _row(name: str, subject: Subject, fingerprints: bytes) -> dict[str, Any]:
    blocks = len(fingerprints) // WIDTH
    empty = await subject.used_bytes()
    seconds, used = [], []
    for holder in range(HOLDERS):
        begun = time.perf_counter()
        for at in range(0, len(fingerprints), BATCH_BLOCKS * WIDTH):
            await subject.store(holder, fingerprints[at : at + BATCH_BLOCKS * WIDTH])
        seconds.append(time.perf_counter() - begun)
        used.append(await subject.used_bytes() - empty)
    questions = _questions(fingerprints)
    sparse = await _times(lambda question: subject.lookup(question, prefix=False), questions)
    prefix = await _times(lambda question: subject.lookup(question, prefix=True), questions)
    return {
        "store": name,
        "new_blocks_per_s": blocks / seconds[0],
        "more_holders_per_s": blocks * (HOLDERS - 1) / sum(seconds[1:]),
        "sparse_p50_us": median(sparse) * 1e6,
        "prefix_p50_us": median(prefix) * 1e6,
        "sparse_per_s": await _rate(lambda question: subject.lookup(question, prefix=False), questions),
        "prefix_per_s": await _rate(lambda question: subject.lookup(question, prefix=True), questions),
        "bytes_1_holder": used[0] / blocks,
        "bytes_4_holders": used[-1] / blocks,
    }


def _questions(fingerprints: bytes) -> list[bytes]:
    """Stretches of blocks that are all held."""
    starts = np.random.default_rng(2).integers(0, len(fingerprints) // WIDTH - ASKED_BLOCKS, LOOKUPS)
    return [fingerprints[start * WIDTH : (start + ASKED_BLOCKS) * WIDTH] for start in starts.tolist()]


async def _times(ask: Callable[[bytes], Awaitable[int]], questions: Sequence[bytes]) -> list[float]:
    """One question at a time."""
    seconds = []
    for question in questions:
        begun = time.perf_counter()
        hits = await ask(question)
        seconds.append(time.perf_counter() - begun)
        assert hits == ASKED_BLOCKS, "every block asked for is held"
    return seconds


async def _rate(ask: Callable[[bytes], Awaitable[int]], questions: Sequence[bytes]) -> float:
    """Questions a second when ASKERS ask side by side."""
    begun = time.perf_counter()
    left = list(questions)

    async def asker() -> None:
        while left:
            await ask(left.pop())

    await asyncio.gather(*(asker() for _ in range(ASKERS)))
    return len(questions) / (time.perf_counter() - begun)


class StoreSubject:
    """A block store; each holder belongs to a node of its own."""

    def __init__(self, store: BlockStore, writers: list[tuple[Writer, int]]) -> None:
        self._store = store
        self._writers = writers

    @classmethod
    async def opened(cls, store: BlockStore) -> StoreSubject:
        await store.open(deadline_s=_D)
        writers = []
        for number in range(HOLDERS):
            writer = (await store.take(f"node-{number}", number + 1, deadline_s=_D)).writer
            (holder,) = await store.create(writer, [(_NAMESPACE, 2)], visible=True, deadline_s=_D)
            writers.append((writer, holder))
        return cls(store, writers)

    async def store(self, holder: int, packed: bytes) -> None:
        writer, number = self._writers[holder]
        await self._store.write(writer, [Change(ChangeKind.STORE, number, 1, packed, WIDTH)], deadline_s=_D)

    async def lookup(self, packed: bytes, *, prefix: bool) -> int:
        return (await self._store.lookup(packed, WIDTH, scope=1, prefix=prefix, deadline_s=_D)).hits

    async def used_bytes(self) -> int:
        return (await self._store.health(deadline_s=_D)).used_bytes


class NaiveSubject:
    """A hash per block, over the same connection code; commands of a batch in one write."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def store(self, holder: int, packed: bytes) -> None:
        await self._run([("HSET", key, f"node-{holder}:2", 1) for key in _keys(packed)])

    async def lookup(self, packed: bytes, *, prefix: bool) -> int:
        """Asks for every block; nothing tells it where a prefix ends."""
        return sum(bool(holders) for holders in await self._run([("HKEYS", key) for key in _keys(packed)]))

    async def used_bytes(self) -> int:
        (info,) = await self._run([("INFO", "memory")])
        return int(info.partition(b"used_memory:")[2].partition(b"\r")[0])

    async def _run(self, commands: list[tuple[Argument, ...]]) -> list[Any]:
        return await self._connection.send(commands)


def _keys(packed: bytes) -> list[str]:
    name = _NAMESPACE.hex()[:16]
    return [f"block:{name}:{packed[at : at + WIDTH].hex()}" for at in range(0, len(packed), WIDTH)]

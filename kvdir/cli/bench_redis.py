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
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from statistics import median
from typing import Any, Protocol

import numpy as np

from kvdir.store import BlockStore, make_store
from kvdir.store.base import Change, ChangeKind, Writer
from kvdir.store.connection import Connection
from kvdir.store.memory import MemoryBlockStore
from kvdir.store.reply import Argument
from kvdir.store.url import Credentials
from kvdir.testing.redis_servers import ClusterOfServers, Server, redis_cluster, redis_server, valkey_program

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
    """rows: one per store. Raises NotInstalled without redis-server or a Valkey.

    new_per_s, again_per_s: blocks stored a second for the first holder, and for three more. sparse_us, prefix_us: median of a
    lookup of 1,024 blocks that are all held; ..._per_s: such lookups a second, eight at a time. bytes_1, bytes_4: of a block
    with one holder, with four; fewer_...: the hash per block takes so many times as much.
    """
    return asyncio.run(_rounds(blocks, advance))


async def _rounds(blocks: int, advance: Advance) -> dict[str, Any]:
    fingerprints = np.random.default_rng(1).bytes(blocks * WIDTH)
    async with AsyncExitStack() as stack:
        subjects = await _subjects(stack)
        rows = await _measure(subjects, fingerprints, advance)
    naive = rows[-1]
    for row in rows:
        for column in ("bytes_1", "bytes_4"):
            row[f"fewer_{column[6:]}"] = naive[column] / row[column]
    return {"blocks": blocks, "batch_blocks": BATCH_BLOCKS, "asked_blocks": ASKED_BLOCKS, "width_bytes": WIDTH, "rows": rows}


async def _subjects(stack: AsyncExitStack) -> dict[str, Subject]:
    servers: dict[str, Server | ClusterOfServers] = {
        "redis": stack.enter_context(redis_server()),
        "valkey": stack.enter_context(redis_server(program=valkey_program())),
        "redis cluster": stack.enter_context(redis_cluster("--repl-backlog-size", "16kb")),
    }
    stores: dict[str, BlockStore] = {"memory": MemoryBlockStore()}
    stores |= {name: make_store(server.url) for name, server in servers.items()}
    subjects: dict[str, Subject] = {}
    for name, store in stores.items():
        stack.push_async_callback(store.close)
        subjects[name] = await StoreSubject.opened(store)
    naive = stack.enter_context(redis_server())
    connection = await Connection.connect(naive.address, credentials=Credentials())
    stack.push_async_callback(connection.wait_closed)
    stack.callback(connection.abort, "done")
    return subjects | {"hash per block": NaiveSubject(connection)}


async def _measure(subjects: dict[str, Subject], fingerprints: bytes, advance: Advance) -> list[dict[str, Any]]:
    """Everything in turns, so that what else the machine does meets all alike."""
    blocks, size = len(fingerprints) // WIDTH, BATCH_BLOCKS * WIDTH
    empty = {name: await subject.used_bytes() for name, subject in subjects.items()}
    used: dict[str, list[float]] = {name: [] for name in subjects}
    stored: dict[str, list[float]] = {name: [0.0] * HOLDERS for name in subjects}
    for holder in range(HOLDERS):
        for at in range(0, len(fingerprints), size):
            for name, subject in subjects.items():
                stored[name][holder] += await _seconds(subject.store(holder, fingerprints[at : at + size]))
        for name, subject in subjects.items():
            used[name].append((await subject.used_bytes() - empty[name]) / blocks)
        advance(0.8 / HOLDERS, f"holder {holder + 1}")
    asked: dict[tuple[str, bool], list[float]] = {(name, prefix): [] for name in subjects for prefix in (False, True)}
    rates = dict.fromkeys(asked, 0.0)
    questions = _questions(fingerprints)
    for question in questions:
        for name, prefix in asked:
            asked[name, prefix].append(await _seconds(_ask(subjects[name], question, prefix)))
    for at in range(0, LOOKUPS, ASKERS):
        for name, prefix in rates:
            several = (_ask(subjects[name], question, prefix) for question in questions[at : at + ASKERS])
            rates[name, prefix] += await _seconds(asyncio.gather(*several))
    advance(0.2, "lookups")
    return [
        {
            "store": name,
            "new_per_s": blocks / stored[name][0],
            "again_per_s": blocks * (HOLDERS - 1) / sum(stored[name][1:]),
            "sparse_us": median(asked[name, False]) * 1e6,
            "prefix_us": median(asked[name, True]) * 1e6,
            "sparse_per_s": LOOKUPS / rates[name, False],
            "prefix_per_s": LOOKUPS / rates[name, True],
            "bytes_1": used[name][0],
            "bytes_4": used[name][-1],
        }
        for name in subjects
    ]


async def _seconds(work: Awaitable[object]) -> float:
    begun = time.perf_counter()
    await work
    return time.perf_counter() - begun


async def _ask(subject: Subject, question: bytes, prefix: bool) -> None:
    assert await subject.lookup(question, prefix=prefix) == ASKED_BLOCKS, "every block asked for is held"


def _questions(fingerprints: bytes) -> list[bytes]:
    """Stretches of blocks that are all held."""
    starts = np.random.default_rng(2).integers(0, len(fingerprints) // WIDTH - ASKED_BLOCKS, LOOKUPS)
    return [fingerprints[start * WIDTH : (start + ASKED_BLOCKS) * WIDTH] for start in starts.tolist()]


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

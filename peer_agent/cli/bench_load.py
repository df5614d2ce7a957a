"""`peer-agent bench load`: a whole load, engine call to verified bytes, beside the sum of what it is made of.

    whole   engine.load of blocks that only peers have: the engine's call, the agent's lookup, locks and reads, the copy out
    parts   the same steps done one after another from outside, of the same blocks, in the same round:
            call    an engine RPC with as many fingerprints and as large an answer (Lookup of local blocks)
            lookup  the coordinator
            lock    Peer.Lock at the owners, all at once; unlock likewise
            read    the data plane alone: verified reads into an arena of ours, from all owners at once
            copy    the agent's arena to the engine's memory, as the load itself reports it
and asked_ms, what the lookup took inside the load: the same call, or with `replica` a look into the reader's own memory.
Owners and reader are agents in processes of their own. The reader's arena is smaller than what it is asked for in turn, so
every load finds nothing at home. Medians; ratio = whole / sum of the parts in the same round.

Does not: judge a figure (bench/load.py does).
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import uvloop

from kvdir.client.aio import DirectoryClient
from kvdir.fingerprint import Fingerprints
from kvdir.rpc.channel import client_options
from kvdir.rpc.lookup_codec import encode_fingerprints
from kvdir.rpc.tls import PLAINTEXT
from peer_agent import _native
from peer_agent.cli.bench_nodes import READY_S, Nodes, bench_nodes, blocks_of
from peer_agent.client import aio
from peer_agent.client.results import LoadResult
from peer_agent.core.records import BLOCK_RECORD
from peer_agent.memory.arena import Arena
from peer_agent.memory.layout import SizeClass
from peer_agent.transport.base import Connection, ReadList, ReadStatus
from peer_agent.transport.registry import PlaneOptions, open_transports
from peer_agent.v1 import peer_pb2, peer_pb2_grpc

SETS = 3
"""Of blocks, loaded in turn; the reader has room for fewer."""
ROOM_SETS = 2
DEADLINE_S = 10.0
PLANES = ("shm", "tcp")
OWNERS = ((1, False), (4, False), (4, True))
"""How many, and whether each holds everything."""
CASES = len(PLANES) * len(OWNERS)
PARTS = ("call", "lookup", "lock", "read", "copy", "unlock")


@dataclass(frozen=True, slots=True)
class Case:
    """owners: agents that hold blocks; each all of them, or each its share."""

    plane: str
    owners: int
    replicas: bool
    blocks: int
    block_bytes: int

    @property
    def words(self) -> str:
        if self.owners == 1:
            return "1 peer"
        return f"{self.owners} peers, each holds all" if self.replicas else f"{self.owners} peers, each a share"

    def held_by(self, owner: int, wanted: Fingerprints) -> Fingerprints:
        if self.replicas or self.owners == 1:
            return wanted
        return wanted.select(range(owner, len(wanted), self.owners))

    def served_by(self, owner: int, wanted: Fingerprints) -> Fingerprints:
        """What the parts read from this owner: an equal share each."""
        return wanted.select(range(owner, len(wanted), self.owners))


def run_load_bench(
    *,
    planes: Sequence[str] = PLANES,
    owners: Sequence[tuple[int, bool]] = OWNERS,
    blocks: int = 256,
    block_bytes: int = 256 << 10,
    rounds: int = 15,
    replica: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """{"rows": [{plane, peers, whole_ms, parts_ms, ratio, <part>_ms..., asked_ms, gb_per_s, p99_ms}]}; times are medians.

    replica: the reader keeps one and asks it instead of the coordinator.

    Needs about (SETS * owners + 2 * ROOM_SETS) * blocks * block_bytes of shared memory, 1.1 GiB as it stands.
    """
    rows = []
    for plane in planes:
        for count, replicas in owners:
            case = Case(plane, count, replicas, blocks, block_bytes)
            progress(f"{plane}, {case.words}")
            rows.append(uvloop.run(_run(case, rounds, replica=replica)))
    return {"blocks": blocks, "block_bytes": block_bytes, "replica": replica, "rows": rows}


async def _run(case: Case, rounds: int, *, replica: bool) -> dict[str, Any]:
    async with bench_nodes(block_bytes=case.block_bytes) as nodes:
        wanted = [blocks_of(f"set {number}", case.blocks) for number in range(SETS)]
        for owner in range(case.owners):
            await nodes.start(f"owner-{owner}", blocks=SETS * case.blocks, transports=case.plane)
            for number, item in enumerate(wanted):
                held = case.held_by(owner, item)
                await nodes.fill(f"owner-{owner}", held)
                await nodes.until_known(f"owner-{owner}", (number + 1) * len(held))
        await nodes.start("reader", blocks=ROOM_SETS * case.blocks, transports=case.plane, replica=replica)
        engine = await nodes.engine("reader")
        if replica:
            await _until_replicated(engine, wanted)
        async with _outside(nodes, case) as outside:
            return _row(case, await _rounds(case, rounds, engine, outside, wanted))


async def _until_replicated(engine: aio.Engine, wanted: Sequence[Fingerprints]) -> None:
    ends_s = time.monotonic() + READY_S
    for item in wanted:
        while engine.directory.lookup(engine.namespace.digest, item).hits < len(item):
            if time.monotonic() > ends_s:
                raise RuntimeError(f"the reader's replica is not whole after {READY_S:g} s: {engine.directory.replica}")
            await asyncio.sleep(0.02)


async def _rounds(
    case: Case, rounds: int, engine: aio.Engine, outside: Outside, wanted: Sequence[Fingerprints]
) -> list[dict[str, float]]:
    into = np.zeros((case.blocks, case.block_bytes), np.uint8)
    times = []
    for number in range(rounds + SETS):
        chosen = wanted[number % SETS]
        began_s = time.perf_counter()
        result = await engine.load(chosen, into=into, deadline_s=DEADLINE_S)
        took = {"whole": time.perf_counter() - began_s, "asked": result.timings.lookup_us / 1e6}
        if result.hits < case.blocks or result.peer_bytes < case.blocks * case.block_bytes:
            raise RuntimeError(f"not everything came from peers: {result}")
        took |= await outside.parts(chosen, engine, result)
        if number >= SETS:  # the first turn warms up connections and maps pages
            times.append(took)
    return times


def _row(case: Case, times: Sequence[dict[str, float]]) -> dict[str, Any]:
    whole = sorted(item["whole"] for item in times)
    sums = [sum(item[part] for part in PARTS) for item in times]
    median_s = statistics.median(whole)
    return {
        "plane": case.plane,
        "from": case.words,
        "whole_ms": _ms(median_s),
        "parts_ms": _ms(statistics.median(sums)),
        "ratio": round(statistics.median(item["whole"] / total for item, total in zip(times, sums, strict=True)), 3),
        **{f"{part}_ms": _ms(statistics.median(item[part] for item in times)) for part in (*PARTS, "asked")},
        "gb_per_s": round(case.blocks * case.block_bytes / median_s / 1e9, 2),
        "p99_ms": _ms(whole[min(len(whole) - 1, int(len(whole) * 0.99))]),
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


# ---- the parts, from outside ----


@dataclass(slots=True)
class Outside:
    """Does by hand what the reader's agent does, with an arena and connections of its own."""

    case: Case
    directory: DirectoryClient
    owners: list[Owner]
    arena: Arena
    digest: bytes

    async def parts(self, wanted: Fingerprints, engine: aio.Engine, result: LoadResult) -> dict[str, float]:
        """Seconds by part."""
        shares = [self.case.served_by(owner, wanted) for owner in range(len(self.owners))]
        took = {"copy": result.timings.copy_us / 1e6}
        with _timed(took, "call"):
            await engine.lookup(wanted)
        with _timed(took, "lookup"):
            await self.directory.lookup(self.digest, wanted)
        with _timed(took, "lock"):
            locks = await asyncio.gather(*(owner.lock(self.digest, wanted) for owner in self.owners))
        lists = self._lists(wanted, shares, locks)
        with _timed(took, "read"):
            outcomes = await asyncio.gather(
                *(owner.plane.read(item, deadline_s=DEADLINE_S) for owner, item in zip(self.owners, lists, strict=True))
            )
        with _timed(took, "unlock"):
            await asyncio.gather(*(owner.unlock(answer.lock) for owner, answer in zip(self.owners, locks, strict=True)))
        if any(outcome.statuses.strip(bytes([ReadStatus.OK])) for outcome in outcomes):
            raise RuntimeError("the parts: not every block arrived")
        return took

    def _lists(
        self, wanted: Fingerprints, shares: Sequence[Fingerprints], locks: Sequence[peer_pb2.LockResponse]
    ) -> list[ReadList]:
        lists, first = [], 0
        for owner, (share, answer) in enumerate(zip(shares, locks, strict=True)):
            records = np.frombuffer(answer.blocks, BLOCK_RECORD)[owner :: len(shares)]
            slots = range(first, first + len(share))
            first += len(share)
            offsets = np.array([self.arena.classes[0].offset(slot) for slot in slots], "<u8").tobytes()
            lists.append(
                ReadList(
                    lock=answer.lock,
                    epoch=answer.epoch,
                    namespace_digest=self.digest,
                    fingerprints=share.packed,
                    width=share.width,
                    records=records.tobytes(),
                    destinations=offsets,
                    capability=answer.capability,
                )
            )
        return lists


@dataclass(slots=True)
class Owner:
    stub: peer_pb2_grpc.PeerStub
    plane: Connection

    async def lock(self, digest: bytes, wanted: Fingerprints) -> peer_pb2.LockResponse:
        request = peer_pb2.LockRequest(namespace_digest=digest, fingerprints=encode_fingerprints(wanted), lease_ms=5000)
        answer: peer_pb2.LockResponse = await self.stub.Lock(request, timeout=DEADLINE_S)
        return answer

    async def unlock(self, lock: int) -> None:
        await self.stub.Unlock(peer_pb2.UnlockRequest(locks=[lock]), timeout=DEADLINE_S)


@contextlib.asynccontextmanager
async def _outside(nodes: Nodes, case: Case) -> AsyncIterator[Outside]:
    digest = nodes.namespace.digest
    classes = [SizeClass(digest, case.block_bytes, case.blocks)]
    async with contextlib.AsyncExitStack() as stack:
        arena = stack.enter_context(Arena.create(str(nodes.arenas / "outside"), classes, epoch=1, prefault=True))
        offsets = np.array([arena.classes[0].offset(slot) for slot in range(case.blocks)], "<u8").tobytes()
        _native.begin_write(arena.region, offsets)
        transport = open_transports((case.plane,), arena, options=PlaneOptions())[case.plane]
        stack.push_async_callback(transport.close)
        directory = await stack.enter_async_context(DirectoryClient(nodes.coordinator))
        owners = []
        for name in [name for name in nodes.agents if name != "reader"]:
            channel = PLAINTEXT.aio(str(nodes.agents[name].ready["peer"]), options=client_options())
            stub = peer_pb2_grpc.PeerStub(await stack.enter_async_context(channel))
            hello = await stub.Hello(peer_pb2.HelloRequest(protocol_version=1, node="outside", transports=[case.plane]))
            (offer,) = [item for item in hello.transports if item.transport == case.plane]
            owners.append(Owner(stub, await transport.connect(offer.descriptor, deadline_s=DEADLINE_S)))
        yield Outside(case, directory, owners, arena, digest)


@contextlib.contextmanager
def _timed(took: dict[str, float], part: str) -> Any:
    began_s = time.perf_counter()
    yield
    took[part] = time.perf_counter() - began_s

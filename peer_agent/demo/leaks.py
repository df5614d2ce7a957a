"""What the processes of a run hold while it lasts, and what of that they did not give back.

Every second: descriptors, threads and private memory of each process, from /proc. At the end, once the engines have gone: slots
and locks, from the agents themselves, which must be 0. Something has grown if it is more at the end than it was half way
through the process's life by more than its slack; the halves are compared because pools, caches and replay rings fill first.
A life shorter than MIN_SAMPLES tells nothing about growth, and the report says so. Does not: fail a run.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvdir.rpc.channel import client_options
from kvdir.rpc.tls import PLAINTEXT
from peer_agent.demo.cluster import DemoCluster
from peer_agent.demo.processes import Child
from peer_agent.v1 import engine_pb2, engine_pb2_grpc

SAMPLE_S = 1.0
MIN_SAMPLES = 20
CALL_S = 2.0
POLL_S = 0.1
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

SLACK: Mapping[str, int] = {"descriptors": 8, "threads": 4, "memory_bytes": 24 << 20}
"""memory_bytes: a replay ring (ring_bytes, 16 MiB) may still be filling, and allocators keep pages."""

MUST_BE_ZERO = ("reserved", "quarantined", "retired", "locks")


@dataclass(slots=True)
class Life:
    """One process. samples: {"descriptors", "threads", "memory_bytes"} in time order. left: slots and locks at the end."""

    name: str
    pid: int
    samples: list[Mapping[str, int]] = field(default_factory=list)
    left: dict[str, int] = field(default_factory=dict)

    @property
    def tells(self) -> bool:
        return len(self.samples) >= MIN_SAMPLES

    def half_way(self, what: str) -> int:
        """The most of the middle fifth, so that one quiet moment does not make the end look like growth."""
        count = len(self.samples)
        return max((sample[what] for sample in self.samples[2 * count // 5 : 3 * count // 5 + 1]), default=0)

    def at_end(self, what: str) -> int:
        return self.samples[-1][what] if self.samples else 0

    def faults(self) -> list[str]:
        """In words; empty if nothing was kept."""
        out = [f"{self.name}: {count} {what} left at the end" for what, count in self.left.items() if count]
        for what, slack in SLACK.items() if self.tells else ():
            half, end = self.half_way(what), self.at_end(what)
            if end > half + slack:
                out.append(f"{self.name}: {what} grew from {half:,} half way to {end:,}")
        return out

    def document(self) -> dict[str, Any]:
        figures: dict[str, Any] = {"process": self.name, "samples": len(self.samples), "left": dict(self.left)}
        return figures | {what: {"half_way": self.half_way(what), "end": self.at_end(what)} for what in SLACK}


class Watch:
    """Samples a cluster's processes; a restarted agent begins a life of its own."""

    def __init__(self, cluster: DemoCluster) -> None:
        self._cluster = cluster
        self._lives: dict[int, Life] = {}

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            self.sample()
            await asyncio.sleep(SAMPLE_S)

    def sample(self) -> None:
        for child in (*self._cluster.agents, *self._cluster.coordinators):
            self._sample(child)

    def _sample(self, child: Child) -> None:
        if child.running and (held := held_by(child.pid)) is not None:
            self._lives.setdefault(child.pid, Life(child.name, child.pid)).samples.append(held)

    async def finish(self, *, within_s: float) -> list[Life]:
        """Call it when no engine is attached any more. Waits until slots and locks are given back, or the time is up."""
        until_s = asyncio.get_running_loop().time() + within_s
        left = await self._left()
        while any(map(any, (held.values() for held in left))) and asyncio.get_running_loop().time() < until_s:
            await asyncio.sleep(POLL_S)
            left = await self._left()
        self.sample()
        for agent, held in zip(self._cluster.agents, left, strict=True):
            self._lives[agent.pid].left = held
        return list(self._lives.values())

    async def _left(self) -> Sequence[dict[str, int]]:
        return [await _held_slots(self._cluster.engine_address(node)) for node in range(self._cluster.plan.nodes)]


def held_by(pid: int) -> dict[str, int] | None:
    """Of a process of ours; None when it has ended. memory_bytes: resident and not of a mapped file (proc_pid_statm(5))."""
    root = Path("/proc") / str(pid)
    try:
        resident, shared = map(int, (root / "statm").read_text().split()[1:3])
        descriptors, threads = len(os.listdir(root / "fd")), len(os.listdir(root / "task"))
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    return {"descriptors": descriptors, "threads": threads, "memory_bytes": (resident - shared) * PAGE_BYTES}


async def _held_slots(address: str) -> dict[str, int]:
    async with PLAINTEXT.aio(address, options=client_options()) as channel:
        answer = await engine_pb2_grpc.EngineStub(channel).Inventory(engine_pb2.InventoryRequest(), timeout=CALL_S)
    slots = {what: sum(getattr(item, what) for item in answer.namespaces) for what in MUST_BE_ZERO if what != "locks"}
    return {**slots, "locks": answer.locks}

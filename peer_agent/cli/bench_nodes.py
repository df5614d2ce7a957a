"""Real nodes for benches: a coordinator and agents as processes of their own, and engines that fill them.

Everything it starts is ended by its pid, and the arenas go with their directory (peer_agent/demo/processes.py, cluster.py).
Does not: measure.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvdir.client.aio import DirectoryClient
from kvdir.fingerprint import Fingerprints
from kvdir.namespace import Namespace
from peer_agent.client import aio
from peer_agent.demo.cluster import SHARED_MEMORY, locked_directory
from peer_agent.demo.content import Content
from peer_agent.demo.processes import Child
from peer_agent.memory.layout import SUPERBLOCK_BYTES, stride_bytes

READY_S = 60.0
GRACE_S = 5.0
STORE_BYTES = 64 << 20
"""Of one store, when an owner is filled."""


def bench_namespace(block_bytes: int) -> Namespace:
    """Blocks of 16 tokens, of this size."""
    return Namespace.create(
        model="bench", weights="-", kv_dtype="float16", layout="NHD", block_tokens=16,
        groups=[{"kind": "full", "layers": 1, "kv_heads": 1, "head_dim": 64}], position="rope:theta=10000",
        parallel="replicated", adapter="none", hash_scheme="blake2b-chain", hash_seed="0", cache_policy="exact",
        bytes_override=block_bytes,
    )  # fmt: skip


def blocks_of(name: str, count: int) -> Fingerprints:
    """`count` blocks that no other name gives."""
    return Fingerprints.chain((b"%d" % number for number in range(count)), root=name.encode())


@dataclass(slots=True)
class Nodes:
    """agents: by name. coordinator: its gRPC address."""

    namespace: Namespace
    coordinator: str
    agents: dict[str, Child]
    arenas: Path
    _work: Path
    _stack: contextlib.AsyncExitStack

    @property
    def namespace_file(self) -> Path:
        return self._work / "namespace.json"

    async def start(self, name: str, *, blocks: int, **settings: Any) -> Child:
        """An agent whose arena holds `blocks`. settings: of peer-agent serve, with underscores."""
        values: dict[str, Any] = {
            "node": name,
            "namespaces": self.namespace_file,
            "arena_path": self.arenas / name,
            "arena_bytes": SUPERBLOCK_BYTES + blocks * stride_bytes(self.namespace.block_bytes),
            "coordinators": self.coordinator,
            "listen": "127.0.0.1:0",
            "http_listen": "127.0.0.1:0",
            "log_level": "warning",
        }
        flags = [part for key, value in (values | settings).items() for part in _flag(key.replace("_", "-"), value)]
        arguments = ["-m", "peer_agent", "serve", "--output", "json", *flags]
        child = await Child.start(name, arguments, log=self._work / f"{name}.log", ready_s=READY_S)
        self._stack.push_async_callback(child.end, grace_s=GRACE_S)
        self.agents[name] = child
        return child

    async def engine(self, name: str, **options: Any) -> aio.Engine:
        """Attached to an agent; closed with the nodes."""
        engine = await aio.connect(str(self.agents[name].ready["engine"]), namespace=self.namespace, engine="bench", **options)
        self._stack.push_async_callback(engine.close)
        return engine

    async def fill(self, name: str, fingerprints: Fingerprints) -> None:
        """Stores bytes that follow from the fingerprints (demo/content.py), and waits until the directory knows."""
        content = Content(self.namespace.block_bytes)
        async with await aio.connect(str(self.agents[name].ready["engine"]), namespace=self.namespace) as engine:
            step = max(1, STORE_BYTES // self.namespace.block_bytes)
            for first in range(0, len(fingerprints), step):
                part = fingerprints.slice(first, min(step, len(fingerprints) - first))
                data = np.empty((len(part), self.namespace.block_bytes), np.uint8)
                for fingerprint, block in zip(part, data, strict=True):
                    content.fill(fingerprint, block)
                stored = await engine.store(part, data, deadline_s=30)
                if stored.stored < len(part):
                    raise RuntimeError(f"{name}: stored {stored.stored} of {len(part)} blocks {stored.reason}")
        await self.until_known(name, len(fingerprints))

    async def until_known(self, name: str, blocks: int) -> None:
        ends_s = time.monotonic() + READY_S
        async with DirectoryClient(self.coordinator) as directory:
            while time.monotonic() < ends_s:
                for view in await directory.nodes():
                    if view.trust.node == name and sum(held.blocks.value for held in view.holdings) >= blocks:
                        return
                await asyncio.sleep(0.02)
        raise RuntimeError(f"the coordinator does not know {name}'s {blocks} blocks after {READY_S:g} s")


def _flag(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}", str(value)]


@contextlib.asynccontextmanager
async def bench_nodes(*, block_bytes: int) -> AsyncIterator[Nodes]:
    """A running coordinator; agents are for the caller to start."""
    namespace = bench_namespace(block_bytes)
    fields = json.loads(namespace.canonical())
    del fields["version"]
    with tempfile.TemporaryDirectory(prefix="kvdir-bench-") as work, locked_directory(SHARED_MEMORY) as arenas:
        (Path(work) / "namespace.json").write_text(json.dumps(fields))
        async with contextlib.AsyncExitStack() as stack:
            arguments = ["-m", "kvdir", "serve", "--listen", "127.0.0.1:0", "--http-listen", "", "--output", "json"]
            log = Path(work) / "coordinator.log"
            coordinator = await Child.start("coordinator", arguments, log=log, ready_s=READY_S)
            stack.push_async_callback(coordinator.end, grace_s=GRACE_S)
            yield Nodes(namespace, str(coordinator.ready["grpc"]), {}, arenas, Path(work), stack)


def cpu_s(pid: int) -> float:
    """User and system time of a process, all threads (proc(5))."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

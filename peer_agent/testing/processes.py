"""A coordinator and agents as real processes, for tests that kill, stop or cut them off.

Arenas are in a directory on shared memory that the caller owns; everything started here is ended by `close`. For what needs no
processes of its own, peer_agent/testing/cluster.py is faster.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc.aio

from kvdir.client.aio import DirectoryClient
from kvdir.errors import KvdirError
from kvdir.fingerprint import Fingerprints
from kvdir.namespace import Namespace
from peer_agent.client import aio
from peer_agent.client.results import LoadResult
from peer_agent.demo.processes import Child
from peer_agent.testing.cluster import PATIENCE_S, Blocks
from peer_agent.testing.network import Host
from peer_agent.testing.timing import took
from peer_agent.v1 import engine_pb2, engine_pb2_grpc

READY_S = 20.0


class ProcessCluster:
    """Processes on free ports; arenas in a directory of their own on shared memory."""

    def __init__(self, directory: Path, namespace: Namespace) -> None:
        self.directory = directory
        self.namespace = namespace
        self.blocks = Blocks(namespace)
        self.children: dict[str, Child] = {}
        self.stack = contextlib.AsyncExitStack()
        fields = json.loads(namespace.canonical())
        fields.pop("version")
        self.namespace_file = directory / "namespace.json"
        self.namespace_file.write_text(json.dumps(fields))

    async def start(self, name: str, *arguments: str, host: Host | None = None) -> Child:
        """`host`: where it runs and listens; default: here, on loopback."""
        log, prefix = self.directory / f"{name}.log", host.prefix if host else ()
        insecure = ("--insecure",) if host else ()
        child = await Child.start(name, (*arguments, *insecure), log=log, ready_s=READY_S, prefix=prefix)
        self.children[name] = child
        return child

    async def start_coordinator(
        self, *more: str, name: str = "coordinator", listen: str = "127.0.0.1:0", host: Host | None = None
    ) -> str:
        child = await self.start(
            name, "-m", "kvdir", "serve", "--listen", f"{host.address}:0" if host else listen, "--http-listen", "",
            "--heartbeat-interval-ms", "100", "--output", "json", *more, host=host,
        )  # fmt: skip
        return str(child.ready["grpc"])

    async def start_agent(self, node: str, coordinator: str, *more: str, host: Host | None = None) -> Child:
        listen = f"{host.address}:0" if host else "127.0.0.1:0"
        return await self.start(
            node, "-m", "peer_agent", "serve", "--node", node, "--namespaces", str(self.namespace_file),
            "--arena-path", str(self.directory / node), "--coordinators", coordinator, "--listen", listen,
            "--data-listen", listen, "--http-listen", "", "--output", "json", "--grace-s", "1",
            "--directory-timeout-s", str(PATIENCE_S), *more, host=host,
        )  # fmt: skip

    async def engine(self, node: str, **options: Any) -> aio.Engine:
        address = self.children[node].ready["engine"]
        engine = await aio.connect(address, namespace=self.namespace, engine=f"test-{node}", **options)
        self.stack.push_async_callback(engine.close)
        return engine

    async def inventory(self, node: str) -> Any:
        async with grpc.aio.insecure_channel(self.children[node].ready["engine"]) as channel:
            answer = await engine_pb2_grpc.EngineStub(channel).Inventory(engine_pb2.InventoryRequest(), timeout=5)
        return answer.namespaces[0]

    async def wait_inventory(self, node: str, condition: Callable[[Any], object], *, within_s: float = 20.0) -> None:
        """Until what the agent says of its slots satisfies the condition."""
        until_s = time.monotonic() + within_s
        while not condition(held := await self.inventory(node)):
            assert time.monotonic() < until_s, f"{node} never got there: {held}"
            await asyncio.sleep(0.005)

    async def wait_known(self, coordinator: str, node: str, blocks: int) -> None:
        """Until the coordinator names `blocks` blocks for the node."""
        until_s = time.monotonic() + 20
        async with DirectoryClient(coordinator) as client:
            while True:
                with contextlib.suppress(KvdirError):
                    for view in await client.nodes():
                        if view.trust.node == node and sum(item.blocks.value for item in view.holdings) == blocks:
                            return
                assert time.monotonic() < until_s, f"the coordinator never knew {blocks} blocks of {node}"
                await asyncio.sleep(0.02)

    async def wait_nominated(self, engine: aio.Engine, fingerprints: Fingerprints) -> None:
        """Until the directory, asked by this engine's agent, names somebody for every block."""
        until_s = time.monotonic() + 20
        while not all((answer := await engine.lookup(fingerprints, deadline_s=1.0)).nominated):
            assert time.monotonic() < until_s, f"the directory never named an owner of every block: {answer}"
            await asyncio.sleep(0.02)

    async def load(self, engine: aio.Engine, fingerprints: Fingerprints, *, deadline_s: float) -> tuple[LoadResult, float]:
        """(result, seconds less the machine's own delay); AssertionError if a block called a hit has a wrong byte."""
        into = self.blocks.room(fingerprints)
        result, seconds = await took(engine.load(fingerprints, into=into, deadline_s=deadline_s))
        self.blocks.check(fingerprints, into, result)
        return result, seconds

    async def close(self) -> None:
        await self.stack.aclose()
        for child in self.children.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGCONT)
            await child.end(grace_s=3)

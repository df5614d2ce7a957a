"""A coordinator and some agents inside this process and its event loop, on free ports of 127.0.0.1, arenas in `directory`.

Real in every part (gRPC, sockets, mapped files, native copies); only the processes are missing. Use it with asyncio.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdir.fingerprint import Fingerprints
from kvdir.location import StreamState
from kvdir.namespace import Namespace
from kvdir.server.app import build_coordinator
from kvdir.server.config import CoordinatorConfig
from kvdir.server.coordinator import Coordinator
from kvdir.server.serve import running
from kvdir.testing.wait import eventually
from peer_agent.client import aio
from peer_agent.client.results import LoadResult
from peer_agent.core.effects import LoadStatus
from peer_agent.demo.content import Content
from peer_agent.server.app import Agent
from peer_agent.server.config import AgentConfig
from peer_agent.server.planes import OpenPlanes
from peer_agent.transport.registry import open_transports

Bytes = npt.NDArray[np.uint8]

PATIENCE_S = 5.0
"""For the directory, where a test says nothing else: a busy machine may hold up a call for longer than the default allows, and
a load would then bring nothing although nothing is wrong."""


def sample_namespace(*, block_bytes: int = 4096, model: str = "test", **fields: Any) -> Namespace:
    """A complete namespace with blocks of exactly `block_bytes`."""
    values: dict[str, Any] = {
        "model": model, "weights": "rev-1", "kv_dtype": "float16", "layout": "NHD", "block_tokens": 16,
        "groups": [{"kind": "full", "layers": 1, "kv_heads": 1, "head_dim": 64}], "position": "rope:theta=10000",
        "parallel": "replicated", "adapter": "none", "hash_scheme": "blake2b-chain", "hash_seed": "0",
        "cache_policy": "exact", "bytes_override": block_bytes,
    }  # fmt: skip
    return Namespace.create(**(values | fields))


@dataclass(slots=True)
class Blocks:
    """Blocks with known bytes: makes them, and checks what came back."""

    namespace: Namespace
    content: Content = field(init=False)

    def __post_init__(self) -> None:
        self.content = Content(self.namespace.block_bytes)

    def chain(self, count: int, *, root: str = "") -> Fingerprints:
        """`count` chained fingerprints; another root gives others."""
        return Fingerprints.chain((b"%d" % number for number in range(count)), root=root.encode())

    def data(self, fingerprints: Fingerprints) -> Bytes:
        """(n, block_bytes) uint8 with the right bytes."""
        made = [self.content.make(fingerprint) for fingerprint in fingerprints]
        return np.stack(made) if made else self.room(fingerprints)

    def room(self, fingerprints: Fingerprints) -> Bytes:
        """(n, block_bytes) uint8, filled with bytes that are right for no block."""
        return np.full((len(fingerprints), self.namespace.block_bytes), 0xA5, np.uint8)

    def check(self, fingerprints: Fingerprints, into: Bytes, result: LoadResult) -> None:
        """AssertionError if a block counted as hit has a wrong byte."""
        for position, fingerprint in enumerate(fingerprints):
            if LoadStatus(result.statuses[position]).hit:
                assert self.content.matches(fingerprint, into[position]), f"block {position} counted as hit has wrong bytes"


class LocalCluster:
    """agents: by node name, in start order. coordinator: None once stopped."""

    def __init__(self, directory: Path, namespace: Namespace, settings: dict[str, Any]) -> None:
        self.directory = directory
        self.namespace = namespace
        self.blocks = Blocks(namespace)
        self.agents: dict[str, Agent] = {}
        self.coordinator: Coordinator | None = None
        self.coordinator_address = ""
        self.open_planes: OpenPlanes = open_transports
        self._settings = settings
        self._coordinator_stack = contextlib.AsyncExitStack()
        self._stack = contextlib.AsyncExitStack()

    # coordinator

    async def start_coordinator(self, *, listen: str = "127.0.0.1:0", **settings: Any) -> None:
        config = CoordinatorConfig(listen=listen, http_listen="", **({"heartbeat_interval_ms": 50, "grace_s": 0.1} | settings))
        self.coordinator = build_coordinator(config)
        bound = await self._coordinator_stack.enter_async_context(running(self.coordinator))
        self.coordinator_address = bound.grpc

    async def stop_coordinator(self) -> None:
        self.coordinator = None
        await self._coordinator_stack.aclose()

    def known_blocks(self, node: str) -> int:
        """Blocks that the coordinator names for this node."""
        for view in self._nodes():
            if view.trust.node == node:
                return sum(holding.blocks.value for holding in view.holdings)
        return 0

    def is_synced(self, node: str) -> bool:
        return any(view.trust.node == node and view.trust.state is StreamState.SYNCED for view in self._nodes())

    async def wait_known(self, node: str) -> None:
        """Until the coordinator knows everything the node holds."""
        agent = self.agents[node]
        held = sum(item.committed for item in agent.store.occupancy())

        def known() -> bool:
            heard = any(view.trust.node == node for view in self._nodes())  # with its namespaces, also if it holds nothing
            return heard and self.known_blocks(node) == held

        await eventually(known, what=f"coordinator knows {node}'s {held} blocks")

    def _nodes(self) -> Iterable[Any]:
        from kvdir.core.inspect import node_views

        if self.coordinator is None:
            return ()
        return node_views(self.coordinator.directory, now_s=self.coordinator.now_s())

    # agents

    def config(self, node: str, **settings: Any) -> AgentConfig:
        """An agent's configuration in this cluster."""
        file = self.directory / f"{self.namespace.model}.json"
        fields = json.loads(self.namespace.canonical())
        fields.pop("version")
        file.write_text(json.dumps(fields))
        values: dict[str, Any] = {
            "node": node,
            "namespaces": (str(file),),
            "arena_path": str(self.directory / f"{node}.arena"),
            "arena_bytes": 1 << 20,
            "listen": "127.0.0.1:0",
            "http_listen": "",
            "coordinators": (self.coordinator_address,) if self.coordinator_address else (),
            "grace_s": 1.0,
            "directory_timeout_s": PATIENCE_S,
        }
        return AgentConfig(**(values | self._settings | settings))

    async def start_agent(self, node: str, **settings: Any) -> Agent:
        agent = await Agent.start(self.config(node, **settings), open_planes=self.open_planes)
        self.agents[node] = agent
        return agent

    async def stop_agent(self, node: str) -> None:
        await self.agents.pop(node).close()

    async def engine(self, node: str, **options: Any) -> aio.Engine:
        """An engine attached to the node's agent; closed with the cluster."""
        engine = await aio.connect(
            self.agents[node].ready.engine, namespace=self.namespace, engine=f"engine-of-{node}", **options
        )
        self._stack.push_async_callback(engine.close)
        return engine

    async def close(self) -> None:
        await self._stack.aclose()
        for node in list(self.agents):
            await self.stop_agent(node)
        await self.stop_coordinator()


@contextlib.asynccontextmanager
async def local_cluster(
    directory: Path,
    *nodes: str,
    namespace: Namespace | None = None,
    coordinator: bool = True,
    open_planes: OpenPlanes = open_transports,
    **settings: Any,
) -> AsyncIterator[LocalCluster]:
    """A running cluster; settings are those of every AgentConfig."""
    cluster = LocalCluster(directory, namespace or sample_namespace(), settings)
    cluster.open_planes = open_planes
    try:
        if coordinator:
            await cluster.start_coordinator()
        for node in nodes:
            await cluster.start_agent(node)
        yield cluster
    finally:
        await cluster.close()

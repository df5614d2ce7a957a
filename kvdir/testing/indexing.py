"""An indexer API in this process, and followed streams without engines behind them."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any

import msgspec

from kvdir.core.policy import ALL, Grant
from kvdir.namespace import Namespace
from kvdir.server.app import AnyCoordinator, score_source
from kvdir.server.http_server import HttpLimits, HttpServer
from kvdir.server.indexer import Indexer
from kvdir.server.indexer_answers import Listener
from kvdir.server.indexer_names import registered_stream
from kvdir.server.indexer_requests import Registration
from kvdir.testing.fake_node import FakeNode


class FakeFollowed:
    """server.indexer.Followed: each registration is a FakeNode that publishes what a test has it store."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._stack = contextlib.AsyncExitStack()
        self.nodes: dict[str, FakeNode] = {}
        self.refuse: Exception | None = None

    def follow(self, registration: Registration) -> None:
        if self.refuse is not None:
            raise self.refuse
        namespace = Namespace.announced(
            model=registration.model,
            block_tokens=registration.block_tokens,
            hash_scheme=f"{registration.hash_scheme or 'vllm:sha256_cbor'}:low64",
            hash_seed=registration.hash_seed or "builtin",
        )
        name = self._name(registration)
        self.nodes[name] = node = FakeNode(self._address, name, namespace=namespace)
        node.begin()

    async def leave(self, registration: Registration) -> None:
        await self.nodes.pop(self._name(registration)).leave()

    def listeners(self) -> Iterable[Listener]:
        return [Listener(name, True) for name in self.nodes]

    async def close(self) -> None:
        for node in self.nodes.values():
            await node.end()

    def _name(self, registration: Registration) -> str:
        return registered_stream(registration.node, registration.tenant, registration.instance_id, registration.dp_rank)


@contextlib.asynccontextmanager
async def indexing_fakes(
    coordinator: AnyCoordinator,
    grpc_address: str,
    limits: HttpLimits | None = None,
    sees: Callable[[], Grant] = lambda: ALL,
) -> AsyncIterator[tuple[str, FakeFollowed, HttpServer]]:
    """(address, what is followed, the server) of an indexer over a coordinator that runs."""
    followed = FakeFollowed(grpc_address)
    indexer = Indexer(
        score_source(coordinator),
        followed,
        coordinator.metrics.calls,
        max_fingerprints=coordinator.config.max_fingerprints,
        not_ready=coordinator.not_ready,
        draining=lambda: coordinator.draining,
        sees=sees,
    )
    server = HttpServer(indexer.answer, limits or HttpLimits())
    port = await server.start("127.0.0.1", 0, setting="indexer_listen")
    try:
        yield f"127.0.0.1:{port}", followed, server
    finally:
        await server.close()
        await followed.close()


async def call(
    address: str, path: str, body: Any = None, *, msgpack: bool = False, headers: Mapping[str, str] | None = None
) -> tuple[int, Any]:
    """(status, answer) of one request: POST when there is a body, GET otherwise. bytes are sent as they are."""
    return await asyncio.to_thread(_call, address, path, body, msgpack, dict(headers or {}))


def _call(address: str, path: str, body: Any, msgpack: bool, headers: dict[str, str]) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(address, timeout=10)
    codec = msgspec.msgpack if msgpack else msgspec.json
    raw = body if isinstance(body, bytes | None) else codec.encode(body)
    if msgpack:
        headers["Content-Type"] = "application/msgpack"
    try:
        connection.request("GET" if body is None else "POST", path, raw, headers)
        response = connection.getresponse()
        text = response.read()
        decoded = codec.decode(text) if "text/" not in (response.headers["Content-Type"] or "") else text.decode()
        return response.status, decoded
    finally:
        connection.close()

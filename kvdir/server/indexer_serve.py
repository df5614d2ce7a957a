"""Starts and ends the indexer API of a coordinator."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from kvdir.client.discovery import Discovery
from kvdir.client.engine_life import Publishing
from kvdir.rpc.open_files import part_of_open_files
from kvdir.rpc.tls import PLAINTEXT, Dialer
from kvdir.server.app import AnyCoordinator, score_source
from kvdir.server.config import is_loopback, split_address
from kvdir.server.http_server import HttpLimits, HttpServer
from kvdir.server.indexer import Indexer
from kvdir.server.indexer_engines import RegisteredEngines
from kvdir.server.rights import indexer_tenants


@dataclass(frozen=True, slots=True)
class Itself:
    """Where this process takes streams of events, and how it connects there."""

    address: str
    dialer: Dialer = PLAINTEXT


@contextlib.asynccontextmanager
async def indexing(coordinator: AnyCoordinator, *, itself: Itself) -> AsyncIterator[str]:
    """Serves inside the block, at the address that is yielded; empty when the config has none.

    itself: for streams of registered engines. Raises ConfigError.
    """
    config = coordinator.config
    if not config.indexer_listen:
        yield ""
        return
    host, port = split_address(config.indexer_listen)
    discovery = Discovery(itself.address)
    engines = RegisteredEngines(Publishing(coordinators=discovery, version=coordinator.version, dialer=itself.dialer))
    indexer = Indexer(
        score_source(coordinator),
        engines,
        coordinator.metrics.calls,
        max_fingerprints=config.max_fingerprints,
        not_ready=coordinator.not_ready,
        draining=lambda: coordinator.draining,
        sees=lambda: indexer_tenants(coordinator.security, config.indexer_identity),
        loopback=is_loopback(host),
    )
    limits = HttpLimits(connections=part_of_open_files(0.125, most=1_024), body_bytes=config.max_message_bytes)
    server = HttpServer(indexer.answer, limits)
    try:
        yield f"{host}:{await server.start(host, port, setting='indexer_listen')}"
    finally:
        await server.close()
        await engines.close()
        discovery.close()

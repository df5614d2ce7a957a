"""A coordinator on a shared store in this process, on free ports: real gRPC, real sessions, whatever store it is given."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from kvdir.client.aio import DirectoryClient
from kvdir.server.app import build_shared
from kvdir.server.serve import running
from kvdir.server.shared.coordinator import SharedCoordinator
from kvdir.store.base import BlockStore
from kvdir.testing.served import FAST_CONFIG

FAST_SHARED_CONFIG = replace(
    FAST_CONFIG,
    heartbeat_interval_ms=100,
    store="redis://the-test-gives-one",
    store_timeout_s=0.2,
    store_lookup_s=0.1,
)


class Shared:
    """A running coordinator, with the ends a test needs."""

    def __init__(self, coordinator: SharedCoordinator, grpc_address: str, http_address: str) -> None:
        self.coordinator = coordinator
        self.address = grpc_address
        self.http = http_address
        self.client = DirectoryClient(grpc_address, deadline_s=5.0)

    def held(self, node: str) -> int | None:
        """Blocks of a node as this coordinator knows it; None when it does not."""
        views = self.coordinator.link.fleet.views(self.coordinator.now_s())
        return next((sum(item.blocks.value for item in view.holdings) for view in views if view.trust.node == node), None)


@contextlib.asynccontextmanager
async def shared(store: BlockStore, name: str = "a", **settings: Any) -> AsyncIterator[Shared]:
    """Serves until the block ends. settings: of CoordinatorConfig."""
    coordinator = build_shared(replace(FAST_SHARED_CONFIG, name=name, **settings), store)
    await coordinator.open()
    try:
        async with running(coordinator) as bound:
            made = Shared(coordinator, bound.grpc, bound.http)
            async with made.client:
                yield made
    finally:
        await coordinator.close()

"""The peer agent's engine library: store and load KV-cache blocks through the agent of this host.

    import kvdir, peer_agent
    engine = peer_agent.connect("unix:/dev/shm/kvdir-node1.sock", namespace=namespace, engine="vllm-0")

`peer_agent.aio` has the same for asyncio. Nothing is imported before it is used, so `import peer_agent` is cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peer_agent.client import aio
    from peer_agent.client.engine import Engine, connect
    from peer_agent.client.results import LoadResult, LookupResult, StoreResult, Timings
    from peer_agent.client.state import StateEngine, StateLoadResult, connect_state
    from peer_agent.core.effects import BlockState, LoadStatus

__all__ = [
    "BlockState",
    "Engine",
    "LoadResult",
    "LoadStatus",
    "LookupResult",
    "StateEngine",
    "StateLoadResult",
    "StoreResult",
    "Timings",
    "aio",
    "connect",
    "connect_state",
]

_HOMES = {
    "BlockState": "peer_agent.core.effects",
    "Engine": "peer_agent.client.engine",
    "LoadResult": "peer_agent.client.results",
    "LoadStatus": "peer_agent.core.effects",
    "LookupResult": "peer_agent.client.results",
    "StoreResult": "peer_agent.client.results",
    "Timings": "peer_agent.client.results",
    "StateEngine": "peer_agent.client.state",
    "StateLoadResult": "peer_agent.client.state",
    "connect": "peer_agent.client.engine",
    "connect_state": "peer_agent.client.state",
}


def __getattr__(name: str) -> Any:
    if name == "aio":
        return importlib.import_module("peer_agent.client.aio")
    if name not in _HOMES:
        raise AttributeError(f"module 'peer_agent' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)

"""SGLang HiCache over an agent: the class that HiCache's `dynamic` storage backend loads (docs/engines/sglang.md).

    --hicache-storage-backend dynamic
    --hicache-storage-backend-extra-config '{"backend_name": "kvdir", "module_path": "peer_agent.connectors.sglang",
        "class_name": "KvdirHiCache", "interface_v1": 1, "agent": "unix:/dev/shm/kvdir-node1.sock", "weights": "<revision>"}'

SGLang is imported only when that class is asked for. Written against SGLang 0.5.23.
"""

from __future__ import annotations

from typing import Any

__all__ = ["KvdirHiCache"]


def __getattr__(name: str) -> Any:
    if name != "KvdirHiCache":
        raise AttributeError(name)
    from peer_agent.connectors.sglang.backend import KvdirHiCache

    return KvdirHiCache

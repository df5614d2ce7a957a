"""KvdirConnector as a way in for tests/vllm/world.py, and what its tests need to look at."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.vllm.engines import Engine
from tests.vllm.nodes import wait_for

if TYPE_CHECKING:
    from peer_agent.connectors.vllm.connector_worker import WorkerHalf
    from tests.vllm.world import World

_numbers = itertools.count()


def connector(agent: str, *, role: str = "kv_both", policy: str = "recompute", **settings: Any) -> dict[str, Any]:
    """kv_transfer_config with our own connector; it goes on sharing after a reset, which these tests use to forget."""
    return {
        "kv_connector": "KvdirConnector",
        "kv_connector_module_path": "peer_agent.connectors.vllm",
        "kv_role": role,
        "kv_load_failure_policy": policy,
        "engine_id": f"test-{os.getpid()}-{next(_numbers)}",
        "kv_connector_extra_config": {"kvdir": {"agent": agent, "share_after_reset": True, "load_s": 0.5} | settings},
    }


def settle(engine: Engine, *, within_s: float = 5.0) -> None:
    """Steps the engine until nothing is being saved any more: blocks under way are held, and a reset would be refused."""
    until_s = time.monotonic() + within_s
    while engine.connector.half.held_blocks:
        assert time.monotonic() < until_s, f"{engine.connector.half.held_blocks} blocks are still held"
        engine.llm.llm_engine.engine_core.engine_core.step()


def forget(engine: Engine) -> None:
    settle(engine)
    engine.forget()


def reader_of(world: World, *more: str, model: Path | None = None, **options: Any) -> Engine:
    """An engine on a new node that holds nothing, once its replica is there; the readers before it are gone.

    options: of the engine, and `settings` of kvdir.
    """
    while world.readers:
        world.nodes.children.pop(world.readers.pop()).end()
    node = f"reader-{next(_numbers)}"
    world.nodes.start_agent(node, *more)
    world.readers.append(node)
    settings = options.pop("settings", {})
    engine = Engine(model or world.model, connector=connector(world.nodes.engine(node), **settings), **options)
    directory = engine.connector._engines[0].directory
    wait_for(lambda: directory.replica.usable, f"the replica of {node}")
    return engine


def worker_half() -> WorkerHalf:
    """Of the one engine of this process."""
    from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group

    half: WorkerHalf = get_kv_transfer_group()._worker._half
    return half

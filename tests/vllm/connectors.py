"""KvdirConnector as a way in for tests/vllm/world.py, and what its tests need to look at."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peer_agent.connectors.vllm.connector_scheduler import Figures
from tests.vllm.engines import Engine
from tests.vllm.nodes import wait_for
from tests.vllm.world import READER, assert_same

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


def fresh_reader(world: World, *more: str) -> Engine:
    """The world's one reader, with empty caches and counters, on a node whose agent was started anew and holds nothing."""
    world.nodes.start_agent(READER, *more)
    if world.engine is None:
        world.engine = Engine(world.model, connector=connector(world.nodes.engine(READER)))
    engine = world.engine
    forget(engine)
    sessions = [*engine.connector._engines, *(group.engine for group in worker_half()._groups)]
    wait_for(lambda: all(session.attached for session in sessions), "sessions with the new agent")
    wait_for(lambda: sees_owner(world, engine), "the reader's node sees what the owner has")
    wait_for(
        lambda: engine.connector.half._paused_until_s < time.monotonic(), "the end of the pause after a load without answer"
    )
    engine.connector.totals.clear()
    engine.connector.half.figures = Figures()
    return engine


def sees_owner(world: World, engine: Engine) -> bool:
    """Whether the scheduler's own lookups name somebody for all that the owner has."""
    directory = engine.connector._engines[0].directory
    return all(directory.lookup_here(space.digest, blocks).hits >= len(blocks) for space, blocks, _ in world.copies)


def reader_of(world: World, *more: str, model: Path | None = None, **options: Any) -> Engine:
    """An engine of its own on a new node that holds nothing, once its replica is there; the readers before it are gone.

    options: of the engine, and `settings` of kvdir.
    """
    world.close_engine()
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


def hit_again(world: World, engine: Engine) -> int:
    """Tokens loaded since the start, once prompt 2 was answered with empty caches."""
    assert_same(engine.generate(world.prompts[2]), [world.right[2]])
    forget(engine)
    return engine.connector.half.figures.hit_tokens


def worker_half() -> WorkerHalf:
    """Of the one engine of this process."""
    from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group

    half: WorkerHalf = get_kv_transfer_group()._worker._half
    return half

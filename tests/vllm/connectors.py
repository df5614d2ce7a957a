"""KvdirConnector as a way in for tests/vllm/world.py, and what its tests need to look at."""

from __future__ import annotations

import ctypes
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
    world.end_other_agents()
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
    """An engine of its own, on a node that holds nothing, once its replica is there.

    options: of the engine, and `settings` of kvdir.
    """
    world.close_engine()
    world.end_other_agents()
    world.nodes.start_agent(READER, *more)
    settings = options.pop("settings", {})
    engine = Engine(model or world.model, connector=connector(world.nodes.engine(READER), **settings), **options)
    directory = engine.connector._engines[0].directory
    wait_for(lambda: directory.replica.usable, "the reader's replica")
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


def zero(half: WorkerHalf, group: int, block_id: int) -> None:
    """One block of the engine's pages."""
    for segment in half._groups[group].pool.segments:
        ctypes.memset(segment.address + block_id * segment.stride_bytes, 0, segment.size_bytes)


def assert_free(engine: Engine) -> None:
    """Nothing is held by saves any more, and every block is free again."""
    settle(engine)
    pool = engine.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "blocks were not given back"

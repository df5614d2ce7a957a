"""Two nodes for the proof: an engine on the first has computed prompts, engines on the second load them.

The right answers come from an engine without any connector. How an engine shares (tier or connector) is a Way.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvdir.testing.wait import wait_until
from tests.vllm.engines import BLOCK_TOKENS, Answer, Engine, Prompt, shared_prompts
from tests.vllm.nodes import Nodes

POOL_BYTES = 16 << 20
OWNER = "owner"
_numbers = itertools.count()

Way = Callable[..., dict[str, Any]]


def tier(agent: str, **settings: Any) -> dict[str, Any]:
    """kv_transfer_config with vLLM's offloading and our tier."""
    return {
        "kv_connector": "KvdirOffloadingConnector",
        "kv_connector_module_path": "peer_agent.connectors.vllm",
        "kv_role": "kv_both",
        "engine_id": f"test-{os.getpid()}-{next(_numbers)}",
        "kv_connector_extra_config": {"cpu_bytes_to_use": POOL_BYTES, "kvdir": {"agent": agent} | settings},
    }


@dataclass(slots=True)
class World:
    nodes: Nodes
    model: Path
    prompts: list[Prompt]
    right: list[Answer]
    way: Way = tier
    readers: list[str] = field(default_factory=list)

    @classmethod
    def start(cls, directory: Path, model: Path, way: Way = tier) -> World:
        """Three engines, one after another: the right answers, the owner's, and then those that tests make."""
        directory.mkdir()
        prompts = shared_prompts(8)
        alone = Engine(model)
        right = alone.generate(*prompts)
        alone.close()
        world = cls(Nodes(directory), model, prompts, right, way)
        try:
            world.nodes.start_coordinator()
            world.fill_owner()
        except BaseException:
            world.close()
            raise
        return world

    def fill_owner(self, *more: str) -> None:
        """The owner's agent, anew, with what an engine stores that computes all prompts."""
        self.nodes.start_agent(OWNER, *more)
        engine = Engine(self.model, connector=self.way(self.nodes.engine(OWNER)))
        assert_same(engine.one_by_one(self.prompts), self.right)
        engine.close()
        self.wait_known(OWNER)

    def wait_known(self, node: str) -> None:
        wait_until(
            lambda: 0 < self.nodes.held_blocks(node) == self.nodes.known_blocks(node), what=f"all blocks of {node} known"
        )

    def reader(self, *more: str, **settings: Any) -> Engine:
        """An engine on a node whose agent holds nothing yet."""
        node = f"reader-{next(_numbers)}"
        self.nodes.start_agent(node, *more)
        self.readers.append(node)
        return Engine(self.model, connector=self.way(self.nodes.engine(node), **settings))

    def close(self) -> None:
        self.nodes.close()


def shareable(prompts: list[Prompt]) -> int:
    """Tokens in full blocks: the most that can come from elsewhere."""
    return sum(len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS for prompt in prompts)


def assert_same(answers: list[Answer], right: list[Answer]) -> None:
    different = [number for number, (one, other) in enumerate(zip(answers, right, strict=True)) if one.tokens != other.tokens]
    assert not different, f"prompts {different} were answered otherwise"

"""Two nodes for the proof: an engine on the first has computed prompts, one on the second loads them.

The right answers come from an engine without any connector. How engines share is a Way: the tier here, or the connector
(connectors.py). Making an engine costs seconds, so tests of the tier share one reader and get new agents instead: a reader's
agent holds nothing at first, and an owner's gets its blocks back from a copy.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import peer_agent
from kvdir.fingerprint import Fingerprints
from kvdir.namespace import Namespace
from peer_agent.core.effects import LoadStatus
from tests.vllm.engines import BLOCK_TOKENS, Answer, Engine, Prompt, shared_prompts
from tests.vllm.nodes import Child, Nodes, wait_for

POOL_BYTES = 16 << 20
LOAD_S = 0.5
"""How long a load goes on without a block arriving: what a fault may cost, once."""
OWNER, READER = "owner", "reader"
_numbers = itertools.count()


Way = Callable[..., dict[str, Any]]
"""kv_transfer_config from an agent's address and kvdir's settings."""


def tier(agent: str, **settings: Any) -> dict[str, Any]:
    """vLLM's offloading with our tier."""
    return {
        "kv_connector": "KvdirOffloadingConnector",
        "kv_connector_module_path": "peer_agent.connectors.vllm",
        "kv_role": "kv_both",
        "engine_id": f"test-{os.getpid()}-{next(_numbers)}",
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": POOL_BYTES,
            "kvdir": {"agent": agent, "load_s": LOAD_S, "store_s": LOAD_S, "share_after_reset": True} | settings,
        },
    }


@dataclass(slots=True)
class World:
    """The owner has the blocks of `prompts`, and nobody those of `other_prompts`."""

    nodes: Nodes
    model: Path
    prompts: list[Prompt]
    right: list[Answer]
    other_prompts: list[Prompt]
    other_right: list[Answer]
    way: Way
    engine: Engine | None = None
    copies: list[tuple[Namespace, Fingerprints, Any]] = field(default_factory=list)

    @classmethod
    def start(cls, directory: Path, model: Path, way: Way = tier) -> World:
        directory.mkdir()
        prompts, others = shared_prompts(8), [[token + 1 for token in prompt] for prompt in shared_prompts(3)]
        alone = Engine(model)
        right, other_right = alone.one_by_one(prompts, forget=True), alone.one_by_one(others, forget=True)
        alone.close()
        world = cls(Nodes(directory), model, prompts, right, others, other_right, way)
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
        self.wait_known(OWNER)
        self.copies = [self._copy(namespace) for namespace in namespaces_of(engine)]
        engine.close()

    def _copy(self, namespace: Namespace) -> tuple[Namespace, Fingerprints, Any]:
        """What the owner has of the prompts in this namespace, with its bytes."""
        blocks = fingerprints(self.prompts)
        into = np.zeros((len(blocks), namespace.block_bytes), np.uint8)
        with peer_agent.connect(self.nodes.engine(OWNER), namespace=namespace) as session:
            result = session.load(blocks, into=into, deadline_s=10, local_only=True)
        held = [place for place, status in enumerate(result.statuses) if LoadStatus(status).hit]
        return namespace, blocks.select(held), into[held]

    def refill_owner(self, *more: str) -> None:
        """The owner's agent, started anew, with the blocks that it had."""
        self.nodes.start_agent(OWNER, *more)
        for namespace, blocks, content in self.copies:
            with peer_agent.connect(self.nodes.engine(OWNER), namespace=namespace) as session:
                assert session.store(blocks, content, deadline_s=10).stored == len(blocks)
        self.wait_known(OWNER)

    def wait_known(self, node: str) -> None:
        nodes = self.nodes
        wait_for(lambda: 0 < nodes.held_blocks(node) == nodes.known_blocks(node), f"all blocks of {node} known")

    def start_coordinator(self) -> None:
        self.nodes.start_coordinator()
        self.wait_known(OWNER)

    @contextlib.contextmanager
    def reader(self, *more: str) -> Iterator[Reader]:
        """With the tier: an engine with empty caches, whose node's agent holds nothing yet."""
        agent = self.nodes.start_agent(READER, *more)
        if self.engine is None:
            self.engine = Engine(self.model, connector=self.way(self.nodes.engine(READER)))
        self.engine.forget()
        reader = Reader(self.engine, agent, self, self.engine.connector._tier.counts())
        wait_for(reader.is_ready, "the engine attached to the new agent")
        wait_for(reader.sees_owner, "the reader's node sees what the owner has")
        try:
            yield reader
        finally:
            reader.agent.end()

    def end_other_agents(self) -> None:
        """So that only the owner has anything."""
        for name in set(self.nodes.children) - {"coordinator", OWNER}:
            self.nodes.children.pop(name).end()

    def close_engine(self) -> None:
        """Before another one is made: there is one at a time."""
        if self.engine is not None:
            self.engine.close()
            self.engine = None

    def close(self) -> None:
        self.close_engine()
        self.nodes.close()


@dataclass(slots=True)
class Reader:
    """An engine, and its node's agent. before: counters when it began."""

    engine: Engine
    agent: Child
    world: World
    before: dict[str, int]

    def answers_right(self) -> list[Answer]:
        """To all prompts, one by one, with empty caches. AssertionError for a wrong answer."""
        answers = self.engine.one_by_one(self.world.prompts, forget=True)
        assert_same(answers, self.world.right)
        return answers

    def counted(self, *names: str) -> int:
        """Since the reader began."""
        counts = self.engine.connector._tier.counts()
        return sum(counts.get(name, 0) - self.before.get(name, 0) for name in names)

    def is_ready(self) -> bool:
        """Whether its tier is attached to the agent for all groups, and has got over the failures of the test before."""
        inside = self.engine.connector._tier
        failed_until_s = max(inside._lookups._failed.values(), default=0.0)
        return failed_until_s < time.monotonic() and all(session.attached for session in inside._sessions.values())

    def sees_owner(self) -> bool:
        """Whether a lookup through this node's agent names somebody for all that the owner has."""
        for namespace, blocks, _ in self.world.copies:
            with peer_agent.connect(self.world.nodes.engine(READER), namespace=namespace) as asker:
                if asker.directory.lookup_here(namespace.digest, blocks).hits < len(blocks):
                    return False
        return True


def namespaces_of(engine: Engine) -> list[Namespace]:
    """What an engine with the tier, or with our own connector, stores blocks in."""
    connector = engine.connector
    if hasattr(connector, "_tier"):
        return list(connector._tier.namespaces.values())
    return [namespace for group in connector._groups for namespace in group.namespaces]


def fingerprints(prompts: list[Prompt]) -> Fingerprints:
    """Of all full blocks, each once."""
    chains = (Fingerprints.from_tokens(prompt, scheme="vllm:sha256", block_tokens=BLOCK_TOKENS) for prompt in prompts)
    return Fingerprints.of(list(dict.fromkeys(itertools.chain.from_iterable(chains))))


def shareable(prompts: list[Prompt]) -> int:
    """Tokens in full blocks: the most that can come from elsewhere."""
    return sum(len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS for prompt in prompts)


def loaded(answers: list[Answer]) -> int:
    """Prompt tokens that were not computed."""
    return sum(answer.cached for answer in answers)


def assert_same(answers: list[Answer], right: list[Answer]) -> None:
    different = [number for number, (one, other) in enumerate(zip(answers, right, strict=True)) if one.tokens != other.tokens]
    assert not different, f"prompts {different} were answered otherwise"


def assert_added(answers: list[Answer], right: list[Answer], at_most_s: float = 1.0) -> None:
    """That no answer took at_most_s more than it takes alone."""
    added = [answer.took_s - alone.took_s for answer, alone in zip(answers, right, strict=True)]
    assert max(added) <= at_most_s, f"added seconds: {[round(each, 2) for each in added]}"

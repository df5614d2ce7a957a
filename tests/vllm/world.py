"""Two nodes for the proof: an engine on the first has computed prompts, one on the second loads them.

The right answers come from an engine without any connector. How engines share is a Way: the tier, or the connector. Making an
engine costs seconds, so there are three in a world, and what tests need anew is the agents: a reader's holds nothing at first,
and an owner's gets its blocks back from a copy, not from an engine.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import peer_agent
from kvdir.fingerprint import Fingerprints
from kvdir.namespace import Namespace
from kvdir.testing.wait import wait_until
from tests.vllm.engines import BLOCK_TOKENS, Answer, Engine, Prompt, shared_prompts
from tests.vllm.nodes import Child, Nodes

POOL_BYTES = 16 << 20
LOAD_S = 0.5
"""How long a load goes on without a block arriving: what a fault may cost, once."""
OWNER, READER = "owner", "reader"
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Way:
    """config: kv_transfer_config for an agent's address and kvdir's settings. Of an engine's connector: its namespaces,
    whether it is attached to its agent for all of them and has got over old failures, and its counters.
    """

    config: Callable[..., dict[str, Any]]
    namespaces: Callable[[Any], Iterable[Namespace]]
    ready: Callable[[Any], bool]
    counts: Callable[[Any], dict[str, int]]


def tier_config(agent: str, **settings: Any) -> dict[str, Any]:
    return {
        "kv_connector": "KvdirOffloadingConnector",
        "kv_connector_module_path": "peer_agent.connectors.vllm",
        "kv_role": "kv_both",
        "engine_id": f"test-{os.getpid()}-{next(_numbers)}",
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": POOL_BYTES,
            "kvdir": {"agent": agent, "load_s": LOAD_S, "store_s": LOAD_S} | settings,
        },
    }


def _tier_ready(connector: Any) -> bool:
    tier = connector._tier
    failed_until_s = max(tier._lookups._failed.values(), default=0.0)
    return failed_until_s < time.monotonic() and all(session.attached for session in tier._sessions.values())


TIER = Way(
    tier_config,
    lambda connector: connector._tier.namespaces.values(),
    _tier_ready,
    lambda connector: connector._tier.counts(),
)


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
    def start(cls, directory: Path, model: Path, way: Way = TIER) -> World:
        directory.mkdir()
        prompts, others = shared_prompts(8), [[token + 1 for token in prompt] for prompt in shared_prompts(3)]
        alone = Engine(model)
        right, other_right = alone.one_by_one(prompts, forget=True), alone.one_by_one(others, forget=True)
        alone.close()
        world = cls(Nodes(directory), model, prompts, right, others, other_right, way)
        try:
            world.nodes.start_coordinator()
            world._compute_owner()
        except BaseException:
            world.close()
            raise
        return world

    def _compute_owner(self) -> None:
        self.nodes.start_agent(OWNER)
        engine = Engine(self.model, connector=self.way.config(self.nodes.engine(OWNER)))
        assert_same(engine.one_by_one(self.prompts), self.right)
        self._wait_known()
        for namespace in self.way.namespaces(engine.connector):
            blocks = fingerprints(self.prompts)
            bytes_ = np.zeros((len(blocks), namespace.block_bytes), np.uint8)
            with peer_agent.connect(self.nodes.engine(OWNER), namespace=namespace) as copier:
                result = copier.load(blocks, into=bytes_, local_only=True)
            held = [place for place, status in enumerate(result.statuses) if status == 1]
            self.copies.append((namespace, blocks.select(held), bytes_[held]))
        engine.close()

    def refill_owner(self, *more: str) -> None:
        """The owner's agent, started anew, with the blocks that it had."""
        self.nodes.start_agent(OWNER, *more)
        for namespace, blocks, bytes_ in self.copies:
            with peer_agent.connect(self.nodes.engine(OWNER), namespace=namespace) as copier:
                assert copier.store(blocks, bytes_, deadline_s=10).stored == len(blocks)
        self._wait_known()

    def _wait_known(self) -> None:
        nodes = self.nodes
        wait_until(lambda: 0 < nodes.held_blocks(OWNER) == nodes.known_blocks(OWNER), what="all blocks of the owner known")

    def start_coordinator(self) -> None:
        self.nodes.start_coordinator()
        self._wait_known()

    @contextlib.contextmanager
    def reader(self, *more: str) -> Iterator[Reader]:
        """An engine with empty caches, whose node's agent holds nothing yet."""
        agent = self.nodes.start_agent(READER, *more)
        if self.engine is None:
            self.engine = Engine(self.model, connector=self.way.config(self.nodes.engine(READER)))
        self.engine.forget()
        reader = Reader(self.engine, agent, self, self.way.counts(self.engine.connector))
        connector = self.engine.connector
        wait_until(lambda: self.way.ready(connector), what="the engine attached to the new agent")
        wait_until(reader.sees_owner, what="the reader's node sees what the owner has")
        try:
            yield reader
        finally:
            reader.agent.end()

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
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
        counts = self.world.way.counts(self.engine.connector)
        return sum(counts.get(name, 0) - self.before.get(name, 0) for name in names)

    def sees_owner(self) -> bool:
        """Whether a lookup through this node's agent names somebody for all that the owner has."""
        for namespace, blocks, _ in self.world.copies:
            with peer_agent.connect(self.world.nodes.engine(READER), namespace=namespace) as asker:
                if asker.directory.lookup_here(namespace.digest, blocks).hits < len(blocks):
                    return False
        return True


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

"""Proof of the tier: an engine that loads another node's KV answers as one that computes it, and it really loads it.

Whatever breaks meanwhile, answers stay right, and nobody waits for more than a second for it. (vLLM's own tier between peers
takes 30 seconds over a dead peer; measured with the same version.)
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from kvdir.testing.fake_node import FakeNode
from peer_agent.memory.arena import Arena
from peer_agent.memory.layout import HEADER_BYTES
from tests.vllm.engines import BLOCK_TOKENS
from tests.vllm.nodes import wait_for
from tests.vllm.world import OWNER, READER, Reader, World, assert_added, assert_same, fingerprints, loaded, shareable

with_llama = pytest.mark.parametrize("world", ["llama"], indirect=True)
"""Where the model's groups make no difference: what the tier does when nobody answers is the same for all of a job."""

POLLING_SHARE = 0.02
"""Of a core: what this test's own waiting costs, and the interpreter's other threads."""


def test_answers_are_the_same_and_blocks_are_loaded_when_another_node_has_them(world: World):
    with world.reader() as reader, patience(reader):
        answers = reader.answers_right()
        assert loaded(answers) >= 0.8 * shareable(world.prompts)
        assert reader.counted("load_hit_peer") > 0
        assert reader.counted("peer_bytes") > 0


def test_answers_are_the_same_when_all_prompts_come_at_once(world: World):
    with world.reader() as reader, patience(reader):
        answers = reader.engine.generate(*world.prompts)
        assert_same(answers, world.right)
        assert loaded(answers) >= 0.8 * shareable(world.prompts)
        reader.engine.forget()
        assert_same(reader.engine.generate(*world.prompts), world.right)
        assert reader.counted("load_hit_local") > 0, "the second time they come from this node's agent"


def test_answers_change_when_one_loaded_block_is_zeroed(world: World, monkeypatch: pytest.MonkeyPatch):
    """The control: equal answers prove something only if wrong KV gives others."""
    with world.reader() as reader, patience(reader):
        for session in reader.engine.connector._tier._sessions.values():

            def spoiled(blocks: Any, *, into: Any, load: Any = session.load, **options: Any) -> Any:
                result = load(blocks, into=into, **options)
                into.array[into.rows[-1]] = 0
                return result

            monkeypatch.setattr(session, "load", spoiled)
        answers = reader.engine.one_by_one(world.prompts, forget=True)
    assert loaded(answers) >= 0.8 * shareable(world.prompts)
    assert [answer.tokens for answer in answers] != [answer.tokens for answer in world.right]


@with_llama
def test_owner_that_is_stopped_costs_less_than_a_second(world: World):
    with world.reader() as reader:
        world.nodes.children[OWNER].stop()
        try:
            assert_added(reader.answers_right(), world.right)
            assert reader.counted("load_late", "load_miss") > 0
        finally:
            world.nodes.children[OWNER].go_on()


def test_owner_that_is_killed_during_a_load_costs_less_than_a_second(world: World):
    owner = world.nodes.children[OWNER]
    try:
        with world.reader() as reader:
            owner.stop()  # so that the load is certainly under way when the kill comes
            with meanwhile(reader, owner.kill):
                answers = reader.answers_right()
            assert_added(answers, world.right)
    finally:
        world.refill_owner()


@with_llama
def test_own_agent_that_is_stopped_costs_less_than_a_second(world: World):
    with world.reader() as reader:
        reader.agent.stop()
        assert_added(reader.answers_right(), world.right)
        reader.agent.go_on()
        loads_again(reader)


@with_llama
def test_engine_goes_on_when_its_agent_was_killed_and_uses_the_next_one(world: World):
    with world.reader() as reader:
        reader.agent.kill()
        assert_added(reader.answers_right(), world.right)
        reader.agent = world.nodes.start_agent(READER)
        loads_again(reader)


@with_llama
def test_answers_are_right_when_the_coordinator_is_down(world: World):
    with world.reader() as reader:
        world.nodes.children["coordinator"].kill()
        try:
            assert_added(reader.answers_right(), world.right)
        finally:
            world.start_coordinator()
        loads_again(reader)


@with_llama
def test_answers_are_right_when_the_directory_names_blocks_that_are_nowhere(world: World):
    with world.reader() as reader, ghosts(world, reader):
        answers = reader.engine.one_by_one(world.other_prompts)
        assert_same(answers, world.other_right)
        assert_added(answers, world.other_right)
        assert reader.counted("lookup_hits") > 0
        assert reader.counted("load_stale", "load_miss") > 0
        assert loaded(answers[:1]) == 0


def test_corrupt_bytes_on_the_wire_are_recomputed(world: World):
    world.refill_owner("--transports", "tcp")
    spoil_arena(world)
    try:
        with world.reader("--transports", "tcp") as reader, patience(reader):
            assert_added(reader.answers_right(), world.right)
            assert reader.counted("load_corrupt") > 0
            assert reader.counted("load_hit_peer") == 0
    finally:
        world.refill_owner()


@with_llama
def test_request_shares_nothing_and_the_log_says_why_when_it_lacks_a_salt_that_is_required(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    with world.reader() as reader:
        connector = reader.engine.connector
        monkeypatch.setattr(connector, "_settings", replace(connector._settings, require_salt=True))
        answers = reader.answers_right()
        assert (loaded(answers), reader.counted("lookup_hits"), world.nodes.held_blocks(READER)) == (0, 0, 0)
        assert len([text for text in caplog.messages if "send cache_salt with every request" in text]) == 1
        reader.engine.generate(world.prompts[0], salt="s")
        wait_for(
            lambda: world.nodes.held_blocks(READER) == shareable(world.prompts[:1]) // BLOCK_TOKENS, "salted blocks stored"
        )


@with_llama
def test_idle_engine_takes_no_processor(world: World):
    """vLLM's own peer tier: 177 % of a core. Threads of this process, and so the tier's; the agent's are the agent's."""
    with world.reader() as reader:
        reader.answers_right()
        wait_for(lambda: not reader.engine.connector.has_pending_push_work(), "the engine has nothing to do")
        began_s, used_s = time.monotonic(), time.process_time()
        wait_for(lambda: time.monotonic() - began_s > 2.0, "two seconds")
        share = (time.process_time() - used_s) / (time.monotonic() - began_s)
    assert share <= 0.03 + POLLING_SHARE


@contextlib.contextmanager
def patience(reader: Reader) -> Iterator[None]:
    """For what loads and not how soon, on a machine that may be busy: loads go on for ten seconds without a block."""
    transfers = reader.engine.connector._tier._transfers
    usual_s, transfers._load_s = transfers._load_s, 10.0
    try:
        yield
    finally:
        transfers._load_s = usual_s


@contextlib.contextmanager
def meanwhile(reader: Reader, act: Callable[[], None]) -> Iterator[None]:
    """`act` once a load is under way."""
    transfers = reader.engine.connector._tier._transfers

    def wait_and_act() -> None:
        wait_for(lambda: transfers.pending, "a load under way")
        act()

    thread = threading.Thread(target=wait_and_act)
    thread.start()
    try:
        yield
    finally:
        thread.join(30)
    assert not thread.is_alive()


def loads_again(reader: Reader) -> None:
    world = reader.world

    def loads() -> bool:
        answers = reader.engine.one_by_one(world.prompts[:1], forget=True)
        assert_same(answers, world.right[:1])
        return loaded(answers) > 0

    wait_for(loads, "the engine loads again", within_s=30)


@contextlib.contextmanager
def ghosts(world: World, reader: Reader) -> Iterator[None]:
    """Nodes that claim the blocks of the other prompts, at the address of an agent that has them not."""
    ended, ready = threading.Event(), threading.Event()
    claimed = fingerprints(world.other_prompts)
    parts = reader.engine.connector._tier.namespaces
    owner = str(world.nodes.children[OWNER].ready["peer"])

    async def publish() -> None:
        async with contextlib.AsyncExitStack() as stack:
            for number, namespace in parts.items():
                node = FakeNode(world.nodes.coordinator, f"ghost-{number}", namespace=namespace, peer_address=owner)
                await stack.enter_async_context(node)
                node.store(claimed)
                await node.synced()
            ready.set()
            await asyncio.to_thread(ended.wait, 60)

    def replica_names_them() -> bool:
        sessions = reader.engine.connector._tier._sessions
        found = (sessions[number].directory.lookup_here(part.digest, claimed).hits for number, part in parts.items())
        return all(hits == len(claimed) for hits in found)

    thread = threading.Thread(target=lambda: asyncio.run(publish()))
    thread.start()
    try:
        assert ready.wait(30)
        wait_for(replica_names_them, "the replica names the ghosts")
        yield
    finally:
        ended.set()
        thread.join(30)


def spoil_arena(world: World) -> None:
    """One byte of every block, as a memory error or a bad cable would."""
    arena = Arena.open(str(world.nodes.directory / OWNER), writable=True)
    for placed in arena.classes:
        for slot in range(placed.slots):
            arena.region[placed.first + slot * placed.stride + HEADER_BYTES + 1000] ^= 0xFF
    arena.close()

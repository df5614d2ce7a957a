"""What may go wrong beside an engine with KvdirConnector: answers stay right, at most a second late, and nothing leaks.

One engine for all of it, each time with empty caches and a new agent. Engines of other settings: test_connector_engines.py.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import peer_agent
from kvdir.errors import UnknownNamespace
from kvdir.fingerprint import Fingerprints
from tests.vllm.connectors import assert_free, forget, fresh_reader, hit_again, settle, worker_half, zero
from tests.vllm.engines import BLOCK_TOKENS, Engine
from tests.vllm.nodes import wait_for
from tests.vllm.world import OWNER, READER, World, assert_same

ADDED_MOST_S = 1.0


@pytest.fixture(scope="module")
def world(connector_llama: World) -> Iterator[World]:
    yield connector_llama
    connector_llama.close_engine()


@pytest.fixture
def restored(world: World) -> Iterator[None]:
    """The owner has its blocks again for the tests that follow."""
    yield
    world.refill_owner()


@pytest.fixture
def reader(world: World) -> Iterator[Engine]:
    """With empty caches and an empty node."""
    engine = fresh_reader(world)
    yield engine
    world.nodes.children[READER].go_on()
    assert_free(engine)


def recompute_s(world: World, engine: Engine, number: int) -> float:
    """How long a prompt of that length takes that nobody has anything of."""
    prompt = world.prompts[number]
    return engine.generate([prompt[0] + 1 + number, *prompt[1:]])[0].took_s


def assert_soon(world: World, engine: Engine, number: int) -> None:
    """The prompt is answered right, and not more than a second later than without kvdir."""
    usual_s = recompute_s(world, engine, number)
    (answer,) = engine.generate(world.prompts[number])
    assert_same([answer], [world.right[number]])
    assert answer.took_s - usual_s <= ADDED_MOST_S


def test_answer_is_right_and_soon_when_the_owner_is_killed_during_the_load(world: World, restored: None, reader: Engine):
    owner = world.nodes.children[OWNER]
    owner.stop()
    killer = threading.Timer(0.2, owner.kill)
    killer.start()
    assert_soon(world, reader, 0)
    killer.join()
    assert reader.connector.totals["failed_loads"] == 1
    assert_soon(world, reader, 7)


def test_answer_is_right_and_soon_when_the_owner_forgot_everything(world: World, restored: None, reader: Engine):
    address = str(world.nodes.children[OWNER].ready["peer"])
    world.nodes.children["coordinator"].stop()  # so nobody hears of it
    try:
        world.nodes.children[OWNER].kill()
        world.nodes.start_agent(OWNER, "--listen", address)
        assert_soon(world, reader, 1)
        assert reader.connector.totals["failed_loads"] == 1
        assert reader.connector.totals["loaded_blocks"] == 0
    finally:
        world.nodes.children["coordinator"].go_on()


def test_answers_are_right_and_soon_when_our_agent_is_stopped(world: World, reader: Engine):
    agent = world.nodes.children[READER]
    agent.stop()
    try:
        for number in (0, 3, 7):
            assert_soon(world, reader, number)
    finally:
        agent.go_on()
    forget(reader)
    hits = reader.connector.half.figures.hit_tokens
    wait_for(lambda: hit_again(world, reader) > hits, "loads, now that it goes on")


def test_answers_are_right_and_soon_when_the_coordinator_is_down(world: World, reader: Engine):
    world.nodes.children["coordinator"].kill()
    for number in (0, 6):
        assert_soon(world, reader, number)
    assert reader.connector.half.figures.hit_tokens > 0, "the replica still knows"
    world.start_coordinator()


def test_answers_are_right_when_blocks_are_changed_on_the_wire(world: World, restored: None):
    world.refill_owner("--transports", "tcp")
    engine = fresh_reader(world, "--transports", "tcp")
    assert flipped_payloads(world, engine) > 0
    assert_soon(world, engine, 5)
    assert engine.connector.totals["corrupt_blocks"] > 0, (engine.connector.totals, engine.connector.half.figures)
    assert engine.connector.totals["loaded_blocks"] == 0


def flipped_payloads(world: World, engine: Engine) -> int:
    """Changes a byte in every block that the owner has of prompt 5, where it lies; how many."""
    namespace = engine.connector._groups[0].namespaces[0]
    names = block_hashes(engine, world.prompts[5])
    blocks = [bytearray(namespace.block_bytes) for _ in names]
    with peer_agent.connect(world.nodes.engine(OWNER), namespace=namespace) as session:
        result = session.load(Fingerprints.of(names), into=blocks, local_only=True)
    path = Path(world.nodes.children[OWNER].ready["arena"])
    flipped = 0
    with path.open("r+b") as file:
        content = file.read()
        for position, block in enumerate(blocks):
            at = content.find(bytes(block)) if result[position].hit else -1
            if at >= 0:
                file.seek(at + 11)
                file.write(bytes([content[at + 11] ^ 0x40]))
                flipped += 1
    return flipped


def block_hashes(engine: Engine, prompt: list[int]) -> list[bytes]:
    """As vLLM's scheduler names them."""
    seen: list[Any] = []
    connector, original = engine.connector, engine.connector.on_new_request
    connector.on_new_request = lambda request: (seen.append(request), original(request))
    connector.half._stopped, before = True, connector.half._stopped
    engine.generate(prompt, tokens=1)
    connector.half._stopped = before
    del connector.on_new_request
    settle(engine)
    assert engine.llm.reset_prefix_cache()
    return [bytes(name) for name in seen[0].block_hashes]


def test_output_changes_when_one_loaded_block_is_zeroed(world: World, reader: Engine, monkeypatch: pytest.MonkeyPatch):
    half = worker_half()
    arriving = half._arriving

    def zeroing(blocks: Any, load: Any, report: Any) -> set[int]:
        bad: set[int] = arriving(blocks, load, report)
        zero(half, blocks.group, blocks.block_ids[0])
        return bad

    monkeypatch.setattr(half, "_arriving", zeroing)
    (answer,) = reader.generate(world.prompts[1])
    assert answer.cached > 0
    assert answer.tokens != world.right[1].tokens, "the comparison would not see wrong blocks"


def test_one_load_serves_all_when_requests_with_one_prefix_come_at_once(world: World, reader: Engine):
    prompt, right = world.prompts[5], world.right[5]
    assert_same(reader.generate(prompt, prompt, prompt, prompt), [right] * 4)
    assert reader.connector.totals["loaded_blocks"] == reader.connector.half.figures.hit_tokens // 32
    assert reader.connector.half.figures.deferred > 0


def test_idle_engine_takes_no_processor(world: World, reader: Engine):
    """vLLM's own peer tier: 177 % of a core. Of this process: the engine, and the connector with its threads."""
    assert_same(reader.generate(world.prompts[3]), [world.right[3]])
    settle(reader)
    assert not reader.connector.has_pending_push_work()
    began_s, used_s = time.monotonic(), time.process_time()
    threading.Event().wait(2.0)  # an interval to measure over: there is nothing to wait for
    assert time.process_time() - used_s <= 0.03 * (time.monotonic() - began_s)


def test_blocks_come_back_when_a_request_is_aborted_while_it_loads(world: World, reader: Engine):
    from vllm import SamplingParams

    agent = world.nodes.children[READER]
    agent.stop()
    core = reader.llm.llm_engine
    core.add_request("gone", {"prompt_token_ids": world.prompts[4]}, SamplingParams(max_tokens=4, detokenize=False))
    core.step()
    assert reader.connector.half._loading
    core.abort_request(["gone"])
    agent.go_on()
    wait_for(lambda: not steps(reader), "the load's end")
    assert_same(reader.generate(world.prompts[4]), [world.right[4]])


def steps(engine: Engine) -> Any:
    engine.llm.llm_engine.engine_core.engine_core.step()
    return engine.connector.half._loading or engine.connector.half.held_blocks


def test_difference_is_told_in_words_when_the_agent_serves_other_blocks(world: World, reader: Engine):
    namespace = reader.connector._groups[0].namespaces[0]
    other = replace(namespace, block_tokens=64, groups=(replace(namespace.groups[0], block_tokens=64),))
    fields = json.loads(other.canonical())
    fields.pop("version")
    file = world.nodes.directory / "other.json"
    file.write_text(json.dumps(fields))
    world.nodes.start_agent("other", "--accept-bytes", "0", "--namespaces", str(file))
    session = peer_agent.connect(world.nodes.engine("other"), namespace=namespace, timeout_s=0)
    with session, pytest.raises(UnknownNamespace, match="block_tokens: 32 here, 64 there"):
        session.attach(timeout_s=5)


def test_sharing_ends_when_the_external_cache_is_reset_and_nothing_else_was_said(
    world: World, reader: Engine, monkeypatch: pytest.MonkeyPatch
):
    connector = reader.connector
    monkeypatch.setattr(connector, "_settings", replace(connector._settings, share_after_reset=False))
    monkeypatch.setattr(connector.half, "_stopped", False)  # and so it is again afterwards
    assert reader.llm.reset_prefix_cache(reset_connector=True)
    assert_same(reader.generate(world.prompts[0]), [world.right[0]])
    settle(reader)
    assert connector.half.figures.hit_tokens == 0
    assert connector.totals["saved_blocks"] == 0


def test_only_requests_with_a_salt_are_shared_when_one_is_required(
    world: World, reader: Engine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(reader.connector._scheduler, "_require_salt", True)
    half, totals = reader.connector.half, reader.connector.totals

    def saved_and_loaded(salt: str | None) -> tuple[int, int]:
        forget(reader)
        before = totals["saved_blocks"], half.figures.hit_tokens
        assert_same(reader.generate(world.prompts[0], salt=salt), [world.right[0]])
        settle(reader)
        return totals["saved_blocks"] - before[0], half.figures.hit_tokens - before[1]

    blocks = len(world.prompts[0]) // BLOCK_TOKENS
    assert saved_and_loaded(None) == (0, 0)
    assert saved_and_loaded("ours") == (blocks, 0)
    world.wait_known(READER)
    wait_for(lambda: saved_and_loaded("ours")[1] == blocks * BLOCK_TOKENS, "what was saved under the same salt")
    assert saved_and_loaded("theirs") == (blocks, 0)

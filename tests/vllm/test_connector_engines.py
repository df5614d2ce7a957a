"""KvdirConnector in engines of their own: hardly any room, an agent that comes later, other weights, a step that fails."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.vllm.connectors import connector, forget, hit_again, reader_of
from tests.vllm.engines import Engine
from tests.vllm.nodes import wait_for
from tests.vllm.world import READER, World, assert_same, namespaces_of


@pytest.fixture
def world(connector_llama: World) -> World:
    connector_llama.close_engine()
    connector_llama.end_other_agents()
    return connector_llama


def test_engine_shares_later_and_answers_right_when_its_agent_comes_later_and_there_is_hardly_room(world: World):
    engine = Engine(
        world.model, connector=connector(world.nodes.engine("late")), cache_bytes=3 << 20, max_num_batched_tokens=128
    )
    assert_same(engine.generate(world.prompts[0]), [world.right[0]])
    assert engine.connector.half.figures.hit_tokens == 0
    world.nodes.start_agent("late")
    wait_for(lambda: engine.connector._engines[0].attached, "a session")
    forget(engine)
    wait_for(lambda: hit_again(world, engine) > 0, "loads, now that there is an agent")
    for _ in range(2):
        assert_same(engine.generate(*world.prompts), world.right)
        forget(engine)
    engine.close()


def test_nothing_is_shared_when_the_same_name_has_other_weights(world: World, tmp_path: Path):
    from tests.vllm.models import make_llama

    engine = reader_of(world, model=make_llama(tmp_path, seed=5))
    theirs = {space.digest for space, _, _ in world.copies}
    assert theirs
    assert theirs.isdisjoint(space.digest for space in namespaces_of(engine))
    (answer,) = engine.generate(world.prompts[0])
    assert answer.tokens != world.right[0].tokens
    assert engine.connector.half.figures.hit_tokens == 0
    engine.close()


def test_nothing_is_saved_when_a_step_fails_half_way_and_the_policy_that_fails_requests_is_warned_of(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    log = logging.getLogger("vllm.kvdir")
    log.addHandler(caplog.handler)
    try:
        engine = reader_of(world, settings={"policy": "fail"})
    finally:
        log.removeHandler(caplog.handler)
    assert 'Set "kv_load_failure_policy": "recompute"' in caplog.text

    from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group

    def breaks(layer_name: str) -> None:
        if ".2." in layer_name:
            raise RuntimeError("the third layer of four breaks")

    worker = get_kv_transfer_group()
    monkeypatch.setattr(worker, "wait_for_layer_load", breaks)
    half = worker._worker._half
    with pytest.raises(RuntimeError, match="the third layer"):
        engine.generate(world.other_prompts[0])
    half.close()  # jobs under way end first
    assert half.report().counts["saved_blocks"] == 0
    assert world.nodes.held_blocks(READER) == 0
    engine.close()

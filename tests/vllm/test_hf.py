"""The connector for transformers with real (tiny) models and agents: output with loaded KV is that without, and what is
refused.
"""

from __future__ import annotations

import asyncio
import runpy
import time
import types
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from kvdir.errors import InvalidInput
from kvdir.testing.wait import eventually
from peer_agent.testing import LocalCluster, local_cluster
from tests.vllm.engines import shared_prompts
from tests.vllm.models import make_gemma3, make_llama

BLOCK_TOKENS = 16
PATIENCE_S = 30.0
"""Models, agents and other tests share two cores here."""


@pytest.fixture
async def cluster(shared_memory: Path) -> AsyncIterator[LocalCluster]:
    """Agents a and b that accept what engines bring along. They wait for each other as long as a test does: what they gave up
    after their usual 0.2 s for the directory, or 0.5 s for a new peer, would be a miss, and share the event loop with them.
    """
    async with local_cluster(
        shared_memory, "a", "b", arena_bytes=1 << 20, accept_bytes=32 << 20, accept_namespaces=2,
        directory_timeout_s=PATIENCE_S, connect_timeout_s=PATIENCE_S,
    ) as cluster:  # fmt: skip
        yield cluster


@pytest.fixture(scope="module")
def llama(tiny_llama: Path) -> Any:
    return loaded(tiny_llama)


@pytest.fixture(scope="module")
def gemma3(tiny_gemma3: Path) -> Any:
    return loaded(tiny_gemma3)


def loaded(path: Path, dtype: str = "float32") -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)


def connect(cluster: LocalCluster, node: str, model: Any, **options: Any) -> Any:
    from peer_agent.connectors import hf

    return hf.connect(cluster.agents[node].ready.engine, model, block_tokens=BLOCK_TOKENS, timeout_s=PATIENCE_S, **options)


def load_all(connector: Any, prompt: list[int]) -> Any:
    """A cache of all that can be loaded. Asks again for what a busy machine brought too late: a miss like any other."""
    until_s = time.monotonic() + PATIENCE_S
    said = []
    while True:
        cache, tokens = connector.load(prompt)
        assert tokens == cache.get_seq_length()
        if tokens == (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS:
            return cache
        said.append(f"{tokens} of {len(prompt)} tokens: {connector.last_load}, {connector.last_load.explanation}")
        assert time.monotonic() < until_s, "\n".join(said)


def generate(model: Any, prompt: list[int], cache: Any) -> tuple[list[int], Any]:
    """Tokens of the answer, greedily, and the cache afterwards."""
    import torch

    output = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), past_key_values=cache, max_new_tokens=12,
        do_sample=False, eos_token_id=None, return_dict_in_generate=True,
    )  # fmt: skip
    return output.sequences[0, len(prompt) :].tolist(), output.past_key_values


def recomputed(model: Any, prompt: list[int]) -> tuple[list[int], Any]:
    from transformers import DynamicCache

    return generate(model, prompt, DynamicCache())


async def in_thread(work: Callable[[], None]) -> None:
    """Beside the agents, which live in the event loop."""
    await asyncio.to_thread(work)


async def saved_on_a(cluster: LocalCluster, model: Any, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    """Saves the prompts' KV on node a; returns the answers, computed without any KV of before."""
    answers: list[list[int]] = []

    def work() -> None:
        with connect(cluster, "a", model, **options) as connector:
            for prompt in prompts:
                answer, cache = recomputed(model, prompt)
                result = connector.save(cache, prompt)
                assert result.stored + result.present == len(prompt) // BLOCK_TOKENS
                answers.append(answer)

    await in_thread(work)
    await cluster.wait_known("a")
    return answers


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
async def test_answer_is_the_same_when_the_prompt_was_computed_on_another_node(
    cluster: LocalCluster, kind: str, request: pytest.FixtureRequest
):
    """Gemma3 keeps every token of its sliding-window layers, too, in a cache that does not know the config."""
    model = request.getfixturevalue(kind)
    prompts = shared_prompts(4)
    answers = await saved_on_a(cluster, model, prompts)

    def work() -> None:
        with connect(cluster, "b", model) as connector:
            for prompt, answer in zip(prompts, answers, strict=True):
                assert generate(model, prompt, load_all(connector, prompt))[0] == answer

    await in_thread(work)


async def test_answer_changes_when_one_loaded_block_is_zeroed(cluster: LocalCluster, llama: Any):
    """So that equal answers say something."""
    (prompt, *_) = prompts = shared_prompts(1)
    (answer,) = await saved_on_a(cluster, llama, prompts)

    def work() -> None:
        with connect(cluster, "b", llama) as connector:
            cache = load_all(connector, prompt)
            for layer in cache.layers:
                layer.keys[:, :, 16:32] = layer.values[:, :, 16:32] = 0
            assert generate(llama, prompt, cache)[0] != answer

    await in_thread(work)


async def test_answer_of_the_turn_before_is_loaded_with_its_prompt(cluster: LocalCluster, llama: Any):
    def work() -> None:
        (prompt,) = shared_prompts(1)
        with connect(cluster, "a", llama) as connector:
            answer, cache = recomputed(llama, prompt)
            turn = [*prompt, *answer, *range(40, 60)]
            connector.save(cache, turn)
            known = len(prompt) + len(answer) - 1  # the answer's last token was never an input
            again, tokens = connector.load(turn, deadline_s=PATIENCE_S)
            assert tokens == known // BLOCK_TOKENS * BLOCK_TOKENS
            assert generate(llama, turn, again)[0] == recomputed(llama, turn)[0]

    await in_thread(work)


async def test_half_precision_is_loaded_bit_by_bit(cluster: LocalCluster, tiny_llama: Path):
    import torch

    model = loaded(tiny_llama, "bfloat16")

    def work() -> None:
        (prompt,) = shared_prompts(1)
        with connect(cluster, "a", model) as connector:
            assert connector.engine.namespace.kv_dtype == "bfloat16"
            _, cache = recomputed(model, prompt)
            connector.save(cache, prompt)
            again, tokens = connector.load(prompt, deadline_s=PATIENCE_S)
        for layer, other in zip(cache.layers, again.layers, strict=True):
            assert torch.equal(layer.keys[:, :, :tokens], other.keys)
            assert torch.equal(layer.values[:, :, :tokens], other.values)

    await in_thread(work)


async def test_models_of_one_name_and_other_weights_share_nothing(cluster: LocalCluster, llama: Any, tmp_path: Path):
    other = loaded(make_llama(tmp_path, seed=1))
    prompts = shared_prompts(1)
    await saved_on_a(cluster, llama, prompts)

    def work() -> None:
        for node in ("a", "b"):
            with connect(cluster, node, other) as connector:
                assert connector.load(prompts[0], deadline_s=PATIENCE_S)[1] == 0

    await in_thread(work)


async def test_everything_is_recomputed_when_the_agent_has_gone(cluster: LocalCluster, llama: Any):
    prompts = shared_prompts(1)
    (answer,) = await saved_on_a(cluster, llama, prompts)
    connector = await asyncio.to_thread(connect, cluster, "a", llama)
    await cluster.stop_agent("a")
    await eventually(lambda: not connector.engine.attached, what="the engine sees that its agent is gone")

    def work() -> None:
        cache, tokens = connector.load(prompts[0], deadline_s=1)
        assert tokens == 0
        found, cache = generate(llama, prompts[0], cache)
        assert found == answer
        result = connector.save(cache, prompts[0])
        assert (result.stored, bool(result.reason)) == (0, True)
        connector.close()

    await in_thread(work)


async def test_example_loads_what_it_would_recompute(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    example = Path(__file__).parents[2] / "examples" / "two_engines.py"
    monkeypatch.setattr("sys.argv", [str(example), *(cluster.agents[node].ready.engine for node in "ab")])
    await in_thread(lambda: runpy.run_path(str(example)))
    said = capsys.readouterr().out
    assert "blocks stored on a: 125" in said
    assert "for 1984 of them" in said
    assert "answers are equal: True" in said


# what is refused


async def test_caches_that_do_not_keep_every_token_are_refused(cluster: LocalCluster, gemma3: Any):
    from transformers import DynamicCache, StaticCache

    def work() -> None:
        (prompt,) = shared_prompts(1)
        with connect(cluster, "a", gemma3) as connector:
            _, cache = generate(gemma3, prompt, DynamicCache(config=gemma3.config))
            with pytest.raises(InvalidInput, match=r"DynamicSlidingWindowLayer.*DynamicCache\(\) \(without its config\)"):
                connector.save(cache, prompt)
            with pytest.raises(InvalidInput, match="a StaticCache cannot be saved"):
                connector.save(StaticCache(config=gemma3.config, max_cache_len=64), prompt)

    await in_thread(work)


async def test_caches_of_another_model_or_several_prompts_are_refused(cluster: LocalCluster, llama: Any, gemma3: Any):
    import torch
    from transformers import DynamicCache

    def work() -> None:
        (prompt,) = shared_prompts(1)
        with connect(cluster, "a", llama) as connector:
            with pytest.raises(InvalidInput, match="6 layers, the model 4"):
                connector.save(recomputed(gemma3, prompt)[1], prompt)
            two = llama(torch.tensor([prompt, prompt]), past_key_values=DynamicCache()).past_key_values
            with pytest.raises(InvalidInput, match="one prompt at a time"):
                connector.save(two, prompt)
            for empty in (DynamicCache(), DynamicCache(config=llama.config)):
                assert connector.save(empty, prompt).stored == 0
            assert [connector.load(prompt[:n])[1] for n in (0, 1, 16)] == [0, 0, 0]

    await in_thread(work)


def test_models_whose_kv_cannot_be_told_are_refused():
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from peer_agent.connectors import hf

    config = LlamaConfig(num_hidden_layers=1, hidden_size=64, num_attention_heads=2, vocab_size=32, intermediate_size=64)
    with torch.device("meta"):
        elsewhere = LlamaForCausalLM(config)
    with pytest.raises(InvalidInput, match="give weights="):
        hf.namespace_of(elsewhere)
    assert hf.namespace_of(elsewhere, weights="seed 7").weights.startswith("stated:seed 7:none:")
    made = LlamaForCausalLM(config)
    made.peft_config = {"default": object()}
    with pytest.raises(InvalidInput, match="adapter="):
        hf.namespace_of(made)
    assert hf.namespace_of(made, adapter="sql v2").adapter == "sql v2"
    del made.peft_config
    made.config = types.SimpleNamespace(get_text_config=lambda decoder: config, vision_config=object())
    with pytest.raises(InvalidInput, match="text_only=True"):
        hf.namespace_of(made)
    assert hf.namespace_of(made, text_only=True).groups[0].layers == 1
    made.config = config
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(InvalidInput, match="depend on the length"):
        hf.namespace_of(made)


def test_weights_that_changed_after_loading_are_others(tiny_llama: Path):
    import torch

    from peer_agent.connectors import hf

    model = loaded(tiny_llama)
    before = hf.namespace_of(model)
    assert hf.namespace_of(loaded(tiny_llama)) == before
    with torch.no_grad():
        model.model.layers[3].self_attn.v_proj.weight += 1e-3  # as a merged adapter, or one step of training
    assert hf.namespace_of(model).weights != before.weights


def test_a_model_that_computes_otherwise_with_the_same_weights_is_another(tiny_gemma3: Path):
    from peer_agent.connectors import hf

    before = hf.namespace_of(loaded(tiny_gemma3))
    for name, value in (("sliding_window", 8), ("rms_norm_eps", 1e-3), ("query_pre_attn_scalar", 64)):
        model = loaded(tiny_gemma3)
        config = model.config.get_text_config(decoder=True)
        assert getattr(config, name) != value
        setattr(config, name, value)
        assert hf.namespace_of(model) != before
    told = loaded(tiny_gemma3)
    told.config.get_text_config(decoder=True).update({"use_cache": False, "eos_token_id": 7})
    assert hf.namespace_of(told) == before, "neither changes the KV"


def test_namespace_tells_what_changes_the_kv(llama: Any, gemma3: Any, tmp_path: Path):
    from peer_agent.connectors import hf

    base = hf.namespace_of(llama)
    assert base.block_bytes == 4 * 2 * 2 * 16 * 32 * 4
    others = [
        hf.namespace_of(gemma3),
        hf.namespace_of(loaded(make_llama(tmp_path / "other", seed=1))),
        hf.namespace_of(llama, block_tokens=32),
        hf.namespace_of(llama, tenant_salt="a secret salt"),
        hf.namespace_of(llama, scheme="vllm:sha256_cbor"),
    ]
    assert len({item.digest for item in (base, *others)}) == 6
    same = hf.namespace_of(loaded(make_gemma3(tmp_path / "same")))
    assert same == hf.namespace_of(gemma3)

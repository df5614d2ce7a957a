"""Fingerprints from tokens against vLLM itself: the blocks that a real engine caches, and its hash code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import peer_agent
from kvdir.hashing import explain_mismatch, fingerprints, probe, vllm_extra
from tests.vllm.engines import BLOCK_TOKENS, Engine, shared_prompts
from tests.vllm.nodes import Nodes, wait_for
from tests.vllm.world import tier

WAYS = [
    (algorithm, seed)
    for algorithm in ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
    for seed in ("builtin", "0", "42")
    if seed != "builtin" or algorithm.startswith("sha256")
]
"""An xxhash without a seed has a random one."""


@pytest.fixture(autouse=True)
def seed_of_the_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Sets PYTHONHASHSEED, which vLLM reads when an engine starts; its global root is put back afterwards."""
    from vllm.v1.core import kv_cache_utils

    before = getattr(kv_cache_utils, "NONE_HASH", None), kv_cache_utils._NONE_HASH_SEED

    def use(seed: str) -> None:
        if seed == "builtin":
            monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        else:
            monkeypatch.setenv("PYTHONHASHSEED", seed)

    yield use
    kv_cache_utils.NONE_HASH, kv_cache_utils._NONE_HASH_SEED = before


def hashes_of_request(algorithm: str, block_tokens: int, tokens: list[int], **options: Any) -> list[bytes]:
    """As an engine that starts now computes them when the request comes in."""
    from vllm import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    function = get_hash_fn_by_name(algorithm)
    init_none_hash(function)
    hasher = get_request_block_hasher(block_tokens, function)
    request = Request("r", tokens, SamplingParams(max_tokens=1), None, block_hasher=hasher, **options)
    return [bytes(item) for item in request.block_hashes]


def cached_by(engine: Engine) -> set[bytes]:
    from vllm.v1.core.kv_cache_utils import get_block_hash

    blocks = engine.scheduler.kv_cache_manager.block_pool.blocks
    return {bytes(get_block_hash(block.block_hash)) for block in blocks if block.block_hash is not None}


@pytest.mark.parametrize(
    ("algorithm", "seed"),
    [("sha256", "builtin"), ("sha256_cbor", "42"), ("xxhash", "0"), ("xxhash_cbor", "42")],
)
def test_real_engine_caches_blocks_by_these_fingerprints(tiny_llama: Path, seed_of_the_process: Any, algorithm: str, seed: str):
    seed_of_the_process(seed)
    engine = Engine(tiny_llama, prefix_caching_hash_algo=algorithm)
    try:
        prompts = shared_prompts(3)
        engine.generate(*prompts, tokens=1)
        engine.generate(prompts[0], tokens=1, salt="tenant-1")
        cached = cached_by(engine)
    finally:
        engine.close()
    scheme = f"vllm:{algorithm}"
    ours = [fingerprints(prompt, scheme=scheme, block_tokens=BLOCK_TOKENS, seed=seed) for prompt in prompts]
    salt = vllm_extra(len(prompts[0]) // BLOCK_TOKENS, cache_salt="tenant-1")
    salted = fingerprints(prompts[0], scheme=scheme, block_tokens=BLOCK_TOKENS, seed=seed, extra=salt)
    assert cached == {item for found in (*ours, salted) for item in found}
    assert not set(salted) & set(ours[0])


@pytest.mark.parametrize(("algorithm", "seed"), WAYS)
@pytest.mark.parametrize("block_tokens", [1, 3, 16, 32, 300])
def test_requests_hash_as_in_vllm(seed_of_the_process: Any, algorithm: str, seed: str, block_tokens: int):
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    seed_of_the_process(seed)
    tokens = [(n * n * 31 + n) % 160_000 for n in range(610)]
    blocks = len(tokens) // block_tokens
    for how, extra in (
        ({}, None),
        ({"cache_salt": "tenant-1"}, vllm_extra(blocks, cache_salt="tenant-1")),
        (
            {"cache_salt": "t", "lora_request": LoRARequest("adapter", 1, "/path/of/it")},
            vllm_extra(blocks, cache_salt="t", lora_name="adapter", lora_path="/path/of/it"),
        ),
    ):
        theirs = hashes_of_request(algorithm, block_tokens, tokens, **how)
        scheme = f"vllm:{algorithm}"
        ours = fingerprints(tokens, scheme=scheme, block_tokens=block_tokens, seed=seed, extra=extra)
        assert list(ours) == theirs
        told = fingerprints(tokens, scheme=f"{scheme}:low64", block_tokens=block_tokens, seed=seed, extra=extra)
        assert [int.from_bytes(item, "big") for item in told] == [maybe_convert_block_hash(item) for item in theirs]


def test_xxhash_without_a_seed_is_another_one_in_each_engine_and_explained(seed_of_the_process: Any):
    seed_of_the_process("builtin")
    tokens = list(range(1, 17))
    first, second = (hashes_of_request("xxhash", 16, tokens)[0] for _ in range(2))
    assert first != second
    assert "another one in each process" in explain_mismatch(first, scheme="vllm:xxhash", seed="0", block_tokens=16)


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def test_media_in_blocks_hash_as_in_vllm(seed_of_the_process: Any, algorithm: str):
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    seed_of_the_process("builtin")
    media = [
        MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(offset=offset, length=length))
        for identifier, offset, length in (("a" * 64, 3, 7), ("b" * 64, 12, 30), ("a" * 64, 50, 2))
    ]
    theirs = hashes_of_request(algorithm, 16, list(range(64)), mm_features=media)
    extra = [
        (("mm", "a" * 64, 3), ("mm", "b" * 64, 12)),
        (("mm", "b" * 64, -4),),
        (("mm", "b" * 64, -20),),
        (("mm", "a" * 64, 2),),
    ]
    assert list(fingerprints(range(64), scheme=f"vllm:{algorithm}", block_tokens=16, extra=extra)) == theirs


def test_probe_of_an_engine_names_its_algorithm_and_seed(seed_of_the_process: Any):
    seed_of_the_process("42")
    seen = hashes_of_request("sha256", 16, list(range(1, 17)))[0]
    assert seen == probe("vllm:sha256", "42", 16)
    words = explain_mismatch(seen, scheme="vllm:sha256_cbor", seed="builtin", block_tokens=16)
    assert 'hash_scheme = "vllm:sha256", hash_seed = "42"' in words


def test_blocks_of_the_tier_are_found_by_tokens_when_each_is_two_blocks_of_the_engine(tiny_llama: Path, shared_memory: Path):
    """A router that has only tokens, and the namespace from the directory, names the blocks that the tier stored."""
    nodes = Nodes(shared_memory)
    try:
        nodes.start_coordinator()
        nodes.start_agent("chunks")
        way = tier(nodes.engine("chunks"))
        way["kv_connector_extra_config"]["blocks_per_chunk"] = 2
        engine = Engine(tiny_llama, connector=way, prefix_caching_hash_algo="sha256_cbor")
        prompt = shared_prompts(2)[1]
        engine.generate(prompt)
        (namespace,) = engine.connector.scheduler.manager.secondary_tiers[0].namespaces.values()
        wait_for(lambda: nodes.held_blocks("chunks") == len(prompt) // 64, "all blocks stored")
        engine.close()
        assert (namespace.hash_scheme, namespace.block_tokens) == (f"vllm:sha256_cbor@{BLOCK_TOKENS}", 2 * BLOCK_TOKENS)
        found = fingerprints(prompt, scheme=namespace.hash_scheme, block_tokens=namespace.block_tokens)
        with peer_agent.connect(nodes.engine("chunks"), namespace=namespace) as other:
            assert other.lookup(found).local == b"\1" * len(found)
    finally:
        nodes.close()

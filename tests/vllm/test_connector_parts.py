"""How KvdirConnector reads vLLM's configuration: parts of a tensor-parallel split, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest


def configuration(*, tp: int = 1, rank: int = 0, replicas: int = 1, pp: int = 1, caching: bool = True) -> tuple[Any, Any]:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    parallel = SimpleNamespace(
        tensor_parallel_size=tp, pipeline_parallel_size=pp, decode_context_parallel_size=1, prefill_context_parallel_size=1,
        rank=rank,
    )  # fmt: skip
    vllm_config = SimpleNamespace(
        parallel_config=parallel, speculative_config=None, cache_config=SimpleNamespace(enable_prefix_caching=caching)
    )
    spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=8, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["layer.0", "layer.1"], spec)]
    return vllm_config, KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=groups, kv_tp_replicas=replicas)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (1, 0, True)),
        ({"tp": 4, "rank": 2}, (4, 2, True)),
        ({"tp": 4, "rank": 3, "replicas": 2}, (2, 1, False)),
        ({"tp": 4, "rank": 2, "replicas": 4}, (1, 0, False)),
    ],
)
def test_rank_has_the_part_that_its_kv_heads_are(options: dict[str, int], expected: tuple[int, int, bool]):
    from peer_agent.connectors.vllm.v0_32_pages import split_of

    assert split_of(*configuration(**options)) == expected


@pytest.mark.parametrize(
    ("options", "words"), [({"pp": 2}, "pipeline parallelism"), ({"caching": False}, "--no-enable-prefix-caching"), ({}, "")]
)
def test_configuration_is_refused_in_words_when_it_cannot_be_shared(options: dict[str, Any], words: str):
    from peer_agent.connectors.vllm.v0_32_pages import connector_faults

    faults = connector_faults(*configuration(**options))
    assert [words in fault for fault in faults] == ([True] if words else [])


def test_state_space_layers_are_refused_and_the_tier_is_named():
    import torch
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec, MambaSpec

    from peer_agent.connectors.vllm.v0_32_pages import connector_faults

    vllm_config, cache = configuration()
    mamba = MambaSpec(block_size=32, shapes=((2, 8),), dtypes=(torch.float32,))
    cache.kv_cache_groups.append(KVCacheGroupSpec(["mixer.0"], mamba))
    (fault,) = connector_faults(vllm_config, cache)
    assert "group 1 is MambaSpec" in fault
    assert "KvdirTier" in fault


def test_attention_that_only_looks_like_a_known_one_is_refused():
    import torch
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec, RSWASpec

    from peer_agent.connectors.vllm.v0_32_pages import connector_faults

    vllm_config, cache = configuration()
    spec = RSWASpec(block_size=32, num_kv_heads=2, head_size=8, dtype=torch.float32, rswa_window=64)
    cache.kv_cache_groups.append(KVCacheGroupSpec(["layer.2"], spec))
    (fault,) = connector_faults(vllm_config, cache)
    assert "group 1 is RSWASpec" in fault


def test_pages_of_every_layer_are_segments_when_blocks_lie_together():
    import torch

    from kvdir.errors import InvalidInput
    from peer_agent.connectors.vllm.pages import group_pool, page_segment
    from peer_agent.memory.host_device import HostDevice

    caches = {f"layer.{n}": torch.zeros(8, 2, 16, 4) for n in range(2)}  # 4 blocks of two kernel blocks each
    pool = group_pool(HostDevice(), caches, caches, blocks=4, block_bytes=2 * 2 * 2 * 16 * 4 * 4)
    assert [segment.address for segment in pool.segments] == [cache.data_ptr() for cache in caches.values()]
    assert page_segment(caches["layer.0"].transpose(1, 2), blocks=4, where="it").size_bytes == 2 * 2 * 16 * 4 * 4
    with pytest.raises(InvalidInput, match="VLLM_KV_CACHE_LAYOUT"):
        page_segment(caches["layer.0"][:, :, ::2], blocks=4, where="it")
    with pytest.raises(InvalidInput, match="by its namespace"):
        group_pool(HostDevice(), caches, caches, blocks=4, block_bytes=77)

"""What the connector reads from vLLM 0.32's configuration: what it can share, in how many parts, and on which device.

The bytes of a block are the pages of its layers one after another, in the order of the group; a page is [heads, tokens, K and
V] in the layout LBHNC, which the connector asks vLLM for (v1/kv_cache_layout.py). Each rank of a tensor-parallel split stores
its part in a namespace of its own; ranks that hold the same (MLA, few KV heads) share one, and the first of them saves.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from vllm.config import VllmConfig
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import hash_block_tokens, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupRole,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvdir.errors import InvalidInput
from kvdir.namespace import Namespace
from peer_agent.connectors.vllm.identity import identify
from peer_agent.connectors.vllm.settings import Settings
from peer_agent.connectors.vllm.v0_32_offloading import platform
from peer_agent.memory.device import Device, Event
from peer_agent.memory.host_device import HostDevice, HostEvent

LAYOUT = "LBHNC"
FORM = f"vllm-pages-{LAYOUT}"

KNOWN_SPECS = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec)
"""Exactly these: what is derived from them may hold something else (R-SWA, attention sinks, hidden states)."""

USE_TIER = "use vLLM's own offloading with KvdirTier instead (docs/engines/vllm.md)"


class Split(NamedTuple):
    """parts: how many different parts of a block there are. part: this worker's; saves: whether it stores it."""

    parts: int
    part: int
    saves: bool


def split_of(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Split:
    """Of the worker that this configuration is in; in the scheduler only `parts` means something."""
    parallel = vllm_config.parallel_config
    replicas = max(1, kv_cache_config.kv_tp_replicas)
    rank = parallel.rank % parallel.tensor_parallel_size
    return Split(max(1, parallel.tensor_parallel_size // replicas), rank // replicas, rank % replicas == 0)


def connector_faults(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> list[str]:
    """What this connector does not share correctly, in words; empty when it can."""
    parallel, speculative = vllm_config.parallel_config, vllm_config.speculative_config
    out = []
    if parallel.pipeline_parallel_size > 1:
        out.append(
            "pipeline parallelism: its ranks hold different layers, which this connector does not put together; " + USE_TIER
        )
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        out.append("context parallelism: a block is spread over ranks token by token; " + USE_TIER)
    if speculative is not None and speculative.use_eagle_block_drop():
        out.append("a draft model with state of its own (EAGLE, MTP): its last block changes after it is full; " + USE_TIER)
    if not vllm_config.cache_config.enable_prefix_caching:
        out.append("prefix caching is off, so blocks have no names: remove --no-enable-prefix-caching")
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        if (fault := _group_fault(group.kv_cache_spec)) or group.role is not KVCacheGroupRole.DEFAULT or group.host_resident:
            out.append(f"KV cache group {number} is {fault or group.role}, which this connector does not know; {USE_TIER}")
    return out


def group_namespaces(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, settings: Settings
) -> list[tuple[Namespace, ...]]:
    """Per KV cache group the namespaces of its parts. InvalidInput for what cannot be shared safely."""
    groups = dict(enumerate(kv_cache_config.kv_cache_groups))
    identity = identify(vllm_config, groups, settings, platform=platform(vllm_config, groups), environment=os.environ)
    parts = split_of(vllm_config, kv_cache_config).parts
    by_part = [
        identity.namespace(
            form=FORM,
            block_tokens={number: group.kv_cache_spec.block_size for number, group in groups.items()},
            block_bytes={number: _block_bytes(group.kv_cache_spec, group) for number, group in groups.items()},
            parallel="replicated" if parts == 1 else f"tp={part}/{parts}",
        ).parts()
        for part in range(parts)
    ]
    return [tuple(dict.fromkeys(namespaces)) for namespaces in zip(*by_part, strict=True)]


def probe(vllm_config: VllmConfig, *, hash_tokens: int, block_tokens: int) -> bytes:
    """vLLM's own hash of the tokens 1, 2, ... block_tokens: by it the agent checks what the namespace says of hashes."""
    function = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
    init_none_hash(function)  # the engine does so itself, after it has made its connector
    last = b""
    for start in range(1, block_tokens + 1, hash_tokens):
        last = bytes(hash_block_tokens(function, last, range(start, start + hash_tokens)))
    return last


def device_of(caches: Mapping[str, torch.Tensor]) -> Device:
    """Where the pages are. InvalidInput for devices we cannot copy from."""
    place = next(iter(caches.values())).device
    if place.type == "cpu":
        return HostDevice()
    if place.type == "cuda":
        from peer_agent.memory.gpu import CudaDevice

        return CudaDevice(place.index or 0)
    raise InvalidInput(f"the KV cache is on {place}, from which kvdir cannot copy: {USE_TIER}")


def ready_event(device: Any) -> Event:
    """Done once everything that this worker has queued so far has ended."""
    if isinstance(device, HostDevice):
        return HostEvent()
    made: Event = device.stream_of(torch.cuda.current_stream()).record()
    return made


def _group_fault(spec: KVCacheSpec) -> str:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return next((fault for each in spec.kv_cache_specs.values() if (fault := _group_fault(each))), "")
    if type(spec) not in KNOWN_SPECS or not spec.prefix_cacheable or spec.prefix_replay_tokens:
        return type(spec).__name__
    return "attention in which a token sees later ones" if getattr(spec, "non_causal", False) else ""


def _block_bytes(spec: KVCacheSpec, group: Any) -> int:
    """The pages of one block, without the padding between them."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return sum(_page_bytes(each) for each in spec.kv_cache_specs.values())
    return _page_bytes(spec) * len(group.layer_names)


def _page_bytes(spec: KVCacheSpec) -> int:
    return int(spec.num_heads * spec.num_states * spec.state_content_size_bytes)

"""The restore rule equals that of vLLM's own hybrid cache: its coordinator and managers over random pools of blocks.

Only where the blocks lie is faked (the pool); what counts as a hit is decided by vLLM. It resumes at block boundaries only,
below the end of the prompt: its kv_cache_manager asks for prompt_tokens - 1 at most.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvdir.core.restore_points import restore_points
from kvdir.namespace import StateGroup

GROUPS = {
    "full": StateGroup(kind="full", layers=1, kv_heads=1, head_dim=8),
    "narrow": StateGroup(kind="sliding_window", layers=1, kv_heads=1, head_dim=8, window_tokens=33),
    "wide": StateGroup(kind="sliding_window", layers=1, kv_heads=1, head_dim=8, window_tokens=80),
    "recurrent": StateGroup(kind="recurrent", layers=1, state_bytes=8),
    "coarse": StateGroup(kind="recurrent", layers=1, state_bytes=8, block_tokens=48),
    "coarse full": StateGroup(kind="full", layers=1, kv_heads=1, head_dim=8, block_tokens=32),
}
BLOCK_TOKENS = 16
MODELS = [
    ("full",), ("narrow",), ("full", "narrow"), ("full", "narrow", "narrow"), ("full", "wide", "narrow"), ("full", "recurrent"),
    ("full", "recurrent", "narrow"), ("full", "coarse"), ("coarse full", "narrow"), ("coarse full", "wide", "coarse"),
]  # fmt: skip


class Pool:
    """Where vLLM looks for blocks. held: per group, one byte a block of that group's size."""

    def __init__(self, held: Sequence[bytes], sizes: Sequence[int]) -> None:
        self.hash_block_size = BLOCK_TOKENS
        self.null_block = "null"
        self._held, self._sizes = held, sizes

    def get_cached_block(self, block_hash: bytes, group_ids: Sequence[int]) -> list[str] | None:
        tokens = (int.from_bytes(block_hash, "big") + 1) * BLOCK_TOKENS
        places = [(group, tokens // self._sizes[group] - 1) for group in group_ids]
        there = all(at < len(self._held[group]) and self._held[group][at] for group, at in places)
        return ["block"] * len(group_ids) if there else None


def vllm_spec(group: StateGroup) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

    size = group.block_tokens or BLOCK_TOKENS
    attention = {"block_size": size, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    match group.kind:
        case "full":
            return FullAttentionSpec(**attention)
        case "sliding_window":
            return SlidingWindowSpec(**attention, sliding_window=group.window_tokens)
        case _:
            return MambaSpec(block_size=size, shapes=((8,),), dtypes=(torch.float32,), mamba_cache_mode="all")


def vllm_hit_tokens(groups: Sequence[StateGroup], held: Sequence[bytes], max_tokens: int, blocks: int) -> int:
    """What vLLM's coordinator says, without an engine around it."""
    from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, MambaManager, SlidingWindowManager

    managers = {"full": FullAttentionManager, "sliding_window": SlidingWindowManager, "recurrent": MambaManager}
    sizes = [group.block_tokens or BLOCK_TOKENS for group in groups]
    pool = Pool(held, sizes)
    coordinator: Any = object.__new__(HybridKVCacheCoordinator)
    coordinator.hash_block_size = BLOCK_TOKENS
    coordinator.scheduler_block_size = math.lcm(*sizes)
    coordinator.enable_partial_hash_hits = False
    coordinator.eagle_group_ids = set()
    coordinator.kv_cache_config = SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=vllm_spec(group)) for group in groups]
    )
    made = []
    for group, size in zip(groups, sizes, strict=True):
        manager: Any = object.__new__(managers[group.kind])
        manager.block_size, manager.block_pool, manager.retains_longer_hit = size, pool, False
        manager.dcp_world_size = manager.pcp_world_size = 1
        made.append(manager)
    coordinator.single_type_managers = tuple(made)
    coordinator.verify_and_split_kv_cache_groups()
    hashes = [number.to_bytes(8, "big") for number in range(blocks)]
    return int(coordinator.find_longest_cache_hit(hashes, max_tokens)[1])


@pytest.mark.parametrize("names", MODELS, ids=" + ".join)
def test_largest_restore_point_is_vllms_longest_hit(names: tuple[str, ...]) -> None:
    rng = random.Random(" ".join(names))
    groups = [GROUPS[name] for name in names]
    hits = 0
    for _ in range(400):
        prompt_tokens = rng.randrange(1, 400)
        blocks = prompt_tokens // BLOCK_TOKENS
        likely = rng.choice((0.5, 0.8, 0.97))
        held = [
            bytes(rng.random() < likely for _ in range(prompt_tokens // (group.block_tokens or BLOCK_TOKENS)))
            for group in groups
        ]
        if rng.random() < 0.2:  # the same prompt once more, all of it kept
            held = [bytes([1]) * len(item) for item in held]
        expected = vllm_hit_tokens(groups, held, prompt_tokens - 1, blocks)
        found = restore_points(groups, held, block_tokens=BLOCK_TOKENS, prompt_tokens=prompt_tokens, can_trim=False)
        assert found.best_tokens == expected, (names, prompt_tokens, held)
        hits += expected > 0
    assert hits > 20

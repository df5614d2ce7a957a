"""Events encoded by vLLM's own classes are read as they were meant, whatever its version leaves out or adds."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvdir.engines import Cleared, Removed, Stored, decode
from kvdir.engines.media import kind_of
from kvdir.location import Tier

pytestmark = pytest.mark.vllm


def read(*events: Any, rank: int | None = 2) -> Any:
    from vllm.distributed.kv_events import KVEventBatch

    batch = KVEventBatch(ts=12.5, events=list(events))
    batch.data_parallel_rank = rank
    return decode("vllm", msgspec.msgpack.Encoder().encode(batch))


@pytest.mark.parametrize(
    "hashes", [[1, 2**64 - 1], [b"a" * 32, b"b" * 32], [b"c" * 16], []], ids=["u64", "sha256", "xxh3", "none"]
)
@pytest.mark.parametrize(
    "more", [{}, {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 64}]
)
def test_an_event_is_read_when_vllms_own_class_wrote_it(hashes: list[Any], more: dict[str, Any]) -> None:
    from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

    stored = BlockStored(
        block_hashes=hashes, parent_block_hash=None, token_ids=list(range(32)), block_size=16, lora_id=7, medium="CPU",
        lora_name="sql", extra_keys=[("sql", "tenant-1"), None], locality="LOCAL", ownership="fs", session_id="s", **more,
    )  # fmt: skip
    batch = read(stored, BlockRemoved(block_hashes=hashes, medium="GPU", group_idx=1), AllBlocksCleared())
    assert not batch.rejected
    assert (batch.ts_s, batch.dp_rank) == (12.5, 2)
    first, second, third = batch.events
    assert isinstance(first, Stored)
    assert (first.blocks, first.tier, first.block_tokens, first.adapter) == (len(hashes), Tier.CPU, 16, "sql")
    assert first.salted == bool(hashes)
    assert first.group.window_tokens == more.get("kv_cache_spec_sliding_window", 0)
    assert isinstance(second, Removed)
    assert second.group.index == 1
    assert isinstance(third, Cleared)


def test_every_kind_of_group_has_a_rule_or_is_refused_on_purpose() -> None:
    from vllm.v1.kv_cache_interface import KVCacheSpecKind

    refused = {kind.value for kind in KVCacheSpecKind if kind_of(kind.value) is None}
    assert refused == {"encoder_only_attention", "cross_attention", "unknown"}

"""Writes the hand-made golden frames: one small story told in every dialect and generation that existed.

The story, always the same: two blocks stored at the start of a sequence, the second one removed, then everything cleared. Field
names and orders are from the sources that README.md lists; the values are made up. Run it from here: python make.py
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import msgspec

HERE = Path(__file__).parent
FIRST, SECOND = 0x8000_0000_0000_0001, 0x0000_0000_0000_0002
TOKENS = [11, 12, 13, 14, 15, 16, 17, 18]
BLOCK = 4


def signed(value: int) -> int:
    return struct.unpack(">q", struct.pack(">Q", value))[0]


def wide(value: int) -> bytes:
    return bytes(24) + value.to_bytes(8, "big")


def batch(*events: Any, rank: int | None = 0) -> bytes:
    items = [1700000000.5, list(events)] + ([] if rank is None else [rank])
    return msgspec.msgpack.encode(items)


def story(stored: Any, removed: Any, cleared: Any, *, rank: int | None = 0) -> list[bytes]:
    return [batch(stored, rank=rank), batch(removed, rank=rank), batch(cleared, rank=rank)]


def arrays(
    *more: Any, first: Any = FIRST, second: Any = SECOND, removed_more: tuple[Any, ...] = (), rank: int | None = 0
) -> list[bytes]:
    return story(
        ["BlockStored", [first, second], None, TOKENS, BLOCK, None, *more],
        ["BlockRemoved", [second], *removed_more],
        ["AllBlocksCleared"],
        rank=rank,
    )


def maps(first: Any = FIRST, second: Any = SECOND, **more: Any) -> list[bytes]:
    stored = {
        "type": "BlockStored", "block_hashes": [first, second], "parent_block_hash": None, "token_ids": TOKENS,
        "block_size": BLOCK, "lora_id": None, **more,
    }  # fmt: skip
    removed = {"type": "BlockRemoved", "block_hashes": [second], "medium": more.get("medium")}
    return story(stored, removed, {"type": "AllBlocksCleared"})


def envelope(event_id: int, event_type: str, **more: Any) -> dict[str, Any]:
    base = {
        "event_id": event_id, "timestamp": 1700000000500, "event_type": event_type, "model_name": None, "block_size": BLOCK,
        "additional_salt": None, "lora_name": None, "tenant_id": "default", "backend_id": "worker-0", "medium": "gpu",
        "dp_rank": 0,
    }  # fmt: skip
    return base | more


def router(data: Any) -> dict[str, Any]:
    return {"worker_id": 7, "storage_tier": "device", "event": {"event_id": 1, "data": data, "dp_rank": 0}}


STORIES: dict[str, tuple[str, list[bytes]]] = {
    "vllm-array-5-fields": ("vllm", arrays()),
    "vllm-array-5-fields-without-rank": ("vllm", arrays(rank=None)),
    "vllm-array-medium": ("vllm", arrays("GPU", removed_more=("GPU",))),
    "vllm-array-lora-name": ("vllm", arrays("GPU", None, removed_more=("GPU",))),
    "vllm-array-extra-keys": ("vllm", arrays("GPU", None, [None, None], removed_more=("GPU",))),
    "vllm-array-groups": ("vllm", arrays("GPU", None, [None, None], 0, "full_attention", removed_more=("GPU", 0))),
    "vllm-array-bytes": ("vllm", arrays("GPU", first=wide(FIRST), second=wide(SECOND), removed_more=("GPU",))),
    "vllm-map": ("vllm", maps(medium="GPU", lora_name=None)),
    "vllm-map-newer": ("vllm", maps(medium="GPU", lora_name=None, session_id="s", a_field_of_tomorrow={"x": [1]})),
    "sglang-array-5-fields": ("sglang", arrays(first=signed(FIRST), second=signed(SECOND), rank=None)),
    "sglang-array-medium": ("sglang", arrays("GPU", first=signed(FIRST), removed_more=("GPU",))),
    "sglang-0.5.23-map": ("sglang", maps(first=signed(FIRST), medium="GPU")),
    "dynamo-map": ("dynamo", maps(medium="GPU", block_mm_infos=None)),
    "dynamo-tuple": ("dynamo", arrays("GPU", None, None, None, None, None, removed_more=("GPU", None))),
    "dynamo-router-event": (
        "dynamo",
        story(
            router({"stored": {"parent_hash": None, "blocks": [{"block_hash": h, "tokens_hash": 9} for h in (FIRST, SECOND)]}}),
            router({"removed": {"block_hashes": [SECOND]}}),
            router("cleared"),
        ),
    ),
    "mooncake-rfc1527": (
        "mooncake",
        story(
            envelope(1, "stored", seq_hashes=[FIRST, SECOND], base_block_idx=0, parent_hash=None, token_ids=TOKENS),
            envelope(2, "removed", seq_hashes=[SECOND], base_block_idx=1),
            envelope(3, "cleared"),
        ),
    ),
    "mooncake-master": (
        "mooncake",
        story(
            envelope(
                1, "stored", seq_hashes=[FIRST, SECOND], base_block_idx=None, parent_hash=None, token_ids=None, group_id="0",
                object_key="k", type="BlockStored", block_hashes=[FIRST, SECOND], parent_block_hash=None,
            ),
            envelope(
                2, "removed", seq_hashes=[SECOND], group_id="0", object_key="k", type="BlockRemoved", block_hashes=[SECOND],
            ),
            envelope(3, "cleared", type="AllBlocksCleared"),
        ),
    ),
}  # fmt: skip


def main() -> None:
    document = [
        {"name": name, "dialect": dialect, "frames": [["", seq, payload.hex()] for seq, payload in enumerate(payloads)]}
        for name, (dialect, payloads) in STORIES.items()
    ]
    (HERE / "generations.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()

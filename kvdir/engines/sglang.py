"""SGLang's events: vLLM's three, with signed 64-bit hashes, and with salts and sessions among the fields.

    map (0.5.23)     {"type": "BlockStored", ..., "medium", "cache_salt", "session_id", "lora_name"}
    array (before)   ["BlockStored", hashes, parent, tokens, block_size, lora_id, medium?, ...]

Rules: what follows the medium in an array is not read: in some versions it is a salt, where vLLM has the adapter's name. Hashes
are namespaced by salt and adapter since 0.5.23 (with `format: dynamo` by more), so one namespace may hold them all.
Contract: sglang/srt/disaggregation/kv_events.py 0.5.23 and @006d053f. Does not: know HiCache's keys (whole SHA-256).
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvdir.engines import vllm
from kvdir.engines.events import EngineEvent
from kvdir.engines.intake import Intake, Refused
from kvdir.engines.wire import Undecodable, is_map

_NIL = msgspec.Raw(b"\xc0")


class StoredItems(msgspec.Struct, tag="BlockStored", array_like=True):
    block_hashes: list[vllm.Hash]
    parent_block_hash: vllm.Hash | None = None
    token_ids: msgspec.Raw = _NIL
    block_size: int | None = None
    lora_id: Any = None
    medium: str | None = None

    lora_name = None
    extra_keys = _NIL
    group_idx = kv_cache_spec_kind = kv_cache_spec_sliding_window = None


_ITEMS = msgspec.msgpack.Decoder(StoredItems | vllm.RemovedItems | vllm.ClearedItems)


def read(raw: bytes | msgspec.Raw, intake: Intake) -> EngineEvent:
    """One event. Raises Refused."""
    if is_map(raw):
        return vllm.read(raw, intake)
    try:
        fields = _ITEMS.decode(raw)
    except Undecodable as error:
        raise Refused(vllm.refused(raw)) from error
    return vllm.translate(fields, intake)

"""vLLM's events: `BlockStored`, `BlockRemoved`, `AllBlocksCleared`, in both encodings and all their generations.

    map (since PR #42892)   {"type": "BlockStored", "block_hashes": [...], ...}; optional fields are left out
    array (before)          ["BlockStored", hashes, parent, tokens, block_size, lora_id, medium, lora_name, extra_keys,
                             group_idx, kind, window]: each generation appended fields, trailing defaults are left out
                            ["BlockRemoved", hashes, medium, group_idx]

Rules: token ids stay encoded (only their number is looked at) unless the door wants the first block of a sequence; of
extra keys (LoRA name, multimodal ids, salt in clear text) only whether there is a salt. What the fields beyond those
named here say is ignored, whatever its type. Contract: vllm/distributed/kv_events.py 0.32, facts from live captures
(tests/golden/README.md). SGLang and Dynamo send the same events with small differences: sglang.py, dynamo.py.
"""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from kvdir.engines.door import Door
from kvdir.engines.events import NO_ADAPTER, Cleared, EngineEvent, Group, Reason, Removed, Stored
from kvdir.engines.media import kind_of, tier_of
from kvdir.engines.msgpack import array_length
from kvdir.engines.wire import MAX_HASHES, Undecodable, count, pack
from kvdir.namespace import StateKind

MAX_BLOCK_TOKENS = 1 << 20
_NIL = msgspec.Raw(b"\xc0")
_DIGEST_CHARACTERS = 64

Hash = int | bytes
Raws = msgspec.Raw


class StoredFields(msgspec.Struct, tag="BlockStored"):
    """Of a map. `Any` and `Raw` where a value of another type must not cost the event."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None = None
    token_ids: Raws = _NIL
    block_size: int | None = None
    lora_id: Any = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: Raws = _NIL
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    cache_salt: Raws = _NIL


class RemovedFields(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class ClearedFields(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class StoredItems(msgspec.Struct, tag="BlockStored", array_like=True):
    """Of an array, in vLLM's order."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None = None
    token_ids: Raws = _NIL
    block_size: int | None = None
    lora_id: Any = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: Raws = _NIL
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None


class RemovedItems(msgspec.Struct, tag="BlockRemoved", array_like=True):
    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class ClearedItems(msgspec.Struct, tag="AllBlocksCleared", array_like=True):
    pass


_FIELDS = msgspec.msgpack.Decoder(StoredFields | RemovedFields | ClearedFields)
_ITEMS = msgspec.msgpack.Decoder(StoredItems | RemovedItems | ClearedItems)
_TAG = msgspec.msgpack.Decoder(list[Any])
_TAG_FIELD = msgspec.msgpack.Decoder(dict[str, Any])
_TYPES = ("BlockStored", "BlockRemoved", "AllBlocksCleared")
_EXTRA_KEYS = msgspec.msgpack.Decoder(list[Any])


def is_map(raw: bytes | msgspec.Raw) -> bool:
    """Whether an encoded event is a map; an array otherwise (or nothing that is known)."""
    first = bytes(memoryview(raw)[:1])
    return bool(first) and (0x80 <= first[0] <= 0x8F or first[0] in (0xDE, 0xDF))


def read(raw: bytes | msgspec.Raw, rejected: dict[Reason, int], door: Door | None = None) -> EngineEvent | None:
    """One event, or None and a count of why not."""
    try:
        fields = (_FIELDS if is_map(raw) else _ITEMS).decode(raw)
    except Undecodable:
        count(rejected, refused(raw))
        return None
    return translate(fields, rejected, door)


def translate(fields: Any, rejected: dict[Reason, int], door: Door | None) -> EngineEvent | None:
    """The event that decoded fields mean. fields: of this module's classes, or of others with the same names."""
    if isinstance(fields, ClearedFields | ClearedItems):
        return Cleared()
    tier = tier_of(fields.medium, getattr(fields, "locality", None))
    if tier is None:
        count(rejected, Reason.UNKNOWN_MEDIUM)
        return None
    packed = pack(fields.block_hashes)
    if packed is None or len(fields.block_hashes) > MAX_HASHES:
        count(rejected, Reason.BAD_HASH if packed is None else Reason.TOO_LARGE)
        return None
    if isinstance(fields, RemovedFields | RemovedItems):
        return Removed(*packed, tier, Group(fields.group_idx))
    return _stored(fields, *packed, tier, rejected, door)


def refused(raw: bytes | msgspec.Raw) -> Reason:
    """Why a strict decoder did not take an event: its type is new, or its fields have other types than they should."""
    try:
        name = _TAG_FIELD.decode(raw).get("type") if is_map(raw) else _TAG.decode(raw)[0]
    except (*Undecodable, IndexError):
        return Reason.UNDECODABLE_EVENT
    return Reason.UNKNOWN_EVENT if isinstance(name, str) and name not in _TYPES else Reason.UNDECODABLE_EVENT


def _stored(fields: Any, packed: bytes, width: int, tier: Any, rejected: dict[Reason, int], door: Door | None) -> Stored | None:
    parent = (b"", 0) if fields.parent_block_hash is None else pack([fields.parent_block_hash])
    if parent is None:
        count(rejected, Reason.BAD_HASH)
        return None
    if fields.lora_name is None and fields.lora_id is not None:
        count(rejected, Reason.LORA_WITHOUT_NAME)
        return None
    group = group_of(fields.group_idx, fields.kv_cache_spec_kind, fields.kv_cache_spec_sliding_window)
    block_tokens = fields.block_size or 0
    if group is None or not 0 <= block_tokens <= MAX_BLOCK_TOKENS:
        count(rejected, Reason.UNKNOWN_KIND if group is None else Reason.UNDECODABLE_EVENT)
        return None
    begins = not parent[0] and packed != b""
    keys = _first_keys(fields.extra_keys) if begins else []
    adapter = fields.lora_name or NO_ADAPTER
    salted = begins and (bytes(fields.cache_salt) != b"\xc0" if hasattr(fields, "cache_salt") else False)
    salted = salted or any(_may_be_salt(key, adapter) for key in keys)
    if begins and not keys and door is not None and not door.settled and not salted and adapter == NO_ADAPTER:
        items = array_length(fields.token_ids)
        if block_tokens and items == block_tokens * (len(packed) // width):
            door.check(fields.token_ids, block_tokens, packed[:width])
    return Stored(packed, width, tier, group, block_tokens, adapter, salted, parent[0])


@functools.lru_cache(maxsize=256)
def group_of(index: int | None, kind: str | None, window_tokens: int | None) -> Group | None:
    """The state group an event names; None if its restore rule is not known."""
    if kind is None:
        return Group(index)
    known = kind_of(kind)
    if known is None or (known is StateKind.SLIDING_WINDOW and not (window_tokens or 0) > 0):
        return None
    return Group(index, known, window_tokens or 0 if known is StateKind.SLIDING_WINDOW else 0)


def _first_keys(extra_keys: msgspec.Raw) -> list[Any]:
    """Extra keys of an event's first block."""
    if array_length(extra_keys) <= 0:
        return []
    try:
        first = _EXTRA_KEYS.decode(extra_keys)[0]
    except Undecodable:
        return []
    return first if isinstance(first, list) else []


def _may_be_salt(key: object, adapter: str) -> bool:
    """Whether it is a salt. Multimodal ids come as pairs, or, before vLLM 0.19, as 64 hex digits; embeddings as bytes."""
    if not isinstance(key, str) or key == adapter:
        return False
    return not (len(key) == _DIGEST_CHARACTERS and all(character in "0123456789abcdef" for character in key))

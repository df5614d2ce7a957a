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

from kvdir.engines.events import NO_ADAPTER, Cleared, EngineEvent, Group, Reason, Removed, Stored, adapter_of
from kvdir.engines.intake import Intake, Refused, packed, packed_parent
from kvdir.engines.media import kind_of, tier_of
from kvdir.engines.msgpack import array_length
from kvdir.engines.wire import Undecodable, is_map
from kvdir.location import Tier
from kvdir.namespace import MAX_BLOCK_TOKENS, StateKind

MAX_GROUPS = 256
_NIL = msgspec.Raw(b"\xc0")
_DIGEST_CHARACTERS = 64

Hash = int | bytes


class StoredFields(msgspec.Struct, tag="BlockStored"):
    """Of a map. `Any` and `Raw` where a value of another type must not cost the event."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None = None
    token_ids: msgspec.Raw = _NIL
    block_size: int | None = None
    lora_id: Any = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: msgspec.Raw = _NIL
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    cache_salt: msgspec.Raw = _NIL


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
    token_ids: msgspec.Raw = _NIL
    block_size: int | None = None
    lora_id: Any = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: msgspec.Raw = _NIL
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


_REMOVED = frozenset({RemovedFields, RemovedItems})
_CLEARED = frozenset({ClearedFields, ClearedItems})
_FIELDS = msgspec.msgpack.Decoder(StoredFields | RemovedFields | ClearedFields)
_ITEMS = msgspec.msgpack.Decoder(StoredItems | RemovedItems | ClearedItems)
_TAG = msgspec.msgpack.Decoder(list[Any])
_TAG_FIELD = msgspec.msgpack.Decoder(dict[str, Any])
_TYPES = ("BlockStored", "BlockRemoved", "AllBlocksCleared")
_EXTRA_KEYS = msgspec.msgpack.Decoder(list[Any])


def read(raw: bytes | msgspec.Raw, intake: Intake) -> EngineEvent:
    """One event. Raises Refused."""
    try:
        fields = (_FIELDS if is_map(raw) else _ITEMS).decode(raw)
    except Undecodable as error:
        raise Refused(refused(raw)) from error
    return translate(fields, intake)


def translate(fields: Any, intake: Intake) -> EngineEvent:
    """The event that decoded fields mean. fields: of this module's classes, or of others with the same names."""
    shape = type(fields)
    if shape in _CLEARED:
        return Cleared()
    tier = tier_of(fields.medium, getattr(fields, "locality", None))
    if tier is None:
        raise Refused(Reason.UNKNOWN_MEDIUM)
    hashes, width = packed(fields.block_hashes)
    if shape in _REMOVED:
        return Removed(hashes, width, tier, group_of(fields.group_idx, None, None) or Group())
    return _stored(fields, hashes, width, tier, intake)


def refused(raw: bytes | msgspec.Raw) -> Reason:
    """Why a strict decoder did not take an event: its type is new, or its fields have other types than they should."""
    try:
        name = _TAG_FIELD.decode(raw).get("type") if is_map(raw) else _TAG.decode(raw)[0]
    except (*Undecodable, IndexError):
        return Reason.UNDECODABLE_EVENT
    return Reason.UNKNOWN_EVENT if isinstance(name, str) and name not in _TYPES else Reason.UNDECODABLE_EVENT


def _stored(fields: Any, hashes: bytes, width: int, tier: Tier, intake: Intake) -> Stored:
    parent = packed_parent(fields.parent_block_hash)
    if fields.lora_name is None and fields.lora_id is not None:
        raise Refused(Reason.LORA_WITHOUT_NAME)
    group = group_of(fields.group_idx, fields.kv_cache_spec_kind, fields.kv_cache_spec_sliding_window)
    block_tokens = fields.block_size or 0
    if group is None:
        raise Refused(Reason.UNKNOWN_KIND)
    if not 0 <= block_tokens <= MAX_BLOCK_TOKENS:
        raise Refused(Reason.UNDECODABLE_EVENT)
    adapter = adapter_of(fields.lora_name)
    salted = False
    if not parent and hashes:
        keys = _first_keys(fields.extra_keys)
        salted = not _is_nil(getattr(fields, "cache_salt", _NIL)) or any(_may_be_salt(key, fields.lora_name) for key in keys)
        plain = not keys and not salted and adapter == NO_ADAPTER and block_tokens > 0
        # Only where hashes and tokens go together block by block: hybrid groups list fewer hashes than tokens.
        if (door := intake.door) and plain and array_length(fields.token_ids) == block_tokens * (len(hashes) // width):
            door.check(fields.token_ids, block_tokens, hashes[:width])
    return Stored(hashes, width, tier, group, block_tokens, adapter, salted, parent)


def _is_nil(raw: msgspec.Raw) -> bool:
    return bytes(memoryview(raw)[:1]) == b"\xc0"


@functools.lru_cache(maxsize=256)
def group_of(index: int | None, kind: str | None, window_tokens: int | None) -> Group | None:
    """The state group an event names; None if its restore rule is not known. Raises Refused for an impossible index."""
    if index is not None and not 0 <= index < MAX_GROUPS:
        raise Refused(Reason.UNDECODABLE_EVENT)
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


def _may_be_salt(key: object, lora_name: str | None) -> bool:
    """Whether it is a salt. Multimodal ids come as pairs, or, before vLLM 0.19, as 64 hex digits; embeddings as bytes."""
    if not isinstance(key, str) or key == lora_name:
        return False
    return not (len(key) == _DIGEST_CHARACTERS and all(character in "0123456789abcdef" for character in key))

"""The standard envelope of KV events (RFC Mooncake 1527), in and out: `stored`, `removed`, `cleared`.

    {"event_id", "timestamp", "event_type", "model_name", "block_size", "additional_salt", "lora_name", "tenant_id",
     "backend_id", "medium", "dp_rank", "seq_hashes", "base_block_idx", "parent_hash", "token_ids"}, beyond the RFC: "group_id"

Rules of what comes in: it tells of a set, so a repeated `stored` adds nothing. Tenant and salt become one digest. A group
beyond the first has no kind here and is refused. `event_id` orders a stream and is not read: the batch's own number does that.
Rules of what goes out: hashes are 64-bit. Those of 64-bit schemes go out as they are; of longer ones the first 8 bytes, as a
big-endian number, which no engine computes: such events serve consumers that compare our events among themselves. The extra
field `hash_scheme` says which (with `:first64` for those), `fingerprints` has what we know of each hash (16 bytes). Blocks of
state groups that say nothing of a prefix by themselves (windows, recurrent, ...) do not go out: the envelope has no word for
them, their hashes are those of the full group's blocks, and a reader would take one for the other.
Sources: github.com/kvcache-ai/Mooncake issue 1527, its docs conductor-indexer.md @984cf198, pull requests 2214 and 2876.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from kvdir.core.event import Event, EventKind
from kvdir.engines.events import Cleared, EngineEvent, Group, Reason, Removed, Stored, adapter_of, lora_name_of, tenant_of
from kvdir.engines.intake import Intake, Refused, packed, packed_parent
from kvdir.engines.media import tier_of
from kvdir.engines.vllm import Hash, group_of
from kvdir.engines.wire import Undecodable
from kvdir.location import Tier
from kvdir.namespace import MAX_BLOCK_TOKENS, NO_TENANT, WHOLE, Namespace, StateKind

MEDIA: Mapping[Tier, str] = {Tier.GPU: "gpu", Tier.CPU: "cpu", Tier.DISK: "disk", Tier.REMOTE: "external"}
"""Media of events that go out."""
FIRST64 = ":first64"
_KINDS = {EventKind.STORED: "stored", EventKind.REMOVED: "removed", EventKind.CLEARED: "cleared"}


class _Fields(msgspec.Struct):
    event_type: str
    seq_hashes: list[Hash] = []
    parent_hash: Hash | None = None
    block_size: int | None = None
    medium: str | None = None
    model_name: str | None = None
    lora_name: str | None = None
    tenant_id: str | None = None
    additional_salt: str | None = None
    backend_id: str | None = None
    group_id: str | int | None = None


_FIELDS = msgspec.msgpack.Decoder(_Fields)
_ENCODER = msgspec.msgpack.Encoder()


def read(raw: bytes | msgspec.Raw, intake: Intake) -> EngineEvent:
    """One event. Raises Refused."""
    try:
        fields = _FIELDS.decode(raw)
    except Undecodable as error:
        raise Refused(Reason.UNDECODABLE_EVENT) from error
    intake.admit(fields.backend_id or "")
    tier = tier_of(fields.medium)
    if tier is None:
        raise Refused(Reason.UNKNOWN_MEDIUM)
    if fields.event_type == "cleared":
        return Cleared(None if fields.medium is None else tier)
    (hashes, width), group = packed(fields.seq_hashes), _group(fields.group_id)
    if group is None:
        raise Refused(Reason.UNKNOWN_KIND)
    if fields.event_type == "removed":
        return Removed(hashes, width, tier, group)
    if fields.event_type != "stored":
        raise Refused(Reason.UNKNOWN_EVENT)
    return _stored(fields, hashes, width, tier, group)


def _stored(fields: _Fields, hashes: bytes, width: int, tier: Tier, group: Group) -> Stored:
    parent, block_tokens = packed_parent(fields.parent_hash), fields.block_size or 0
    if not 0 <= block_tokens <= MAX_BLOCK_TOKENS:
        raise Refused(Reason.UNDECODABLE_EVENT)
    return Stored(
        hashes, width, tier, group, block_tokens, adapter_of(fields.lora_name or None), bool(fields.additional_salt), parent,
        fields.model_name or "", tenant_of(fields.tenant_id, fields.additional_salt),
    )  # fmt: skip


def _group(group_id: str | int | None) -> Group | None:
    if group_id is None or group_id == "":
        return Group()
    text = str(group_id)
    return group_of(int(text), None, None) if text.isdecimal() and len(text) < 6 else None


def envelopes(
    events: Iterable[Event],
    namespaces: Mapping[bytes, Namespace],
    *,
    backend_id: str,
    first_event_id: int,
    timestamp_ms: int,
    dp_rank: int = 0,
) -> list[dict[str, Any]]:
    """Our events in the envelope, numbered from first_event_id on, one each. namespaces: by digest; what none names is left out
    with its number, so that a consumer sees a hole. Clearing every namespace becomes one event for each of them.
    """
    namespaces = {digest: namespace for digest, namespace in namespaces.items() if _says_a_prefix(namespace)}
    out = []
    for number, event in enumerate(events, first_event_id):
        digests = [event.namespace_digest] if event.namespace_digest else list(namespaces)
        for digest in digests:
            namespace = namespaces.get(digest)
            if namespace is not None and event.tier in [*MEDIA] and event.kind in _KINDS:
                base = _base(namespace, Tier(event.tier), number, backend_id, timestamp_ms, dp_rank)
                out.append(base | _payload(event, namespace))
    return out


def _says_a_prefix(namespace: Namespace) -> bool:
    whole = namespace.part == WHOLE and len(namespace.groups) > 1
    return whole or namespace.group.kind in (StateKind.FULL, StateKind.MLA)


def encode_batch(envelopes: list[dict[str, Any]], *, ts_s: float, dp_rank: int = 0) -> bytes:
    """The payload of one message: an array of time, events and rank, as vLLM's and Mooncake's publishers send it."""
    return _ENCODER.encode([ts_s, envelopes, dp_rank])


def _base(namespace: Namespace, tier: Tier, event_id: int, backend_id: str, timestamp_ms: int, dp_rank: int) -> dict[str, Any]:
    return {
        "event_id": event_id,
        "timestamp": timestamp_ms,
        "model_name": namespace.model,
        "block_size": namespace.block_tokens,
        "additional_salt": None if namespace.tenant == NO_TENANT else namespace.tenant,
        "lora_name": lora_name_of(namespace.adapter),
        "tenant_id": "default",
        "backend_id": backend_id,
        "medium": MEDIA[tier],
        "dp_rank": dp_rank,
    }


def _payload(event: Event, namespace: Namespace) -> dict[str, Any]:
    kind = _KINDS[EventKind(event.kind)]
    if kind == "cleared":
        return {"event_type": kind}
    whole = event.width == 8
    hashes = [number for (number,) in struct.iter_unpack(f">Q{event.width - 8}x", event.packed)]
    return {
        "event_type": kind,
        "seq_hashes": hashes,
        "base_block_idx": None,
        "parent_hash": None,
        "token_ids": None,
        "group_id": None,
        "hash_scheme": namespace.hash_scheme + ("" if whole else FIRST64),
        "fingerprints": event.packed,
    }

"""Events as Dynamo's publishers and router pass them on.

    engine wire      vLLM's events; bigram tokens (Eagle), `block_mm_infos` and where the group stands differ: not read here
    router event     {"worker_id", "storage_tier", "event": {"event_id", "dp_rank", "data": DATA}}
                     DATA = {"stored": {"parent_hash", "blocks": [{"block_hash", "tokens_hash"}]}}
                          | {"removed": {"block_hashes"}} | "cleared"

Rules: `block_hash` is the engine's, `tokens_hash` Dynamo's own of the tokens alone, which names no prefix and is not read. A
router event names no block size: it is the identity's. `worker_id` is the owner. Contract: dynamo lib/kv-router/src
zmq_wire.rs @0cda21dc, protocols.rs @038eab23 (msgpack with names). Does not: speak NATS or the JSON form.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from kvdir.engines import vllm
from kvdir.engines.events import Cleared, EngineEvent, Reason, Removed, Stored
from kvdir.engines.intake import Intake, Refused, packed, packed_parent
from kvdir.engines.media import tier_of
from kvdir.engines.wire import Undecodable, is_map
from kvdir.location import Tier


class _Block(msgspec.Struct):
    block_hash: vllm.Hash


class _StoreData(msgspec.Struct):
    blocks: list[_Block]
    parent_hash: vllm.Hash | None = None


class _RemoveData(msgspec.Struct):
    block_hashes: list[vllm.Hash]


class _Data(msgspec.Struct):
    stored: _StoreData | None = None
    removed: _RemoveData | None = None


class _Event(msgspec.Struct):
    data: _Data | Literal["cleared"]


class _RouterEvent(msgspec.Struct):
    event: _Event
    worker_id: Any = None
    storage_tier: str = "device"


_ROUTER_EVENT = msgspec.msgpack.Decoder(_RouterEvent)


def read(raw: bytes | msgspec.Raw, intake: Intake) -> EngineEvent:
    """One event. Raises Refused."""
    if not is_map(raw):
        return vllm.read(raw, intake)
    try:
        event = _ROUTER_EVENT.decode(raw)
    except Undecodable:
        return vllm.read(raw, intake)
    intake.admit("" if event.worker_id is None else str(event.worker_id))
    tier = tier_of(event.storage_tier)
    if tier is None:
        raise Refused(Reason.UNKNOWN_MEDIUM)
    return _translate(event.event.data, tier)


def _translate(data: _Data | str, tier: Tier) -> EngineEvent:
    if isinstance(data, str):
        return Cleared()
    if data.removed is not None:
        return Removed(*packed(data.removed.block_hashes), tier)
    if data.stored is None:
        raise Refused(Reason.UNKNOWN_EVENT)
    hashes = packed([block.block_hash for block in data.stored.blocks])
    return Stored(*hashes, tier, parent=packed_parent(data.stored.parent_hash))

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
from kvdir.engines.intake import Intake, Refused
from kvdir.engines.media import tier_of
from kvdir.engines.wire import MAX_HASHES, Undecodable, is_map, pack
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
    if intake.owner and str(event.worker_id) != intake.owner:
        raise Refused(Reason.OTHER_OWNER)
    tier = tier_of(event.storage_tier)
    if tier is None:
        raise Refused(Reason.UNKNOWN_MEDIUM)
    return _translate(event.event.data, tier)


def _translate(data: _Data | str, tier: Tier) -> EngineEvent:
    if isinstance(data, str):
        return Cleared()
    if data.removed is not None:
        return _removed(data.removed, tier)
    if data.stored is None:
        raise Refused(Reason.UNKNOWN_EVENT)
    hashes = [block.block_hash for block in data.stored.blocks]
    packed = pack(hashes)
    parent = (b"", 0) if data.stored.parent_hash is None else pack([data.stored.parent_hash])
    if packed is None or parent is None or len(hashes) > MAX_HASHES:
        raise Refused(Reason.BAD_HASH)
    return Stored(*packed, tier, parent=parent[0])


def _removed(data: _RemoveData, tier: Tier) -> Removed:
    packed = pack(data.block_hashes)
    if packed is None or len(data.block_hashes) > MAX_HASHES:
        raise Refused(Reason.BAD_HASH)
    return Removed(*packed, tier)

"""What all dialects share on the wire: the batch around the events, the frames around the batch, and packed hashes.

    live       [topic, sequence 8 bytes big-endian, payload]
    replay     ["", topic, sequence, payload] (vLLM), ["", sequence, payload] (SGLang before 0.5), with or without the
               empty delimiter; end marker: sequence -1
    payload    msgpack: array [time, events, rank?], or map with `ts`, `events` and a rank

Rules: one event that cannot be decoded costs only itself, whatever is in it; lengths are bounded before they are believed.
Sources: vllm/distributed/kv_events.py 0.32, sglang/srt/disaggregation/kv_events.py 0.5.23, dynamo lib/kv-router zmq_wire.rs.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from kvdir.engines.events import Reason
from kvdir.engines.msgpack import MAX_DEPTH, Malformed, Truncated, header, skip
from kvdir.fingerprint import WIDTHS

MAX_PAYLOAD_BYTES = 256 * 2**20
MAX_EVENTS = 1 << 20
MAX_HASHES = 1 << 20
END_SEQ = (1 << 64) - 1
"""Sequence number of the message that ends a replay: -1 as 8 bytes."""

_U64 = (1 << 64) - 1
_EVENTS = msgspec.msgpack.encode("events")
_RANKS = ("data_parallel_rank", "attn_dp_rank", "dp_rank")

Undecodable = (msgspec.DecodeError, msgspec.ValidationError, RecursionError, UnicodeDecodeError, ValueError, OverflowError)
"""What msgspec raises for bytes that are not what was asked for."""


class Frame(NamedTuple):
    """One message of a socket. seq: `END_SEQ` ends a replay."""

    seq: int
    payload: bytes


class RawBatch(NamedTuple):
    """events: each still encoded. reason: why some are missing; None if none is."""

    ts_s: float
    dp_rank: int | None
    events: Sequence[bytes | msgspec.Raw]
    reason: Reason | None = None


class _Array(msgspec.Struct, array_like=True):
    ts: Any
    events: list[msgspec.Raw]
    rank: Any = None


class _Map(msgspec.Struct):
    events: list[msgspec.Raw]
    ts: Any = None
    timestamp: Any = None
    data_parallel_rank: Any = None
    attn_dp_rank: Any = None
    dp_rank: Any = None


_ARRAY = msgspec.msgpack.Decoder(_Array)
_MAP = msgspec.msgpack.Decoder(_Map)


def read_frame(parts: Sequence[bytes]) -> Frame | None:
    """Of a live or replayed message in any of the known forms; None if it is none."""
    if len(parts) < 2 or len(parts) > 5 or len(parts[-2]) != 8:
        return None
    return Frame(int.from_bytes(parts[-2], "big"), parts[-1])


def split(payload: bytes) -> RawBatch:
    """A batch's events, each still encoded. Never raises: what cannot be read is the reason."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        return RawBatch(0.0, None, (), Reason.TOO_LARGE)
    if len(payload) > MAX_EVENTS and _has_too_many(payload):
        return _salvage(payload)  # the decoder would make an object of each
    try:
        batch: _Array | _Map = (_MAP if is_map(payload) else _ARRAY).decode(payload)
    except Undecodable:
        return _salvage(payload)
    if isinstance(batch, _Array):
        ts, rank = batch.ts, batch.rank
    else:
        ts = batch.ts if batch.ts is not None else batch.timestamp
        rank = next((value for name in _RANKS if (value := getattr(batch, name)) is not None), None)
    return RawBatch(_seconds(ts), _rank(rank), batch.events)


def is_map(raw: bytes | msgspec.Raw) -> bool:
    """Whether an encoded object is a map; an array otherwise, or nothing that is known."""
    view = memoryview(raw)
    return len(view) > 0 and (0x80 <= view[0] <= 0x8F or 0xDE <= view[0] <= 0xDF)


def _salvage(payload: bytes) -> RawBatch:
    """Of a batch that the decoder refuses as a whole, the events that are well-formed. A map may be one event by itself."""
    try:
        found = _events_of(payload)
    except Malformed:
        return RawBatch(0.0, None, (), Reason.UNDECODABLE_BATCH)
    if found is None:
        return RawBatch(0.0, None, (payload,))
    at, count = found
    events: list[bytes] = []
    reason = Reason.TOO_LARGE if count > MAX_EVENTS else None
    for _ in range(min(count, MAX_EVENTS)):
        try:
            end, depth = skip(payload, at)
        except Truncated:
            reason = Reason.TRUNCATED_BATCH
            break
        except Malformed:
            reason = Reason.UNDECODABLE_BATCH
            break
        # One nested deeper than the decoder's stack is handed on as nothing, and refused by itself.
        events.append(payload[at:end] if depth <= MAX_DEPTH else b"\xc0")
        at = end
    return RawBatch(0.0, None, events, reason)


def _has_too_many(payload: bytes) -> bool:
    try:
        found = _events_of(payload)
    except Malformed:
        return False
    return found is not None and found[1] > MAX_EVENTS


def _events_of(payload: bytes) -> tuple[int, int] | None:
    """(where a batch's first event begins, how many it says there are); None: a map without events. Raises Malformed."""
    at, items, a_map = header(payload, 0)
    if a_map:
        at = _value_of(_EVENTS, payload, at, items // 2)
        if at < 0:
            return None
    elif items < 2:
        raise Malformed("a batch has a time and events")
    else:
        at, _ = skip(payload, at)
    at, count, a_map = header(payload, at)
    if a_map:
        raise Malformed("events are an array")
    return at, count


def _value_of(key: bytes, payload: bytes, at: int, pairs: int) -> int:
    """Where the value of an encoded key begins, in a map whose content begins at `at`; -1 if it has no such key."""
    for _ in range(pairs):
        value, _ = skip(payload, at)
        if payload[at:value] == key:
            return value
        at, _ = skip(payload, value)
    return -1


def _seconds(value: object) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0


def _rank(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 65_536 else None


def pack(hashes: Sequence[int | bytes]) -> tuple[bytes, int] | None:
    """(packed, width) of hashes as told; None unless they are all 64-bit numbers or all bytes of one known width.

    Numbers may be signed or not (SGLang sends int64, vLLM uint64): 8 bytes, big-endian two's complement either way.
    """
    if not hashes:
        return b"", 8
    first = hashes[0]
    if isinstance(first, bytes):
        width = len(first)
        if width not in WIDTHS or not all(isinstance(item, bytes) and len(item) == width for item in hashes):
            return None
        return b"".join(hashes), width  # type: ignore[arg-type]
    try:
        return struct.pack(f">{len(hashes)}Q", *hashes), 8
    except struct.error:
        pass
    if not all(isinstance(item, int) and -(1 << 63) <= item <= _U64 for item in hashes):
        return None
    return b"".join((int(item) & _U64).to_bytes(8, "big") for item in hashes), 8

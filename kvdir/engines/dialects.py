"""The dialects by name, and `decode`: one message of an engine's event stream as values.

Rules: never raises, whatever the bytes are; what was not taken is counted by reason. A message's first event that proves the
hashes to be computed otherwise than configured says so in `mismatch`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from kvdir.engines import dynamo, rfc1527, sglang, vllm
from kvdir.engines.door import Door
from kvdir.engines.events import DecodedBatch, EngineEvent, Reason, Removed
from kvdir.engines.intake import Intake, Owner, Refused
from kvdir.engines.wire import split
from kvdir.errors import InvalidInput

Read = Callable[[bytes | msgspec.Raw, Intake], EngineEvent]

DIALECTS: Mapping[str, Read] = {"vllm": vllm.read, "sglang": sglang.read, "dynamo": dynamo.read, "mooncake": rfc1527.read}

COUNTS_COPIES = frozenset({"vllm"})
"""Dialects in which a block stored twice must be removed twice. The others tell of a set: SGLang's tree has each page once per
tier, Dynamo's relay passes on the last removal only, Mooncake's master repeats what it holds."""


def decode(dialect: str, payload: bytes, *, door: Door | None = None, owner: Owner | None = None) -> DecodedBatch:
    """One message. dialect: a name in DIALECTS (InvalidInput otherwise). door: asked until it is settled.

    owner: whose events to take, where the dialect names whose they are; None: everybody's.
    """
    read = DIALECTS.get(dialect)
    if read is None:
        raise InvalidInput(f"event dialect {dialect!r} is unknown; one of {', '.join(DIALECTS)}")
    batch = split(payload)
    intake = Intake(door, owner)
    asked = intake.door
    events: list[EngineEvent] = []
    rejected: dict[Reason, int] = {} if batch.reason is None else {batch.reason: 1}
    for raw in batch.events:
        try:
            events.append(read(raw, intake))
        except Refused as refused:
            rejected[refused.reason] = rejected.get(refused.reason, 0) + 1
    mismatch = asked.mismatch if asked is not None else ""
    return DecodedBatch(batch.ts_s, batch.dp_rank, tuple(_joined(events)), rejected, mismatch)


def _joined(events: list[EngineEvent]) -> list[EngineEvent]:
    """Removals that follow each other in one place as one: vLLM sends one event for each block that it evicts."""
    out: list[EngineEvent] = []
    parts: list[bytes] = []
    last: Removed | None = None
    for event in events:
        if isinstance(event, Removed):
            if last is not None and event[1:] == last[1:]:
                parts.append(event.packed)
                continue
            if last is not None:
                out.append(last._replace(packed=b"".join(parts)))
            last, parts = event, [event.packed]
            continue
        if last is not None:
            out.append(last._replace(packed=b"".join(parts)))
            last = None
        out.append(event)
    if last is not None:
        out.append(last._replace(packed=b"".join(parts)))
    return out

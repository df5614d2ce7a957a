"""The dialects by name, and `decode`: one message of an engine's event stream as values.

Rules: never raises, whatever the bytes are; what was not taken is counted by reason. A message's first event that proves the
hashes to be computed otherwise than configured says so in `mismatch`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from kvdir.engines import sglang, vllm
from kvdir.engines.door import Door
from kvdir.engines.events import DecodedBatch, EngineEvent, Reason
from kvdir.engines.wire import NO_REJECTS, count, split
from kvdir.errors import InvalidInput

Read = Callable[[bytes | msgspec.Raw, dict[Reason, int], Door | None], EngineEvent | None]

DIALECTS: Mapping[str, Read] = {"vllm": vllm.read, "sglang": sglang.read}

COUNTS_COPIES = frozenset({"vllm"})
"""Dialects in which a block stored twice must be removed twice. The others tell of a set: SGLang's tree has each page once per
tier, Dynamo's relay passes on the last removal only, Mooncake's master repeats what it holds."""


def decode(dialect: str, payload: bytes, *, door: Door | None = None) -> DecodedBatch:
    """One message. dialect: a name in DIALECTS (InvalidInput otherwise). door: asked until it is settled."""
    read = DIALECTS.get(dialect)
    if read is None:
        raise InvalidInput(f"event dialect {dialect!r} is unknown; one of {', '.join(DIALECTS)}")
    batch = split(payload)
    rejected: dict[Reason, int] = {}
    if batch.reason is not None:
        count(rejected, batch.reason)
    was_settled = door is None or door.settled
    events = tuple([event for raw in batch.events if (event := read(raw, rejected, door)) is not None])
    mismatch = "" if door is None or was_settled else door.mismatch
    return DecodedBatch(batch.ts_s, batch.dp_rank, events, rejected or NO_REJECTS, mismatch)

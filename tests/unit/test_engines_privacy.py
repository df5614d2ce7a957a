"""Token ids and salts come in with the events; nothing that leaves has them: values, wire, words, representations."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest

from kvdir.core.event import Batch
from kvdir.core.outbox import OwnerOutbox
from kvdir.engines import COUNTS_COPIES, DIALECTS, Door, EngineCursor, EngineIdentity, Residency, decode
from kvdir.engines.rfc1527 import encode_batch, envelopes
from kvdir.rpc.event_codec import encode_batch as encode_event_batch
from kvdir.rpc.event_codec import encode_hello

TOKENS = [1_234_567_890 + step for step in range(4)]
SALT = "SALT-THAT-MUST-NOT-LEAVE"
SESSION = "SESSION-THAT-MUST-NOT-LEAVE"


def stored(**more: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": TOKENS, "block_size": 4,
        "medium": "GPU", "extra_keys": [[SALT]], "cache_salt": SALT, "session_id": SESSION,
    } | more  # fmt: skip


EVENTS: list[Any] = [
    stored(),
    stored(extra_keys=[]),
    stored(cache_salt=None, extra_keys=None, block_hashes=[2]),  # what the door looks at
    stored(medium="FS"),
    stored(block_size=SALT),
    stored(type=SALT),
    stored(block_hashes=[SALT]),
    {SALT: TOKENS},
    ["BlockStored", [3], None, TOKENS, 4, None, "GPU", None, [[SALT]]],
    [SALT, TOKENS],
    {"event_type": "stored", "seq_hashes": [4], "token_ids": TOKENS, "block_size": 4, "medium": "cpu", "additional_salt": SALT},
    {"event_type": SALT, "seq_hashes": [4], "token_ids": TOKENS, "additional_salt": SALT},
    {"worker_id": SALT, "event": {"data": {"stored": {"blocks": [{"block_hash": 5, "tokens_hash": 1}]}}, "tokens": TOKENS}},
]  # fmt: skip
MARKS = [
    SALT.encode(),
    SESSION.encode(),
    *(str(token).encode() for token in TOKENS),
    *(msgspec.msgpack.encode(t)[1:] for t in TOKENS),
]


def clean(thing: object) -> None:
    text = thing if isinstance(thing, bytes) else repr(thing).encode()
    for mark in MARKS:
        assert mark not in text
    for token in TOKENS:
        assert token.to_bytes(4, "little") not in text


@pytest.mark.parametrize("dialect", DIALECTS)
def test_nothing_that_leaves_has_them_when_marked_events_come_in(dialect: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    identity = EngineIdentity(model="m", hash_scheme="opaque", block_tokens=4)
    residency, outbox, cursor = Residency(identity, copies=dialect in COUNTS_COPIES), OwnerOutbox(), EngineCursor(replay=True)
    cursor.start(0.0)
    door = Door(lambda tokens, block_tokens, seen: "differs")
    payloads = [msgspec.msgpack.encode([1.0, [event, stored()], 0]) for event in EVENTS]
    payloads += [payload[: len(payload) // 2] for payload in payloads]
    for seq, payload in enumerate(payloads):
        cursor.live(seq, payload, 0.0)
        batch = decode(dialect, payload, door=door)
        applied = residency.apply(batch)
        for event in applied.events:
            outbox.append(event)
        for thing in (batch, applied, batch.mismatch, cursor.uncertain(seq, applied.doubt), cursor.doubt, vars(door)):
            clean(thing)
    taken = outbox.read(1, max_events=1000, max_bytes=2**20)
    clean(list(residency.held()))
    clean({digest: namespace.canonical() for digest, namespace in residency.namespaces.items()})
    hello = encode_hello(
        node="n/vllm-0", epoch=1, last_seq=0, peer_address="", started_unix_ms=0, namespaces=residency.namespaces.values(),
        agent_version="",
    )  # fmt: skip
    clean(hello.SerializeToString())
    if taken is not None:
        assert isinstance(taken, Batch)
        clean(encode_event_batch(1, taken).SerializeToString())
        clean(
            encode_batch(
                envelopes(taken.events, residency.namespaces, backend_id="n", first_event_id=1, timestamp_ms=0), ts_s=0.0
            )
        )
    clean(caplog.text)


def test_nothing_of_them_is_in_the_error_when_a_dialect_is_unknown() -> None:
    with pytest.raises(ValueError, match="unknown") as caught:
        decode("trtllm", msgspec.msgpack.encode([1.0, [stored()], 0]))
    clean(str(caught.value))

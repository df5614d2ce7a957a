"""One bad event costs itself, a bad message costs itself, and nothing that comes in raises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdir.engines import DIALECTS, Cleared, Door, Owner, Reason, Removed, Stored, decode
from kvdir.engines.wire import MAX_EVENTS, MAX_HASHES
from kvdir.location import Tier
from kvdir.namespace import StateKind

encode = msgspec.msgpack.encode
GOOD: dict[str, Any] = {
    "type": "BlockStored",
    "block_hashes": [1, 2],
    "parent_block_hash": None,
    "block_size": 4,
    "medium": "GPU",
}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5) | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)


def read(*events: Any, dialect: str = "vllm", **more: Any) -> Any:
    return decode(dialect, encode([1.0, list(events), 0]), **more)


def kinds(batch: Any) -> list[str]:
    return [type(event).__name__ for event in batch.events]


BAD = {
    "unknown type": ({"type": "BlockTouched", "block_hashes": [1]}, Reason.UNKNOWN_EVENT),
    "unknown type in an array": (["BlockTouched", [1]], Reason.UNKNOWN_EVENT),
    "no type": ({"block_hashes": [1]}, Reason.UNDECODABLE_EVENT),
    "not an event": (7, Reason.UNDECODABLE_EVENT),
    "empty array": ([], Reason.UNDECODABLE_EVENT),
    "numbers for keys": ({1: 2}, Reason.UNDECODABLE_EVENT),
    "hashes missing": ({"type": "BlockStored", "block_size": 4}, Reason.UNDECODABLE_EVENT),
    "hashes of text": (GOOD | {"block_hashes": ["a"]}, Reason.UNDECODABLE_EVENT),
    "hashes of odd length": (GOOD | {"block_hashes": [b"abc"]}, Reason.BAD_HASH),
    "hashes of two widths": (GOOD | {"block_hashes": [b"12345678", b"1234567890123456"]}, Reason.BAD_HASH),
    "numbers and bytes": (GOOD | {"block_hashes": [1, b"12345678"]}, Reason.BAD_HASH),
    "parent of odd length": (GOOD | {"parent_block_hash": b"abc"}, Reason.BAD_HASH),
    "negative block size": (GOOD | {"block_size": -4}, Reason.UNDECODABLE_EVENT),
    "huge block size": (GOOD | {"block_size": 2**40}, Reason.UNDECODABLE_EVENT),
    "impossible group": (GOOD | {"group_idx": 1 << 20}, Reason.UNDECODABLE_EVENT),
    "negative group": (GOOD | {"group_idx": -1}, Reason.UNDECODABLE_EVENT),
    "unknown medium": (GOOD | {"medium": "FS"}, Reason.UNKNOWN_MEDIUM),
    "cross attention": (GOOD | {"kv_cache_spec_kind": "cross_attention"}, Reason.UNKNOWN_KIND),
    "window without size": (GOOD | {"kv_cache_spec_kind": "sliding_window"}, Reason.UNKNOWN_KIND),
    "adapter by number only": (GOOD | {"lora_id": 3}, Reason.LORA_WITHOUT_NAME),
}


@pytest.mark.parametrize("name", BAD)
def test_one_bad_event_costs_itself_when_it_stands_between_good_ones(name: str) -> None:
    bad, reason = BAD[name]
    batch = read(GOOD, bad, {"type": "AllBlocksCleared"})
    assert kinds(batch) == ["Stored", "Cleared"]
    assert batch.rejected == {reason: 1}
    assert reason.words


def test_an_event_too_deep_for_the_decoder_costs_itself_when_the_rest_is_good() -> None:
    body = b"\x91" * 100_000 + b"\xc0"
    payload = b"\x93" + encode(1.0) + b"\x93" + encode(GOOD) + body + encode({"type": "AllBlocksCleared"}) + encode(0)
    batch = decode("vllm", payload)
    assert kinds(batch) == ["Stored", "Cleared"]
    assert batch.rejected == {Reason.UNDECODABLE_EVENT: 1}


def test_a_batch_that_is_a_map_keeps_its_good_events_when_one_is_bad_or_it_is_cut() -> None:
    deep = b"\x91" * 100_000 + b"\xc0"
    for head in (b"\x82" + encode("ts") + encode(1.0), b"\x81"):
        start = head + encode("events") + b"\x93" + encode(GOOD)
        batch = decode("vllm", start + deep + encode({"type": "AllBlocksCleared"}))
        assert kinds(batch) == ["Stored", "Cleared"]
        assert batch.rejected == {Reason.UNDECODABLE_EVENT: 1}
        batch = decode("vllm", start + encode(GOOD)[:-3])
        assert kinds(batch) == ["Stored"]
        assert batch.rejected == {Reason.TRUNCATED_BATCH: 1}


def test_a_batch_of_more_events_than_any_engine_sends_is_cut_before_it_is_decoded() -> None:
    body = b"\xdd" + (MAX_EVENTS + 2).to_bytes(4, "big") + encode(GOOD) + b"\xc0" * (MAX_EVENTS + 1)
    for payload in (b"\x92" + encode(1.0) + body, b"\x81" + encode("events") + body):
        batch = decode("vllm", payload)
        assert kinds(batch) == ["Stored"]
        assert batch.rejected == {Reason.TOO_LARGE: 1, Reason.UNDECODABLE_EVENT: MAX_EVENTS - 1}


def test_a_sequence_settles_nothing_at_the_door_when_its_tokens_cannot_be_read() -> None:
    asked: list[object] = []
    door = Door(lambda tokens, block_tokens, seen: asked.append(seen) or "")  # type: ignore[func-returns-value]
    for broken in (b"\xa1\xff", b"\x91" * 100_000 + b"\xc0"):
        event = b"\x84" + encode("type") + encode("BlockStored") + encode("block_hashes") + encode([1])
        event += encode("token_ids") + b"\x94" + broken + b"\x01\x02\x03" + encode("block_size") + encode(4)
        decode("vllm", b"\x93" + encode(1.0) + b"\x91" + event + encode(0), door=door)
    assert not door.settled
    assert kinds(read(GOOD | {"block_hashes": [1], "token_ids": [1, 2, 3, 4]}, door=door)) == ["Stored"]
    assert door.settled
    assert len(asked) == 1


def test_lengths_are_not_believed_when_they_are_longer_than_the_message() -> None:
    huge = b"\x93" + encode(1.0) + b"\xdd\xff\xff\xff\xff" + encode(GOOD)
    batch = decode("vllm", huge)
    assert kinds(batch) == ["Stored"]
    assert batch.rejected == {Reason.TRUNCATED_BATCH: 1}
    hashes = b"\x93" + encode(1.0) + b"\x92" + encode(GOOD) + b"\x82\xa4type\xabBlockStored\xacblock_hashes\xdd\xff\xff\xff\xff"
    assert kinds(decode("vllm", hashes)) == ["Stored"]


def test_an_event_is_refused_when_it_has_more_hashes_than_any_engine_sends() -> None:
    batch = read(GOOD | {"block_hashes": [1] * (MAX_HASHES + 1)}, GOOD)
    assert kinds(batch) == ["Stored"]
    assert batch.rejected == {Reason.TOO_LARGE: 1}


@pytest.mark.parametrize("dialect", DIALECTS)
@given(cut=st.integers(0, 400), data=st.data())
@settings(max_examples=60, deadline=None)
def test_what_came_whole_is_kept_when_a_message_is_cut(dialect: str, cut: int, data: st.DataObject) -> None:
    frames = json.loads((Path(__file__).parents[1] / "golden" / "vllm-0.32-int.json").read_text())
    payload = bytes.fromhex(data.draw(st.sampled_from(frames))[2])
    whole = decode(dialect, payload)
    part = decode(dialect, payload[: -cut or None])
    assert part.events == whole.events[: len(part.events)]
    if len(part.events) < len(whole.events) and cut:
        assert any(reason.leaves_doubt for reason in part.rejected)


@given(events=st.lists(VALUES, max_size=4), place=st.integers(0, 4))
@settings(max_examples=150, deadline=None)
def test_a_good_event_is_read_when_anything_stands_beside_it(events: list[Any], place: int) -> None:
    for dialect in DIALECTS:
        good = {"event_type": "stored", "seq_hashes": [1, 2], "medium": "gpu"} if dialect == "mooncake" else GOOD
        batch = read(*events[:place], good, *events[place:], dialect=dialect)
        assert any(isinstance(event, Stored) and event.blocks == 2 for event in batch.events)
        assert len(batch.events) + sum(batch.rejected.values()) == len(events) + 1


@given(payload=st.binary(max_size=200), flips=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 255)), max_size=4))
@settings(max_examples=200, deadline=None)
def test_nothing_raises_when_bytes_are_garbage(payload: bytes, flips: list[tuple[int, int]]) -> None:
    real = bytearray(encode([1.0, [GOOD, ["BlockRemoved", [1], "GPU"], {"type": "AllBlocksCleared"}], 0]))
    for at, value in flips:
        real[at % len(real)] = value
    for dialect in DIALECTS:
        for data in (payload, bytes(real)):
            batch = decode(dialect, data, door=Door(lambda tokens, block_tokens, seen: ""))
            assert isinstance(batch.rejected, dict)


@given(fields=st.dictionaries(st.text(min_size=1, max_size=8).map("x_".__add__), VALUES, max_size=5))
@settings(max_examples=60, deadline=None)
def test_fields_of_tomorrow_are_ignored_when_an_event_has_them(fields: dict[str, Any]) -> None:
    assert read(GOOD | fields) == read(GOOD)
    assert (
        read(["BlockRemoved", [1], "GPU", 0, None, None, *fields.values()]).events
        == read(["BlockRemoved", [1], "GPU", 0]).events
    )


def test_media_are_tiers_when_they_are_known() -> None:
    cases = [
        ({"medium": None}, Tier.GPU), ({"medium": "GPU"}, Tier.GPU), ({"medium": "CPU"}, Tier.CPU),
        ({"medium": "CPU_PINNED"}, Tier.CPU), ({"medium": "CPU_TIER2"}, Tier.CPU), ({"medium": "DISK"}, Tier.DISK),
        ({"medium": "EXTERNAL"}, Tier.REMOTE), ({"medium": "STORAGE"}, Tier.REMOTE),
        ({"medium": "STORAGE", "locality": "LOCAL"}, Tier.DISK), ({"medium": "CPU", "locality": "REMOTE"}, Tier.REMOTE),
    ]  # fmt: skip
    for fields, tier in cases:
        assert read(GOOD | fields).events[0].tier is tier


def test_a_salt_is_told_from_other_keys_when_a_sequence_begins() -> None:
    digest = "0123456789abcdef" * 4
    cases = [
        ([["tenant-1"], None], True), ([None, None], False), ([["sql"], ["sql"]], False), ([["sql", "tenant-1"], None], True),
        ([[["image", 3]], None], False), ([[digest], None], False), ([[b"embeds"], None], False), ([], False),
    ]  # fmt: skip
    for extra_keys, salted in cases:
        event = read(GOOD | {"lora_name": "sql", "extra_keys": extra_keys}).events[0]
        assert (event.salted, event.adapter) == (salted, "sql")
    assert read(GOOD | {"cache_salt": "s"}, dialect="sglang").events[0].salted
    assert not read(GOOD | {"cache_salt": None}, dialect="sglang").events[0].salted


def test_a_salt_is_not_taken_for_an_adapter_when_sglang_sends_arrays() -> None:
    array = ["BlockStored", [1], None, [1, 2, 3, 4], 4, None, "GPU", "the-salt"]
    assert read(array, dialect="sglang").events[0].adapter == "none"
    assert read(array, dialect="vllm").events[0].adapter == "the-salt"


def test_adapters_are_quoted_when_their_name_means_something_else() -> None:
    for name in ("none", "default", " x ", "", '"quoted"'):
        event = read(GOOD | {"lora_name": name}).events[0]
        assert event.adapter not in ("none", name)


def test_others_are_left_out_when_an_owner_is_named_or_the_first_was() -> None:
    mine = {"event_type": "stored", "seq_hashes": [1], "medium": "gpu", "backend_id": "a"}
    for owner in (Owner("a"), Owner()):
        for events in ((mine, mine | {"backend_id": "b"}), (mine | {"backend_id": "b"}, mine | {"backend_id": None})):
            batch = read(*events, dialect="mooncake", owner=owner)
            assert kinds(batch) == ["Stored"]
            assert batch.rejected == {Reason.OTHER_OWNER: 1}
    theirs = {"worker_id": 7, "event": {"data": {"removed": {"block_hashes": [1]}}}}
    batch = read(theirs, theirs | {"worker_id": 8}, dialect="dynamo", owner=Owner())
    assert batch.rejected == {Reason.OTHER_OWNER: 1}


def test_a_batch_that_is_a_map_is_read_when_an_engine_sends_one() -> None:
    batch = decode("vllm", encode({"ts": 2.0, "events": [GOOD], "data_parallel_rank": 3}))
    assert (batch.ts_s, batch.dp_rank, kinds(batch)) == (2.0, 3, ["Stored"])
    assert kinds(decode("mooncake", encode({"event_type": "cleared", "medium": "cpu"}))) == ["Cleared"]


def test_kinds_and_windows_are_read_when_removed_events_name_their_group() -> None:
    event = read(GOOD | {"group_idx": 1, "kv_cache_spec_kind": "mamba"}).events[0]
    assert (event.group.index, event.group.kind) == (1, StateKind.RECURRENT)
    removed = read(["BlockRemoved", [1], "GPU", 1]).events[0]
    assert isinstance(removed, Removed)
    assert removed.group.index == 1
    assert isinstance(read(["AllBlocksCleared"]).events[0], Cleared)

"""Requests of the indexer API as routers send them: every dialect's names, and every fault by name."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import numpy as np
import pytest

from kvdir.server.indexer_names import engine_name, instance_id_of, registered_stream
from kvdir.server.indexer_requests import (
    Api,
    BadRequest,
    read_body,
    read_query,
    read_registration,
    read_unregistration,
)

REGISTER = {
    "endpoint": "tcp://1.1.1.1:5557",
    "type": "vLLM",
    "modelname": "m",
    "instance_id": "i",
    "block_size": 16,
    "dp_rank": 0,
}
QUERY = {"model": "m", "token_ids": [1, 2, 3]}


def test_query_is_read_when_its_dialect_is_the_rfcs_or_dynamos() -> None:
    rfc = read_query({**QUERY, "block_size": 64, "instance_id": "i", "tenant_id": 99, "unknown": 1}, by_hash=False)
    assert (rfc.api, rfc.model, rfc.tenant, rfc.instance_id, rfc.block_tokens) == (Api.RFC, "m", "99", "i", 64)
    assert rfc.tokens is not None
    assert rfc.tokens.tolist() == [1, 2, 3]
    dynamo = read_query({"model_name": "m", "token_ids": [1], "routing_group": "g", "lora_name": "sql"}, by_hash=False)
    assert (dynamo.api, dynamo.model, dynamo.tenant, dynamo.adapter) == (Api.DYNAMO, "m", "g", "sql")
    assert read_query({**QUERY, "lora_name": None, "cache_salt": None}, by_hash=False).adapter == "none"


def test_tokens_are_read_from_bytes_when_the_body_is_msgpack() -> None:
    body = msgspec.msgpack.encode({"model": "m", "token_ids": struct.pack("<3i", 7, 8, 9)})
    query = read_query(read_body(body, msgpack=True), by_hash=False)
    assert query.tokens is not None
    assert (query.tokens == np.array([7, 8, 9])).all()


def test_long_prompts_are_read_alike_when_they_come_in_pieces() -> None:
    tokens = [number * 7919 % 128_000 for number in range(60_000)]
    text = msgspec.json.encode({"model": "m", "token_ids": tokens, "unknown": tokens})
    query = read_query(read_body(text, msgpack=False), by_hash=False)
    assert query.tokens is not None
    assert query.tokens.tolist() == tokens
    hashes = {"model": "m", "seq_hashes": [hex(number) for number in tokens]}
    by_hash = read_query(read_body(msgspec.json.encode(hashes), msgpack=False), by_hash=True)
    assert by_hash.hashes == tuple(number.to_bytes(8, "big") for number in tokens)


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([1] * 40_000 + [-1], r"from position \d+ on, token at position"),
        ([1] * 40_000 + ["x" * 8], "must be integers"),
        ([[1, 2]] * 40_000, "one flat list|not valid JSON"),
        ({"a": [1] * 40_000}, "must be an array"),
        ("x" * 80_000, "must be an array"),
    ],
)
def test_long_prompts_are_refused_when_they_are_none(tokens: object, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        read_query(read_body(msgspec.json.encode({"model": "m", "token_ids": tokens}), msgpack=False), by_hash=False)


def test_array_in_msgpack_is_refused_when_reading_it_would_hold_everybody_up() -> None:
    with pytest.raises(BadRequest, match="send token_ids as bytes"):
        read_body(msgspec.msgpack.encode({"model": "m", "token_ids": [100_000] * 250_000}), msgpack=True)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (1, b"\0" * 7 + b"\1"),
        (-1, b"\xff" * 8),
        (2**64 - 1, b"\xff" * 8),
        ("18446744073709551615", b"\xff" * 8),
        ("0x1f", b"\0" * 7 + b"\x1f"),
        ("ab" * 16, b"\xab" * 16),
        ("0x" + "cd" * 32, b"\xcd" * 32),
        (b"\1" * 32, b"\1" * 32),
    ],
)
def test_hashes_are_read_when_given_as_numbers_text_or_bytes(given: object, expected: bytes) -> None:
    for field in ("seq_hashes", "block_hash", "block_hashes"):
        query = read_query({"model": "m", field: [given]}, by_hash=True)
        assert (query.hashes, query.local) == ((expected,), field == "block_hashes")


@pytest.mark.parametrize(
    ("body", "reason", "field"),
    [
        ({"token_ids": []}, "missing", "model"),
        ({"model": 5, "token_ids": []}, "invalid_type", "model"),
        ({"model": "", "token_ids": []}, "invalid_value", "model"),
        ({"model": "m"}, "missing", "token_ids"),
        ({"model": "m", "token_ids": "1 2"}, "not_array", "token_ids"),
        ({"model": "m", "token_ids": [1, "secret"]}, "invalid_type", "token_ids"),
        ({"model": "m", "token_ids": [-424242]}, "invalid_type", "token_ids"),
        ({"model": "m", "token_ids": b"12345"}, "invalid_value", "token_ids"),
        ({**QUERY, "block_size": 0}, "out_of_range", "block_size"),
        ({**QUERY, "block_size": True}, "invalid_type", "block_size"),
        ({**QUERY, "lora_id": 12}, "unsupported", "lora_id"),
        ({**QUERY, "tenant_id": [1]}, "invalid_type", "tenant_id"),
        ({**QUERY, "model": "m" * 300}, "out_of_range", "model"),
    ],
)
def test_query_is_refused_by_field_when_it_cannot_be_meant(body: dict[str, Any], reason: str, field: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read_query(body, by_hash=False)
    assert (caught.value.reason, caught.value.field) == (reason, field)
    assert "secret" not in str(caught.value)
    assert "424242" not in str(caught.value)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"model": "m"}, "missing"),
        ({"model": "m", "seq_hashes": 5}, "not_array"),
        ({"model": "m", "seq_hashes": [1.5]}, "invalid_type"),
        ({"model": "m", "seq_hashes": [2**64]}, "invalid_type"),
        ({"model": "m", "seq_hashes": ["xyz"]}, "invalid_type"),
        ({"model": "m", "seq_hashes": [1, "ab" * 32]}, "invalid_value"),
        ({"model": "m", "seq_hashes": [1], "cache_salt": "s"}, "unsupported"),
    ],
)
def test_hashes_are_refused_when_they_are_none(body: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read_query(body, by_hash=True)
    assert caught.value.reason == reason


def test_registration_is_read_when_its_dialect_is_any_of_the_three() -> None:
    rfc = read_registration({**REGISTER, "additionalsalt": "w8a8", "replay_endpoint": "tcp://1.1.1.1:5558"})
    assert (rfc.api, rfc.model, rfc.dialect, rfc.salt, rfc.key) == (Api.RFC, "m", "vllm", "w8a8", ("default", "i", 0))
    dynamo = {"instance_id": 7, "endpoint": "tcp://1.1.1.1:5557", "model_name": "m", "block_size": 16, "additional_salt": None}
    seven = read_registration(dynamo)
    assert (seven.api, seven.instance_id, seven.given, seven.dp_rank) == (Api.DYNAMO, "7", 7, None)
    profile = {"strategy": "vllm_v1", "algorithm": "sha256_cbor", "python_hash_seed": "0", "index_projection": "low64_be"}
    conductor = read_registration({**REGISTER, "hash_profile": profile, "cache_group": 0})
    assert (conductor.hash_scheme, conductor.hash_seed) == ("vllm:sha256_cbor", "0")
    assert rfc.alike(read_registration({**REGISTER, "additionalsalt": "w8a8", "replay_endpoint": "tcp://1.1.1.1:5558"}))
    assert not rfc.alike(conductor)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"endpoint": None}, "endpoint"),
        ({"modelname": None}, "modelname"),
        ({"instance_id": None}, "instance_id"),
        ({"block_size": None}, "block_size"),
        ({"type": "nobody"}, "type"),
        ({"dp_rank": -1}, "dp_rank"),
        ({"dp_rank": "0"}, "dp_rank"),
        ({"cache_group": 2}, "cache_group"),
        ({"hash_profile": "sha256"}, "hash_profile"),
        ({"hash_profile": {"strategy": "other"}}, "strategy"),
    ],
)
def test_registration_is_refused_by_field_when_it_cannot_be_meant(change: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read_registration(REGISTER | change)
    assert caught.value.field == field


def test_unregistration_means_all_ranks_when_none_is_given() -> None:
    assert read_unregistration({"instance_id": "i", "dp_rank": 1}).dp_rank == 1
    assert read_unregistration({"instance_id": "i", "model_name": "m"}).dp_rank is None


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"null", b'"x"', b"\xff", b"[" * 100_000])
def test_body_is_refused_when_it_is_no_object(body: bytes) -> None:
    with pytest.raises(BadRequest, match="body"):
        read_body(body, msgpack=False)
    with pytest.raises(BadRequest, match="body"):
        read_body(body or b"\xc1", msgpack=True)


@pytest.mark.parametrize("tenant", ["default", "acme", "a|b", "é/@~%7C"])
@pytest.mark.parametrize("instance_id", ["vllm-prefill-node1", "http://10.0.0.1:8000/v1", "a@b|c~%7C", "7"])
def test_instance_reads_back_when_named_in_the_directory(tenant: str, instance_id: str) -> None:
    assert instance_id_of(f"/{engine_name(tenant, instance_id)}") == (tenant, instance_id)
    assert registered_stream("n1", tenant, instance_id, 3).startswith("n1/~")


def test_instance_keeps_its_name_when_nobody_registered_it() -> None:
    assert instance_id_of("n1/vllm-0") == ("default", "n1/vllm-0")
    assert instance_id_of("n1") == ("default", "n1")

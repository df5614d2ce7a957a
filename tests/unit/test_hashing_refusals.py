"""What the hash schemes refuse, in words; and what explains a mismatch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvdir.errors import InvalidInput, Unsupported
from kvdir.hashing import SCHEMES, _native, blake3_chain, explain_mismatch, fingerprints, parse, probe

ONE: dict[str, Any] = {"scheme": "vllm:sha256_cbor", "block_tokens": 4}


def refusal(tokens: Any = (1, 2, 3, 4), **options: Any) -> str:
    with pytest.raises(InvalidInput) as caught:
        fingerprints(tokens, **(ONE | options))
    return str(caught.value)


def test_unknown_scheme_lists_the_known_ones() -> None:
    words = refusal(scheme="sha256")
    assert all(name in words for name in SCHEMES)
    assert ":low64" in words


def test_opaque_is_never_computed() -> None:
    assert "not computed" in refusal(scheme="opaque")
    assert "not computed" in refusal(scheme="opaque:low64")


def test_low64_is_refused_where_there_are_no_other_bits() -> None:
    assert "without :low64" in refusal(scheme="dynamo:xxh3:low64")


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ([1, 2, -3, 4], "position 2"),
        (np.array([1, 2, 3, 2**32]), "position 3"),
        ([1, 2**70, 3, 4], "position 1"),
        ([1, 2.5, 3, 4], "position 1 is no integer but float"),
        ([1, "2", 3, 4], "integers"),
        ([True, True], "integers"),
        ([[1, 2], [3, 4]], "2 dimensions"),
        ([[1, 2], [3]], "flat list"),
        (np.array([1.0, 2.0]), "integers"),
    ],
)
def test_bad_tokens_are_named_by_position(tokens: Any, said: str) -> None:
    assert said in refusal(tokens)


def test_tokens_and_extra_keys_are_never_repeated_in_an_error() -> None:
    assert "87654321" not in refusal([1, 2, -87654321, 4])
    assert "secret" not in refusal(extra=["secret", "secret"])
    assert "secret" not in refusal(extra=[{"secret": 1.5}])
    assert "secret" not in refusal(scheme="vllm:sha256", extra=[{"secret": lambda: 1}])


def test_random_seed_of_xxhash_is_explained() -> None:
    assert "PYTHONHASHSEED" in refusal(scheme="vllm:xxhash")


@pytest.mark.parametrize("seed", ["x", "-1", str(2**64), "٣"])
def test_seed_that_is_no_number_is_refused_where_one_is_needed(seed: str) -> None:
    assert "below 2**64" in refusal(scheme="dynamo:xxh3", seed=seed)


def test_seed_is_refused_where_there_is_none() -> None:
    assert "'builtin'" in refusal(scheme="sglang:sha256", seed="0")
    assert "text" in refusal(seed=0)


def test_model_is_asked_for_where_the_root_needs_it() -> None:
    assert "model" in refusal(scheme="llmd:cbor-fnv")


@pytest.mark.parametrize("block_tokens", [0, -1, 2**20 + 1, 1.5])
def test_block_tokens_out_of_range_are_refused(block_tokens: Any) -> None:
    assert "block_tokens" in refusal(block_tokens=block_tokens)


@pytest.mark.parametrize("scheme", ["vllm:sha256@", "vllm:sha256@0", "vllm:sha256@x", "vllm:sha256@-1"])
def test_hash_every_no_tokens_is_refused(scheme: str) -> None:
    assert "vllm:sha256@16" in refusal(scheme=scheme)


def test_hashes_that_do_not_end_where_blocks_end_are_refused() -> None:
    assert "not a multiple" in refusal(scheme="vllm:sha256@16", block_tokens=24)


def test_roots_of_another_width_are_refused() -> None:
    assert "64 bits of it do not suffice" in refusal(root=bytes(8))
    assert "whole fingerprint" in refusal(root=bytes(16))


def test_extra_keys_that_do_not_fit_are_refused() -> None:
    assert "one for each" in refusal(extra=[])
    assert "no extra keys" in refusal(scheme="sglang:sha256", extra=[("a",)])


def test_block_too_long_for_one_pickle_frame_is_refused() -> None:
    tokens = np.full(22_000, 300)
    assert "CBOR" in refusal(tokens, scheme="vllm:sha256", block_tokens=22_000)
    assert len(fingerprints(tokens, scheme="vllm:sha256_cbor", block_tokens=22_000)) == 1


def test_missing_package_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "blake3", None)
    blake3_chain._blake3.cache_clear()
    with pytest.raises(Unsupported, match=r"kvdir\[hashes\]"):
        fingerprints([1], scheme="kvdir:blake3", block_tokens=1)
    monkeypatch.undo()
    blake3_chain._blake3.cache_clear()
    assert len(fingerprints([1], scheme="kvdir:blake3", block_tokens=1)) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        {"chain": 7},
        {"block_tokens": 0},
        {"block_tokens": 3},
        {"root": bytes(31)},
        {"root": None},
        {"extras": b"", "extra_ends": None},
        {"extras": b"ab", "extra_ends": np.array([1, 3], np.uint64)},
        {"extras": b"ab", "extra_ends": np.array([2, 1], np.uint64)},
        {"extras": b"ab", "extra_ends": np.array([1], np.uint64)},
        {"tokens": None},
        {"chain": 4, "extras": b"ab", "extra_ends": np.array([1, 2], np.uint64)},
    ],
)
def test_native_refuses_what_is_out_of_range(arguments: dict[str, Any]) -> None:
    good: dict[str, Any] = {"chain": 1, "tokens": np.arange(8, dtype=np.uint32), "block_tokens": 4, "root": bytes(32)}
    assert len(_native.hash_blocks(**good)) == 64
    with pytest.raises(ValueError):
        _native.hash_blocks(**(good | arguments))


# mismatches


def explained(seen: bytes, **options: Any) -> str:
    return explain_mismatch(seen, **({"scheme": "vllm:sha256_cbor", "seed": "builtin", "block_tokens": 16} | options))


def test_nothing_is_said_when_the_probe_fits() -> None:
    assert explained(probe("vllm:sha256_cbor", "builtin", 16)) == ""
    tokens = list(range(500, 516))
    assert explained(fingerprints(tokens, scheme="vllm:sha256_cbor", block_tokens=16)[0], tokens=tokens) == ""


def test_nothing_is_said_of_what_cannot_be_computed() -> None:
    assert explained(bytes(32), scheme="opaque") == ""
    assert explained(bytes(16), scheme="vllm:xxhash") == ""


@pytest.mark.parametrize("seed", ["0", "42"])
def test_another_seed_is_found_and_what_to_set(seed: str) -> None:
    words = explained(probe("vllm:sha256_cbor", seed, 16))
    assert "start it without PYTHONHASHSEED" in words
    assert f'hash_seed = "{seed}"' in words
    assert "hash_scheme" not in words
    other = explained(probe("vllm:sha256_cbor", "builtin", 16), seed=seed)
    assert f"PYTHONHASHSEED={seed}" in other


def test_another_scheme_is_found_and_what_to_set() -> None:
    words = explained(probe("vllm:sha256", "builtin", 16))
    assert "--prefix-caching-hash-algo sha256_cbor" in words
    assert 'hash_scheme = "vllm:sha256"' in words
    assert "sglang:sha256" in explained(probe("sglang:sha256", "builtin", 16))


def test_another_block_size_is_found_by_the_probe() -> None:
    words = explained(probe("vllm:sha256_cbor", "builtin", 64))
    assert "blocks of 16 tokens" in words
    assert "block_tokens = 64" in words


def test_64_bits_in_place_of_whole_fingerprints_are_found() -> None:
    words = explained(probe("vllm:sha256_cbor:low64", "builtin", 16))
    assert "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES" in words


def test_hashes_after_fewer_tokens_than_a_block_are_found() -> None:
    words = explained(probe("vllm:sha256_cbor@16", "0", 64), block_tokens=64)
    assert 'write hash_scheme = "vllm:sha256_cbor@16", hash_seed = "0" into' in words
    words = explained(probe("vllm:sha256_cbor", "builtin", 64), scheme="vllm:sha256_cbor@16", block_tokens=64)
    assert 'write hash_scheme = "vllm:sha256_cbor" into' in words


def test_another_scheme_is_found_from_a_first_block_of_any_tokens() -> None:
    tokens = list(range(500, 516))
    seen = fingerprints(tokens, scheme="vllm:sha256:low64", block_tokens=16, seed="0")[0]
    words = explained(seen, tokens=tokens, scheme="vllm:sha256_cbor:low64")
    assert 'hash_scheme = "vllm:sha256:low64", hash_seed = "0"' in words
    assert "500" not in words


def test_the_fix_is_that_of_the_scheme_when_it_is_none_of_vllms() -> None:
    words = explained(probe("dynamo:xxh3", "42", 16), scheme="dynamo:xxh3")
    assert "give it the hash seed '1337'" in words
    assert "PYTHONHASHSEED" not in words
    assert "PYTHONHASHSEED" not in explained(probe("vllm:sha256", "0", 16), scheme="sglang:sha256")


def test_no_other_way_is_tried_when_blocks_are_so_large_that_it_would_take_seconds() -> None:
    seen = probe("vllm:sha256_cbor", "0", 8192)
    assert "It is what" not in explained(seen, block_tokens=8192)
    assert "It is what" in explained(probe("vllm:sha256_cbor", "0", 4096), block_tokens=4096)


def test_a_seed_nobody_can_know_is_explained() -> None:
    assert "another one in each process" in explained(bytes(16), scheme="vllm:xxhash", seed="0")
    assert "Is PYTHONHASHSEED the same" in explained(bytes(32))


def test_names_of_schemes_fit_into_a_namespace() -> None:
    assert all(parse(name).scheme.name == name for name in SCHEMES)

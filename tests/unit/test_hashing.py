"""Hash schemes against published and recomputed vectors, and against pickle, cbor2 and hashlib, block by block."""

from __future__ import annotations

import array
import hashlib
import json
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cbor2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvdir
from kvdir.hashing import LOW64, SCHEMES, _native, fingerprints, vllm_extra
from kvdir.hashing.extra import cbor
from kvdir.hashing.schemes import Extra, Seeding

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "hash_vectors.json").read_text())

Encode = Callable[[Any], bytes]
Hash = Callable[[bytes], bytes]


def pickled(value: Any) -> bytes:
    return pickle.dumps(value, protocol=5)


def canonical(value: Any) -> bytes:
    return cbor2.dumps(value, canonical=True)


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


VLLM: dict[str, tuple[Encode, Hash]] = {
    "vllm:sha256": (pickled, sha256),
    "vllm:sha256_cbor": (canonical, sha256),
    "vllm:xxhash": (pickled, _native.xxh3_128),
    "vllm:xxhash_cbor": (canonical, _native.xxh3_128),
}


def as_vllm_does(scheme: str, tokens: Sequence[int], block_tokens: int, seed: str, extra: Sequence[Any] | None) -> list[bytes]:
    """hash_block_tokens of vLLM 0.32, one block at a time."""
    encode, hashed = VLLM[scheme]
    parent, out = hashed(encode(seed)), []
    for block in range(len(tokens) // block_tokens):
        part = tuple(tokens[block * block_tokens : (block + 1) * block_tokens])
        parent = hashed(encode((parent, part, None if extra is None else extra[block])))
        out.append(parent)
    return out


def numbers(found: kvdir.Fingerprints, *, signed: bool = False) -> list[int]:
    assert found.width == 8
    return [int.from_bytes(item, "big", signed=signed) for item in found]


def test_dynamo_equals_the_published_vector() -> None:
    vector = VECTORS["dynamo_xxh3_1337"]
    found = fingerprints(vector["tokens"], scheme="dynamo:xxh3", block_tokens=vector["block_size"])
    assert numbers(found) == vector["sequence"]
    alone = [fingerprints(vector["tokens"][at : at + 4], scheme="dynamo:xxh3", block_tokens=4) for at in (0, 4, 8)]
    assert [numbers(item)[0] for item in alone] == vector["local"]


def test_sglang_equals_the_recomputed_vector() -> None:
    vector = VECTORS["sglang_page_sha256"]
    whole = fingerprints(vector["tokens"], scheme="sglang:sha256", block_tokens=vector["block_size"])
    assert [item.hex()[:16] for item in whole] == vector["digest_prefix_hex"]
    told = fingerprints(vector["tokens"], scheme="sglang:sha256:low64", block_tokens=vector["block_size"])
    assert numbers(told, signed=True) == vector["event_id"]


def test_llmd_equals_the_recomputed_vector() -> None:
    vector = VECTORS["llmd_cbor_fnv"]
    found = fingerprints(range(1, 49), scheme="llmd:cbor-fnv", block_tokens=vector["block_size"], model=vector["model"])
    assert numbers(found) == vector["hashes"]


def test_xxh3_equals_its_published_values() -> None:
    assert _native.xxh3_128(b"").hex() == "99aa06d3014798d86001c324468d497f"
    assert _native.xxh3_64(b"", 0) == 0x2D06800538D394C2


@pytest.mark.parametrize("scheme", VLLM)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_vllm_chain_equals_one_block_at_a_time(scheme: str, data: st.DataObject) -> None:
    block_tokens = data.draw(st.sampled_from([1, 2, 3, 4, 16, 23, 24, 255, 256, 300]), label="block_tokens")
    token = st.one_of(
        st.integers(0, 2**32 - 1), st.sampled_from([0, 23, 24, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1])
    )
    tokens = data.draw(st.lists(token, max_size=4 * block_tokens), label="tokens")
    blocks = len(tokens) // block_tokens
    extra = data.draw(
        st.none() | st.just(vllm_extra(blocks, lora_name="adapter", lora_path="/path", cache_salt="a secret")), label="extra"
    )
    seed = data.draw(st.sampled_from(["0", "42", "random", "ä" * 300]), label="seed")
    found = fingerprints(tokens, scheme=scheme, block_tokens=block_tokens, seed=seed, extra=extra)
    assert list(found) == as_vllm_does(scheme, tokens, block_tokens, seed, extra)
    told = fingerprints(tokens, scheme=scheme + LOW64, block_tokens=block_tokens, seed=seed, extra=extra)
    assert list(told) == [item[-8:] for item in found]


def test_builtin_seed_of_vllm_is_the_fixed_one_of_its_code() -> None:
    assert list(fingerprints(range(16), scheme="vllm:sha256_cbor", block_tokens=16)) == as_vllm_does(
        "vllm:sha256_cbor", range(16), 16, "vllm-none-hash", None
    )


def test_extra_keys_hash_as_in_vllm_when_there_are_several_media_in_one_block() -> None:
    extra = [(("mm", "a" * 64, 0), ("mm", "b" * 64, 7), ("prompt_embeds", b"\x01" * 32)), None, (("mm", "b" * 64, -9),)]
    for scheme in ("vllm:sha256", "vllm:sha256_cbor"):
        found = fingerprints(range(48), scheme=scheme, block_tokens=16, extra=extra)
        assert list(found) == as_vllm_does(scheme, range(48), 16, "vllm-none-hash", extra)


def test_pickled_tags_are_one_object_when_the_caller_made_them_apart() -> None:
    apart = [(("".join(["m", "m"]), "a", 0), ("".join(["m", "m"]), "b", 1))]
    as_engine = [(("mm", "a", 0), ("mm", "b", 1))]
    found = fingerprints(range(4), scheme="vllm:sha256", block_tokens=4, extra=apart)
    assert list(found) == as_vllm_does("vllm:sha256", range(4), 4, "vllm-none-hash", as_engine)


def test_vllm_extra_puts_the_salt_into_the_first_block_only() -> None:
    assert vllm_extra(3, cache_salt="s") == [(("cache_salt", "s"),), None, None]
    assert vllm_extra(2, cache_salt="s", lora_name="l", lora_path="p", first=False) == [(("lora", "l", "p"),)] * 2
    assert vllm_extra(0, cache_salt="s") == []


@pytest.mark.parametrize("scheme", SCHEMES)
def test_chain_continues_from_a_root(scheme: str) -> None:
    tokens = np.arange(1000, 1000 + 7 * 16)
    seed = "0" if "xxhash" in scheme else "builtin"
    extra = None if SCHEMES[scheme].extra is Extra.NONE else [("k", number) for number in range(7)]
    whole = fingerprints(tokens, scheme=scheme, block_tokens=16, seed=seed, extra=extra, model="m")
    head = fingerprints(tokens[:48], scheme=scheme, block_tokens=16, seed=seed, extra=extra and extra[:3], model="m")
    rest = fingerprints(
        tokens[48:], scheme=scheme, block_tokens=16, seed=seed, extra=extra and extra[3:], root=head[2], model="m"
    )
    assert head.packed + rest.packed == whole.packed
    assert whole.width == SCHEMES[scheme].width


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_input_changes_the_fingerprint(scheme: str) -> None:
    known = SCHEMES[scheme]

    def last(tokens: Sequence[int], **changed: Any) -> bytes:
        options: dict[str, Any] = {
            "block_tokens": 4,
            "seed": "1" if known.seeding is not Seeding.NONE else "builtin",
            "model": "m",
        }
        return fingerprints(tokens, scheme=scheme, **(options | changed))[len(tokens) // 4 - 1]

    variants = [
        last([1, 2, 3, 4, 5, 6, 7, 8]),
        last([1, 2, 3, 5, 5, 6, 7, 8]),
        last([1, 2, 3, 4, 5, 6, 7, 9]),
        last([5, 6, 7, 8]),
        last([5, 6, 7, 8, 1, 2, 3, 4]),
    ]
    if known.seeding is not Seeding.NONE:
        variants.append(last([1, 2, 3, 4, 5, 6, 7, 8], seed="2"))
    if known.extra is not Extra.NONE:
        variants += [last([1, 2, 3, 4, 5, 6, 7, 8], extra=[keys, None]) for keys in (("a",), ("b",), ("a", "b"))]
    if known.by_model:
        variants.append(last([1, 2, 3, 4, 5, 6, 7, 8], model="n"))
    assert len(set(variants)) == len(variants)


@pytest.mark.parametrize("low64", ["", LOW64])
def test_block_of_several_hashes_has_the_last_one(low64: str) -> None:
    fine = fingerprints(range(200), scheme="vllm:sha256_cbor" + low64, block_tokens=16)
    coarse = fingerprints(range(200), scheme="vllm:sha256_cbor@16" + low64, block_tokens=64)
    assert list(coarse) == [fine[3], fine[7], fine[11]]
    salted = fingerprints(range(64), scheme="vllm:sha256@16", block_tokens=32, extra=vllm_extra(4, cache_salt="s"))
    assert list(salted) == as_vllm_does("vllm:sha256", range(64), 16, "vllm-none-hash", vllm_extra(4, cache_salt="s"))[1::2]


def test_from_tokens_is_the_same() -> None:
    found = kvdir.Fingerprints.from_tokens(range(64), scheme="vllm:sha256_cbor", block_tokens=16, seed="0")
    assert found == fingerprints(range(64), scheme="vllm:sha256_cbor", block_tokens=16, seed="0")


@pytest.mark.parametrize(
    "make", [list, tuple, lambda n: array.array("q", n), *(lambda n, t=t: np.array(n, t) for t in "hHiIqQ")]
)
def test_tokens_of_any_integer_type_hash_alike(make: Callable[[range], Any]) -> None:
    wanted = fingerprints(range(100, 164), scheme="sglang:sha256", block_tokens=16)
    assert fingerprints(make(range(100, 164)), scheme="sglang:sha256", block_tokens=16) == wanted


def test_tokens_hash_alike_when_they_are_not_contiguous() -> None:
    strided = np.arange(200, dtype=np.uint32)[::2]
    wanted = fingerprints(strided.tolist(), scheme="dynamo:xxh3", block_tokens=16)
    assert fingerprints(strided, scheme="dynamo:xxh3", block_tokens=16) == wanted


def test_a_block_that_is_not_full_has_no_fingerprint() -> None:
    assert len(fingerprints(range(15), scheme="vllm:sha256", block_tokens=16)) == 0
    assert len(fingerprints(range(33), scheme="vllm:sha256", block_tokens=16)) == 2
    assert len(fingerprints([], scheme="kvdir:blake3", block_tokens=16)) == 0


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**64), 2**64 - 1) | st.text() | st.binary(),
        lambda inner: (
            st.lists(inner, max_size=4) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=30), inner, max_size=4)
        ),
        max_leaves=20,
    )
)
def test_cbor_equals_cbor2_canonical(value: Any) -> None:
    assert cbor(value) == canonical(value)

"""Which names a prompt has: over the namespaces of its model, by tokens and by hash."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from kvdir.core.score import ScorePart
from kvdir.engines import EngineIdentity, Residency, decode
from kvdir.fingerprint import Fingerprints
from kvdir.hashing import fingerprints, vllm_extra
from kvdir.namespace import Namespace, StateGroup
from kvdir.server.indexer_requests import read_query
from kvdir.server.prompt_names import Named, Scope, by_hashes, by_tokens, chained, names
from kvdir.testing.fake_node import EXAMPLE_NAMESPACE

TOKENS = np.arange(1, 81, dtype=np.uint32)


def announced(scheme: str = "vllm:sha256_cbor:low64", **fields: object) -> Namespace:
    return Namespace.announced(**{"model": "m", "block_tokens": 16, "hash_scheme": scheme, "hash_seed": "builtin"} | fields)  # type: ignore[arg-type]


def kept(**fields: object) -> Namespace:
    return replace(EXAMPLE_NAMESPACE, **{"model": "m", "hash_scheme": "vllm:sha256_cbor", "hash_seed": "builtin"} | fields)  # type: ignore[arg-type]


def digests(part: ScorePart) -> list[set[bytes]]:
    return [{name.namespace_digest for name in group.names} for group in part.groups]


def by(named: Named, namespace: Namespace) -> Fingerprints:
    return next(
        name.fingerprints
        for part in named.parts
        for group in part.groups
        for name in group.names
        if name.namespace_digest == namespace.digest
    )


def test_engine_and_arena_are_names_of_one_group_when_they_keep_the_same_kinds() -> None:
    engine, arena = announced(), kept()
    named = names([engine, arena], by_tokens(TOKENS))
    (part,) = named.parts
    assert digests(part) == [{engine.digest, arena.digest}]
    whole = fingerprints(TOKENS, scheme="vllm:sha256_cbor", block_tokens=16)
    assert by(named, arena) == whole
    assert list(by(named, engine)) == [item[-8:] for item in whole]


def test_groups_of_a_hybrid_model_are_needed_together_when_an_engine_announces_both() -> None:
    full, window, other = announced(), announced(kind="sliding_window", window_tokens=32), announced("sglang:sha256:low64")
    named = names([full, window, other], by_tokens(TOKENS))
    assert sorted(map(digests, named.parts), key=len) == [[{other.digest}], [{full.digest}, {window.digest}]]


def test_every_rank_is_needed_when_an_arena_keeps_parts_of_a_split() -> None:
    engine, ranks = announced(), [kept(parallel="tp=0/2"), kept(parallel="tp=1/2")]
    named = names([engine, *ranks], by_tokens(TOKENS))
    parts = sorted(map(digests, named.parts), key=len)
    assert parts == [[{engine.digest}], [{engine.digest, rank.digest} for rank in ranks]]


def test_parts_of_a_composite_namespace_are_groups_of_one_part_when_kept_apart() -> None:
    groups = (
        StateGroup(kind="full", layers=1, kv_heads=1, head_dim=8),
        StateGroup(kind="sliding_window", layers=2, kv_heads=1, head_dim=8, window_tokens=32, block_tokens=32),
    )
    parts = kept(groups=groups).parts()
    (part,) = names(parts, by_tokens(TOKENS), block_tokens=16).parts
    assert sorted(map(len, digests(part))) == [1, 1]
    assert sorted(len(group.names[0].fingerprints) for group in part.groups) == [2, 5]
    assert names(parts, by_tokens(TOKENS), block_tokens=64).parts == ()


def test_namespace_is_left_out_with_words_when_its_hashes_cannot_be_computed() -> None:
    random = announced("vllm:xxhash_cbor:low64")
    named = names([announced(), random, announced("opaque")], by_tokens(TOKENS))
    assert len(named.parts) == 1
    assert sorted(named.skipped) == sorted({random.short, announced("opaque").short})
    assert "PYTHONHASHSEED" in named.skipped[random.short]


def test_scope_holds_what_may_know_the_prompt_when_asked() -> None:
    salted = kept(tenant="salt:" + "0" * 32)
    assert Scope(model="m").holds(announced())
    assert not Scope(model="n").holds(announced())
    assert not Scope(model="m").holds(announced(adapter="sql"))
    assert Scope(model="m", adapter="sql").holds(announced(adapter="sql"))
    assert not Scope(model="m", cache_salt="other-secret").holds(salted)
    own = Namespace.create(**{**_fields(), "tenant_salt": "our-secret"})
    assert Scope(model="m", cache_salt="our-secret").holds(own)


@pytest.mark.parametrize("lora_name", ["sql", "default", "none", " spaced ", '"quoted"'])
def test_adapters_and_tenants_are_those_of_the_events_when_a_router_names_them(lora_name: str) -> None:
    event = {
        "event_type": "stored", "seq_hashes": [1], "medium": "gpu", "block_size": 16, "model_name": "m", "lora_name": lora_name,
        "tenant_id": "acme",
    }  # fmt: skip
    residency = Residency(EngineIdentity(model="m", hash_scheme="vllm:sha256_cbor"), copies=False)
    residency.apply(decode("mooncake", msgspec.msgpack.encode([0.0, [event]])))
    (space,) = residency.namespaces.values()
    query = read_query({"model": "m", "token_ids": [1], "lora_name": lora_name, "tenant_id": "acme"}, by_hash=False)
    assert Scope(model="m", adapter=query.adapter, tenant_id=query.tenant).holds(space)
    assert not Scope(model="m", adapter=query.adapter, tenant_id="default").holds(space)
    named = names([space], by_tokens(TOKENS, adapter=query.adapter))
    extra = vllm_extra(5, lora_name=lora_name)
    assert by(named, space) == fingerprints(TOKENS, scheme=space.hash_scheme, block_tokens=16, extra=extra)


def test_a_namespace_whose_seed_is_no_number_is_left_out_when_dynamos_hashes_are_chained() -> None:
    odd, long = (announced("dynamo:xxh3", hash_seed=seed) for seed in ("abc", "9" * 5000))
    named = names([odd, long, announced("dynamo:xxh3")], by_hashes([b"12345678"], local=True))
    assert len(named.parts) == 1
    assert sorted(named.skipped) == sorted({odd.short, long.short})


def _fields() -> dict[str, object]:
    space = kept()
    return {name: getattr(space, name) for name in space.__dataclass_fields__ if name != "tenant"}


def test_salt_and_adapter_change_the_hashes_when_the_engine_takes_them_in() -> None:
    engine = announced(adapter="sql")
    named = names([engine], by_tokens(TOKENS, adapter="sql", adapter_path="/loras/sql", cache_salt="secret"))
    extra = vllm_extra(5, lora_name="sql", lora_path="/loras/sql", cache_salt="secret")
    expected = fingerprints(TOKENS, scheme=engine.hash_scheme, block_tokens=16, extra=extra)
    assert by(named, engine) == expected
    skipped = names([announced("dynamo:xxh3")], by_tokens(TOKENS, cache_salt="secret")).skipped
    assert "secret" not in str(skipped)
    assert "not known here" in str(skipped)


@pytest.mark.parametrize(("scheme", "width"), [("vllm:sha256_cbor:low64", 8), ("vllm:sha256_cbor", 32), ("dynamo:xxh3", 8)])
def test_hashes_are_looked_up_as_given_when_they_are_as_wide(scheme: str, width: int) -> None:
    space = announced(scheme)
    hashes = [bytes([number]) * width for number in range(3)]
    assert list(by(names([space], by_hashes(hashes)), space)) == hashes
    assert names([space], by_hashes([bytes(16)])).parts == ()


def test_whole_hashes_are_found_by_their_64_bits_when_an_engine_tells_no_more() -> None:
    space = announced()
    whole = fingerprints(TOKENS, scheme="vllm:sha256_cbor", block_tokens=16)
    assert by(names([space], by_hashes(list(whole))), space) == fingerprints(TOKENS, scheme=space.hash_scheme, block_tokens=16)


def test_local_hashes_are_chained_when_dynamo_would() -> None:
    rolling = fingerprints(TOKENS, scheme="dynamo:xxh3", block_tokens=16)
    local = [fingerprints(TOKENS[at : at + 16], scheme="dynamo:xxh3", block_tokens=16)[0] for at in range(0, 80, 16)]
    assert chained(local, 1337) == rolling
    space = announced("dynamo:xxh3")
    assert by(names([space], by_hashes(local, local=True)), space) == rolling
    assert chained([], 1337) == Fingerprints.of([])


def test_namespace_is_left_out_when_its_seed_is_no_number() -> None:
    space = announced("dynamo:xxh3", hash_seed="abc")
    named = names([space], by_hashes([b"12345678"], local=True))
    assert not named.parts
    assert "number" in named.skipped[space.short]

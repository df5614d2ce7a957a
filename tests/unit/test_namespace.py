"""The namespace: canonical form, digest, refusals, differences in words, and what never leaves it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdir.errors import NamespaceError
from kvdir.namespace import DTYPE_BYTES, Namespace, StateGroup, StateKind, salt_digest

FIELDS: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "weights": "sha256:aa",
    "kv_dtype": "bfloat16",
    "layout": "NHD",
    "block_tokens": 16,
    "groups": [{"kind": "full", "layers": 32, "kv_heads": 8, "head_dim": 128}],
    "position": "rope:theta=500000",
    "parallel": "replicated",
    "adapter": "none",
    "hash_scheme": "vllm-sha256",
    "hash_seed": "0",
    "cache_policy": "exact",
}
OTHER: dict[str, Any] = {
    "model": "llama-3.1-70b",
    "weights": "sha256:bb",
    "kv_dtype": "fp8_e4m3",
    "layout": "HND",
    "block_tokens": 32,
    "groups": [{"kind": "full", "layers": 80, "kv_heads": 8, "head_dim": 128}],
    "position": "rope:theta=10000",
    "parallel": "tp=0/2",
    "adapter": "lora:1",
    "tenant_salt": "a salt of enough bytes",
    "hash_scheme": "sglang-sha256",
    "hash_seed": "1",
    "cache_policy": "int8",
    "bytes_override": 4096,
}

texts = st.text(min_size=1, max_size=12).filter(
    lambda text: text.strip() == text and text.lower() not in ("auto", "default", "unknown")
)
groups = st.one_of(
    st.builds(
        StateGroup,
        kind=st.sampled_from(["full", "mla", "index", "draft"]),
        layers=st.integers(1, 99),
        kv_heads=st.integers(1, 64),
        head_dim=st.integers(1, 512),
        tensors=st.sampled_from([1, 2]),
    ),
    st.builds(StateGroup, kind=st.just("recurrent"), layers=st.integers(1, 99), state_bytes=st.integers(1, 2**20)),
)


@st.composite
def namespaces(draw: st.DrawFn) -> Namespace:
    plain = ("model", "weights", "layout", "position", "parallel", "adapter", "hash_scheme", "hash_seed", "cache_policy")
    fields: dict[str, Any] = {name: draw(texts) for name in plain}
    fields["kv_dtype"] = draw(st.sampled_from(sorted(DTYPE_BYTES)))
    fields["block_tokens"] = draw(st.integers(2, 1024).map(lambda tokens: tokens * 2))
    fields["groups"] = draw(st.lists(groups, min_size=1, max_size=3))
    fields["bytes_override"] = draw(st.integers(0, 2**30))
    return Namespace.create(**fields, tenant_salt=draw(st.none() | st.binary(min_size=8, max_size=20)))


@given(namespaces())
def test_canonical_form_round_trips(namespace: Namespace) -> None:
    again = Namespace.from_canonical(namespace.canonical())
    assert again == namespace
    assert again.canonical() == namespace.canonical()
    assert again.digest == namespace.digest
    assert len(again.digest) == 32
    assert Namespace.diff(namespace, again) == []


@given(namespaces(), namespaces())
def test_digest_is_equal_only_when_namespaces_are(a: Namespace, b: Namespace) -> None:
    assert (a == b) == (a.digest == b.digest)
    assert (a == b) == (Namespace.diff(a, b) == [])


@given(namespaces(), namespaces())
def test_diff_names_exactly_the_fields_that_differ(a: Namespace, b: Namespace) -> None:
    differing = {f.name for f in dataclasses.fields(Namespace) if getattr(a, f.name) != getattr(b, f.name)}
    named = {line.partition(":")[0].partition("[")[0] for line in Namespace.diff(a, b)}
    assert named == differing


@pytest.mark.parametrize("field", sorted(OTHER))
def test_digest_and_diff_change_when_one_field_changes(field: str) -> None:
    base, other = Namespace.create(**FIELDS), Namespace.create(**{**FIELDS, field: OTHER[field]})
    assert base.digest != other.digest
    lines = Namespace.diff(base, other)
    assert len(lines) == 1
    assert lines[0].startswith(field.removesuffix("_salt"))


def test_canonical_form_does_not_depend_on_the_order_of_arguments() -> None:
    assert Namespace.create(**dict(reversed(FIELDS.items()))).canonical() == Namespace.create(**FIELDS).canonical()


def test_canonical_form_and_digest_are_pinned() -> None:
    """They are an on-the-wire identity: a change here is a protocol change."""
    namespace = Namespace.create(**FIELDS)
    assert json.loads(namespace.canonical())["version"] == 1
    assert namespace.digest.hex() == "ec50495f6e8355f516d103280d49532732db4637964181ce2285e0835a614cde"
    assert namespace.block_bytes == 2 * 32 * 8 * 128 * 16 * 2


@given(st.binary(min_size=8, max_size=40).filter(lambda salt: len(set(salt)) > 4))
def test_salt_is_in_no_text_form(salt: bytes) -> None:
    namespace = Namespace.create(**FIELDS, tenant_salt=salt)
    text = "".join([repr(namespace), str(namespace), namespace.canonical(), namespace.short])
    for form in (repr(salt)[2:-1], salt.hex(), repr(salt)):
        assert form not in text
    other = Namespace.create(**FIELDS)
    assert salt.hex() not in "".join(Namespace.diff(namespace, other))
    assert salt_digest(salt) not in "".join(Namespace.diff(namespace, other))


def test_salt_is_not_repeated_when_it_is_in_the_wrong_field() -> None:
    with pytest.raises(NamespaceError) as caught:
        Namespace.create(**FIELDS, tenant="my secret salt 123")
    assert "tenant_salt" in str(caught.value)
    assert "secret" not in str(caught.value)
    with pytest.raises(NamespaceError) as caught:
        Namespace.create(**FIELDS, tenant="salt:my secret")
    assert "secret" not in str(caught.value)


def test_salt_is_refused_when_it_is_short() -> None:
    with pytest.raises(NamespaceError, match="at least 8 bytes") as caught:
        Namespace.create(**FIELDS, tenant_salt="hunter2")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("field", sorted(set(FIELDS) - {"groups", "block_tokens"}))
@pytest.mark.parametrize("value", ["auto", "AUTO", "", " ", "default", "unknown", None, 5])
def test_unclear_value_is_refused_with_its_name(field: str, value: object) -> None:
    with pytest.raises(NamespaceError) as caught:
        Namespace.create(**{**FIELDS, field: value})
    assert [line.partition(":")[0] for line in caught.value.faults] == [field]


def test_every_fault_is_listed_at_once() -> None:
    with pytest.raises(NamespaceError) as caught:
        Namespace.create(kv_dtype="auto", modle="typo", groups=[{"kind": "odd", "layers": 0}], block_tokens="16")
    text = str(caught.value)
    for expected in (
        "modle",
        "model",
        "weights",
        "kv_dtype",
        "groups[0].kind",
        "groups[0].layers",
        "block_tokens",
        "hash_seed",
    ):
        assert expected in text


@pytest.mark.parametrize(
    ("group", "fault"),
    [
        ({"kind": "full", "layers": 2, "kv_heads": 0, "head_dim": 8}, "kv_heads"),
        ({"kind": "full", "layers": 2, "kv_heads": 1, "head_dim": 8, "window_tokens": 9}, "window_tokens"),
        ({"kind": "sliding_window", "layers": 2, "kv_heads": 1, "head_dim": 8}, "window_tokens"),
        ({"kind": "recurrent", "layers": 2}, "state_bytes"),
        ({"kind": "full", "layers": "2", "kv_heads": 1, "head_dim": 8}, "layers"),
        ({"kind": "full", "layers": 2, "kv_heads": 1, "head_dim": 10**400}, "head_dim"),
        ({"kind": [], "layers": 2, "kv_heads": 1, "head_dim": 8}, "kind"),
        ({"kind": "full"}, "layers"),
        ({"kind": "full", "layers": 2, "kv_heads": 2**30, "head_dim": 2**30}, "bytes"),
        (7, "groups"),
    ],
)
def test_group_is_refused_when_its_geometry_is_incomplete(group: object, fault: str) -> None:
    with pytest.raises(NamespaceError, match=fault):
        Namespace.create(**{**FIELDS, "groups": [group]})


def test_block_bytes_sum_over_groups_of_every_kind() -> None:
    groups = [
        {"kind": StateKind.FULL, "layers": 2, "kv_heads": 4, "head_dim": 8},
        {"kind": StateKind.MLA, "layers": 2, "kv_heads": 1, "head_dim": 576, "tensors": 1},
        {"kind": StateKind.RECURRENT, "layers": 3, "state_bytes": 1000},
    ]
    namespace = Namespace.create(**{**FIELDS, "groups": groups})
    assert namespace.block_bytes == 2 * 2 * 4 * 8 * 16 * 2 + 2 * 576 * 16 * 2 + 1000


@given(st.binary(max_size=60) | st.text(max_size=60))
def test_from_canonical_refuses_garbage(text: str | bytes) -> None:
    with pytest.raises(NamespaceError):
        Namespace.from_canonical(text)


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "5",
        "{}",
        '{"version":2}',
        '{"version":1}',
        '{"version":1,"cls":1}',
        "[" * 100_000,
        '{"version":1,"tenant_salt":"x"}',
    ],
)
def test_from_canonical_refuses_other_json(text: str) -> None:
    with pytest.raises(NamespaceError):
        Namespace.from_canonical(text)


def test_announced_namespace_never_equals_one_with_geometry_when_an_engine_attaches():
    told = [
        Namespace.announced(model="m", block_tokens=16, hash_scheme="vllm:sha256_cbor", hash_seed="builtin", kind=kind)
        for kind in ("full", "mla", "recurrent", "index", "draft")
    ]
    assert len({namespace.digest for namespace in told}) == 5
    assert all(namespace.is_announced and Namespace.from_canonical(namespace.canonical()) == namespace for namespace in told)
    windowed = Namespace.announced(
        model="m", block_tokens=16, hash_scheme="s", hash_seed="0", kind="sliding_window", window_tokens=64
    )
    assert windowed.groups[0].window_tokens == 64

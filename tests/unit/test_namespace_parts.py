"""Part namespaces (one state group each) and families (the ranks of a split)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdir.errors import NamespaceError
from kvdir.namespace import Namespace
from kvdir.parallel import ranks, without

ATTENTION = {"layers": 2, "kv_heads": 2, "head_dim": 8}
GROUPS: list[dict[str, Any]] = [
    {"kind": "full", **ATTENTION},
    {"kind": "sliding_window", "window_tokens": 64, **ATTENTION},
    {"kind": "sliding_window", "window_tokens": 64, **ATTENTION},
    {"kind": "recurrent", "layers": 2, "state_bytes": 100},
]


def namespace(groups: list[dict[str, Any]] = GROUPS, **fields: Any) -> Namespace:
    values: dict[str, Any] = {
        "model": "m", "weights": "w", "kv_dtype": "float16", "layout": "NHD", "block_tokens": 16, "groups": groups,
        "position": "rope", "parallel": "replicated", "adapter": "none", "hash_scheme": "vllm:sha256", "hash_seed": "0",
        "cache_policy": "exact",
    }  # fmt: skip
    return Namespace.create(**(values | fields))


def test_every_group_has_a_namespace_and_a_block_size_of_its_own() -> None:
    whole = namespace()
    parts = whole.parts()
    assert [part.group.kind for part in parts] == ["full", "sliding_window", "sliding_window", "recurrent"]
    assert [part.block_bytes for part in parts] == [2 * 2 * 2 * 8 * 16 * 2] * 3 + [100]
    assert len({part.digest for part in (whole, *parts)}) == 5  # also of two groups that are alike: they hold other layers
    assert parts[1].short == f"m/1-sliding_window@{parts[1].digest.hex()[:8]}"
    assert whole.block_bytes == sum(part.block_bytes for part in parts)


def test_part_survives_its_canonical_form_and_knows_the_others() -> None:
    whole = namespace()
    for part in whole.parts():
        again = Namespace.from_canonical(part.canonical())
        assert (again, again.digest) == (part, part.digest)
        assert again.parts() == whole.parts()


def test_part_of_a_model_with_other_groups_is_another_namespace() -> None:
    assert namespace().parts()[0].digest != namespace(GROUPS[:3]).parts()[0].digest


def test_namespace_of_one_group_is_its_only_part() -> None:
    one = namespace(GROUPS[:1])
    assert one.parts() == (one,)
    assert one.group.kind == "full"


def test_group_is_refused_when_blocks_hold_several() -> None:
    with pytest.raises(ValueError, match=r"4 state groups.*parts\(\)"):
        _ = namespace().group


def test_part_has_the_block_tokens_and_bytes_of_its_group_when_groups_differ() -> None:
    groups = [
        {"kind": "full", **ATTENTION},
        {"kind": "recurrent", "layers": 1, "state_bytes": 9, "block_tokens": 64, "bytes_override": 4096},
    ]
    full, recurrent = namespace(groups).parts()
    assert (full.block_tokens, full.block_bytes) == (16, 2048)
    assert (recurrent.block_tokens, recurrent.block_bytes) == (64, 4096)
    assert recurrent.parts() == full.parts() == (full, recurrent)


def test_latent_state_is_stored_once_for_all_ranks_and_attention_once_for_each() -> None:
    groups = [{"kind": "mla", "layers": 1, "kv_heads": 1, "head_dim": 8, "tensors": 1}, {"kind": "full", **ATTENTION}]
    first, second = (namespace(groups, parallel=f"tp={rank}/2,pp=0/2") for rank in range(2))
    assert first.parts()[0] == second.parts()[0]
    assert first.parts()[0].parallel == "pp=0/2"
    assert first.parts()[1] != second.parts()[1]
    assert second.parts()[1] in first.parts()[1].family()


def test_digests_of_namespaces_without_parts_are_those_of_earlier_releases() -> None:
    canonical = namespace(GROUPS[:1]).canonical()
    assert "part" not in canonical
    assert canonical.count("block_tokens") == canonical.count("bytes_override") == 1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"part": 4}, "part: must be the number of one of the 4 groups"),
        ({"part": -2}, "part: must be"),
        ({"part": "0"}, "part: must be a whole number"),
        ({"groups": [{**GROUPS[0], "block_tokens": 8}]}, "leave it out"),
        ({"groups": [{**GROUPS[0], "block_tokens": 8}, GROUPS[3]], "part": 0}, r"make parts with Namespace.parts\(\)"),
        ({"groups": [{**GROUPS[0], "bytes_override": -1}]}, "must not be negative"),
        ({"groups": [{**GROUPS[0], "block_tokens": 2**20 + 1}, GROUPS[3]]}, "block_tokens must be 0 to 1,048,576"),
        ({"block_tokens": 2**20 + 1}, "block_tokens: must be 1 to 1,048,576"),
    ],
)
def test_senseless_parts_are_refused_in_words(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(NamespaceError, match=words):
        namespace(**fields)


def test_difference_names_the_group_when_two_parts_are_compared() -> None:
    first, second, *_ = namespace().parts()
    assert Namespace.diff(first, second) == ["part: 0 here, 1 there (each holds another state group)"]


def test_family_is_every_rank_of_the_split() -> None:
    family = namespace(parallel="tp=1/2,pp=0/3").family()
    assert [item.parallel for item in family] == [f"tp={tp}/2,pp={pp}/3" for tp in range(2) for pp in range(3)]
    assert namespace(parallel="replicated").family() == (namespace(),)


@pytest.mark.parametrize(
    "parallel", ["replicated", "tp=2/2", "tp=0/0", "tp=0/2,tp=1/2", "tp", "rank 0 of 2", "tp=0/99999,pp=0/99999"]
)
def test_split_that_cannot_be_read_has_no_family(parallel: str) -> None:
    assert ranks(parallel) == (parallel,)
    assert without(parallel, "tp") == parallel


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=3))
def test_every_rank_names_the_same_family_in_the_same_order(axes: list[tuple[int, int]]) -> None:
    parallel = ",".join(f"{name}={min(rank, size - 1)}/{size}" for name, (rank, size) in zip("abc", axes, strict=False))
    family = ranks(parallel)
    assert parallel in family
    assert len(set(family)) == len(family)
    assert all(ranks(other) == family for other in family)

"""Names of streams: reading and writing are inverse, and reading never fails."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdir.core.instance import MAX_RANKS, StreamOf, instance_of, parse, stream_name
from kvdir.errors import InvalidInput

NODES = st.text(max_size=12).filter(lambda text: "/" not in text)
ENGINES = st.text(min_size=1, max_size=12).filter(lambda text: not set("/@") & set(text))
RANKS = st.none() | st.integers(0, MAX_RANKS - 1)


@given(NODES, ENGINES, RANKS)
def test_name_reads_back_when_written(node: str, engine: str, dp_rank: int | None) -> None:
    assert parse(stream_name(node, engine, dp_rank)) == (node, engine, dp_rank)


@given(st.text(max_size=16) | st.text(alphabet="ab/@019", max_size=10))
def test_name_writes_back_when_read(name: str) -> None:
    node, engine, dp_rank = parse(name)
    assert (stream_name(node, engine, dp_rank) if engine else node) == name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("n1", ("n1", "", None)),
        ("n1/vllm-0", ("n1", "vllm-0", None)),
        ("n1/vllm-0@0", ("n1", "vllm-0", 0)),
        ("n1/vllm-0@12", ("n1", "vllm-0", 12)),
        ("/vllm-0@1", ("", "vllm-0", 1)),
        ("n@1/vllm", ("n@1", "vllm", None)),
    ],
)
def test_parts_are_named_when_a_stream_is_an_engines(name: str, expected: tuple[str, str, int | None]) -> None:
    assert parse(name) == expected


@pytest.mark.parametrize("name", ["", "n1/", "n1/e@", "n1/e@01", "n1/e@-1", "n1/e@x", "n1/e@65536", "a/b/c", "n1/@1", "n1/e@٣"])
def test_name_is_a_plain_node_when_it_is_no_engines(name: str) -> None:
    assert parse(name) == StreamOf(name, "", None)
    assert instance_of(name) == name


@pytest.mark.parametrize(
    ("node", "engine", "dp_rank"), [("a/b", "e", None), ("a", "", None), ("a", "e@1", None), ("a", "e", -1), ("a", "e", 65_536)]
)
def test_name_is_refused_when_it_would_not_read_back(node: str, engine: str, dp_rank: int | None) -> None:
    with pytest.raises(InvalidInput, match="a node has no '/'"):
        stream_name(node, engine, dp_rank)


def test_ranks_are_one_instance_when_they_are_of_one_engine() -> None:
    assert {instance_of(stream_name("n1", "vllm-0", rank)) for rank in (None, 0, 1)} == {"n1/vllm-0"}
    assert instance_of("n1") == "n1"

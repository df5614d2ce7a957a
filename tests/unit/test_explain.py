"""Why a block hits or misses, in words."""

from __future__ import annotations

import dataclasses

import pytest

from kvdir.location import NodeTrust, StreamState
from kvdir.testing.fake_node import EXAMPLE_NAMESPACE
from peer_agent.cli.explain import Owner, judge, namespace_differences


def owner(name: str, *present: bool, silent: str = "") -> Owner:
    trust = NodeTrust(name, 1, StreamState.SYNCED, "", 0.1, 0, "h:1")
    return Owner(trust, None if silent else present, silent)


@pytest.mark.parametrize(
    ("claims", "owners", "verdict", "words"),
    [
        ({0: ["cpu"]}, [owner("a", True)], "hit", "a has it"),
        ({0: ["cpu"], 1: ["cpu"]}, [owner("a", True), owner("b", True)], "hit", "a and b have it"),
        ({0: ["cpu"]}, [owner("a", False)], "stale", "a was named and does not have it"),
        ({0: ["cpu"], 1: ["cpu"]}, [owner("a", False), owner("b", False)], "stale", "a and b were named and do not have it"),
        ({}, [owner("a", False)], "miss", "nobody is named"),
        ({}, [owner("a", True)], "unclaimed", "lost or is late"),
        ({0: ["cpu"]}, [owner("a", False), owner("b", True)], "unclaimed", "a was named"),
        ({0: ["cpu"]}, [owner("a", silent="no connection")], "unknown", "no connection"),
        ({0: ["cpu"], 1: ["cpu"]}, [owner("a", silent="gone"), owner("b", True)], "hit", "b has it"),
    ],
)
def test_verdict_follows_the_owner_when_it_answers(
    claims: dict[int, list[str]], owners: list[Owner], verdict: str, words: str
) -> None:
    explained = judge(0, claims, owners)
    assert explained.verdict == verdict
    assert words in explained.words


def test_most_alike_namespace_comes_first_when_none_is_served() -> None:
    mine = EXAMPLE_NAMESPACE
    far = dataclasses.replace(mine, model="other", weights="w", kv_dtype="float16")
    near = dataclasses.replace(mine, hash_seed="1")
    first, second = namespace_differences(mine, {far.digest: far, near.digest: near})
    assert first["namespace"] == near.short
    assert "PYTHONHASHSEED" in first["differences"][0]
    assert len(second["differences"]) == 3
    (hint,) = namespace_differences(None, {near.digest: near})
    assert "namespace file" in hint["differences"][0]

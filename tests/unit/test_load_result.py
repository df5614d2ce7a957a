"""What a load says of itself to people."""

from __future__ import annotations

import pytest

from peer_agent.client.results import LoadResult
from peer_agent.core.effects import LoadStatus

HIT, MISS = LoadStatus.HIT_LOCAL, LoadStatus.MISS


@pytest.mark.parametrize(
    ("statuses", "reached", "reason", "words"),
    [
        ([HIT, MISS], True, "", "2 blocks: 1 miss, 1 hit_local; 0 bytes"),
        ([HIT, MISS], False, "", "1 miss, 1 hit_local (no directory was asked, or none answered);"),
        ([HIT, HIT], False, "", "2 blocks: 2 hit_local; 0 bytes"),
        ([MISS], False, "the agent has gone", "1 blocks: 1 miss (the agent has gone);"),
    ],
)
def test_a_load_says_why_when_it_brought_less_than_all(
    statuses: list[LoadStatus], reached: bool, reason: str, words: str
) -> None:
    assert words in str(LoadResult(statuses=bytes(statuses), directory_reached=reached, reason=reason))

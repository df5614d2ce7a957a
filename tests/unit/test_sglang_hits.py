"""SGLang's restore rule and keys, without SGLang; tests/sglang compares the rule with SGLang's own file backend."""

from __future__ import annotations

import hashlib

import pytest

from peer_agent.connectors.sglang.hits import PoolHits, Usable, leading, usable
from peer_agent.connectors.sglang.keys import fingerprints_of


def pool(policy: str, present: list[int], **options: int) -> PoolHits:
    return PoolHits(name=policy, policy=policy, present=bytes(present), **options)


def test_every_length_is_restorable_when_there_is_only_the_kv_pool() -> None:
    assert usable(3, []) == Usable(3, {}, [1, 2, 3])
    assert usable(0, []) == Usable(0, {}, [])


def test_restorable_lengths_have_holes_when_states_are_sparse() -> None:
    found = usable(6, [pool("trailing_pages", [0, 1, 0, 1, 0, 0])])
    assert found == Usable(4, {"trailing_pages": 4}, [2, 4])


def test_a_window_may_be_shorter_when_the_prefix_is() -> None:
    assert usable(4, [pool("trailing_pages", [1, 1, 0, 1], pages=3)]).restorable == [1, 2]


def test_a_pool_reports_but_never_gates_when_its_policy_is_block_groups() -> None:
    """Two keys a group, four pages a group: two whole groups, half a third."""
    groups = pool("block_groups", [1, 1, 1, 1, 1, 0], block_pages=4, group_pages=2)
    assert usable(2, [groups]) == Usable(2, {"block_groups": 8}, [1, 2])


def test_nothing_is_restorable_when_a_pool_tells_of_fewer_pages_than_the_prefix_has() -> None:
    assert usable(3, [pool("all_pages", [])]).pages == 0
    assert usable(3, [pool("trailing_pages", [1])]).restorable == [1]


@pytest.mark.parametrize(("policy", "words"), [("some_pages", "is unknown"), ("block_groups", "needs block_pages")])
def test_a_policy_is_refused_in_words_when_it_makes_no_sense(policy: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        usable(1, [pool(policy, [1])])


def test_pages_are_counted_up_to_the_first_gap() -> None:
    assert [leading(bytes(item)) for item in ([], [0, 1], [1, 1, 0, 1], [1, 1])] == [0, 0, 2, 2]


def test_a_page_hash_stays_what_it_is_and_other_text_is_hashed_as_a_whole() -> None:
    page = hashlib.sha256(b"page").hexdigest()
    plain, unified, upper = fingerprints_of([page, f"{page}_ukv1-0123_L0-4_H1", page.upper()])
    assert plain == bytes.fromhex(page)
    assert len({plain, unified, upper}) == 3
    assert fingerprints_of([f"{page}_ukv1-0123_L0-4_H1"])[0] == unified

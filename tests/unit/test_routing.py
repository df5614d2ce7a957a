"""Routing policies and the LRU model."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdir.testing.clock import ManualClock
from kvdir.testing.lru import LruBlocks
from kvdir.testing.routing import Policy, Router


@pytest.mark.parametrize("policy", list(Policy))
def test_choices_repeat_when_the_seed_does(policy: Policy) -> None:
    def choices() -> list[int]:
        router = Router(policy, nodes=5, rng=random.Random(7))
        return [router.choose([i % 3, 0, 5, 1, 2], (i, i + 1)) for i in range(50)]

    assert choices() == choices()
    assert set(choices()) <= set(range(5))


def test_p2c_never_takes_the_busiest_node() -> None:
    router = Router(Policy.P2C, nodes=4, rng=random.Random(1))
    assert 2 not in Counter(router.choose([0, 0, 9, 0], ()) for _ in range(200))


def test_only_node_is_chosen_when_there_is_one() -> None:
    assert Router(Policy.P2C, nodes=1, rng=random.Random(1)).choose([5], ()) == 0


def test_affinity_keeps_a_prefix_together_until_its_node_is_too_busy() -> None:
    router = Router(Policy.AFFINITY, nodes=4, rng=random.Random(1), spill_blocks=10)
    (home,) = {router.choose([0, 0, 0, 0], (1, 2, tail)) for tail in range(20)}
    busy = [0.0] * 4
    busy[home] = 1000
    assert home not in {router.choose(busy, (1, 2, tail)) for tail in range(20)}


@given(st.integers(1, 8), st.lists(st.lists(st.integers(0, 15), max_size=6), max_size=30))
def test_lru_holds_the_newest_and_reports_every_change(capacity: int, batches: list[list[int]]) -> None:
    lru, newest_last, log = LruBlocks(capacity), list[int](), Counter[int]()
    for batch in batches:
        for block in batch:
            newest_last = [*(other for other in newest_last if other != block), block][-capacity:]
        added, evicted = lru.store(batch)
        log.update(added)
        log.subtract(evicted)
        assert list(lru) == newest_last
        assert {block for block, count in log.items() if count} == set(newest_last)


def test_lru_touch_protects_from_eviction() -> None:
    lru = LruBlocks(2)
    lru.store([1, 2])
    assert lru.touch([1, 9]) == 1
    assert lru.store([3]) == ([3], [2])
    with pytest.raises(ValueError, match="at least 1"):
        LruBlocks(0)


def test_clock_moves_only_forward_and_only_when_told() -> None:
    clock = ManualClock(5.0)
    assert clock() == clock.now_s == 5.0
    assert clock.advance_to(6.5) == 6.5
    with pytest.raises(ValueError, match="cannot go back"):
        clock.advance_to(6.0)

"""Bytes in flight per peer."""

from __future__ import annotations

from peer_agent.core.budget import FlightBudget, chunks


def test_admits_until_the_limit_when_several_ask():
    budget = FlightBudget(100)
    assert budget.ask(1, 60)
    assert not budget.ask(2, 60)
    assert not budget.ask(3, 10), "must not pass the one that waits"
    assert budget.give_back(1) == (2, 3)
    assert budget.in_flight_bytes == 70


def test_flies_alone_when_a_chunk_is_larger_than_the_limit():
    budget = FlightBudget(100)
    assert budget.ask(1, 500)
    assert not budget.ask(2, 1)
    assert budget.give_back(1) == (2,)


def test_leaves_the_queue_when_the_caller_gives_up():
    budget = FlightBudget(10)
    assert budget.ask(1, 10)
    assert not budget.ask(2, 10)
    assert not budget.ask(3, 10)
    assert budget.give_back(2) == ()
    assert budget.give_back(1) == (3,)
    assert budget.give_back(3) == ()
    assert budget.in_flight_bytes == 0


def test_chunks_cover_the_list_when_sizes_do_not_divide():
    assert [list(part) for part in chunks(5, block_bytes=4, chunk_bytes=9)] == [[0, 1], [2, 3], [4]]
    assert [len(part) for part in chunks(3, block_bytes=100, chunk_bytes=1)] == [1, 1, 1]
    assert not list(chunks(0, block_bytes=4, chunk_bytes=8))

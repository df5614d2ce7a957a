"""Engines that an agent did not let in: what is remembered of them, and for how long."""

from __future__ import annotations

from peer_agent.server.refusals import FORGET_S, MAX_ENGINES, Refusals


def test_a_refusal_is_news_once_when_the_engine_tries_again() -> None:
    refusals = Refusals()
    assert refusals.refused("e", "why", now_s=1.0)
    assert not refusals.refused("e", "why", now_s=2.0)
    assert refusals.refused("e", "another reason", now_s=3.0)
    (item,) = refusals.recent(now_s=3.0)
    assert (item.words, item.at_s, item.times) == ("another reason", 3.0, 1)


def test_a_refusal_is_forgotten_when_the_engine_is_let_in_or_was_not_seen_for_long() -> None:
    refusals = Refusals()
    refusals.refused("a", "why", now_s=0.0)
    refusals.refused("b", "why", now_s=10.0)
    refusals.admitted("b")
    refusals.admitted("never seen")
    assert [item.engine for item in refusals.recent(now_s=FORGET_S)] == ["a"]
    assert refusals.recent(now_s=FORGET_S + 0.1) == []


def test_the_oldest_refusal_goes_when_there_are_too_many() -> None:
    refusals = Refusals()
    for number in range(MAX_ENGINES + 1):
        refusals.refused(f"e{number}", "why", now_s=float(number))
    names = [item.engine for item in refusals.recent(now_s=float(MAX_ENGINES))]
    assert (len(names), names[0]) == (MAX_ENGINES, "e1")

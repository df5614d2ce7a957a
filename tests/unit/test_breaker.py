"""Whom not to ask for a while: one try per pause, pauses that grow, and an answer that ends it."""

from __future__ import annotations

from kvdir.core.breaker import Breaker


def test_one_asks_per_pause_when_nobody_answers():
    breaker = Breaker(limit=2, pause_s=0.25, pause_max_s=1.0)
    breaker.failed(0.0, asked_s=0.0)
    assert breaker.allows(0.0)
    breaker.failed(0.0, asked_s=0.0)
    assert breaker.open
    assert not breaker.allows(0.2)
    assert breaker.allows(0.3)
    assert not breaker.allows(0.3)  # somebody finds out already
    breaker.failed(0.4, asked_s=0.4)
    assert not breaker.allows(0.8)
    assert breaker.allows(0.95)
    for at_s in range(1, 10):
        breaker.failed(float(at_s), asked_s=float(at_s))
    assert not breaker.allows(9.9)
    assert breaker.allows(10.1)  # never longer than pause_max_s
    assert breaker.opened == 1


def test_all_ask_again_when_one_was_answered():
    breaker = Breaker(limit=1)
    breaker.failed(0.0, asked_s=0.0)
    assert not breaker.allows(0.0)
    breaker.answered()
    assert breaker.allows(0.0)
    assert not breaker.open


def test_questions_that_fail_together_count_as_one_when_they_were_under_way_together():
    breaker = Breaker(limit=2, pause_s=0.25, pause_max_s=2.0)
    for number in range(16):
        breaker.failed(0.1, asked_s=number / 1000)
    assert not breaker.open
    for number in range(16):
        breaker.failed(0.3, asked_s=0.2 + number / 1000)
    assert breaker.open
    assert not breaker.allows(0.54)
    assert breaker.allows(0.56)  # the pause is the first, not the longest

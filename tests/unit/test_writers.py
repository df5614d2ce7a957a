"""Presence, and the moment after a killed engine in which its device may still write."""

from __future__ import annotations

from peer_agent.server.writers import GRACE_S, Writers


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_presence_decides_when_an_engine_lives():
    held = {1}
    writers = Writers(held.__contains__, clock=Clock())
    writers.uses_device(1)
    assert writers.is_writing(1)
    held.clear()
    assert not writers.is_writing(1), "it gives the lock back when its copies have ended"


def test_engine_without_device_is_gone_when_its_lock_is():
    writers = Writers(lambda session: False, clock=Clock())
    writers.ended(1)
    assert not writers.is_writing(1)


def test_engine_with_device_counts_as_writing_for_a_while_after_its_end():
    clock = Clock()
    writers = Writers(lambda session: False, clock=clock)
    writers.uses_device(1)
    writers.ended(1)
    clock.now_s += GRACE_S * 0.9
    assert writers.is_writing(1)
    clock.now_s += GRACE_S * 0.2
    assert not writers.is_writing(1)


def test_nothing_is_remembered_of_engines_that_are_gone():
    clock = Clock()
    writers = Writers(lambda session: False, clock=clock)
    for session in range(1000):
        writers.uses_device(session)
        writers.ended(session)
        clock.now_s += GRACE_S / 2
    assert len(writers._until_s) + len(writers._devices) < 5

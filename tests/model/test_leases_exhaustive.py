"""Every interleaving of a few scripts over the real inventory: nobody accepts foreign bytes, nothing locked is rewritten.

Each case is small enough that all its states are visited; `peer_agent/testing/lease_world.py` says what is checked in each. The
mistakes at the end show that the explorer finds what it is there to find.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from peer_agent.testing.lease_actors import Actor, Clock, Evictor, Fetcher, Reader, Restart, Writer
from peer_agent.testing.lease_explorer import explore
from peer_agent.testing.lease_world import Rules, Violation, World

BOTH = (1, 2)


def world(slots: int, *actors: Actor, holds: tuple[int, ...] = (), **mistakes: bool) -> World:
    """Blocks `holds` are here already; nobody reads them yet."""
    made = World(slots=slots, rules=Rules(**mistakes))
    if holds:
        first = Writer(blocks=holds)
        made.add(first)
        while not first.done:
            made.step(first)
    return made.add(*actors)


CASES: dict[str, Callable[[], World]] = {
    "two readers of the same blocks, a writer that needs their slots": lambda: world(
        3, Reader(blocks=BOTH), Reader(blocks=(2, 1), plane="shm"), Writer(blocks=(3, 4)), holds=BOTH
    ),
    "leases end while a peer and an engine read, and their slots are wanted": lambda: world(
        1, Reader(blocks=(1,)), Reader(blocks=(1,), plane="engine"), Writer(blocks=(2,)), Clock(ticks_s=(2.0,)), holds=(1,)
    ),
    "a lock expires during a read over shm, and the unlock comes late": lambda: world(
        1, Reader(blocks=(1,), plane="shm", lease_s=1.0), Writer(blocks=(2,)), Clock(ticks_s=(1.0, 1.0)), holds=(1,)
    ),
    "a writer is lost, and writes once more after another has asked for its slot": lambda: world(
        1, Writer(blocks=(1,), vanishes=True), Writer(blocks=(2,)), Reader(blocks=BOTH), Clock(ticks_s=(2.0,))
    ),
    "a writer's lease ends before its commit": lambda: world(
        1, Writer(blocks=(1,), lease_s=1.0), Writer(blocks=(1,)), Reader(blocks=(1,), plane="shm"), Clock(ticks_s=(1.0,))
    ),
    "a late transfer writes into a slot that everybody wants": lambda: world(
        1, Fetcher(blocks=(1,), late=True), Writer(blocks=(2,)), Reader(blocks=BOTH), Clock(ticks_s=(1.0,))
    ),
    "a hedged read: the second copy comes first, or last, or late": lambda: world(
        2, Fetcher(blocks=(1,)), Fetcher(blocks=(1,), hedges=1, late=True), Reader(blocks=(1,), plane="shm"), Evictor()
    ),
    "a hedged read whose first peer is the late one": lambda: world(
        2, Fetcher(blocks=(1,), late=True), Fetcher(blocks=(1,), hedges=1), Reader(blocks=(1,)), Evictor(discards=(1,))
    ),
    "the agent restarts between a lock and its read, over both planes": lambda: world(
        1, Reader(blocks=(1,)), Reader(blocks=(1,), plane="shm"), Writer(blocks=(2,)), Restart(), holds=(1,)
    ),
    "blocks are discarded and evicted while they are read": lambda: world(
        2, Reader(blocks=BOTH), Evictor(discards=(1,)), Evictor(), Writer(blocks=(3,)), holds=BOTH
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_promises_hold_in_every_interleaving_when(case: Callable[[], World]) -> None:
    explored = explore(case())
    assert explored.ends > 0
    assert explored.accepted > 0, "nobody ever read anything: the case shows nothing"


MISTAKES: dict[str, tuple[Callable[[], World], str]] = {
    "readers do not look at the generation again": (
        lambda: world(
            1, Reader(blocks=(1,), plane="shm", lease_s=1.0), Writer(blocks=(2,)), Clock(ticks_s=(1.0,)), holds=(1,),
            readers_look_again=False,
        ),
        "accepted with bytes of",
    ),
    "slots of lost writers are free at once": (
        lambda: world(
            1, Writer(blocks=(1,), vanishes=True), Writer(blocks=(2,)), Clock(ticks_s=(2.0,)), lost_writers_are_waited_for=False
        ),
        "may still write to it",
    ),
    "locks do not hold": (
        lambda: world(1, Reader(blocks=(1,)), Writer(blocks=(2,)), holds=(1,), locks_hold=False),
        "is rewritten under lock",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("case", "words"), MISTAKES.values(), ids=list(MISTAKES))
def test_explorer_finds_it_when(case: Callable[[], World], words: str) -> None:
    with pytest.raises(Violation, match=words) as found:
        explore(case())
    assert "after: " in str(found.value), "the steps that led there"

"""Eviction that somebody else asks for: bounded by age, by number, by what is in use, and by a floor."""

from __future__ import annotations

from itertools import count

from kvdir.core.event import EventKind
from kvdir.fingerprint import Fingerprints
from peer_agent.core.inventory import PEERS, Inventory
from peer_agent.core.slot_table import SlotTable

DIGEST = bytes(32)


def inventory(blocks: int, *, each_s: float = 10.0) -> tuple[Inventory, list[bytes]]:
    """One that holds `blocks` blocks, stored each_s apart."""
    numbers = count(1)
    table = SlotTable(DIGEST, block_bytes=64, first_offset=0, stride_bytes=256, slots=100)
    made = Inventory([table], new_id=lambda: next(numbers))
    made.open_session(1)
    names = [bytes([number]) * 32 for number in range(1, blocks + 1)]
    for number, name in enumerate(names):
        made.tick(each_s * number)
        reserved = made.reserve(DIGEST, Fingerprints.of([name]), session=1, now_s=each_s * number, lease_s=1000)
        granted = made.granted(reserved.reservation, session=1)
        assert granted is not None
        made.commit(reserved.reservation, granted, b"r" * 32)
    return made, names


def held(made: Inventory) -> set[bytes]:
    return {name for group in made.held(DIGEST) for name in group}


def test_evicts_the_least_recently_used_when_asked() -> None:
    made, names = inventory(10)
    offsets, events = made.evict(DIGEST, max_blocks=3, keep_blocks=0, unused_since_s=1e9)
    assert len(offsets) == 3 * 8
    assert [event.kind for event in events] == [EventKind.REMOVED]
    assert held(made) == set(names[3:])
    assert made.occupancy()[0].free == 93
    made.check()


def test_never_goes_below_the_floor_when_asked_for_more() -> None:
    made, names = inventory(10)
    for _ in range(3):  # a repeated request takes nothing more
        made.evict(DIGEST, max_blocks=5, keep_blocks=8, unused_since_s=1e9)
        assert held(made) == set(names[2:])
    made.evict(DIGEST, max_blocks=5, keep_blocks=50, unused_since_s=1e9)
    assert len(held(made)) == 8
    made.check()


def test_spares_what_was_used_since_when_asked_by_age() -> None:
    made, names = inventory(10)
    made.tick(95.0)
    lock = made.lock(DIGEST, Fingerprints.of(names[:2]), session=PEERS, now_s=95.0, lease_s=10.0).lock
    made.unlock([lock], session=PEERS)
    made.evict(DIGEST, max_blocks=10, keep_blocks=0, unused_since_s=45.0)
    assert held(made) == {*names[:2], *names[5:]}
    made.check()


def test_spares_what_is_locked_or_pinned_when_asked() -> None:
    made, names = inventory(5)
    made.lock(DIGEST, Fingerprints.of(names[:1]), session=PEERS, now_s=50.0, lease_s=10.0)
    made.pin(DIGEST, Fingerprints.of(names[1:2]), now_s=50.0, pin_s=10.0)
    made.evict(DIGEST, max_blocks=10, keep_blocks=0, unused_since_s=1e9)
    assert held(made) == set(names[:2])
    made.check()

"""What a node holds: the cases that people should be able to read; tests/model covers the interleavings."""

from __future__ import annotations

import itertools

import pytest

from kvdir.core.event import Event
from kvdir.errors import InvalidInput, UnknownNamespace
from kvdir.fingerprint import Fingerprints
from kvdir.location import Tier
from peer_agent.core.effects import BlockState
from peer_agent.core.inventory import AGENT, PEERS, Inventory
from peer_agent.core.slot_table import SlotTable

DIGEST = bytes(range(32))
ENGINE = 7


def blocks(*numbers: int) -> Fingerprints:
    return Fingerprints.of([number.to_bytes(8, "little") for number in numbers])


def inventory(slots: int = 3) -> Inventory:
    counter = itertools.count(100)
    table = SlotTable(DIGEST, block_bytes=64, first_offset=4096, stride_bytes=256, slots=slots)
    made = Inventory([table], new_id=lambda: next(counter))
    made.open_session(ENGINE)
    return made


def store(held: Inventory, *numbers: int) -> tuple[object, ...]:
    answer = held.reserve(DIGEST, blocks(*numbers), session=ENGINE, now_s=0, lease_s=1)
    granted = held.granted(answer.reservation, session=ENGINE)
    assert granted is not None
    records = b"".join(granted.offsets[at : at + 8] + b"\1" * 24 for at in range(0, len(granted.offsets), 8))
    return answer.events + held.commit(answer.reservation, granted, records)


def lock(held: Inventory, *numbers: int, lease_s: float = 1.0, session: int = PEERS):
    return held.lock(DIGEST, blocks(*numbers), session=session, now_s=0, lease_s=lease_s)


def test_only_committed_blocks_are_visible():
    held = inventory()
    answer = held.reserve(DIGEST, blocks(1, 2), session=ENGINE, now_s=0, lease_s=1)
    assert answer.states == bytes([BlockState.RESERVED] * 2)
    assert held.present(DIGEST, blocks(1, 2)) == b"\0\0"
    assert lock(held, 1, 2).lock == 0
    granted = held.granted(answer.reservation, session=ENGINE, positions=[1])
    assert granted is not None
    assert held.commit(answer.reservation, granted, bytes(32)) == (Event.stored(Tier.CPU, DIGEST, blocks(2)),)
    assert held.abort(answer.reservation, session=ENGINE) == 1
    assert held.present(DIGEST, blocks(1, 2)) == b"\0\1"


def test_least_recently_used_goes_first_when_full():
    held = inventory()
    store(held, 1, 2, 3)
    held.unlock([lock(held, 1).lock], session=PEERS)
    assert store(held, 4) == (Event.removed(Tier.CPU, DIGEST, blocks(2)), Event.stored(Tier.CPU, DIGEST, blocks(4)))
    assert held.present(DIGEST, blocks(1, 2, 3, 4)) == b"\1\0\1\1"


def test_oldest_use_is_that_of_the_block_that_would_be_evicted_next():
    held = inventory(3)
    assert held.oldest_use_s(5.0) == 0.0
    store(held, 1)
    held.tick(10.0)
    store(held, 2)
    assert held.oldest_use_s(12.0) == 12.0
    lock(held, 1)  # nobody may evict it now
    assert held.oldest_use_s(12.0) == 2.0


def test_no_space_when_everything_is_locked_or_pinned():
    held = inventory(2)
    store(held, 1, 2)
    number = lock(held, 1).lock
    held.pin(DIGEST, blocks(2), now_s=0, pin_s=5)
    answer = held.reserve(DIGEST, blocks(3), session=ENGINE, now_s=0, lease_s=1)
    assert answer.states == bytes([BlockState.NO_SPACE])
    assert answer.reservation == 0
    held.tick(5.0)  # both have run out
    assert held.unlock([number], session=PEERS).unknown == 1
    assert BlockState.NO_SPACE not in held.reserve(DIGEST, blocks(3, 4), session=ENGINE, now_s=5, lease_s=1).states


def test_second_writer_is_busy_when_the_first_has_not_committed():
    held = inventory()
    held.reserve(DIGEST, blocks(1), session=ENGINE, now_s=0, lease_s=1)
    assert held.reserve(DIGEST, blocks(1), session=AGENT, now_s=0, lease_s=1).states == bytes([BlockState.BUSY])


def test_slot_is_quarantined_when_a_living_writer_overruns_its_lease():
    held = inventory(1)
    late = held.reserve(DIGEST, blocks(1), session=ENGINE, now_s=0, lease_s=1)
    held.tick(2.0)
    assert held.granted(late.reservation, session=ENGINE) is None
    assert held.reserve(DIGEST, blocks(2), session=AGENT, now_s=2, lease_s=1).states == bytes([BlockState.NO_SPACE])
    assert held.abort(late.reservation, session=ENGINE) == 1
    assert held.reserve(DIGEST, blocks(2), session=AGENT, now_s=2, lease_s=1).states == bytes([BlockState.RESERVED])


def test_quarantined_slots_come_back_when_their_living_writer_is_known_to_be_idle():
    held = inventory(2)
    held.reserve(DIGEST, blocks(1), session=ENGINE, now_s=0, lease_s=1)
    assert held.unsettled_sessions() == ()
    held.tick(2.0)
    kept = held.reserve(DIGEST, blocks(2), session=ENGINE, now_s=2, lease_s=1)
    assert held.unsettled_sessions() == (ENGINE,)
    assert held.settle_session(ENGINE) == 1
    assert (held.occupancy()[0].free, held.occupancy()[0].reserved) == (1, 1)
    assert held.granted(kept.reservation, session=ENGINE) is not None
    assert held.is_attached(ENGINE)
    held.check()


@pytest.mark.parametrize("writing", [False, True])
def test_reservations_come_back_when_the_engine_dies(writing: bool):
    held = inventory(1)
    held.reserve(DIGEST, blocks(1), session=ENGINE, now_s=0, lease_s=100)
    held.end_session(ENGINE, writing=writing)
    assert held.occupancy()[0].free == (0 if writing else 1)
    if writing:
        assert held.unsettled_sessions() == (ENGINE,)
        assert held.settle_session(ENGINE) == 1
    assert held.occupancy()[0].free == 1
    with pytest.raises(InvalidInput, match="attach again"):
        held.reserve(DIGEST, blocks(1), session=ENGINE, now_s=0, lease_s=1)


def test_locked_block_is_retired_not_freed_when_discarded():
    held = inventory(1)
    store(held, 1)
    number = lock(held, 1).lock
    offsets, events = held.discard(DIGEST, blocks(1, 9))
    assert (offsets, events) == ((4096).to_bytes(8, "little"), (Event.removed(Tier.CPU, DIGEST, blocks(1)),))
    assert held.occupancy()[0].retired == 1
    assert held.unlock([number], session=PEERS).revoked == (number,)
    assert held.occupancy()[0].free == 1


def test_lock_answers_for_the_whole_list_in_order_when_blocks_repeat():
    held = inventory()
    store(held, 1, 2)
    answer = lock(held, 9, 2, 1, 2)
    offsets = [int.from_bytes(answer.records[at : at + 8], "little") for at in range(0, 128, 32)]
    assert offsets == [0, 4352, 4096, 4352]
    assert answer.present == 3
    held.check()


def test_nobody_ends_the_lock_of_another_session():
    held = inventory()
    store(held, 1)
    number = lock(held, 1, session=ENGINE).lock
    assert held.unlock([number], session=PEERS).unknown == 1
    assert held.unlock([number], session=ENGINE).unknown == 0


def test_nobody_uses_the_lock_of_another_holder_when_they_share_a_session():
    held = inventory()
    store(held, 1)
    number = held.lock(DIGEST, blocks(1), session=PEERS, now_s=0, lease_s=1, holder="a").lock
    assert held.locked_records(number, session=PEERS, holder="b") == set()
    assert held.unlock([number], session=PEERS, holder="b").unknown == 1
    assert len(held.locked_records(number, session=PEERS, holder="a")) == 1
    assert held.unlock([number], session=PEERS, holder="a").revoked == (number,)


def test_lock_can_grow_when_more_blocks_have_arrived():
    held = inventory()
    store(held, 1)
    first = lock(held, 1, session=ENGINE)
    store(held, 2)
    more = held.lock(DIGEST, blocks(2), session=ENGINE, now_s=0, lease_s=9, lock=first.lock)
    assert (more.lock, more.expires_s) == (first.lock, first.expires_s)
    held.unlock([first.lock], session=ENGINE)
    assert held.occupancy()[0].locked == 0


def test_pins_renewed_many_times_do_not_pile_up():
    held = inventory()
    store(held, 1)
    for step in range(3000):
        held.pin(DIGEST, blocks(1), now_s=step, pin_s=10_000)
        held.tick(step)
    assert len(held._pin_ends) < 1100
    held.check()


def test_locks_and_reservations_that_end_early_do_not_pile_up():
    held = inventory()
    store(held, 1)
    for step in range(3000):
        held.unlock([lock(held, 1, lease_s=10_000).lock], session=PEERS)
        answer = held.reserve(DIGEST, blocks(2), session=ENGINE, now_s=step, lease_s=10_000)
        assert held.abort(answer.reservation, session=ENGINE) == 1
        held.tick(0)
    kept = lock(held, 1, lease_s=5)
    assert len(held._lock_ends) < 1100
    assert len(held._reservation_ends) < 1100
    held.tick(5)
    assert held.unlock([kept.lock], session=PEERS).unknown == 1
    held.check()


def test_refused_when_the_namespace_is_not_configured():
    with pytest.raises(UnknownNamespace):
        inventory().present(bytes(32), blocks(1))


def test_commit_of_a_position_that_was_not_granted_changes_nothing():
    held = inventory()
    answer = held.reserve(DIGEST, blocks(1), session=ENGINE, now_s=0, lease_s=1)
    with pytest.raises(InvalidInput, match="not granted"):
        held.granted(answer.reservation, session=ENGINE, positions=[0, 5])
    assert held.granted(answer.reservation, session=ENGINE, positions=[0]) is not None


def read(held: Inventory, *numbers: int, twin_of: int = 0):
    return held.reserve(DIGEST, blocks(*numbers), session=AGENT, now_s=0, lease_s=1, twin_of=twin_of)


def arrive(held: Inventory, reservation: int) -> tuple[Event, ...]:
    granted = held.granted(reservation, session=AGENT)
    assert granted is not None
    return held.commit(reservation, granted, bytes(32 * len(granted.positions)))


def test_first_copy_is_committed_when_a_block_is_read_twice():
    held = inventory()
    slow = read(held, 1)
    hedge = read(held, 1, twin_of=slow.reservation)
    assert hedge.offsets != slow.offsets
    assert arrive(held, hedge.reservation) == (Event.stored(Tier.CPU, DIGEST, blocks(1)),)
    assert held.granted(slow.reservation, session=AGENT).positions == ()  # type: ignore[union-attr]
    with pytest.raises(InvalidInput, match="not granted"):
        held.granted(slow.reservation, session=AGENT, positions=[0])
    held.check()
    assert held.abort(slow.reservation, session=AGENT) == 1
    held.check()
    assert held.present(DIGEST, blocks(1)) == b"\1"
    assert held.occupancy()[0].free == 2


@pytest.mark.parametrize("gives_up", ["abort", "quarantine"])
def test_the_other_goes_on_when_one_of_two_reads_gives_up(gives_up: str):
    held = inventory()
    slow = read(held, 1)
    hedge = read(held, 1, twin_of=slow.reservation)
    if gives_up == "abort":
        held.abort(slow.reservation, session=AGENT)
    else:
        held.quarantine(slow.reservation)
    held.check()
    assert held.writers(DIGEST, blocks(1)) == {hedge.reservation}
    assert read(held, 1).states == bytes([BlockState.BUSY])
    assert arrive(held, hedge.reservation)
    held.settle(slow.reservation)
    held.check()
    assert held.occupancy()[0].free == 2


def test_busy_when_a_third_read_or_a_stranger_wants_the_block():
    held = inventory(slots=6)
    slow, other = read(held, 1, 2), read(held, 3)
    hedge = read(held, 1, 1, 3, twin_of=slow.reservation)
    assert hedge.states == bytes([BlockState.RESERVED, BlockState.BUSY, BlockState.BUSY])
    assert read(held, 1, twin_of=slow.reservation).states == bytes([BlockState.BUSY])
    assert read(held, 1, twin_of=hedge.reservation).states == bytes([BlockState.BUSY])
    assert read(held, 2, twin_of=other.reservation).states == bytes([BlockState.BUSY])
    engine = held.reserve(DIGEST, blocks(1, 4), session=ENGINE, now_s=0, lease_s=1)
    assert engine.states == bytes([BlockState.BUSY, BlockState.RESERVED])
    with pytest.raises(InvalidInput, match="only the agent"):
        read(held, 4, twin_of=engine.reservation)
    held.check()


def test_a_lost_block_is_not_committed_over_a_later_writer_when_it_was_evicted_meanwhile():
    held = inventory()
    slow = read(held, 1)
    hedge = read(held, 1, twin_of=slow.reservation)
    arrive(held, hedge.reservation)
    held.discard(DIGEST, blocks(1))
    later = held.reserve(DIGEST, blocks(1), session=ENGINE, now_s=0, lease_s=1)
    assert later.states == bytes([BlockState.RESERVED])
    assert held.granted(slow.reservation, session=AGENT).positions == ()  # type: ignore[union-attr]
    held.abort(slow.reservation, session=AGENT)
    held.check()
    assert held.writers(DIGEST, blocks(1)) == {later.reservation}


def test_no_second_slot_when_there_is_no_space_for_it():
    held = inventory(slots=1)
    slow = read(held, 1)
    assert read(held, 1, twin_of=slow.reservation).states == bytes([BlockState.NO_SPACE])
    held.check()
    assert arrive(held, slow.reservation)

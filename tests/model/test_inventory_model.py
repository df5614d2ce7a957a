"""The inventory against a model that knows only what a user of it may rely on, under arbitrary interleavings."""

from __future__ import annotations

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from kvdir.core.event import Event, EventKind
from kvdir.fingerprint import Fingerprints
from peer_agent.core.effects import BlockState
from peer_agent.core.inventory import AGENT, PEERS, Inventory
from peer_agent.core.slot_table import SlotTable

DIGEST = bytes(range(32))
SLOTS = 4
BLOCKS = st.lists(st.integers(0, 6), min_size=1, max_size=5)
LEASES = st.sampled_from([1.0, 3.0])


def fingerprints(blocks: list[int]) -> Fingerprints:
    return Fingerprints.of([block.to_bytes(8, "little") for block in blocks])


class InventoryMachine(RuleBasedStateMachine):
    """visible: the fold of the published events. readable, writable: who may touch which offset, until when."""

    sessions = Bundle("sessions")
    reservations = Bundle("reservations")
    locks = Bundle("locks")
    reads = Bundle("reads")

    def __init__(self) -> None:
        super().__init__()
        table = SlotTable(DIGEST, block_bytes=64, first_offset=4096, stride_bytes=256, slots=SLOTS)
        counter = itertools.count(1)
        self.inventory = Inventory([table], new_id=lambda: next(counter))
        self.now_s = 0.0
        self.next_session = 1
        self.visible: set[int] = set()
        self.readable: dict[int, tuple[float, set[int]]] = {}  # lock -> (expires, offsets)
        self.writable: dict[int, tuple[int, set[int]]] = {}  # reservation -> (session, offsets) that may still be written
        self.reading: dict[int, set[int]] = {}  # the agent's own reservation -> blocks that it reads and nobody has yet
        self.pinned: dict[int, float] = {}

    def apply(self, events: tuple[Event, ...]) -> None:
        for event in events:
            blocks = {int.from_bytes(item, "little") for item in Fingerprints(event.packed, event.width)}
            if event.kind == EventKind.STORED:
                assert not blocks & self.visible, "stored twice"
                self.visible |= blocks
                for wanted in self.reading.values():
                    wanted -= blocks
            else:
                assert blocks <= self.visible, "removed what was not there"
                assert all(self.pinned.get(block, 0.0) <= self.now_s for block in blocks), "evicted a pinned block"
                self.visible -= blocks

    def may_not_be_rewritten(self) -> set[int]:
        read = [offsets for expires_s, offsets in self.readable.values() if expires_s > self.now_s]
        return set().union(*read, *(offsets for _, offsets in self.writable.values()))

    @initialize(target=sessions)
    def attach_first(self) -> int:
        return self.attach_one()

    @rule(target=sessions)
    def attach(self) -> int:
        return self.attach_one()

    def attach_one(self) -> int:
        self.next_session += 1
        self.inventory.open_session(self.next_session)
        return self.next_session

    @rule(session=sessions, blocks=BLOCKS)
    def store(self, session: int, blocks: list[int]) -> None:
        number = self.reserve_some(session, blocks, 1.0)
        if number:
            self.commit_some(number, session, len(blocks))

    @rule(target=reservations, session=sessions, blocks=BLOCKS, lease_s=LEASES)
    def reserve(self, session: int, blocks: list[int], lease_s: float):
        number = self.reserve_some(session, blocks, lease_s)
        return (number, session) if number else multiple()

    @rule(target=reads, blocks=BLOCKS)
    def read(self, blocks: list[int]):
        number = self.reserve_some(AGENT, blocks, 1.0)
        return number or multiple()

    @rule(target=reads, first=reads, blocks=BLOCKS)
    def read_twice(self, first: int, blocks: list[int]):
        """From a second peer: only what `first` still reads, and nobody reads a third time, or is not being read at all."""
        alone = {
            block for block in self.reading.get(first, ()) if sum(block in wanted for wanted in self.reading.values()) == 1
        }
        busy = set().union(*self.reading.values()) - alone
        number = self.reserve_some(AGENT, blocks, 1.0, twin_of=first)
        assert not self.reading.get(number, set()) & busy, "a third writer"
        return number or multiple()

    @rule(number=consumes(reads), keep=st.integers(0, 5), late=st.booleans())
    def arrive(self, number: int, keep: int, late: bool) -> None:
        """Some blocks have arrived; those that a twin had committed first are no longer this one's."""
        granted = self.inventory.granted(number, session=AGENT)
        if granted is None:
            assert number not in self.reading
            return
        mine = [int.from_bytes(item, "little") for item in granted.fingerprints]
        assert set(mine) == self.reading[number], "what is granted is not what nobody has committed"
        self.commit_part(number, AGENT, keep)
        self.reading.pop(number)
        if not late:
            self.inventory.abort(number, session=AGENT)
            self.writable.pop(number)
        elif not self.inventory.quarantine(number):
            self.writable.pop(number)

    @rule(number=reads)
    def settle(self, number: int) -> None:
        if self.inventory.settle(number):
            self.writable.pop(number)

    def reserve_some(self, session: int, blocks: list[int], lease_s: float, *, twin_of: int = 0) -> int:
        guarded = self.may_not_be_rewritten()
        before = set(self.visible)
        answer = self.inventory.reserve(
            DIGEST, fingerprints(blocks), session=session, now_s=self.now_s, lease_s=lease_s, twin_of=twin_of
        )
        offsets = {int.from_bytes(answer.offsets[at : at + 8], "little") for at in range(0, len(answer.offsets), 8)}
        assert len(offsets) == len(answer.positions) == answer.states.count(BlockState.RESERVED)
        assert not offsets & guarded, "handed out a slot that someone reads or writes"
        for position, state in enumerate(answer.states):
            assert state != BlockState.PRESENT or blocks[position] in before
        self.apply(answer.events)
        if answer.reservation:
            self.writable[answer.reservation] = (session, offsets)
            if session == AGENT:
                self.reading[answer.reservation] = {blocks[position] for position in answer.positions}
        return answer.reservation

    @rule(item=consumes(reservations), keep=st.integers(0, 3))
    def commit(self, item: tuple[int, int], keep: int) -> None:
        self.commit_some(*item, keep)

    def commit_some(self, number: int, session: int, keep: int) -> None:
        self.commit_part(number, session, keep)
        self.inventory.abort(number, session=session)
        self.writable.pop(number, None)

    def commit_part(self, number: int, session: int, keep: int) -> None:
        granted = self.inventory.granted(number, session=session)
        if granted is not None:
            chosen = self.inventory.granted(number, session=session, positions=granted.positions[:keep])
            assert chosen is not None
            records = b"".join(chosen.offsets[at : at + 8] + bytes(24) for at in range(0, len(chosen.offsets), 8))
            self.apply(self.inventory.commit(number, chosen, records))
            written = {int.from_bytes(chosen.offsets[at : at + 8], "little") for at in range(0, len(chosen.offsets), 8)}
            self.writable[number] = (session, self.writable[number][1] - written)

    @rule(item=consumes(reservations))
    def abort(self, item: tuple[int, int]) -> None:
        self.inventory.abort(item[0], session=item[1])
        self.writable.pop(item[0], None)

    @rule(target=locks, blocks=st.one_of(BLOCKS, st.just(list(range(7)))), lease_s=LEASES)
    def lock(self, blocks: list[int], lease_s: float):
        answer = self.inventory.lock(DIGEST, fingerprints(blocks), session=PEERS, now_s=self.now_s, lease_s=lease_s)
        records = [answer.records[at : at + 32] for at in range(0, len(answer.records), 32)]
        assert [any(record) for record in records] == [block in self.visible for block in blocks]
        if not answer.lock:
            assert not answer.present
            return multiple()
        offsets = {int.from_bytes(record[:8], "little") for record in records if any(record)}
        self.readable[answer.lock] = (answer.expires_s, offsets)
        return answer.lock

    @rule(number=consumes(locks))
    def unlock(self, number: int) -> None:
        ended = self.inventory.unlock([number], session=PEERS)
        assert ended.revoked in ((number,), ())
        assert len(ended.revoked) + ended.unknown == 1
        self.readable.pop(number, None)

    @rule(blocks=BLOCKS, pin_s=st.sampled_from([0.0, 2.0, 4.0]))
    def pin(self, blocks: list[int], pin_s: float) -> None:
        self.inventory.pin(DIGEST, fingerprints(blocks), now_s=self.now_s, pin_s=pin_s)
        self.pinned |= {block: self.now_s + pin_s for block in blocks if block in self.visible}

    @rule(block=st.integers(0, 6))
    def discard(self, block: int) -> None:
        blocks = [block]
        self.pinned = {block: until_s for block, until_s in self.pinned.items() if block not in blocks}
        self.apply(self.inventory.discard(DIGEST, fingerprints(blocks))[1])

    @rule(step_s=st.sampled_from([0.25, 1.0]))
    def time_passes(self, step_s: float) -> None:
        self.now_s += step_s
        ended = self.inventory.tick(self.now_s)
        assert all(self.readable[number][0] <= self.now_s for number in ended.revoked), "a live lock was revoked"

    @rule(session=consumes(sessions), writing=st.booleans())
    def detach(self, session: int, writing: bool) -> None:
        self.inventory.end_session(session, writing=writing)
        if not writing:
            self.writable = {number: item for number, item in self.writable.items() if item[0] != session}

    @rule()
    def nobody_is_writing(self) -> None:
        """Open reservations stay; whoever lost one, or is gone, has written for the last time."""
        for session in self.inventory.unsettled_sessions():
            self.inventory.settle_session(session)
            self.writable = {
                number: item for number, item in self.writable.items() if item[0] != session or self.inventory.is_open(number)
            }

    @invariant()
    def holds_what_was_published(self) -> None:
        self.inventory.check()
        held = {int.from_bytes(item, "little") for group in self.inventory.held(DIGEST) for item in group}
        assert held == self.visible


InventoryMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestInventory = InventoryMachine.TestCase

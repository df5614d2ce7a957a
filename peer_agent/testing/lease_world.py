"""An owner and its memory, moved one step at a time by actors (lease_actors.py): the world of the lease models.

The inventory is the real one. Made is the memory: a generation, a name and two halves per slot, so that a copy can be torn.
What `World` does around the inventory is what peer_agent/server/store.py does, in its order. It raises `Violation` when
- a slot is written that somebody may read under a live lock, or handed out while somebody may still write to it;
- a reader accepts a copy that is not, in both halves, the block it asked for;
- the events published do not add up to what is held.

Does not: decide who moves (lease_explorer.py, or Hypothesis), know asyncio, bytes or processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvdir.core.event import Event, EventKind
from kvdir.fingerprint import Fingerprints
from peer_agent.core.inventory import PEERS, Inventory
from peer_agent.core.slot_table import SlotTable

if TYPE_CHECKING:
    from peer_agent.testing.lease_actors import Actor

DIGEST = bytes(range(32))
FIRST_OFFSET, STRIDE = 4096, 256
HALVES = 2


class Violation(AssertionError):
    """A promise was broken. The message says which; lease_explorer.py adds the steps that led there."""


def fingerprints(blocks: Sequence[int]) -> Fingerprints:
    return Fingerprints.of([block.to_bytes(8, "little") for block in blocks])


@dataclass(slots=True)
class Ids:
    """Numbers of locks and reservations. The next one depends on who acts, not on who acted before: equal states look equal."""

    next: int = 1

    def __call__(self) -> int:
        self.next += 1
        return self.next


@dataclass(slots=True)
class Memory:
    """One life of the arena. halves: which block's bytes lie there; 0: nobody's."""

    epoch: int
    generations: list[int]
    names: list[int]
    halves: list[list[int]]

    @classmethod
    def blank(cls, epoch: int, slots: int) -> Memory:
        return cls(epoch, [1] * slots, [0] * slots, [[0] * HALVES for _ in range(slots)])


@dataclass(slots=True)
class Rules:
    """What the world keeps to. Each False is a mistake that the models must find, or they find nothing."""

    readers_look_again: bool = True  # at the generation, after the copy
    lost_writers_are_waited_for: bool = True  # quarantine
    locks_hold: bool = True


@dataclass(slots=True)
class World:
    """The owner and its memory. readable, writable: the truth about who may touch which slots, as the actors were told."""

    slots: int = 3
    rules: Rules = field(default_factory=Rules)
    now_s: float = 0.0
    ids: Ids = field(default_factory=Ids)
    memory: Memory = field(init=False)
    inventory: Inventory = field(init=False)
    actors: list[Actor] = field(default_factory=list)
    visible: set[int] = field(default_factory=set)
    readable: dict[int, tuple[float, frozenset[int]]] = field(default_factory=dict)
    writable: dict[int, frozenset[int]] = field(default_factory=dict)
    grants: dict[int, tuple[float, frozenset[int]]] = field(default_factory=dict)
    accepted: int = 0

    def __post_init__(self) -> None:
        self._begin_life(1)

    def _begin_life(self, epoch: int) -> None:
        table = SlotTable(DIGEST, block_bytes=64, first_offset=FIRST_OFFSET, stride_bytes=STRIDE, slots=self.slots)
        self.memory = Memory.blank(epoch, self.slots)
        self.inventory = Inventory([table], new_id=self.ids)
        self.visible, self.readable, self.writable, self.grants = set(), {}, {}, {}

    def add(self, *actors: Actor) -> World:
        for actor in actors:
            actor.number = len(self.actors) + 1
            self.actors.append(actor)
        return self

    def step(self, actor: Actor) -> None:
        """The actor's next step. Raises Violation."""
        self.ids.next = 100 * actor.number + 10 * actor.at
        actor.step(self)

    # the owner, as in store.py

    def open_session(self, session: int) -> None:
        self.inventory.open_session(session)

    def reserve(self, blocks: Sequence[int], *, session: int, lease_s: float, twin_of: int = 0) -> tuple[int, dict[int, int]]:
        """(reservation, slot -> block)."""
        answer = self.inventory.reserve(
            DIGEST, fingerprints(blocks), session=session, now_s=self.now_s, lease_s=lease_s, twin_of=twin_of
        )
        granted = dict(zip(self._slots(answer.offsets), (blocks[at] for at in answer.positions), strict=True))
        for slot in granted:
            if writers := [number for number, slots in self.writable.items() if slot in slots]:
                raise Violation(f"slot {slot} is handed out while reservation {writers} may still write to it")
            self._may_change(slot)
            self.memory.generations[slot] += 1 + self.memory.generations[slot] % 2
            self.memory.names[slot] = 0
        self._apply(answer.events)
        if granted:
            self.writable[answer.reservation] = frozenset(granted)
        return answer.reservation, granted

    def write(self, memory: Memory, slot: int, half: int, block: int) -> None:
        """By whoever believes to have a reservation; an engine writes to the mapping of the life it reserved in."""
        if memory is self.memory:
            self._may_change(slot)
        memory.halves[slot][half] = block

    def commit(self, reservation: int, *, session: int) -> int:
        """Blocks committed; 0 when the reservation is gone, which then means that its writer has finished."""
        granted = self.inventory.granted(reservation, session=session)
        if granted is None:
            self.abort(reservation, session=session)
            return 0
        slots = self._slots(granted.offsets)
        blocks = [int.from_bytes(item, "little") for item in granted.fingerprints]
        records = b"".join(map(self._publish, slots, blocks))
        self._apply(self.inventory.commit(reservation, granted, records))
        if left := self.writable[reservation] - set(slots):
            self.writable[reservation] = left  # a twin was first: not committed, and not given back yet
        else:
            del self.writable[reservation]
        return len(blocks)

    def _publish(self, slot: int, block: int) -> bytes:
        self.memory.names[slot] = block
        self.memory.generations[slot] += 1
        return record_of(slot, self.memory.generations[slot])

    def abort(self, reservation: int, *, session: int) -> None:
        self.writable.pop(reservation, None)
        self.inventory.abort(reservation, session=session)

    def quarantine(self, reservation: int) -> None:
        self.inventory.quarantine(reservation)

    def settle(self, reservation: int) -> None:
        self.writable.pop(reservation, None)
        self.inventory.settle(reservation)

    def lock(self, blocks: Sequence[int], *, session: int, lease_s: float) -> tuple[int, dict[int, tuple[int, int]]]:
        """(lock, block -> (slot, generation)) of those that are here."""
        answer = self.inventory.lock(DIGEST, fingerprints(blocks), session=session, now_s=self.now_s, lease_s=lease_s)
        records = [answer.records[at : at + 32] for at in range(0, len(answer.records), 32)]
        found = {block: slot_of(record) for block, record in zip(blocks, records, strict=True) if any(record)}
        if set(found) != self.visible & set(blocks):
            raise Violation(f"of {blocks} the owner locked {sorted(found)}, visible are {sorted(self.visible)}")
        if answer.lock:
            slots = frozenset(slot for slot, _ in found.values())
            self.readable[answer.lock] = answer.expires_s, slots
            if session == PEERS:
                self.grants[answer.lock] = answer.expires_s, slots
            if not self.rules.locks_hold:
                self.inventory.unlock([answer.lock], session=session)
        return answer.lock, found

    def unlock(self, lock: int, *, session: int) -> None:
        self.readable.pop(lock, None)
        self._revoke(self.inventory.unlock([lock], session=session).revoked)

    def end_session(self, session: int, *, writing: bool) -> None:
        for lock in self.inventory._sessions[session].locks:
            self.readable.pop(lock, None)
        self.inventory.end_session(session, writing=writing)

    def settle_session(self, session: int) -> None:
        """The writer has been seen not to write: what it lost may be used again; what it holds, it holds."""
        if session not in self.inventory.unsettled_sessions():
            return
        listed = self.inventory._sessions[session].reservations
        for reservation in [number for number in listed if not self.inventory.is_open(number)]:
            self.writable.pop(reservation, None)
        self.inventory.settle_session(session)

    def discard(self, blocks: Sequence[int]) -> None:
        self._retire(*self.inventory.discard(DIGEST, fingerprints(blocks)))

    def evict(self, max_blocks: int) -> None:
        self._retire(*self.inventory.evict(DIGEST, max_blocks=max_blocks, keep_blocks=0, unused_since_s=self.now_s))

    def _retire(self, offsets: bytes, events: tuple[Event, ...]) -> None:
        """Out of sight, which changes the header and no byte of the payload: who is copying it may finish."""
        for slot in self._slots(offsets):
            self.memory.generations[slot] += 1
            self.memory.names[slot] = 0
        self._apply(events)

    def tick(self, step_s: float) -> None:
        self.now_s += step_s
        ended = self.inventory.tick(self.now_s)
        if live := [lock for lock in ended.revoked if lock in self.readable and self.readable[lock][0] > self.now_s]:
            raise Violation(f"live locks {live} were revoked")
        self._revoke(ended.revoked)
        self.readable = {lock: held for lock, held in self.readable.items() if held[0] > self.now_s}
        if not self.rules.lost_writers_are_waited_for:
            for reservation in list(self.inventory._quarantined):
                self.inventory.settle(reservation)

    def restart(self) -> None:
        """The old arena says that it is over (epoch 0), and stays mapped by whoever has mapped it."""
        epoch, self.memory.epoch = self.memory.epoch + 1, 0
        self._begin_life(epoch)

    def serves(self, lock: int, slot: int) -> bool:
        """Whether the tcp plane of the owner would read this slot under this lock now."""
        expires_s, slots = self.grants.get(lock, (0.0, frozenset()))
        return self.now_s < expires_s and slot in slots

    # what must hold

    def check(self) -> None:
        """Raises Violation or AssertionError if the inventory contradicts itself or what was published."""
        self.inventory.check()
        held = {int.from_bytes(item, "little") for group in self.inventory.held(DIGEST) for item in group}
        if held != self.visible:
            raise Violation(f"published {sorted(self.visible)}, held {sorted(held)}")

    def finish(self) -> None:
        """Everybody comes to an end; then nothing may be left. Raises Violation."""
        for actor in self.actors:
            while not actor.done:
                self.step(actor)
        self.tick(1000.0)
        for session in self.inventory.unsettled_sessions():
            self.settle_session(session)
        self.check()
        (held,) = self.inventory.occupancy()
        left = {name: getattr(held, name) for name in ("reserved", "quarantined", "retired", "locked", "pinned")}
        if any(left.values()) or self.inventory.locks:
            raise Violation(f"left at the end: {left}, {self.inventory.locks} locks")

    def _may_change(self, slot: int) -> None:
        for lock, (expires_s, slots) in self.readable.items():
            if slot in slots and expires_s > self.now_s:
                raise Violation(f"slot {slot} is rewritten under lock {lock}, which lives until {expires_s:g} s")

    def _apply(self, events: Sequence[Event]) -> None:
        for event in events:
            blocks = {int.from_bytes(item, "little") for item in Fingerprints(event.packed, event.width)}
            if event.kind == EventKind.STORED and blocks & self.visible:
                raise Violation(f"{sorted(blocks & self.visible)} published as stored twice")
            if event.kind != EventKind.STORED and blocks - self.visible:
                raise Violation(f"{sorted(blocks - self.visible)} published as removed though not there")
            self.visible = self.visible | blocks if event.kind == EventKind.STORED else self.visible - blocks

    def _revoke(self, locks: Sequence[int]) -> None:
        for lock in locks:
            self.grants.pop(lock, None)

    @staticmethod
    def _slots(offsets: bytes) -> list[int]:
        starts = range(0, len(offsets), 8)
        return [(int.from_bytes(offsets[at : at + 8], "little") - FIRST_OFFSET) // STRIDE for at in starts]


def record_of(slot: int, generation: int) -> bytes:
    """A LockResponse.blocks record, as far as this world needs one."""
    return (FIRST_OFFSET + slot * STRIDE).to_bytes(8, "little") + generation.to_bytes(8, "little") + bytes(12) + b"\1\0\0\0"


def slot_of(record: bytes) -> tuple[int, int]:
    """(slot, generation)."""
    return (int.from_bytes(record[:8], "little") - FIRST_OFFSET) // STRIDE, int.from_bytes(record[8:16], "little")

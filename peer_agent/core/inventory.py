"""What this node holds, who reads it and who writes it: reservations, locks, pins and sessions over the slot tables.

Rules:
- Only committed blocks are visible. A fingerprint has at most one slot, and at most one writer at a time (BUSY); two only
  where the agent itself reads it from a second peer as well (`twin_of`, writers.py), and then the first commit wins.
- Order of an eviction: `reserve` answers the slots and REMOVED events; the shell makes the headers odd, publishes the events,
  and only then hands out the slots. Nobody awaits in between.
- A slot under a live lock is never rewritten; it is retired and freed when the last lock ends.
- A reservation whose lease ran out while its writer lives is quarantined, not reused: late writes are real. It comes back
  when the writer says it has finished (commit, abort) or is known not to write at all now (`settle_session`).
- Leases end by `tick(now_s)`. Ids come from the caller (`new_id`: unpredictable in production, counted in tests).

Does not: touch memory, publish, or know transports (peer_agent/server/store.py does). Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvdir.core.event import Event
from kvdir.errors import InvalidInput, UnknownNamespace
from kvdir.fingerprint import Fingerprints
from kvdir.location import Tier
from peer_agent.core.effects import BlockState, Ended, Granted, Locked, Occupancy, Reserved
from peer_agent.core.inventory_check import check_inventory
from peer_agent.core.leases import AGENT, PEERS, Ends, Lock, Reservation, Session
from peer_agent.core.slot_table import SlotTable, by_width
from peer_agent.core.writers import Writers

__all__ = ["AGENT", "PEERS", "Inventory"]

_PRESENT, _RESERVED, _NO_SPACE, _BUSY = map(
    int, (BlockState.PRESENT, BlockState.RESERVED, BlockState.NO_SPACE, BlockState.BUSY)
)


class Inventory:
    """See the module docstring. All times are the caller's monotonic seconds."""

    def __init__(self, tables: Iterable[SlotTable], *, new_id: Callable[[], int]) -> None:
        self._tables = {table.namespace_digest: table for table in tables}
        self._new_id = new_id
        self._open: dict[int, Reservation] = {}
        self._quarantined: dict[int, Reservation] = {}
        self._writers = Writers()
        self._locks: dict[int, Lock] = {}
        self._sessions: dict[int, Session] = {AGENT: Session(), PEERS: Session()}
        self._lock_ends = Ends[int]()
        self._reservation_ends = Ends[int]()
        self._pin_ends = Ends[tuple[bytes, int]]()

    def add_table(self, table: SlotTable) -> None:
        """One more namespace. ValueError: there is one with its digest."""
        if table.namespace_digest in self._tables:
            raise ValueError(f"namespace {table.namespace_digest.hex()[:16]} has slots already")
        self._tables[table.namespace_digest] = table

    # sessions

    def open_session(self, session: int) -> None:
        """Registers a writer and reader. Numbers are never reused by the caller."""
        self._sessions[session] = Session()

    def end_session(self, session: int, *, writing: bool) -> None:
        """Ends its locks; its reservations are freed, or quarantined if it may still be `writing` (see settle_session)."""
        state = self._session(session)
        state.ended = True
        self._end_locks(state.locks)
        for number in list(state.reservations):
            if number in self._open:
                self._quarantine(number)
            if not writing:
                self.settle(number)
        if not state.reservations:
            del self._sessions[session]

    def settle_session(self, session: int) -> int:
        """The session does not write at this moment: frees its quarantined slots, returns how many.

        Sound for attached sessions too: whoever might still write under a quarantined reservation has been a writer all along.
        """
        state = self._sessions[session]
        freed = sum(self.settle(number) for number in list(state.reservations) if number in self._quarantined)
        if state.ended:
            del self._sessions[session]
        return freed

    def is_attached(self, session: int) -> bool:
        state = self._sessions.get(session)
        return state is not None and not state.ended

    def unsettled_sessions(self) -> tuple[int, ...]:
        """Engines with quarantined slots, attached or not: ask whether they are writing now; if not, settle_session."""
        writers = {found.session for found in self._quarantined.values() if found.session != AGENT}
        return tuple(writers | {number for number, state in self._sessions.items() if state.ended})

    # writers

    def reserve(
        self, digest: bytes, fingerprints: Fingerprints, *, session: int, now_s: float, lease_s: float, twin_of: int = 0
    ) -> Reserved:
        """Slots for those blocks that are neither here nor being written; evicts by recency. See `Reserved`.

        twin_of: an AGENT reservation whose blocks get a second slot, for AGENT to read them from somewhere else as well.
        """
        table = self._table(digest)
        state = self._session(session)
        number = self._new_id()
        beside = self._twin_of(twin_of, session=session)
        states = bytearray(len(fingerprints))
        slots: dict[int, int] = {}
        evicted: list[bytes] = []
        writing, find, take = self._writers.first, table.slot, table.take
        for position, fingerprint in enumerate(fingerprints):
            key = digest, fingerprint
            if (present := find(fingerprint)) is not None:
                table.touch(present)
                states[position] = _PRESENT
            elif key in writing and not self._writers.double(key, number, beside=beside):
                states[position] = _BUSY
            elif (taken := take(fingerprint)) is None:
                self._writers.stopped([key], number)
                states[position] = _NO_SPACE
            else:
                slots[position], gone = taken
                if gone:
                    evicted.append(gone)
                writing.setdefault(key, number)
                states[position] = _RESERVED
        if slots:
            reservation = Reservation(session, table, fingerprints, slots, now_s + lease_s, contested=bool(beside))
            self._open[number] = reservation
            state.reservations.add(number)
            if session != AGENT:
                self._reservation_ends.push(reservation.expires_s, number)
        return Reserved(
            reservation=number if slots else 0,
            states=bytes(states),
            positions=tuple(slots),
            offsets=table.offsets(slots.values()),
            events=tuple(Event.removed(Tier.CPU, digest, group) for group in by_width(evicted)),
        )

    def granted(self, reservation: int, *, session: int, positions: Sequence[int] | None = None) -> Granted | None:
        """The slots a commit of these positions would make visible. None: expired, unknown, or not this session's.

        What a twin has committed first is not granted any more.
        """
        found = self._open.get(reservation)
        if found is None or found.session != session:
            return None
        mine = self._writers.not_lost(reservation, found) if found.contested else list(found.slots)
        chosen = mine if positions is None else sorted(set(positions))
        if positions is not None and not set(chosen) <= set(mine):
            raise InvalidInput("commit names positions that were not granted by this reservation")
        return Granted(
            namespace_digest=found.table.namespace_digest,
            positions=tuple(chosen),
            offsets=found.table.offsets(found.slots[position] for position in chosen),
            fingerprints=found.fingerprints.select(chosen),
            contested=found.contested,
        )

    def commit(self, reservation: int, granted: Granted, records: bytes) -> tuple[Event, ...]:
        """Makes blocks visible whose headers are written (`records`: 32 bytes each, in `granted` order)."""
        found = self._open[reservation]
        found.table.commit([found.slots[position] for position in granted.positions], records)
        for position in granted.positions:
            del found.slots[position]
        self._writers.committed((granted.namespace_digest, fingerprint) for fingerprint in granted.fingerprints)
        self._close_if_done(reservation, found)
        return (Event.stored(Tier.CPU, granted.namespace_digest, granted.fingerprints),) if granted.positions else ()

    def abort(self, reservation: int, *, session: int, positions: Iterable[int] | None = None) -> int:
        """The writer gives slots back (all that are left, or the given positions) and no longer writes to them."""
        found = self._open.get(reservation)
        if found is None:
            late = self._quarantined.get(reservation)
            return self.settle(reservation) if late is not None and late.session == session else 0
        if found.session != session:
            return 0
        chosen = list(found.slots) if positions is None else found.slots.keys() & set(positions)
        self._stop_writing(reservation, found, chosen)
        for position in chosen:
            found.table.give_back(found.slots.pop(position))
        self._close_if_done(reservation, found)
        return len(chosen)

    def quarantine(self, reservation: int) -> int:
        """Everything still open in it may yet be written to: unusable until `settle`. Returns the number of slots."""
        return self._quarantine(reservation) if reservation in self._open else 0

    def settle(self, reservation: int) -> int:
        """Nothing can write to the quarantined slots any more: free again. Returns how many."""
        found = self._quarantined.pop(reservation, None)
        if found is None:
            return 0
        for slot in found.slots.values():
            found.table.give_back(slot)
        self._forget_reservation(reservation, found)
        return len(found.slots)

    def writers(self, namespace_digest: bytes, fingerprints: Fingerprints) -> set[int]:
        """Open reservations under which any of these blocks are being written."""
        keys = ((namespace_digest, fingerprint) for fingerprint in fingerprints)
        return {self._writers.first[key] for key in keys if key in self._writers.first}

    def is_open(self, reservation: int) -> bool:
        return reservation in self._open

    # readers

    def present(self, namespace_digest: bytes, fingerprints: Fingerprints) -> bytes:
        """One byte per fingerprint: 1 if it is visible here."""
        return self._table(namespace_digest).present(fingerprints)

    def lock(
        self,
        namespace_digest: bytes,
        fingerprints: Fingerprints,
        *,
        session: int,
        now_s: float,
        lease_s: float,
        lock: int = 0,
        holder: str = "",
    ) -> Locked:
        """Locks what is visible, for the whole list. `lock`: adds to a lock of the same session and namespace instead.

        holder: who of those that share the session may use the lock.
        """
        table = self._table(namespace_digest)
        state = self._session(session)
        slots, records = table.lock(fingerprints)
        expires_s = now_s + lease_s
        known = self._locks.get(lock)
        if known is not None and known.session == session and known.table is table:
            known.slots += slots
            return Locked(lock, records, len(slots), known.expires_s)
        if not slots:
            return Locked(0, records, 0, expires_s)
        number = self._new_id()
        self._locks[number] = Lock(session, table, slots, expires_s, holder)
        state.locks.add(number)
        self._lock_ends.push(expires_s, number)
        return Locked(number, records, len(slots), expires_s)

    def unlock(self, locks: Iterable[int], *, session: int, holder: str = "") -> Ended:
        """Ends locks of this session and holder early."""
        asked = set(locks)
        mine = {number for number in asked & self._session(session).locks if self._locks[number].holder == holder}
        return Ended(self._end_locks(mine), len(asked) - len(mine))

    def locked_records(self, lock: int, *, session: int, holder: str = "") -> set[bytes]:
        """The records that a live lock of this session and holder covers; empty when it has ended."""
        found = self._locks.get(lock)
        if found is None or (found.session, found.holder) != (session, holder):
            return set()
        return found.table.records(found.slots)

    def pin(self, namespace_digest: bytes, fingerprints: Fingerprints, *, now_s: float, pin_s: float) -> int:
        """Protects visible blocks from eviction until now_s + pin_s; 0 unpins. Returns how many blocks that concerned."""
        table = self._table(namespace_digest)
        slots = [slot for slot in map(table.slot, fingerprints) if slot is not None]
        for slot in slots:
            if pin_s <= 0:
                table.unpin(slot)
                continue
            table.pin(slot, now_s + pin_s)
            self._pin_ends.push(now_s + pin_s, (namespace_digest, slot))
        return len(slots)

    def evict(
        self, namespace_digest: bytes, *, max_blocks: int, keep_blocks: int, unused_since_s: float
    ) -> tuple[bytes, tuple[Event, ...]]:
        """Evicts on somebody's wish, least recently used first; never below keep_blocks, nothing locked or pinned.

        As `discard`: returns (offsets to make odd, events). The slots are free afterwards.
        """
        table = self._table(namespace_digest)
        spare = table.occupancy().committed - keep_blocks
        victims = table.oldest(min(max_blocks, spare), unused_since_s=unused_since_s)
        table.evicted += len(victims)
        return self._discard(table, victims)

    def discard(self, namespace_digest: bytes, fingerprints: Fingerprints) -> tuple[bytes, tuple[Event, ...]]:
        """Takes blocks out of sight, say because they failed verification. Returns (offsets to make odd, events)."""
        return self._discard(self._table(namespace_digest), fingerprints)

    # time

    def tick(self, now_s: float) -> Ended:
        """Ends leases and pins that have run out. Call about once a second; being late only delays reuse."""
        for table in self._tables.values():
            table.now_s = now_s
        revoked: list[int] = []
        for number in self._lock_ends.due(now_s):
            revoked += self._end_locks([number])
        for number in self._reservation_ends.due(now_s):
            if number in self._open:
                self._quarantine(number)
        for digest, slot in self._pin_ends.due(now_s):
            self._tables[digest].unpin(slot, now_s=now_s)
        self._compact_ends()
        return Ended(tuple(revoked))

    # figures

    def held(self, namespace_digest: bytes, max_blocks: int | None = None) -> tuple[Fingerprints, ...]:
        """Every visible block of the namespace (a snapshot's content), or some max_blocks; one packed list per width."""
        return self._table(namespace_digest).held(max_blocks)

    def occupancy(self) -> tuple[Occupancy, ...]:
        return tuple(table.occupancy() for table in tuple(self._tables.values()))  # a copy: metrics ask from their own thread

    def oldest_use_s(self, now_s: float) -> float:
        """Since the block that would be evicted next was last used, the oldest of all classes; 0 when none would be."""
        used_s = [table.next_used_s for table in self._tables.values() if table.next_used_s is not None]
        return max(0.0, now_s - min(used_s)) if used_s else 0.0

    @property
    def locks(self) -> int:
        return len(self._locks)

    @property
    def peer_locks(self) -> int:
        """Of `locks`, those that other agents hold."""
        return len(self._sessions[PEERS].locks)

    @property
    def open_sessions(self) -> int:
        return len(self._sessions) - 2

    def check(self) -> None:
        """AssertionError if an invariant does not hold. O(everything); for tests."""
        check_inventory(self._tables.values(), self._open, self._quarantined, self._writers, self._locks, self._sessions)

    # internals

    def _table(self, namespace_digest: bytes) -> SlotTable:
        table = self._tables.get(namespace_digest)
        if table is None:
            raise UnknownNamespace(f"namespace {namespace_digest.hex()[:16]} is not configured on this node")
        return table

    def _session(self, session: int) -> Session:
        state = self._sessions.get(session)
        if state is None or state.ended:
            raise InvalidInput(f"session {session} is not attached: the agent restarted or the session ended; attach again")
        return state

    def _compact_ends(self) -> None:
        locks, open_, tables = self._locks, self._open, self._tables
        self._lock_ends.compact(len(locks), lambda: ((found.expires_s, number) for number, found in locks.items()))
        self._reservation_ends.compact(
            len(open_), lambda: ((found.expires_s, number) for number, found in open_.items() if found.session != AGENT)
        )
        self._pin_ends.compact(
            sum(table.pinned for table in tables.values()),
            lambda: ((until_s, (digest, slot)) for digest, table in tables.items() for slot, until_s in table.pins()),
        )

    def _discard(self, table: SlotTable, fingerprints: Iterable[bytes]) -> tuple[bytes, tuple[Event, ...]]:
        found = {fingerprint: slot for fingerprint in fingerprints if (slot := table.slot(fingerprint)) is not None}
        for slot in found.values():
            table.discard(slot)
        events = tuple(Event.removed(Tier.CPU, table.namespace_digest, group) for group in by_width(found))
        return table.offsets(found.values()), events

    def _twin_of(self, number: int, *, session: int) -> int:
        """The open reservation to write beside; 0: none, or it has ended."""
        found = self._open.get(number)
        if found is None:
            return 0
        if session != AGENT or found.session != AGENT:
            raise InvalidInput("only the agent's own reads may write a block twice")
        found.contested = True
        return number

    def _stop_writing(self, number: int, found: Reservation, positions: Iterable[int]) -> None:
        self._writers.stopped(found.keys(positions), number)

    def _quarantine(self, number: int) -> int:
        found = self._open.pop(number)
        self._stop_writing(number, found, found.slots)
        for slot in found.slots.values():
            found.table.quarantine(slot)
        self._quarantined[number] = found
        return len(found.slots)

    def _close_if_done(self, number: int, found: Reservation) -> None:
        if not found.slots:
            del self._open[number]
            self._forget_reservation(number, found)

    def _forget_reservation(self, number: int, found: Reservation) -> None:
        state = self._sessions.get(found.session)
        if state is not None:
            state.reservations.discard(number)

    def _end_locks(self, numbers: Iterable[int]) -> tuple[int, ...]:
        """Returns those held by peers: their grants must be revoked."""
        revoked = []
        for number in list(numbers):
            found = self._locks.pop(number, None)
            if found is None:
                continue
            found.table.unlock(found.slots)
            if found.session == PEERS:
                revoked.append(number)
            self._sessions[found.session].locks.discard(number)
        return tuple(revoked)

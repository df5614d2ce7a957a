"""The slots of one size class (one namespace): states, the index of visible blocks, recency.

    FREE ──reserve──▶ RESERVED ──commit──▶ COMMITTED ──evict──▶ (RESERVED by the next writer)
      ▲                 │   │                  │
      │◀────abort───────┘   └──writer lost──▶ QUARANTINED ──settled──▶ FREE
      │                                        │ discard
      └──────────last lock ends────────── RETIRED (only while locked; else FREE at once)

Invariants (`check`): `index` holds exactly the COMMITTED slots; `recency` exactly those of them with neither lock nor pin,
least recently used first; a slot with locks is COMMITTED or RETIRED. So an eviction takes the first of `recency` and can
never meet a locked, pinned, reserved or quarantined slot. Pure: no clock, no I/O. All operations are O(1) per block, and lists
of tens of thousands run in the event loop, so what is done per block is plain ints and locals.

`recency` also says when each block was last used, as of `now_s`, which the inventory moves at every tick: so a block may
seem older by one tick than it is, never younger.
"""

from __future__ import annotations

import enum
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice

from kvdir.fingerprint import Fingerprints
from peer_agent.core.effects import ABSENT_RECORD, Occupancy


class SlotState(enum.IntEnum):
    FREE = 0
    RESERVED = 1
    COMMITTED = 2
    RETIRED = 3
    QUARANTINED = 4


_FREE, _RESERVED, _COMMITTED, _RETIRED, _QUARANTINED = map(int, SlotState)


class SlotTable:
    """See the module docstring. Slots are numbered 0 .. slots - 1; slot i's header is at first_offset + i * stride_bytes."""

    def __init__(self, namespace_digest: bytes, *, block_bytes: int, first_offset: int, stride_bytes: int, slots: int) -> None:
        self.namespace_digest = namespace_digest
        self.block_bytes = block_bytes
        self.slots = slots
        self.evicted = 0
        self.now_s = 0.0
        self._offsets = [(first_offset + slot * stride_bytes).to_bytes(8, "little") for slot in range(slots)]
        self._states = bytearray(slots)
        self._counts = [slots, 0, 0, 0, 0]
        self._locks = array("I", bytes(4 * slots))
        self._locked = 0
        self._pins: dict[int, float] = {}
        self._fingerprints: list[bytes] = [b""] * slots
        self._records: list[bytes] = [ABSENT_RECORD] * slots
        self._index: dict[bytes, int] = {}
        self._recency: OrderedDict[int, float] = OrderedDict()
        self._free = list(range(slots - 1, -1, -1))

    # reading

    def slot(self, fingerprint: bytes) -> int | None:
        """The slot of a visible block."""
        return self._index.get(fingerprint)

    def present(self, fingerprints: Iterable[bytes]) -> bytes:
        """One byte per fingerprint: 1 if it is visible here."""
        index = self._index
        return bytes([fingerprint in index for fingerprint in fingerprints])

    def offsets(self, slots: Iterable[int]) -> bytes:
        """Slot header offsets, u64 LE, packed."""
        return b"".join([self._offsets[slot] for slot in slots])

    def records(self, slots: Iterable[int]) -> set[bytes]:
        """Records of those of the slots that are still visible."""
        return {self._records[slot] for slot in slots if self._states[slot] == _COMMITTED}

    def state(self, slot: int) -> SlotState:
        return SlotState(self._states[slot])

    def held(self, max_blocks: int | None = None) -> tuple[Fingerprints, ...]:
        """Every visible block, or some max_blocks of them; one list per fingerprint width."""
        return by_width(islice(self._index, max_blocks))

    def occupancy(self) -> Occupancy:
        free, reserved, committed, retired, quarantined = self._counts
        return Occupancy(
            namespace_digest=self.namespace_digest, block_bytes=self.block_bytes, slots=self.slots,
            free=free, reserved=reserved, committed=committed, retired=retired, quarantined=quarantined,
            locked=self._locked, pinned=self.pinned, evicted=self.evicted,
        )  # fmt: skip

    # writers

    def take(self, fingerprint: bytes) -> tuple[int, bytes] | None:
        """Reserves a slot for `fingerprint`: a free one, else the least recently used. Returns (slot, evicted or b"").

        None when every slot is locked, pinned, reserved or quarantined.
        """
        evicted = b""
        if self._free:
            slot = self._free.pop()
        elif self._recency:
            slot = self._recency.popitem(last=False)[0]
            evicted = self._fingerprints[slot]
            del self._index[evicted]
            self.evicted += 1
        else:
            return None
        self._move(slot, _RESERVED)
        self._fingerprints[slot] = fingerprint
        return slot, evicted

    def commit(self, slots: Iterable[int], records: bytes) -> None:
        """RESERVED -> COMMITTED: visible from now on. records: 32 bytes per slot. ValueError leaves that slot and the rest."""
        states, fingerprints, known = self._states, self._fingerprints, self._records
        index, recency, now_s, at = self._index, self._recency, self.now_s, 0
        try:
            for slot in slots:
                if states[slot] != _RESERVED:
                    self._expect(slot, SlotState.RESERVED)
                if index.setdefault(fingerprint := fingerprints[slot], slot) != slot:
                    raise ValueError(f"block {fingerprint.hex()} is already held: commit would give it two slots")
                states[slot] = _COMMITTED
                known[slot] = records[32 * at : 32 * at + 32]
                recency[slot] = now_s
                at += 1
        finally:
            self._counts[_RESERVED] -= at
            self._counts[_COMMITTED] += at

    def give_back(self, slot: int) -> None:
        """RESERVED or QUARANTINED -> FREE: nobody writes to it any more."""
        if self._states[slot] not in (_RESERVED, _QUARANTINED):
            self._expect(slot, SlotState.RESERVED)
        self._free_slot(slot)

    def quarantine(self, slot: int) -> None:
        """RESERVED -> QUARANTINED: somebody may still write to it."""
        self._expect(slot, SlotState.RESERVED)
        self._move(slot, _QUARANTINED)
        self._fingerprints[slot] = b""

    def discard(self, slot: int) -> None:
        """COMMITTED -> invisible; free at once, or RETIRED until the last lock ends."""
        self._expect(slot, SlotState.COMMITTED)
        del self._index[self._fingerprints[slot]]
        self._recency.pop(slot, None)
        self._pins.pop(slot, None)
        if self._locks[slot]:
            self._move(slot, _RETIRED)
        else:
            self._free_slot(slot)

    def oldest(self, max_blocks: int, *, unused_since_s: float) -> list[bytes]:
        """Up to max_blocks that may be evicted and were not used after unused_since_s, least recently used first."""
        found: list[bytes] = []
        for slot, used_s in self._recency.items():
            if len(found) >= max_blocks or used_s > unused_since_s:
                break
            found.append(self._fingerprints[slot])
        return found

    @property
    def next_used_s(self) -> float | None:
        """When the block that would be evicted next was last used; None when none would be."""
        return next(iter(self._recency.values()), None)

    # readers

    def lock(self, fingerprints: Iterable[bytes]) -> tuple[list[int], bytes]:
        """Adds one lock to each visible block; returns their slots (with repeats) and one record per fingerprint."""
        slots, records = [], []
        index, locks, known = self._index, self._locks, self._records
        for fingerprint in fingerprints:
            slot = index.get(fingerprint)
            if slot is None:
                records.append(ABSENT_RECORD)
                continue
            if not locks[slot]:
                self._recency.pop(slot, None)
                self._locked += 1
            locks[slot] += 1
            slots.append(slot)
            records.append(known[slot])
        return slots, b"".join(records)

    def unlock(self, slots: Iterable[int]) -> None:
        """Takes one lock from each; the last one makes the block the most recently used, or frees a retired slot."""
        locks, pins = self._locks, self._pins
        for slot in slots:
            locks[slot] -= 1  # array("I") raises OverflowError below zero
            if locks[slot]:
                continue
            self._locked -= 1
            if self._states[slot] == _RETIRED:
                self._free_slot(slot)
            elif slot not in pins:
                self._recency[slot] = self.now_s

    def touch(self, slot: int) -> None:
        """Most recently used, if it can be evicted at all."""
        if slot in self._recency:
            self._recency.move_to_end(slot)
            self._recency[slot] = self.now_s

    def pin(self, slot: int, until_s: float) -> None:
        """No eviction before until_s; a later call replaces an earlier one."""
        self._expect(slot, SlotState.COMMITTED)
        self._pins[slot] = until_s
        self._recency.pop(slot, None)

    def unpin(self, slot: int, *, now_s: float | None = None) -> None:
        """Ends a pin; with now_s only if it has run out."""
        until_s = self._pins.get(slot)
        if until_s is None or (now_s is not None and until_s > now_s):
            return
        del self._pins[slot]
        if not self._locks[slot]:
            self._recency[slot] = self.now_s

    def pins(self) -> list[tuple[int, float]]:
        """Pinned slots and until when."""
        return list(self._pins.items())

    @property
    def pinned(self) -> int:
        return len(self._pins)

    # internals

    def _move(self, slot: int, state: int) -> None:
        self._counts[self._states[slot]] -= 1
        self._counts[state] += 1
        self._states[slot] = state

    def _free_slot(self, slot: int) -> None:
        self._move(slot, _FREE)
        self._fingerprints[slot] = b""
        self._records[slot] = ABSENT_RECORD
        self._free.append(slot)

    def _expect(self, slot: int, state: SlotState) -> None:
        if self._states[slot] != state:
            raise ValueError(f"slot {slot} is {SlotState(self._states[slot]).name}, not {state.name}")

    def check(self) -> None:
        """AssertionError if an invariant of the module docstring does not hold. O(slots); for tests."""
        committed = {slot for slot in range(self.slots) if self._states[slot] == SlotState.COMMITTED}
        assert set(self._index.values()) == committed, "index and COMMITTED slots differ"
        assert len(self._index) == len(committed), "two fingerprints share a slot"
        assert all(self._fingerprints[slot] == fingerprint for fingerprint, slot in self._index.items())
        idle = {slot for slot in committed if not self._locks[slot] and slot not in self._pins}
        assert set(self._recency) == idle, "recency is not the evictable set"
        assert set(self._pins) <= committed, "a pin on a slot that is not committed"
        assert sorted(self._free) == [slot for slot in range(self.slots) if self._states[slot] == SlotState.FREE]
        locked = {slot for slot in range(self.slots) if self._locks[slot]}
        assert len(locked) == self._locked, "count of locked slots is off"
        retired = {slot for slot in range(self.slots) if self._states[slot] == SlotState.RETIRED}
        assert locked <= committed | retired, "a lock on a slot that may be rewritten"
        assert retired <= locked, "a retired slot that nobody reads was not freed"
        assert self._counts == [self._states.count(state) for state in SlotState], "counts by state are off"


def by_width(fingerprints: Iterable[bytes]) -> tuple[Fingerprints, ...]:
    """Fingerprints grouped into packed lists of one width each, widths ascending."""
    fingerprints = list(fingerprints)
    widths = set(map(len, fingerprints))
    if len(widths) == 1:
        return (Fingerprints(b"".join(fingerprints), widths.pop()),)
    groups: dict[int, list[bytes]] = {}
    for fingerprint in fingerprints:
        groups.setdefault(len(fingerprint), []).append(fingerprint)
    return tuple(Fingerprints(b"".join(groups[width]), width) for width in sorted(groups))

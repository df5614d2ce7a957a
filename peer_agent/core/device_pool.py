"""Which blocks lie in device memory of this host's engines (tier gpu), and who is copying them out at the moment.

    EMPTY ──publish──▶ PUBLISHED ──withdraw, pool or session gone, found overwritten──▶ EMPTY
                          │  ▲
                     begin│  │end          a staging copies the slot into the arena

Rules:
- The engine owns its slots: it withdraws before it overwrites and waits for nobody. What a staging then copies is thrown away,
  because the slot's generation (peer_agent/client/pool_table.py) is compared before and after. Here is only what to publish
  and whom to ask; a staging that is under way never keeps a block visible.
- A block is stored in tier gpu from its first slot on and removed with its last, whatever pools they are in.
- `end` says of each block whether its slot still held it; if not, the entry goes, unless it was published anew meanwhile.
- `reading` says which slots stagings still copy, so that a caller may wait for them, for as long as it likes.

Does not: touch memory, wait, or know the arena (peer_agent/server/staging.py). Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvdir.core.event import Event
from kvdir.errors import InvalidInput
from kvdir.fingerprint import Fingerprints
from kvdir.location import Tier
from peer_agent.core.slot_table import by_width

Slot = tuple[int, int]
"""(pool, slot)."""


@dataclass(frozen=True, slots=True)
class Staging:
    """Blocks to copy out of one pool. positions: in the list asked; slots and generations in the same order."""

    number: int
    pool: int
    positions: tuple[int, ...]
    slots: tuple[int, ...]
    generations: tuple[int, ...]


@dataclass(slots=True)
class _Pool:
    """published: slot -> (fingerprint, generation that its table had then)."""

    session: int
    namespace_digest: bytes
    slots: int
    published: dict[int, tuple[bytes, int]] = field(default_factory=dict)


class DevicePools:
    """See the module docstring. Pool numbers are the caller's, never reused."""

    def __init__(self) -> None:
        self._pools: dict[int, _Pool] = {}
        self._index: dict[bytes, dict[bytes, set[Slot]]] = {}  # namespace digest -> fingerprint -> where
        self._stagings: dict[int, Staging] = {}
        self._next_staging = 1

    def __len__(self) -> int:
        return len(self._pools)

    # engines

    def register(self, pool: int, *, session: int, namespace_digest: bytes, slots: int) -> None:
        if slots < 1:
            raise InvalidInput(f"a pool of {slots} slots: register one that has some")
        self._pools[pool] = _Pool(session, namespace_digest, slots)
        self._index.setdefault(namespace_digest, {})

    def publish(
        self, pool: int, fingerprints: Fingerprints, slots: Sequence[int], generations: Sequence[int], *, session: int
    ) -> tuple[Event, ...]:
        """These slots hold these blocks from now on; what they held before goes. InvalidInput changes nothing."""
        found = self._own(pool, session)
        if not len(fingerprints) == len(slots) == len(generations):
            raise InvalidInput(f"{len(slots)} slots and {len(generations)} generations for {len(fingerprints)} fingerprints")
        self._check(found, slots)
        if any(generation % 2 for generation in generations):
            raise InvalidInput("a slot with an odd generation is being written: publish it once it is even")
        removed = self._take_out(pool, found, slots)
        stored, index = [], self._index[found.namespace_digest]
        for fingerprint, slot, generation in zip(fingerprints, slots, generations, strict=True):
            places = index.setdefault(fingerprint, set())
            if not places:
                stored.append(fingerprint)
            places.add((pool, slot))
            found.published[slot] = fingerprint, generation
        return *self._removed(found, removed), *(
            Event.stored(Tier.GPU, found.namespace_digest, group) for group in by_width(stored)
        )

    def withdraw(self, pool: int, slots: Sequence[int], *, session: int) -> tuple[Event, ...]:
        """These slots hold no block any more. InvalidInput changes nothing."""
        found = self._own(pool, session)
        self._check(found, slots)
        return self._removed(found, self._take_out(pool, found, slots))

    def unregister(self, pool: int, *, session: int) -> tuple[Event, ...]:
        found = self._own(pool, session)
        removed = self._take_out(pool, found, list(found.published))
        del self._pools[pool]
        return self._removed(found, removed)

    def end_session(self, session: int) -> tuple[tuple[int, ...], tuple[Event, ...]]:
        """Unregisters all its pools; returns their numbers and what is to be published."""
        mine = tuple(number for number, pool in self._pools.items() if pool.session == session)
        return mine, tuple(event for number in mine for event in self.unregister(number, session=session))

    def reading(self, pool: int, slots: Iterable[int]) -> int:
        """How many of these slots a staging may still be reading."""
        busy = {slot for staging in self._stagings.values() if staging.pool == pool for slot in staging.slots}
        return len(busy & set(slots))

    # stagings

    def present(self, namespace_digest: bytes, fingerprints: Iterable[bytes]) -> bytes:
        """One byte per fingerprint: 1 if it is published."""
        index = self._index.get(namespace_digest, {})
        return bytes([fingerprint in index for fingerprint in fingerprints])

    def begin(self, namespace_digest: bytes, fingerprints: Fingerprints) -> tuple[Staging, ...]:
        """Stagings for those of the blocks that are published, one a pool. Each needs its `end`."""
        chosen: dict[int, list[tuple[int, int, int]]] = {}
        index = self._index.get(namespace_digest, {})
        for position, fingerprint in enumerate(fingerprints):
            places = index.get(fingerprint)
            if places:
                pool, slot = min(places)
                chosen.setdefault(pool, []).append((position, slot, self._pools[pool].published[slot][1]))
        return tuple(self._open(pool, rows) for pool, rows in chosen.items())

    def end(self, number: int, gone: Iterable[int] = ()) -> tuple[Event, ...]:
        """The staging reads no more. gone: indices into its slots whose block was not there (any more)."""
        staging = self._stagings.pop(number)
        found = self._pools.get(staging.pool)
        if found is None:
            return ()
        stale = [
            staging.slots[at] for at in gone if found.published.get(staging.slots[at], (b"", -1))[1] == staging.generations[at]
        ]
        return self._removed(found, self._take_out(staging.pool, found, stale))

    # figures

    def held(self, namespace_digest: bytes) -> tuple[Fingerprints, ...]:
        """Every published block, one packed list per width: the content of a snapshot."""
        return by_width(self._index.get(namespace_digest, {}))

    def counts(self) -> list[tuple[bytes, int]]:
        """(namespace digest, published blocks), where there are any."""
        return [(digest, len(index)) for digest, index in list(self._index.items()) if index]

    @property
    def stagings(self) -> int:
        return len(self._stagings)

    def check(self) -> None:
        """AssertionError if an invariant does not hold; for tests."""
        index: dict[bytes, dict[bytes, set[Slot]]] = {digest: {} for digest in self._index}
        for number, pool in self._pools.items():
            for slot, (fingerprint, generation) in pool.published.items():
                assert 0 <= slot < pool.slots
                assert generation % 2 == 0
                index[pool.namespace_digest].setdefault(fingerprint, set()).add((number, slot))
        assert index == self._index, "published slots and the index differ"

    # internals

    def _own(self, pool: int, session: int) -> _Pool:
        found = self._pools.get(pool)
        if found is None or found.session != session:
            raise InvalidInput(f"pool {pool} is not registered by this session: register it again")
        return found

    def _check(self, pool: _Pool, slots: Sequence[int]) -> None:
        if len(set(slots)) != len(slots) or not all(0 <= slot < pool.slots for slot in slots):
            raise InvalidInput(f"slots of a pool of {pool.slots}: pass each once, below that")

    def _open(self, pool: int, rows: list[tuple[int, int, int]]) -> Staging:
        number, self._next_staging = self._next_staging, self._next_staging + 1
        positions, slots, generations = zip(*rows, strict=True)
        self._stagings[number] = staging = Staging(number, pool, positions, slots, generations)
        return staging

    def _take_out(self, number: int, pool: _Pool, slots: Iterable[int]) -> list[bytes]:
        """Returns the fingerprints that are published nowhere any more."""
        gone, index = [], self._index[pool.namespace_digest]
        for slot in slots:
            if slot not in pool.published:
                continue
            fingerprint, _ = pool.published.pop(slot)
            index[fingerprint].discard((number, slot))
            if not index[fingerprint]:
                del index[fingerprint]
                gone.append(fingerprint)
        return gone

    def _removed(self, pool: _Pool, fingerprints: list[bytes]) -> tuple[Event, ...]:
        return tuple(Event.removed(Tier.GPU, pool.namespace_digest, group) for group in by_width(fingerprints))

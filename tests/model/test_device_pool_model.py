"""DevicePools against a plain model: in whatever order engines and stagings act, the directory learns exactly what is there."""

from __future__ import annotations

from collections.abc import Iterable

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from kvdir.core.event import EVENT_WIDTH, Event, EventKind
from kvdir.errors import InvalidInput
from kvdir.fingerprint import Fingerprints
from kvdir.location import Tier
from peer_agent.core.device_pool import DevicePools, Staging

DIGESTS = (b"n" * 32, b"m" * 32)
POOL_SLOTS = 4
NAMES = [bytes([value]) * 32 for value in range(5)]


class DevicePoolsModel(RuleBasedStateMachine):
    """slots: (pool, slot) -> (digest, fingerprint, generation) as the engines see it. seen: what the events say is there."""

    stagings: Bundle[Staging] = Bundle("stagings")

    def __init__(self) -> None:
        super().__init__()
        self.pools = DevicePools()
        self.owners: dict[int, tuple[int, bytes]] = {}
        self.slots: dict[tuple[int, int], tuple[bytes, bytes, int]] = {}
        self.reading: dict[int, Staging] = {}
        self.seen: set[tuple[bytes, bytes]] = set()
        self.next_pool = 1
        self.generation = 0

    @rule(session=st.integers(1, 2), digest=st.sampled_from(DIGESTS))
    def register(self, session: int, digest: bytes) -> None:
        self.pools.register(self.next_pool, session=session, namespace_digest=digest, slots=POOL_SLOTS)
        self.owners[self.next_pool] = session, digest
        self.next_pool += 1

    @rule(data=st.data(), slots=st.lists(st.integers(0, POOL_SLOTS - 1), unique=True, min_size=1))
    def publish(self, data: st.DataObject, slots: list[int]) -> None:
        if not self.owners:
            return
        pool = data.draw(st.sampled_from(sorted(self.owners)))
        names = data.draw(st.lists(st.sampled_from(NAMES), min_size=len(slots), max_size=len(slots)))
        session, digest = self.owners[pool]
        self.generation += 2
        generations = [self.generation] * len(slots)
        self.apply(self.pools.publish(pool, Fingerprints.of(names), slots, generations, session=session))
        for slot, name in zip(slots, names, strict=True):
            self.slots[pool, slot] = digest, name, self.generation

    @rule(data=st.data(), slots=st.lists(st.integers(0, POOL_SLOTS - 1), unique=True))
    def withdraw(self, data: st.DataObject, slots: list[int]) -> None:
        if not self.owners:
            return
        pool = data.draw(st.sampled_from(sorted(self.owners)))
        self.apply(self.pools.withdraw(pool, slots, session=self.owners[pool][0]))
        for slot in slots:
            self.slots.pop((pool, slot), None)
        busy = {slot for staging in self.reading.values() if staging.pool == pool for slot in staging.slots}
        assert self.pools.reading(pool, slots) == len(busy & set(slots))

    @rule(data=st.data(), slots=st.lists(st.integers(-1, POOL_SLOTS), min_size=1))
    def refuse(self, data: st.DataObject, slots: list[int]) -> None:
        """Other people's pools, slots that are not there or come twice, odd generations: refused, nothing changes."""
        if not self.owners:
            return
        pool = data.draw(st.sampled_from(sorted(self.owners)))
        session, _ = self.owners[pool]
        names = Fingerprints.of([NAMES[0]] * len(slots))
        wrong_session = data.draw(st.booleans())
        odd = [self.generation + 1] * len(slots)
        for attempt in (
            lambda: self.pools.publish(pool, names, slots, odd, session=session + wrong_session),
            lambda: self.pools.withdraw(pool, slots, session=session + 1),
            lambda: self.pools.publish(pool, names, [POOL_SLOTS] * len(slots), [2] * len(slots), session=session),
        ):
            try:
                attempt()
            except InvalidInput:
                continue
            raise AssertionError("was not refused")

    @rule(data=st.data())
    def unregister(self, data: st.DataObject) -> None:
        if not self.owners:
            return
        pool = data.draw(st.sampled_from(sorted(self.owners)))
        self.apply(self.pools.unregister(pool, session=self.owners[pool][0]))
        self.forget([pool])

    @rule(session=st.integers(1, 2))
    def end_session(self, session: int) -> None:
        gone, events = self.pools.end_session(session)
        self.apply(events)
        assert set(gone) == {pool for pool, (owner, _) in self.owners.items() if owner == session}
        self.forget(gone)

    @rule(target=stagings, digest=st.sampled_from(DIGESTS), names=st.lists(st.sampled_from(NAMES), unique=True, min_size=1))
    def begin(self, digest: bytes, names: list[bytes]):
        begun = self.pools.begin(digest, Fingerprints.of(names))
        there = {name for owner, name, _ in self.slots.values() if owner == digest}
        asked = [position for staging in begun for position in staging.positions]
        assert sorted(asked) == [position for position, name in enumerate(names) if name in there], "each once, if published"
        for staging in begun:
            self.reading[staging.number] = staging
            for position, slot, generation in zip(staging.positions, staging.slots, staging.generations, strict=True):
                assert self.slots[staging.pool, slot] == (digest, names[position], generation)
        return multiple(*begun)

    @rule(staging=stagings, data=st.data())
    def end(self, staging: Staging, data: st.DataObject) -> None:
        if self.reading.pop(staging.number, None) is None:
            return
        gone = data.draw(st.lists(st.integers(0, len(staging.slots) - 1), unique=True))
        self.apply(self.pools.end(staging.number, gone))
        for at in gone:
            place = staging.pool, staging.slots[at]
            if place in self.slots and self.slots[place][2] == staging.generations[at]:
                del self.slots[place]

    def forget(self, pools: Iterable[int]) -> None:
        for pool in pools:
            del self.owners[pool]
            self.slots = {place: held for place, held in self.slots.items() if place[0] != pool}

    def apply(self, events: Iterable[Event]) -> None:
        for event in events:
            assert event.tier == Tier.GPU
            width = event.width
            for at in range(0, len(event.packed), width):
                entry = event.namespace_digest, event.packed[at : at + width]
                assert (entry in self.seen) == (event.kind == EventKind.REMOVED), "an event that changes nothing"
                self.seen ^= {entry}

    @invariant()
    def the_directory_knows_exactly_what_is_there(self) -> None:
        self.pools.check()
        there = {(digest, name) for digest, name, _ in self.slots.values()}
        assert self.seen == {(digest, name[:EVENT_WIDTH]) for digest, name in there}
        held = {(digest, name) for digest in DIGESTS for group in self.pools.held(digest) for name in group}
        assert held == there
        assert dict(self.pools.counts()) == {d: n for d in DIGESTS if (n := sum(digest == d for digest, _ in there))}
        assert self.pools.stagings == len(self.reading)


DevicePoolsModel.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestDevicePools = DevicePoolsModel.TestCase

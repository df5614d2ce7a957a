"""Residency against an engine's pool with copies: what we say is held is what the pool holds, event by event.

The oracle is a pool of physical blocks as vLLM has it: a hash may lie in several blocks of a group, every block cached is one
`BlockStored`, every block evicted one `BlockRemoved`. It recomputes from scratch what must be held, group by group.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvdir.core.event import Event, EventKind
from kvdir.core.sketches import OwnerSketches
from kvdir.engines import Cleared, DecodedBatch, EngineIdentity, Group, Removed, Residency, Stored
from kvdir.index import Sketch
from kvdir.location import Tier
from kvdir.namespace import StateKind

GROUPS = (
    Group(0, StateKind.FULL),
    Group(1, StateKind.SLIDING_WINDOW, 64),
    Group(2, StateKind.SLIDING_WINDOW, 64),
)
TIERS = (Tier.GPU, Tier.CPU)
HASHES = st.lists(st.integers(1, 4), min_size=1, max_size=3)
CHANGES = (*["come"] * 4, *["go"] * 4, "clear")
WIDTH = 8


def packed(hashes: list[int]) -> bytes:
    return b"".join(item.to_bytes(WIDTH, "big") for item in hashes)


class Mirror:
    """What a reader of our events believes; refuses what is no exact change."""

    def __init__(self) -> None:
        self.held: dict[tuple[bytes, int], set[bytes]] = {}

    def take(self, event: Event) -> None:
        blocks = [event.packed[at : at + event.width] for at in range(0, len(event.packed), event.width)]
        held = self.held.setdefault((event.namespace_digest, event.tier), set())
        match event.kind:
            case EventKind.STORED:
                assert len(set(blocks)) == len(blocks), "each block once"
                assert not held & set(blocks), "0 -> 1"
                held |= set(blocks)
            case EventKind.REMOVED:
                assert len(set(blocks)) == len(blocks), "each block once"
                assert held >= set(blocks), "1 -> 0"
                held -= set(blocks)
            case EventKind.CLEARED:
                held.clear()


class Pool(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.residency = Residency(EngineIdentity(model="m", hash_scheme="opaque"))
        self.mirror = Mirror()
        self.sketches = OwnerSketches(lambda: Sketch(64))
        self.copies: dict[tuple[Tier, int], Counter[int]] = {(tier, group): Counter() for tier in TIERS for group in range(3)}
        self.known: set[int] = set()

    def tell(self, *events: Any) -> None:
        applied = self.residency.apply(DecodedBatch(0.0, 0, events, {}))
        assert not applied.rejected
        for event in applied.events:
            self.mirror.take(event)
            self.sketches.apply(event)

    @rule(
        tier=st.sampled_from(TIERS),
        group=st.sampled_from((0, 1, 1, 2)),
        hashes=HASHES,
        parent=st.booleans(),
        times=st.integers(1, 3),
    )
    def store(self, tier: Tier, group: int, hashes: list[int], parent: bool, times: int) -> None:
        for _ in range(times):
            self.store_once(tier, group, hashes, parent)

    def store_once(self, tier: Tier, group: int, hashes: list[int], parent: bool) -> None:
        self.known.add(group)
        pool = self.copies[tier, group]
        report = not parent and len(hashes) > 1 and all(pool[item] for item in hashes)
        if not report:  # what looks like a report of what is held is taken for one: documented
            pool.update(hashes)
        self.tell(Stored(packed(hashes), WIDTH, tier, GROUPS[group], 16, parent=b"p" if parent else b""))

    @rule(tier=st.sampled_from(TIERS), group=st.sampled_from((0, 1, 1, 2)), hashes=HASHES)
    def report(self, tier: Tier, group: int, hashes: list[int]) -> None:
        """A full report never changes anything: of a prefix, so each block once, and all of them held."""
        held = [item for item in dict.fromkeys(hashes) if self.copies[tier, group][item]]
        if len(held) > 1:
            self.tell(Stored(packed(held), WIDTH, tier, GROUPS[group], 16))

    @rule(tier=st.sampled_from(TIERS), group=st.sampled_from((0, 1, 1, 2)), hashes=HASHES)
    def evict(self, tier: Tier, group: int, hashes: list[int]) -> None:
        pool, there = self.copies[tier, group], []
        for item in hashes:
            if pool[item]:
                pool[item] -= 1
                there.append(item)
        self.tell(*[Removed(packed([item]), WIDTH, tier, Group(group)) for item in there])

    @rule(changes=st.lists(st.tuples(st.sampled_from(CHANGES), st.sampled_from((0, 1, 2)), st.integers(1, 4)), max_size=12))
    def many_at_once(self, changes: list[tuple[str, int, int]]) -> None:
        """One batch in which blocks of one place come and go, several times, and everything may be cleared between."""
        events: list[Any] = []
        for change, group, item in changes:
            pool = self.copies[Tier.GPU, group]
            if change == "clear":
                for other in self.copies.values():
                    other.clear()
                events.append(Cleared())
            elif change == "come":
                self.known.add(group)
                pool[item] += 1
                events.append(Stored(packed([item]), WIDTH, Tier.GPU, GROUPS[group], 16, parent=b"p"))
            elif pool[item]:
                pool[item] -= 1
                events.append(Removed(packed([item]), WIDTH, Tier.GPU, Group(group)))
        self.tell(*events)

    @rule(tier=st.sampled_from(TIERS), group=st.sampled_from((0, 1, 1, 2)), hashes=HASHES)
    def evict_unknown(self, tier: Tier, group: int, hashes: list[int]) -> None:
        missing = [item for item in hashes if not self.copies[tier, group][item]]
        before = self.residency.unknown_removals
        self.tell(Removed(packed(missing), WIDTH, tier, Group(group)))
        assert self.residency.unknown_removals == before + len(missing)

    @rule(often=st.integers(0, 7))
    def clear(self, often: int) -> None:
        if often:
            return  # rarely, or copies never gather
        for pool in self.copies.values():
            pool.clear()
        self.tell(Cleared())

    def expected(self) -> dict[tuple[StateKind, Tier], set[int]]:
        out = {}
        for kind, members in ((StateKind.FULL, {0}), (StateKind.SLIDING_WINDOW, {1, 2})):
            groups = members & self.known
            for tier in TIERS:
                sets = [{item for item, copies in self.copies[tier, group].items() if copies} for group in groups]
                whole = set.intersection(*sets) if sets else set()
                if whole:
                    out[kind, tier] = whole
        return out

    def named(self, held: dict[tuple[bytes, int], set[bytes]]) -> dict[tuple[StateKind, Tier], set[int]]:
        return {
            (StateKind(self.residency.namespaces[digest].groups[0].kind), Tier(tier)): {
                int.from_bytes(b, "big") for b in blocks
            }
            for (digest, tier), blocks in held.items()
            if blocks
        }

    @invariant()
    def what_we_say_is_what_the_pool_holds(self) -> None:
        assert self.named(self.mirror.held) == self.expected()
        assert self.residency.blocks == sum(len(+pool) for pool in self.copies.values())

    @invariant()
    def snapshot_and_counts_say_the_same(self) -> None:
        snapshot = Mirror()
        for event in self.residency.held():
            snapshot.take(event)
        assert self.named(snapshot.held) == self.expected()
        counts = {(count.namespace_digest, count.tier): count.blocks for count in self.residency.counts()}
        assert counts == {key: len(blocks) for key, blocks in self.mirror.held.items() if blocks}
        sketched = {(count.namespace_digest, count.tier): count.blocks for count in self.sketches.counts() or ()}
        assert {key: blocks for key, blocks in sketched.items() if blocks} == counts


Pool.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestPool = Pool.TestCase

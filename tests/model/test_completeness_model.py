"""Completeness against an oracle: a directory that applies what is published always holds the intersection of the ranks."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvdir.core.event import Event, EventKind
from kvdir.fingerprint import Fingerprints
from kvdir.location import Tier
from peer_agent.core.completeness import Completeness

FAMILIES = [[bytes([family, rank]) * 16 for rank in range(size)] for family, size in enumerate((1, 2, 3))]
RANKS = [rank for family in FAMILIES for rank in family]
BLOCKS = [bytes([number]) * 32 for number in range(6)] + [bytes([number]) * 8 for number in range(100, 102)]
TIERS = (Tier.CPU, Tier.GPU)

blocks = st.lists(st.sampled_from(BLOCKS), min_size=1, max_size=5, unique=True)


class CompletenessMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.core = Completeness()
        self.served: set[bytes] = set()
        self.held: dict[tuple[bytes, Tier], set[bytes]] = defaultdict(set)
        self.directory: dict[tuple[bytes, int], set[bytes]] = defaultdict(set)

    @rule(rank=st.sampled_from(RANKS))
    def serve(self, rank: bytes) -> None:
        family = next(family for family in FAMILIES if rank in family)
        self.tell(self.core.serve(rank, family))
        self.served.add(rank)

    @rule(rank=st.sampled_from(RANKS), tier=st.sampled_from(TIERS), chosen=blocks)
    def store(self, rank: bytes, tier: Tier, chosen: list[bytes]) -> None:
        self.change(rank, tier, chosen, stored=True)

    @rule(rank=st.sampled_from(RANKS), tier=st.sampled_from(TIERS), chosen=blocks)
    def evict(self, rank: bytes, tier: Tier, chosen: list[bytes]) -> None:
        self.change(rank, tier, chosen, stored=False)

    @rule(rank=st.sampled_from(RANKS), tier=st.sampled_from(TIERS))
    def clear(self, rank: bytes, tier: Tier) -> None:
        if rank in self.served:
            self.held[rank, tier].clear()
            self.tell(self.core.publish(Event.cleared(tier, rank)))

    @rule(tier=st.sampled_from(TIERS))
    def clear_all(self, tier: Tier) -> None:
        for rank in RANKS:
            self.held[rank, tier].clear()
        self.tell(self.core.publish(Event.cleared(tier)))

    def change(self, rank: bytes, tier: Tier, chosen: list[bytes], *, stored: bool) -> None:
        if rank not in self.served:
            return
        for width in {len(block) for block in chosen}:
            group = [block for block in chosen if len(block) == width]
            known = self.held[rank, tier]
            self.held[rank, tier] = known | set(group) if stored else known - set(group)
            make = Event.stored if stored else Event.removed
            self.tell(self.core.publish(make(tier, rank, Fingerprints.of(group))))

    def tell(self, events: tuple[Event, ...]) -> None:
        for event in events:
            told = set(Fingerprints(event.packed, event.width))
            where = [key for key in self.directory if key[1] == event.tier and event.namespace_digest in (b"", key[0])]
            match event.kind:
                case EventKind.STORED:
                    assert not told & self.directory[event.namespace_digest, event.tier] or not self.tracked(event), "twice"
                    self.directory[event.namespace_digest, event.tier] |= told
                case EventKind.REMOVED:
                    self.directory[event.namespace_digest, event.tier] -= told
                case _:
                    for key in where:
                        self.directory[key].clear()

    def tracked(self, event: Event) -> bool:
        return self.core.tracks(event.namespace_digest)

    @invariant()
    def directory_holds_what_every_rank_has(self) -> None:
        for family in FAMILIES:
            members = [rank for rank in family if rank in self.served]
            for tier in TIERS:
                whole = {block[:16] for block in BLOCKS if all(block in self.held[rank, tier] for rank in members)}
                for rank in members:
                    assert self.directory[rank, tier] == whole
                    if len(family) == 1:
                        assert not self.core.tracks(rank)
                        continue
                    assert self.core.count(tier, rank) == len(whole)
                    assert {block for group in self.core.held(tier, rank) for block in group} == whole
                    for block in BLOCKS:
                        assert self.core.complete(tier, rank, Fingerprints.of([block])) == bytes([block[:16] in whole])

    @invariant()
    def own_invariants_hold(self) -> None:
        self.core.check()


TestCompleteness = CompletenessMachine.TestCase
TestCompleteness.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

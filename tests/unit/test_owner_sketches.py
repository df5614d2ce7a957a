"""The agent's inventory says exact changes, so the sketches kept beside its events never differ from what it holds."""

from __future__ import annotations

import itertools
import random

import pytest

from kvdir.core.event import Event
from kvdir.core.sketches import OwnerSketches
from kvdir.fingerprint import Fingerprints
from kvdir.index import Sketch
from kvdir.location import Tier
from peer_agent.core.inventory import AGENT, PEERS, Inventory
from peer_agent.core.slot_table import SlotTable

DIGEST = bytes(range(32))
ENGINE = 7
SLOTS = 12


class Agent:
    """An inventory whose every event goes to the sketches, like a store's."""

    def __init__(self) -> None:
        ids = itertools.count(100)
        table = SlotTable(DIGEST, block_bytes=64, first_offset=4096, stride_bytes=256, slots=SLOTS)
        self.inventory = Inventory([table], new_id=lambda: next(ids))
        self.inventory.open_session(ENGINE)
        self.sketches = OwnerSketches(lambda: Sketch(64))
        self.open: list[int] = []

    def say(self, events: tuple[Event, ...]) -> None:
        for event in events:
            self.sketches.apply(event)

    def step(self, rng: random.Random, now_s: float) -> None:
        picks = Fingerprints.of([number.to_bytes(8, "little") * 2 for number in rng.sample(range(20), rng.randint(1, 4))])
        inventory = self.inventory
        match rng.choice(("reserve", "reserve", "commit", "commit", "discard", "lock", "tick", "quarantine")):
            case "reserve":
                session = rng.choice((ENGINE, AGENT))
                answer = inventory.reserve(DIGEST, picks, session=session, now_s=now_s, lease_s=2.0)
                self.say(answer.events)
                if answer.reservation:
                    self.open.append(answer.reservation)
            case "commit" if self.open:
                number = self.open.pop(rng.randrange(len(self.open)))
                for session in (ENGINE, AGENT):
                    granted = inventory.granted(number, session=session)
                    if granted is not None:
                        self.say(inventory.commit(number, granted, bytes(32 * len(granted.positions))))
            case "discard":
                self.say(inventory.discard(DIGEST, picks)[1])
            case "lock":
                inventory.lock(DIGEST, picks, session=PEERS, now_s=now_s, lease_s=rng.choice((0.5, 3.0)))
            case "tick":
                inventory.tick(now_s)
            case "quarantine" if self.open:
                inventory.quarantine(self.open.pop())

    def check(self) -> None:
        fresh = OwnerSketches(lambda: Sketch(64))
        fresh.restate([Event.stored(Tier.CPU, DIGEST, held) for held in self.inventory.held(DIGEST)])
        known = {(c.namespace_digest, c.tier): (c.blocks, c.digest) for c in self.sketches.counts() or () if c.blocks}
        assert known == {(c.namespace_digest, c.tier): (c.blocks, c.digest) for c in fresh.counts() or () if c.blocks}


@pytest.mark.parametrize("seed", range(20))
def test_sketches_equal_the_inventory_when_blocks_come_and_go(seed: int) -> None:
    rng, agent = random.Random(seed), Agent()
    for step in range(150):
        agent.step(rng, step / 10)
        agent.check()


def test_sketch_is_empty_when_a_tier_is_cleared() -> None:
    sketches = OwnerSketches(Sketch)
    some = Fingerprints.of([bytes([number]) * 16 for number in range(5)])
    sketches.restate([Event.stored(tier, DIGEST, some) for tier in (Tier.CPU, Tier.DISK)])
    sketches.apply(Event.cleared(Tier.CPU, bytes(32)))
    assert [count.blocks for count in sketches.counts() or ()] == [5, 5]
    sketches.apply(Event.cleared(Tier.CPU))
    assert [(count.tier, count.blocks) for count in sketches.counts() or ()] == [(Tier.CPU, 0), (Tier.DISK, 5)]
    statement = sketches.statement(1, 9)
    assert statement is not None
    assert [(part.tier, part.blocks, len(part.encoded)) for part in statement.parts] == [(Tier.DISK, 5, 40 + 24 * 1024)]


def test_sketch_is_whole_when_it_cannot_be_folded_as_asked() -> None:
    sketches = OwnerSketches(Sketch)
    sketches.restate([Event.stored(Tier.CPU, DIGEST, Fingerprints.of([bytes(16)]))])
    for cells, size in ((0, 1024), (128, 128), (1000, 1024), (2**31, 1024)):
        statement = sketches.statement(1, 9, cells=cells)
        assert statement is not None
        assert len(statement.parts[0].encoded) == 40 + 24 * size

"""Prefetched blocks count once: as used, or as unused."""

from __future__ import annotations

from kvdir.core.event import Event
from kvdir.fingerprint import Fingerprints
from kvdir.location import Tier
from peer_agent.core.prefetched import Prefetched

DIGEST = b"n" * 32
BLOCKS = Fingerprints.chain(b"%d" % number for number in range(10))


def test_blocks_count_once_when_they_are_used_and_then_go() -> None:
    ahead = Prefetched()
    ahead.bring(DIGEST, BLOCKS, block_bytes=100)
    ahead.use(DIGEST, BLOCKS.select([0, 1, 2]))
    ahead.use(DIGEST, BLOCKS.select([0]))
    ahead.follow(Event.stored(Tier.CPU, DIGEST, BLOCKS))
    ahead.follow(Event.removed(Tier.CPU, DIGEST, BLOCKS.select([0, 1, 5])))
    ahead.follow(Event.removed(Tier.CPU, b"m" * 32, BLOCKS))
    assert (ahead.brought, ahead.used, ahead.unused, ahead.unused_bytes) == (10, 3, 1, 100)


def test_the_oldest_are_forgotten_when_there_are_too_many() -> None:
    ahead = Prefetched(max_blocks=4)
    ahead.bring(DIGEST, BLOCKS, block_bytes=1)
    ahead.use(DIGEST, BLOCKS)
    assert (ahead.brought, ahead.used) == (10, 4)

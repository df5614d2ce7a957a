"""Who is asked for nominations: the replica while it is young, then the coordinators, then a replica however old."""

from __future__ import annotations

import time
from collections.abc import Coroutine
from typing import Any

import pytest

from kvdir.client.replica_reader import ReplicaReader
from kvdir.core.region_roster import RegionRoster
from kvdir.core.roster import Beat, NamespaceRecord
from kvdir.errors import Unavailable
from kvdir.fingerprint import Fingerprints
from kvdir.location import NodeTrust, StreamState, Tier
from kvdir.testing.fake_node import EXAMPLE_NAMESPACE, some_fingerprints
from kvdir.testing.fake_region import FakeReader, FakeRegion
from peer_agent.core.nominees import Claim
from peer_agent.server.load import Nominations
from peer_agent.server.nearest import NearestDirectory

DIGEST = EXAMPLE_NAMESPACE.digest
BLOCKS = some_fingerprints(4)
FAR = NodeTrust("far", 1, StreamState.SYNCED, "", 0.0, 0, "far:1")
NEAR = NodeTrust("near", 2, StreamState.SYNCED, "", 0.0, 0, "near:1")


class FakeCoordinators:
    """Nominates `far` for everything while `up`."""

    def __init__(self) -> None:
        self.up = True
        self.nominated = 0
        self.reported: list[str] = []

    async def nominate(self, namespace_digest: bytes, fingerprints: Fingerprints, *, timeout_s: float) -> Nominations:
        self.nominated += 1
        if not self.up:
            raise Unavailable("nobody there")
        return Nominations([Claim.of(FAR, range(len(fingerprints)))], [FAR])

    def report_stale(
        self, namespace_digest: bytes, fingerprints: Fingerprints, *, node: str, epoch: int, owner_seq: int
    ) -> Coroutine[Any, Any, None]:
        async def report() -> None:
            self.reported.append(node)

        return report()


class World:
    def __init__(self) -> None:
        self.region = region = FakeRegion()
        self.roster = RegionRoster(region)
        record = NamespaceRecord(DIGEST, "example", 1, 1)
        self.roster.put_namespace(record)
        self.roster.put_node(0, NEAR, heard_s=time.monotonic(), hidden=False)
        self.roster.put_holder(0, 0, Tier.CPU, visible=True)
        region.index.store(BLOCKS.packed, BLOCKS.width, scope=record.scope, holder=0, now_s=1)
        self.coordinators = FakeCoordinators()
        reader = ReplicaReader("/r", open_region=lambda _: FakeReader(region))
        self.nearest = NearestDirectory(self.coordinators, reader, max_lag_s=1.0)

    def beat(self, *, behind_s: float = 0.0) -> None:
        now_ns = time.monotonic_ns()
        self.roster.beat(Beat(beat_ns=now_ns, as_of_ns=now_ns - round(behind_s * 1e9)))

    async def nominated(self) -> list[tuple[str, list[int]]]:
        found = await self.nearest.nominate(DIGEST, BLOCKS, timeout_s=0.1)
        return [(claim.node.node, claim.positions.tolist()) for claim in found.claims]


async def test_replica_nominates_without_a_call_while_it_is_young() -> None:
    world = World()
    world.beat()
    assert await world.nominated() == [("near", [0, 1, 2, 3])]
    assert (world.coordinators.nominated, world.nearest.asked["replica"]) == (0, 1)


@pytest.mark.parametrize("behind_s", [5.0, None], ids=["too-old", "dead"])
async def test_coordinators_nominate_when_the_replica_is_too_old_or_dead(behind_s: float | None) -> None:
    world = World()
    if behind_s is not None:
        world.beat(behind_s=behind_s)
    assert await world.nominated() == [("far", [0, 1, 2, 3])]
    assert world.nearest.asked == {"replica": 0, "coordinator": 1, "none": 0}


async def test_coordinators_nominate_when_the_replica_was_being_changed() -> None:
    world = World()
    world.beat()
    world.region.torn = True
    assert await world.nominated() == [("far", [0, 1, 2, 3])]


async def test_old_replica_nominates_when_no_coordinator_does() -> None:
    world = World()
    world.coordinators.up = False
    world.beat(behind_s=500.0)
    assert await world.nominated() == [("near", [0, 1, 2, 3])]
    assert (world.coordinators.nominated, world.nearest.asked["replica"]) == (1, 1)


async def test_error_of_the_coordinators_is_passed_on_when_there_is_no_replica_either() -> None:
    world = World()
    world.coordinators.up = False
    with pytest.raises(Unavailable, match="nobody there"):
        await world.nominated()
    assert world.nearest.asked["none"] == 1


async def test_stale_blocks_are_told_to_the_coordinators() -> None:
    world = World()
    await world.nearest.report_stale(DIGEST, BLOCKS, node="near", epoch=2, owner_seq=0)
    assert world.coordinators.reported == ["near"]

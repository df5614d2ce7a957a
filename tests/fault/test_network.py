"""Agents on hosts of their own (network namespaces), whose packets really get lost: 10 % of them, or all of one way.

Skipped where namespaces are not permitted; test_plane_links.py and test_peer_faults.py run the same faults everywhere, over a
made network.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kvdir.fingerprint import Fingerprints
from peer_agent.client import aio
from peer_agent.core.effects import LoadStatus
from peer_agent.testing import sample_namespace
from peer_agent.testing.network import Network, NotPermitted, network_of
from peer_agent.testing.processes import ProcessCluster
from peer_agent.testing.timing import DEADLINE_SLACK_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

BLOCKS = 16


@pytest.fixture
def network() -> Iterator[Network]:
    try:
        with network_of("directory", "owner", "second", "reader") as made:
            yield made
    except NotPermitted as reason:
        pytest.skip(str(reason))


class Bed:
    """Two owners of the same blocks, a reader, a directory: four hosts."""

    def __init__(self, cluster: ProcessCluster, network: Network, reader: aio.Engine, fingerprints: Fingerprints) -> None:
        self.cluster = cluster
        self.network = network
        self.reader = reader
        self.fingerprints = fingerprints

    async def load(self, fingerprints: Fingerprints, *, deadline_s: float):
        return await self.cluster.load(self.reader, fingerprints, deadline_s=deadline_s)

    def part(self, number: int) -> Fingerprints:
        """Two blocks that no other number has: each is at the reader after its first load."""
        return self.fingerprints.slice(2 * number, 2)

    async def settled(self) -> None:
        await self.cluster.wait_inventory("reader", lambda held: held.reserved == held.quarantined == 0)


async def bed_of(network: Network, cluster: ProcessCluster, *owners: str) -> Bed:
    coordinator = await cluster.start_coordinator(host=network.hosts["directory"])
    more = ("--arena-bytes", "16MiB", "--transports", "tcp", "--breaker-s", "0.05", "--breaker-max-s", "0.1")
    for node in (*owners, "reader"):
        await cluster.start_agent(node, coordinator, *more, host=network.hosts[node])
    fingerprints = cluster.blocks.chain(BLOCKS)
    reader = await cluster.engine("reader")
    for node in owners:
        engine = await cluster.engine(node)
        assert (await engine.store(fingerprints, cluster.blocks.data(fingerprints), deadline_s=5)).stored == BLOCKS
    await cluster.wait_nominated(reader, fingerprints)
    return Bed(cluster, network, reader, fingerprints)


@pytest.fixture
async def cluster() -> AsyncIterator[ProcessCluster]:
    with tempfile.TemporaryDirectory(prefix="kvdir-test-", dir="/dev/shm") as path:
        made = ProcessCluster(Path(path), sample_namespace(block_bytes=256 << 10))
        try:
            yield made
        finally:
            await made.close()


async def test_blocks_are_right_or_late_when_packets_are_lost(network: Network, cluster: ProcessCluster):
    bed = await bed_of(network, cluster, "owner")
    for host in network.hosts.values():
        host.drop(share=0.1)
    late_s = []
    for number in range(BLOCKS // 2):
        result, seconds = await bed.load(bed.part(number), deadline_s=1.0)
        late_s.append(seconds - 1.0)
        assert result.count(LoadStatus.CORRUPT) == 0
    assert statistics.median(late_s) <= DEADLINE_SLACK_S
    for host in network.hosts.values():
        host.pass_all()
    for _ in range(100):
        result, _ = await bed.load(bed.fingerprints, deadline_s=5.0)
        if result.hits == BLOCKS:
            break
        await asyncio.sleep(0.05)
    assert result.hits == BLOCKS
    await bed.settled()


@pytest.mark.parametrize(("deaf", "unheard"), [("owner", "reader"), ("reader", "owner")])
async def test_loads_keep_their_deadline_and_heal_when_one_way_is_cut(
    network: Network, cluster: ProcessCluster, deaf: str, unheard: str
):
    bed = await bed_of(network, cluster, "owner")
    warm, _ = await bed.load(bed.part(0), deadline_s=2.0)
    assert warm.hits == 2, "connected before the cut"
    network.hosts[deaf].drop(source=unheard)
    seconds = []
    for number in range(1, 6):
        result, took_s = await bed.load(bed.part(number), deadline_s=0.3)
        assert (result.hits, result.count(LoadStatus.CORRUPT)) == (0, 0)
        seconds.append(took_s)
    assert statistics.median(seconds) <= 0.3 + DEADLINE_SLACK_S, seconds
    here, took_s = await bed.load(bed.part(0), deadline_s=0.3)
    assert here.hits == 2
    assert took_s < 0.2, "what is here needs no network"
    await bed.settled()
    network.hosts[deaf].pass_all()
    for _ in range(100):
        result, _ = await bed.load(bed.fingerprints, deadline_s=1.0)
        if result.hits == BLOCKS:
            break
        await asyncio.sleep(0.05)
    assert result.hits == BLOCKS


async def test_second_owner_serves_within_the_deadline_when_the_first_one_is_cut_off(network: Network, cluster: ProcessCluster):
    bed = await bed_of(network, cluster, "owner", "second")
    assert (await bed.load(bed.part(0), deadline_s=2.0))[0].hits == 2
    network.hosts["reader"].drop(source="owner")
    hits = []
    for number in range(1, 6):
        result, took_s = await bed.load(bed.part(number), deadline_s=1.0)
        assert took_s <= 1.0 + DEADLINE_SLACK_S
        hits.append(result.hits)
    assert sum(hits) >= 8, f"of 2 blocks each: {hits}"


async def test_local_blocks_are_served_at_once_when_the_directory_is_cut_off(network: Network, cluster: ProcessCluster):
    bed = await bed_of(network, cluster, "owner")
    assert (await bed.load(bed.part(0), deadline_s=2.0))[0].hits == 2
    network.hosts["reader"].drop(source="directory")
    result, took_s = await bed.load(bed.part(0), deadline_s=1.0)
    assert result.hits == 2
    assert took_s < 0.2
    result, took_s = await bed.load(bed.part(1), deadline_s=1.0)
    assert (result.hits, result.directory_reached) == (0, False)
    assert took_s <= 1.0 + DEADLINE_SLACK_S

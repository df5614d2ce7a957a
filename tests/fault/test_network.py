"""Agents on hosts of their own (network namespaces), whose packets really get lost: 10 % of them, or all of one way.

Skipped where namespaces are not permitted; test_plane_links.py and test_peer_faults.py run the same faults everywhere, over a
made network.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from kvdir.fingerprint import Fingerprints
from peer_agent.client import aio
from peer_agent.client.results import LoadResult
from peer_agent.core.effects import LoadStatus
from peer_agent.testing import sample_namespace
from peer_agent.testing.network import Network, NotPermitted, network_of
from peer_agent.testing.processes import ProcessCluster
from peer_agent.testing.timing import DEADLINE_SLACK_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="module")]

BLOCKS = 16


class Bed:
    """Four hosts: a directory, two owners, a reader. One for all tests: each stores blocks of its own, and heals at its end."""

    def __init__(self, cluster: ProcessCluster, network: Network, engines: Mapping[str, aio.Engine]) -> None:
        self.cluster = cluster
        self.network = network
        self.engines = engines
        self.fingerprints = Fingerprints(b"", 32)

    async def store(self, root: str, *owners: str) -> None:
        """BLOCKS blocks, known to the directory; `part` and `load` are about them."""
        for host in self.network.hosts.values():
            host.pass_all()  # what a failed test has left
        blocks = self.cluster.blocks
        self.fingerprints = blocks.chain(BLOCKS, root=root)
        for node in owners:
            stored = await self.engines[node].store(self.fingerprints, blocks.data(self.fingerprints), deadline_s=10)
            assert stored.stored == BLOCKS
        await self.cluster.wait_nominated(self.engines["reader"], self.fingerprints)

    async def load(self, fingerprints: Fingerprints, *, deadline_s: float) -> tuple[LoadResult, float]:
        return await self.cluster.load(self.engines["reader"], fingerprints, deadline_s=deadline_s)

    def part(self, number: int) -> Fingerprints:
        """Two blocks that no other number has: each is at the reader after its first load."""
        return self.fingerprints.slice(2 * number, 2)

    async def expect_local_at_once(self, fingerprints: Fingerprints) -> None:
        """What is here needs no network."""
        seconds = []
        for _ in range(5):
            result, took_s = await self.load(fingerprints, deadline_s=1.0)
            assert result.hits == len(fingerprints)
            seconds.append(took_s)
        assert statistics.median(seconds) < 0.1, seconds

    async def heal(self) -> None:
        """The network is whole again: everything arrives, and no slot is kept."""
        for host in self.network.hosts.values():
            host.pass_all()
        hits = 0
        for _ in range(100):
            hits = (await self.load(self.fingerprints, deadline_s=5.0))[0].hits
            if hits == BLOCKS:
                break
            await asyncio.sleep(0.05)
        assert hits == BLOCKS
        await self.cluster.wait_inventory("reader", lambda held: held.reserved == held.quarantined == 0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bed() -> AsyncIterator[Bed]:
    try:
        with network_of("directory", "owner", "second", "reader") as network:
            async with agents_on(network) as made:
                yield made
    except NotPermitted as reason:
        pytest.skip(str(reason))


@asynccontextmanager
async def agents_on(network: Network) -> AsyncIterator[Bed]:
    with tempfile.TemporaryDirectory(prefix="kvdir-test-", dir="/dev/shm") as path:
        cluster = ProcessCluster(Path(path), sample_namespace(block_bytes=256 << 10))
        try:
            coordinator = await cluster.start_coordinator(host=network.hosts["directory"])
            more = ("--arena-bytes", "64MiB", "--transports", "tcp", "--breaker-s", "0.05", "--breaker-max-s", "0.1")
            nodes = ("owner", "second", "reader")
            for node in nodes:
                await cluster.start_agent(node, coordinator, *more, host=network.hosts[node])
            yield Bed(cluster, network, {node: await cluster.engine(node) for node in nodes})
        finally:
            await cluster.close()


async def test_blocks_are_right_or_late_when_packets_are_lost(bed: Bed):
    await bed.store("loss", "owner")
    for host in bed.network.hosts.values():
        host.drop(share=0.1)
    late_s = []
    for number in range(BLOCKS // 2):
        result, seconds = await bed.load(bed.part(number), deadline_s=1.0)
        late_s.append(seconds - 1.0)
        assert result.count(LoadStatus.CORRUPT) == 0
    assert statistics.median(late_s) <= DEADLINE_SLACK_S
    await bed.heal()


@pytest.mark.parametrize(("deaf", "unheard"), [("owner", "reader"), ("reader", "owner")])
async def test_loads_keep_their_deadline_and_heal_when_one_way_is_cut(bed: Bed, deaf: str, unheard: str):
    await bed.store(f"{deaf} is deaf", "owner")
    warm, _ = await bed.load(bed.part(0), deadline_s=2.0)
    assert warm.hits == 2, "connected before the cut"
    bed.network.hosts[deaf].drop(source=unheard)
    seconds = []
    for number in range(1, 6):
        result, took_s = await bed.load(bed.part(number), deadline_s=0.3)
        assert (result.hits, result.count(LoadStatus.CORRUPT)) == (0, 0)
        seconds.append(took_s)
    assert statistics.median(seconds) <= 0.3 + DEADLINE_SLACK_S, seconds
    await bed.expect_local_at_once(bed.part(0))
    await bed.heal()


async def test_second_owner_serves_within_the_deadline_when_the_first_one_is_cut_off(bed: Bed):
    await bed.store("two owners", "owner", "second")
    assert (await bed.load(bed.part(0), deadline_s=2.0))[0].hits == 2
    bed.network.hosts["reader"].drop(source="owner")
    hits, seconds = [], []
    for number in range(1, 6):
        result, took_s = await bed.load(bed.part(number), deadline_s=1.0)
        hits.append(result.hits)
        seconds.append(took_s)
    assert sum(hits) >= 8, f"of 2 blocks each: {hits}"
    assert statistics.median(seconds) <= 1.0 + DEADLINE_SLACK_S, seconds
    await bed.heal()


async def test_local_blocks_are_served_at_once_when_the_directory_is_cut_off(bed: Bed):
    await bed.store("no directory", "owner")
    assert (await bed.load(bed.part(0), deadline_s=2.0))[0].hits == 2
    bed.network.hosts["reader"].drop(source="directory")
    await bed.expect_local_at_once(bed.part(0))
    seconds = []
    for _ in range(5):
        result, took_s = await bed.load(bed.part(1), deadline_s=0.5)
        assert (result.hits, result.directory_reached) == (0, False)
        seconds.append(took_s)
    assert statistics.median(seconds) <= 0.5 + DEADLINE_SLACK_S, seconds
    await bed.heal()

"""Two coordinators and two agents on hosts of their own, whose packets are dropped: between any two of them, both ways.

Skipped where network namespaces are not permitted; test_many_coordinators.py runs such faults everywhere, over made networks.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from peer_agent.client import aio
from peer_agent.core.effects import LoadStatus
from peer_agent.testing import sample_namespace
from peer_agent.testing.network import Network, NotPermitted, network_of
from peer_agent.testing.processes import ProcessCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="module")]

COORDINATORS = ("first", "second")
BLOCKS = 16


class Bed:
    """One for all tests: each stores blocks of its own, and heals at its end."""

    def __init__(
        self, cluster: ProcessCluster, network: Network, coordinators: list[str], engines: dict[str, aio.Engine]
    ) -> None:
        self.cluster = cluster
        self.network = network
        self.coordinators = coordinators
        self.engines = engines

    def cut(self, one: str, other: str) -> None:
        """Nothing passes between the two, either way."""
        self.network.hosts[one].drop(source=other)
        self.network.hosts[other].drop(source=one)

    def heal(self) -> None:
        for host in self.network.hosts.values():
            host.pass_all()

    async def diff(self, *more: str) -> dict[str, Any]:
        """`kvdir diff` as an operator runs it, on the host of the reader."""
        process = await asyncio.create_subprocess_exec(
            *self.network.hosts["reader"].prefix, sys.executable, "-m", "kvdir", "diff", *self.coordinators, *more,
            "--output", "json", stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        output, _ = await process.communicate()
        document: dict[str, Any] = json.loads(output)
        return document


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bed() -> AsyncIterator[Bed]:
    try:
        with (
            network_of(*COORDINATORS, "owner", "reader") as network,
            tempfile.TemporaryDirectory(prefix="kvdir-test-", dir="/dev/shm") as path,
        ):
            cluster = ProcessCluster(Path(path), sample_namespace(block_bytes=64 << 10))
            try:
                listening = [
                    await cluster.start_coordinator("--stale-after-s", "0.5", name=name, host=network.hosts[name])
                    for name in COORDINATORS
                ]
                more = ("--arena-bytes", "16MiB", "--transports", "tcp", "--no-replica")
                for node in ("owner", "reader"):
                    await cluster.start_agent(node, ",".join(listening), *more, host=network.hosts[node])
                engines = {node: await cluster.engine(node) for node in ("owner", "reader")}
                yield Bed(cluster, network, listening, engines)
            finally:
                await cluster.close()
    except NotPermitted as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("away", COORDINATORS)
async def test_loads_bring_blocks_inside_their_deadline_when_the_reader_cannot_reach_one_coordinator(bed: Bed, away: str):
    blocks = bed.cluster.blocks.chain(BLOCKS, root=f"without {away}")
    await bed.engines["owner"].store(blocks, bed.cluster.blocks.data(blocks), deadline_s=10)
    await bed.cluster.wait_nominated(bed.engines["reader"], blocks)
    assert (await bed.diff("--wait", "10"))["verdict"] == "equal"
    bed.cut("reader", away)
    for number in range(BLOCKS // 2):
        result, _ = await bed.cluster.load(bed.engines["reader"], blocks.slice(2 * number, 2), deadline_s=2.0)
        assert result.count(LoadStatus.HIT_PEER) == 2, "the other coordinator named the owner"
    bed.heal()


@pytest.mark.parametrize("away", COORDINATORS)
async def test_coordinators_agree_again_when_one_had_lost_the_owner_for_a_while(bed: Bed, away: str):
    bed.cut("owner", away)
    blocks = bed.cluster.blocks.chain(BLOCKS, root=f"unheard by {away}")
    await bed.engines["owner"].store(blocks, bed.cluster.blocks.data(blocks), deadline_s=10)
    async with asyncio.timeout(20):
        while not any(side["state"] == "stale" for part in (await bed.diff())["parts"] for side in part["sides"] if side):
            pass
    found = await bed.diff()
    assert found["verdict"] == "behind"
    (part,) = [part for part in found["parts"] if part["node"] == "owner"]
    assert "asked for again" in part["words"]
    bed.heal()
    assert (await bed.diff("--wait", "20"))["verdict"] == "equal"

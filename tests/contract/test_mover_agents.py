"""Whole agents whose blocks travel by the ucx plane (tcp lane, allow_emulated_rma)."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kvdir.errors import ConfigError
from kvdir.testing.wait import eventually
from peer_agent.core.effects import LoadStatus
from peer_agent.mover import libucp
from peer_agent.testing import LocalCluster, local_cluster
from peer_agent.transport.mover import MoverTransport


@pytest.fixture
def directory() -> Iterator[Path]:
    """Short, because socket paths end at 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="kvdir-") as path:
        yield Path(path)


@pytest.fixture
async def pair(directory: Path) -> AsyncIterator[LocalCluster]:
    async with local_cluster(
        directory, "a", "b", transports=("ucx",), allow_emulated_rma=True, connect_timeout_s=2.0, breaker_s=0.05
    ) as cluster:
        yield cluster


def mover_of(cluster: LocalCluster, node: str) -> MoverTransport:
    plane = cluster.agents[node].store.planes[0]
    assert isinstance(plane, MoverTransport)
    return plane


async def test_blocks_come_over_ucx_when_it_is_the_only_plane(pair: LocalCluster) -> None:
    fingerprints = pair.blocks.chain(40)
    writer, reader = await pair.engine("a"), await pair.engine("b")
    await writer.store(fingerprints, pair.blocks.data(fingerprints))
    await pair.wait_known("a")
    into = pair.blocks.room(fingerprints)
    result = await reader.load(fingerprints, into=into)
    assert result.count(LoadStatus.HIT_PEER) == 40
    pair.blocks.check(fingerprints, into, result)
    assert sum(mover_of(pair, "b").lanes.values()) >= 1
    assert all(lane.startswith("tcp/") for lane in mover_of(pair, "b").lanes)


async def test_loads_recover_when_the_owners_mover_is_killed(pair: LocalCluster) -> None:
    """The first one may cost what the peer would have given; nothing else, and later ones find the new mover by hello."""
    writer, reader = await pair.engine("a"), await pair.engine("b")
    first, second = pair.blocks.chain(8, root="first"), pair.blocks.chain(40, root="second")
    for fingerprints in (first, second):
        await writer.store(fingerprints, pair.blocks.data(fingerprints))
    await pair.wait_known("a")
    assert (await reader.load(first, into=pair.blocks.room(first))).count(LoadStatus.HIT_PEER) == 8
    os.kill(mover_of(pair, "a").pid, signal.SIGKILL)
    await eventually(
        lambda: mover_of(pair, "a").stats()["mover_starts"] == 2 and mover_of(pair, "a").pid != 0, what="restarted"
    )

    async def loaded() -> bool:
        into = pair.blocks.room(second)
        result = await reader.load(second, into=into)
        pair.blocks.check(second, into, result)
        return result.count(LoadStatus.HIT_PEER) + result.count(LoadStatus.HIT_LOCAL) == 40

    for _ in range(50):
        if await loaded():
            break
    else:
        pytest.fail("the new mover was never found")


async def test_start_says_what_is_missing_when_the_machine_has_no_rdma(directory: Path) -> None:
    if libucp.rdma_devices():
        pytest.skip("this machine has RDMA devices: the refusal cannot happen here")
    with pytest.raises(ConfigError, match=r"ucx: no RDMA device: looked for lanes rc, dc and srd"):
        async with local_cluster(directory, "a", transports=("ucx",)):
            pass

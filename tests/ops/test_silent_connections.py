"""A thousand connections that say nothing, at every port of real daemons: others are served, nothing grows with them."""

from __future__ import annotations

import contextlib
import resource
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvdir.testing.crowd import Cost, Crowd, open_files
from kvdir.testing.wait import eventually
from peer_agent.demo.processes import Child
from peer_agent.testing import sample_namespace
from peer_agent.testing.daemons import everything_answers, http_answers, started
from peer_agent.testing.processes import ProcessCluster

SILENT = 1_000
GROWTH_BYTES = 96 << 20
FEW = 192
"""Descriptors of a daemon that has too few."""


@pytest.fixture
async def cluster() -> AsyncIterator[ProcessCluster]:
    with tempfile.TemporaryDirectory(prefix="kvdir-test-", dir="/dev/shm") as path, open_files(8 * SILENT + 500):
        made = ProcessCluster(Path(path), sample_namespace(block_bytes=1 << 16))
        try:
            yield made
        finally:
            await made.close()


async def gives_back(child: Child, before: Cost) -> None:
    """Until it has about as many descriptors as before."""
    await eventually(
        lambda: Cost.of(child.pid).descriptors <= before.descriptors + 16, within_s=60.0, what="descriptors come back"
    )


def ports(coordinator: Child, agent: Child) -> list[str]:
    mine = [str(coordinator.ready[name]) for name in ("grpc", "http", "indexer", "health")]
    return [*mine, str(agent.ready["peer"]), str(agent.ready["http"]), str(agent.ready["data"])]


async def test_others_are_served_and_nothing_grows_when_a_thousand_connections_say_nothing(cluster: ProcessCluster) -> None:
    """At every port at once; and each closes them in its time, but for the indexer, which gives routers 75 s."""
    coordinator, agent = await started(cluster)
    await everything_answers(coordinator, agent)
    before = {pid: Cost.of(pid) for pid in (coordinator.pid, agent.pid)}
    with contextlib.ExitStack() as stack:
        crowds = [stack.enter_context(Crowd(address, SILENT)) for address in ports(coordinator, agent)]
        crowds.append(stack.enter_context(Crowd(coordinator.ready["grpc"], 50, saying=b"PRI * HTTP/2.0\r\n")))
        crowds.append(stack.enter_context(Crowd(coordinator.ready["http"], 50, saying=b"GET /metrics HT")))
        await everything_answers(coordinator, agent)
        for pid, cost in before.items():
            now = Cost.of(pid)
            assert now.rss_bytes < cost.rss_bytes + GROWTH_BYTES, "memory grows with silent connections"
            assert now.threads < cost.threads + 32, "threads grow with silent connections"
        next(crowd for crowd in crowds if crowd.address == coordinator.ready["indexer"]).close()
        for child in (coordinator, agent):
            await gives_back(child, before[child.pid])
    assert coordinator.running
    assert agent.running


async def test_daemons_live_and_recover_when_they_run_out_of_descriptors(cluster: ProcessCluster) -> None:
    """Probes answer meanwhile, nobody spins on accept, and when the crowd has left everything is as before."""
    few = ("sh", "-c", f'ulimit -n {FEW} && exec "$@"', "sh")
    coordinator, agent = await started(cluster, prefix=few)
    assert resource.prlimit(coordinator.pid, resource.RLIMIT_NOFILE) == (FEW, FEW)
    await everything_answers(coordinator, agent)
    began_s, before = time.monotonic(), {child: Cost.of(child.pid) for child in (coordinator, agent)}
    with contextlib.ExitStack() as stack:
        for address in ports(coordinator, agent):
            stack.enter_context(Crowd(address, 2 * FEW))
        await http_answers(f"http://{coordinator.ready['http']}/healthz")
        await http_answers(f"http://{agent.ready['http']}/healthz")
        await everything_answers(coordinator, agent)
        waited_s = max(1.0, time.monotonic() - began_s)
        for child, cost in before.items():
            assert Cost.of(child.pid).cpu_s - cost.cpu_s < 0.5 * waited_s + 1.0, "it spins"
    await everything_answers(coordinator, agent)
    for child, cost in before.items():
        await gives_back(child, cost)

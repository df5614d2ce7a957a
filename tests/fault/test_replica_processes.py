"""Real processes, real signals, and an engine that looks up in the replica all the while: it is answered, in time, and told the
truth about how old the answer is.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

import kvdir
from kvdir.client.attached import Attached
from kvdir.core.answer import Lookup
from kvdir.fingerprint import Fingerprints
from kvdir.location import StreamState
from kvdir.testing.wait import eventually
from peer_agent.testing import sample_namespace
from peer_agent.testing.processes import ProcessCluster

pytestmark = pytest.mark.slow

BLOCKS = 64
STALE_AFTER_S = 1.5
DEADLINE_S = 2.0
SLOWEST_S = DEADLINE_S + 1.0
"""Of a lookup that has a coordinator to ask, on a busy machine."""


@pytest.fixture
async def cluster() -> AsyncIterator[ProcessCluster]:
    with tempfile.TemporaryDirectory(prefix="kvdir-test-", dir="/dev/shm") as path:
        made = ProcessCluster(Path(path), sample_namespace())
        try:
            yield made
        finally:
            await made.close()


class Watcher:
    """Looks up every 2 ms in a thread of its own, and keeps what it saw: (when it asked, answer)."""

    def __init__(self, directory: Attached, digest: bytes, fingerprints: Fingerprints) -> None:
        self.seen: list[tuple[float, Lookup]] = []
        self.slowest_s = 0.0
        self.lookups = 0
        self._ask: Callable[[], Lookup] = lambda: directory.lookup(digest, fingerprints)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    @property
    def last(self) -> Lookup:
        return self.seen[-1][1]

    def _run(self) -> None:
        while not self._over.wait(0.002):
            began_s = time.monotonic()
            answer = self._ask()
            self.slowest_s = max(self.slowest_s, time.monotonic() - began_s)
            self.lookups += 1
            self.seen.append((began_s, answer))

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


@contextlib.contextmanager
def watching(cluster: ProcessCluster, coordinator: str, fingerprints: Fingerprints) -> Iterator[Watcher]:
    """An engine of node b."""
    path = str(cluster.directory / "b.replica")
    with (
        kvdir.attach(path, coordinators=coordinator, deadline_s=DEADLINE_S) as directory,
        Watcher(directory, cluster.namespace.digest, fingerprints) as watcher,
    ):
        yield watcher


async def started(cluster: ProcessCluster) -> tuple[str, Fingerprints]:
    """A coordinator, a with blocks, and b with a replica that knows them."""
    coordinator = await cluster.start_coordinator("--stale-after-s", str(STALE_AFTER_S))
    await cluster.start_agent("a", coordinator, "--arena-bytes", "4MiB")
    await cluster.start_agent("b", coordinator, "--arena-bytes", "4MiB", "--replica")
    fingerprints = cluster.blocks.chain(BLOCKS)
    engine = await cluster.engine("a")
    assert (await engine.store(fingerprints, cluster.blocks.data(fingerprints))).stored == BLOCKS
    await cluster.wait_known(coordinator, "a", BLOCKS)
    return coordinator, fingerprints


async def settled(watcher: Watcher, source: str) -> None:
    await eventually(
        lambda: watcher.seen and watcher.last.source == source and watcher.last.hits == BLOCKS,
        what=f"answers come from {source}; last: {watcher.seen[-1] if watcher.seen else None}",
    )


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
async def test_replica_answers_on_and_ages_visibly_when_its_coordinator_is_gone(
    cluster: ProcessCluster, number: signal.Signals
) -> None:
    coordinator, fingerprints = await started(cluster)
    with watching(cluster, coordinator, fingerprints) as watcher:
        await settled(watcher, "replica")
        gone_s = time.monotonic()
        os.kill(cluster.children["coordinator"].pid, number)
        await eventually(lambda: watcher.last.lag_s > 2.5, what="the lag grows")
        await eventually(lambda: watcher.last.nodes[0].state is StreamState.STALE, what="a is stale")
        stale = watcher.last
    assert stale.nodes[0].age_s > STALE_AFTER_S
    after = [(at_s, answer) for at_s, answer in watcher.seen if at_s > gone_s]
    assert {answer.source for _, answer in after} == {"replica"}
    assert all(answer.hits == BLOCKS for _, answer in after)
    assert all(answer.lag_s >= at_s - gone_s - 0.25 for at_s, answer in after), "an answer looks fresher than it can be"
    assert watcher.slowest_s < SLOWEST_S


async def test_coordinator_answers_while_the_agent_is_dead_and_the_replica_when_it_is_back(cluster: ProcessCluster) -> None:
    coordinator, fingerprints = await started(cluster)
    with watching(cluster, coordinator, fingerprints) as watcher:
        await settled(watcher, "replica")
        caught_up = len(watcher.seen)  # before, it may have been a few milliseconds behind what the coordinator knows
        more = cluster.blocks.chain(200, root="churn")
        engine = await cluster.engine("a")
        churn = asyncio.create_task(engine.store(more, cluster.blocks.data(more)))  # so that it dies at work
        await cluster.children["b"].kill()
        await churn
        await settled(watcher, "coordinator")
        await cluster.start_agent("b", coordinator, "--arena-bytes", "4MiB", "--replica")
        await settled(watcher, "replica")
    assert watcher.slowest_s < SLOWEST_S
    short = [answer for _, answer in watcher.seen[caught_up:] if answer.source != "none" and answer.hits != BLOCKS]
    assert not short, short[0]
    nobody = [answer for _, answer in watcher.seen if answer.source == "none"]
    assert not nobody, nobody[0].reason


async def test_coordinator_answers_while_the_agent_is_stopped(cluster: ProcessCluster) -> None:
    coordinator, fingerprints = await started(cluster)
    with watching(cluster, coordinator, fingerprints) as watcher:
        await settled(watcher, "replica")
        os.kill(cluster.children["b"].pid, signal.SIGSTOP)
        await settled(watcher, "coordinator")
        os.kill(cluster.children["b"].pid, signal.SIGCONT)
        await settled(watcher, "replica")
    assert watcher.slowest_s < SLOWEST_S


async def test_engine_of_another_release_is_told_so_and_asks_a_coordinator(cluster: ProcessCluster) -> None:
    """The layout number in the header is what tells releases apart; here it is another one."""
    coordinator, fingerprints = await started(cluster)
    path = cluster.directory / "b.replica"
    with kvdir.attach(str(path), coordinators=coordinator) as directory:
        await eventually(lambda: directory.lookup(cluster.namespace.digest, fingerprints).source == "replica")
    await cluster.children["b"].kill()
    with path.open("r+b") as file:
        file.seek(8)
        file.write(b"\x63\0\0\0")
    with kvdir.attach(str(path), coordinators=coordinator) as directory:
        answer = directory.lookup(cluster.namespace.digest, fingerprints, deadline_s=5.0)
        assert (answer.source, answer.hits) == ("coordinator", BLOCKS)
        assert "release" in directory.replica.reason or "version" in directory.replica.reason, directory.replica.reason

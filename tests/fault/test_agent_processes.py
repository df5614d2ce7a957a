"""Real processes, real signals: agents, engines and the coordinator are killed and stopped in the middle of things.

Whatever happens: every load ends by its deadline, every block counted as hit has the right bytes, and memory comes back.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvdir.fingerprint import Fingerprints
from peer_agent.client import aio
from peer_agent.core.effects import LoadStatus
from peer_agent.testing import sample_namespace
from peer_agent.testing.processes import ProcessCluster
from peer_agent.testing.timing import PROMPT_S, took

pytestmark = pytest.mark.slow

SLACK_S = 1.0
"""For a busy machine: beyond its deadline, a load may take this long to be scheduled."""


async def timed_load(cluster: ProcessCluster, engine: aio.Engine, fingerprints: Fingerprints, *, deadline_s: float):
    """(result, seconds); asserts that every hit has the right bytes and that the deadline was kept."""
    result, took_s = await cluster.load(engine, fingerprints, deadline_s=deadline_s)
    assert took_s < deadline_s + SLACK_S, f"took {took_s:.2f} s, the deadline was {deadline_s} s"
    return result, took_s


@pytest.fixture
async def cluster() -> AsyncIterator[ProcessCluster]:
    with tempfile.TemporaryDirectory(prefix="kvdir-test-", dir="/dev/shm") as path:
        made = ProcessCluster(Path(path), sample_namespace(block_bytes=1 << 20))
        try:
            yield made
        finally:
            await made.close()


@pytest.mark.parametrize("transports", ["shm", "tcp"])
async def test_load_ends_with_verified_blocks_when_the_owner_is_killed_in_the_middle(cluster: ProcessCluster, transports: str):
    coordinator = await cluster.start_coordinator()
    small_chunks = ("--arena-bytes", "100MiB", "--transports", transports, "--max-chunk-bytes", "1MiB")
    for node in ("owner", "reader"):
        await cluster.start_agent(node, coordinator, *small_chunks)
    fingerprints = cluster.blocks.chain(80)
    owner, reader = await cluster.engine("owner", deadline_s=10), await cluster.engine("reader")
    assert (await owner.store(fingerprints, cluster.blocks.data(fingerprints))).stored == 80
    await cluster.wait_known(coordinator, "owner", 80)
    load = asyncio.ensure_future(timed_load(cluster, reader, fingerprints, deadline_s=3.0))
    await cluster.wait_inventory("reader", lambda held: held.committed + held.reserved > 0 or load.done())
    await cluster.children["owner"].kill()
    result, _ = await load
    assert result.count(LoadStatus.CORRUPT) == 0
    await cluster.wait_inventory("reader", lambda held: held.quarantined == held.reserved == 0)

    # The same arena path is taken over by the next owner, and reads go on.
    await cluster.start_agent("owner", coordinator, *small_chunks)
    again = await cluster.engine("owner", deadline_s=10)
    fresh = cluster.blocks.chain(5, root="fresh")
    assert (await again.store(fresh, cluster.blocks.data(fresh))).stored == 5
    await cluster.wait_known(coordinator, "owner", 5)
    for _ in range(50):  # the reader's circuit breaker skips the node for a second
        result, _ = await timed_load(cluster, reader, fresh, deadline_s=1.0)
        if result.hits == 5:
            break
        await asyncio.sleep(0.05)
    assert result.hits == 5


async def test_load_ends_at_once_when_the_only_owner_is_killed_during_it(cluster: ProcessCluster):
    coordinator = await cluster.start_coordinator()
    for node in ("owner", "reader"):
        await cluster.start_agent(node, coordinator, "--arena-bytes", "16MiB", "--transports", "tcp")
    fingerprints = cluster.blocks.chain(8)
    owner, reader = await cluster.engine("owner"), await cluster.engine("reader")
    await owner.store(fingerprints, cluster.blocks.data(fingerprints))
    await cluster.wait_known(coordinator, "owner", 8)
    warm, _ = await timed_load(cluster, reader, fingerprints.slice(0, 1), deadline_s=2)
    assert warm.hits == 1
    os.kill(cluster.children["owner"].pid, signal.SIGSTOP)  # so that the load is certainly unfinished when the kill comes
    load = asyncio.ensure_future(cluster.load(reader, fingerprints, deadline_s=10.0))
    await asyncio.wait({load}, timeout=0.1)
    assert not load.done()
    os.kill(cluster.children["owner"].pid, signal.SIGKILL)
    (result, _), seconds = await took(load)
    assert result.count(LoadStatus.MISS) == 7
    assert seconds <= PROMPT_S
    await cluster.wait_inventory("reader", lambda held: held.quarantined == held.reserved == 0)


async def test_blocks_are_late_by_the_deadline_when_the_owner_is_stopped(cluster: ProcessCluster):
    coordinator = await cluster.start_coordinator()
    for node in ("owner", "reader"):
        more = ("--transports", "tcp", "--breaker-s", "8", "--breaker-max-s", "8")
        await cluster.start_agent(node, coordinator, "--arena-bytes", "16MiB", *more)
    fingerprints = cluster.blocks.chain(8)
    owner, reader = await cluster.engine("owner"), await cluster.engine("reader")
    await owner.store(fingerprints, cluster.blocks.data(fingerprints))
    await cluster.wait_known(coordinator, "owner", 8)
    warm, _ = await timed_load(cluster, reader, fingerprints.slice(0, 1), deadline_s=2)
    assert warm.hits == 1
    os.kill(cluster.children["owner"].pid, signal.SIGSTOP)
    result, took_s = await timed_load(cluster, reader, fingerprints, deadline_s=3.0)
    assert result.count(LoadStatus.HIT_LOCAL) == 1
    assert result.count(LoadStatus.LATE) == 7
    assert took_s > 2.0
    # It is skipped now: no second load pays for it.
    _, took_s = await timed_load(cluster, reader, fingerprints, deadline_s=6.0)
    assert took_s < 4.0
    os.kill(cluster.children["owner"].pid, signal.SIGCONT)
    until_s = time.monotonic() + 30
    while result.hits < 8 and time.monotonic() < until_s:
        result, _ = await timed_load(cluster, reader, fingerprints, deadline_s=1.0)
    assert result.hits == 8


async def test_agents_restate_what_they_hold_when_the_coordinator_was_killed(cluster: ProcessCluster):
    coordinator = await cluster.start_coordinator()
    for node in ("owner", "reader"):
        await cluster.start_agent(node, coordinator, "--arena-bytes", "16MiB")
    fingerprints = cluster.blocks.chain(8)
    owner, reader = await cluster.engine("owner"), await cluster.engine("reader")
    await owner.store(fingerprints, cluster.blocks.data(fingerprints))
    await cluster.wait_known(coordinator, "owner", 8)
    await cluster.children["coordinator"].kill()
    result, _ = await timed_load(cluster, reader, fingerprints, deadline_s=0.5)
    assert (result.hits, result.directory_reached) == (0, False)
    assert (await owner.load(fingerprints, into=cluster.blocks.room(fingerprints))).hits == 8, "local service goes on"
    await cluster.start_coordinator(listen=coordinator)
    await cluster.wait_known(coordinator, "owner", 8)
    until_s = time.monotonic() + 15
    while result.hits < 8 and time.monotonic() < until_s:
        result, _ = await timed_load(cluster, reader, fingerprints, deadline_s=1.0)
    assert result.hits == 8


ENGINE = """
import sys, asyncio, json
from kvdir.namespace import Namespace
from peer_agent.client import aio
from peer_agent.testing import Blocks
async def main():
    fields = json.loads(open(sys.argv[1]).read())
    namespace = Namespace.create(**fields)
    engine = await aio.connect(sys.argv[2], namespace=namespace, engine="doomed")
    attachment = engine._session()
    with attachment.storing():
        request = attachment.reserve_request(Blocks(namespace).chain(6), lease_s=float(sys.argv[3]))
        reserved = await engine._rpc("Reserve", request, asyncio.get_running_loop().time() + 5)
        print("reserved", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        memory = Blocks(namespace).data(Blocks(namespace).chain(6))
        from peer_agent.client.buffers import memory_of
        source = memory_of(memory, count=6, block_bytes=namespace.block_bytes, writable=False)
        commit = attachment.write(reserved, source, count=6, until_s=asyncio.get_running_loop().time() + 5)
        answer = await engine._rpc("Commit", commit, asyncio.get_running_loop().time() + 5)
        print("committed", answer.committed, flush=True)
asyncio.run(main())
"""


@contextlib.contextmanager
def doomed_engine(cluster: ProcessCluster, lease_s: float):
    """An engine in a process of its own that has reserved 6 slots and waits for a line before it writes and commits."""
    arguments = [str(cluster.namespace_file), str(cluster.children["owner"].ready["engine"]), str(lease_s)]
    command = [sys.executable, "-c", ENGINE, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        assert engine.stdout.readline() == "reserved\n"
        try:
            yield engine
        finally:
            engine.kill()


async def test_slots_come_back_when_an_engine_is_killed_between_reserve_and_commit(cluster: ProcessCluster):
    await cluster.start_agent("owner", "127.0.0.1:1", "--arena-bytes", "8MiB")
    with doomed_engine(cluster, 30.0) as engine:
        await cluster.wait_inventory("owner", lambda held: held.reserved == 6)
        engine.kill()
        await cluster.wait_inventory("owner", lambda held: held.reserved == held.quarantined == 0)
    assert (await cluster.inventory("owner")).committed == 0


async def test_slots_of_a_stopped_engine_are_not_reused_until_it_has_finished(cluster: ProcessCluster):
    await cluster.start_agent("owner", "127.0.0.1:1", "--arena-bytes", "8MiB")
    with doomed_engine(cluster, 0.1) as stopped:
        os.kill(stopped.pid, signal.SIGSTOP)
        await cluster.wait_inventory("owner", lambda held: held.quarantined == 6)
        engine = await cluster.engine("owner")
        others = cluster.blocks.chain(6, root="others")
        assert (await engine.store(others, cluster.blocks.data(others))).stored == 1, "7 slots, 6 of them unusable"
        os.kill(stopped.pid, signal.SIGCONT)
        assert stopped.stdin is not None
        assert stopped.stdout is not None
        stopped.stdin.write("\n")
        stopped.stdin.flush()
        assert await asyncio.to_thread(stopped.stdout.readline) == "committed 0\n"
        await cluster.wait_inventory("owner", lambda held: held.quarantined == 0)
        assert (await engine.store(others, cluster.blocks.data(others))).stored == 5
        result, _ = await timed_load(cluster, engine, others, deadline_s=2)
        assert result.hits == 6


async def test_store_ends_by_its_deadline_and_slots_come_back_when_the_agent_was_stopped(cluster: ProcessCluster):
    await cluster.start_agent("owner", "127.0.0.1:1", "--arena-bytes", "8MiB")
    engine = await cluster.engine("owner")
    fingerprints = cluster.blocks.chain(6)
    data = cluster.blocks.data(fingerprints)
    os.kill(cluster.children["owner"].pid, signal.SIGSTOP)
    began_s = time.monotonic()
    result = await engine.store(fingerprints, data, deadline_s=0.3)
    assert time.monotonic() - began_s < 0.3 + SLACK_S
    assert (result.stored, bool(result.reason)) == (0, True)
    os.kill(cluster.children["owner"].pid, signal.SIGCONT)  # it may grant slots now, to a call that nobody waits for
    await cluster.wait_inventory("owner", lambda held: held.reserved == held.quarantined == held.committed == 0)
    assert (await engine.store(fingerprints, data, deadline_s=5)).stored == 6
    result, _ = await timed_load(cluster, engine, fingerprints, deadline_s=2)
    assert result.hits == 6


def run_agent(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "peer_agent", "serve", "--http-listen", "", "--listen", "127.0.0.1:0", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


async def test_start_is_refused_with_exit_3_when_shared_memory_is_too_small(cluster: ProcessCluster):
    stats = os.statvfs("/dev/shm")
    too_much = str(stats.f_blocks * stats.f_frsize + (1 << 30))
    common = ("--namespaces", str(cluster.namespace_file), "--arena-path", str(cluster.directory / "big"))
    for more in ((), ("--dry-run",)):
        ended = await asyncio.to_thread(run_agent, *common, "--arena-bytes", too_much, *more)
        assert ended.returncode == 3
        assert "bytes are free in" in ended.stderr
        assert not (cluster.directory / "big").exists()


async def test_start_lists_every_fault_at_once_when_the_config_is_wrong(cluster: ProcessCluster):
    file = cluster.directory / "agent.toml"
    file.write_text('arena_byte = 5\nlog_level = "loud"\nmax_locks = -1\n')
    ended = await asyncio.to_thread(run_agent, "--config", str(file), "--event-loss", "x")
    assert ended.returncode == 3
    for words in ("unknown key 'arena_byte'; did you mean 'arena_bytes'?", "event-loss", "'x' is not a number"):
        assert words in ended.stderr
    ended = await asyncio.to_thread(run_agent, "--log-level", "loud", "--max-locks", "-1", "--transports", "rdma")
    assert ended.returncode == 3
    for words in ("'loud' is not one of", "max_locks: must be positive", "namespaces: at least one", "transports: rdma"):
        assert words in ended.stderr


async def test_sigterm_ends_with_0_and_leaves_nothing_behind(cluster: ProcessCluster):
    child = await cluster.start_agent("owner", "127.0.0.1:1", "--arena-bytes", "8MiB")
    await cluster.engine("owner")
    assert await child.end(grace_s=10) == 0
    assert not [name for name in os.listdir(cluster.directory) if name.startswith("owner") and not name.endswith(".log")]

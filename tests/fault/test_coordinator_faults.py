"""The coordinator as a process: drain, restart, kill, freeze, a port that is taken."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator

import pytest

from kvdir.client.aio import DirectoryClient
from kvdir.errors import DeadlineExceeded, KvdirError, Unavailable
from kvdir.testing.fake_node import FakeNode, some_fingerprints
from kvdir.testing.wait import eventually

BLOCKS = some_fingerprints(200)
FLAGS = ("--heartbeat-interval-ms", "100", "--stale-after-s", "2", "--grace-s", "3")


class Process:
    """A running `kvdir serve`."""

    def __init__(self, process: asyncio.subprocess.Process, ready: dict[str, str]) -> None:
        self.process = process
        self.address = ready["grpc"]
        self.http = ready["http"]

    async def end(self, number: signal.Signals = signal.SIGTERM, *, within_s: float = 15.0) -> int:
        self.process.send_signal(number)
        async with asyncio.timeout(within_s):
            return await self.process.wait()


async def start(*flags: str) -> asyncio.subprocess.Process:
    env = {name: value for name, value in os.environ.items() if not name.startswith("KVDIR_")}
    env["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvdir", "serve", "--output", "json", *FLAGS, *flags,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=env,
    )  # fmt: skip


@contextlib.asynccontextmanager
async def serving(listen: str = "127.0.0.1:0") -> AsyncIterator[Process]:
    process = await start("--listen", listen, "--http-listen", "127.0.0.1:0")
    assert process.stdout is not None
    assert process.stderr is not None
    drained = asyncio.create_task(process.stderr.read())
    try:
        async with asyncio.timeout(20):
            line = await process.stdout.readline()
        yield Process(process, json.loads(line))
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await drained


def _readyz(http: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{http}/readyz", timeout=5) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


async def test_streams_end_and_the_process_exits_when_sigterm_drains() -> None:
    async with serving() as coordinator, FakeNode(coordinator.address, "n1") as node:
        node.store(BLOCKS)
        await node.synced()
        assert await coordinator.end() == 0
        await eventually(lambda: not node.publisher.stats().connected)
        async with DirectoryClient(coordinator.address, deadline_s=1.0) as client:
            with pytest.raises(Unavailable):
                await client.status()


async def test_agent_resyncs_by_snapshot_when_the_coordinator_restarts() -> None:
    async with serving() as first, FakeNode(first.address, "n1") as node:
        node.store(BLOCKS)
        await node.synced()
        await first.end(signal.SIGKILL)
        node.remove(BLOCKS.slice(0, 50))  # while nobody listens
        async with serving(first.address) as second, DirectoryClient(second.address, deadline_s=5.0) as client:
            await node.synced()
            answer = await client.lookup(node.digest, BLOCKS)
            assert [(run.start, run.count) for run in answer] == [(50, 150)]
            (view,) = await client.nodes()
            assert (view.snapshots, view.trust.epoch) == (1, node.epoch)
            assert view.holdings[0].blocks.require_trusted() == 150


async def test_readiness_says_warming_when_a_node_has_not_restated() -> None:
    async with serving() as coordinator:
        status, words = await asyncio.to_thread(_readyz, coordinator.http)
        assert (status, words.partition(":")[0]) == (503, "warming")
        async with FakeNode(coordinator.address, "n1") as node, DirectoryClient(coordinator.address) as client:
            await node.synced()
            deadline_s = asyncio.get_running_loop().time() + 20
            while (await client.status()).warming:
                assert asyncio.get_running_loop().time() < deadline_s
            while (await asyncio.to_thread(_readyz, coordinator.http))[0] != 200:
                assert asyncio.get_running_loop().time() < deadline_s


async def test_client_ends_by_its_deadline_and_agent_returns_when_the_coordinator_freezes() -> None:
    async with serving() as coordinator, FakeNode(coordinator.address, "n1") as node:
        node.store(BLOCKS)
        await node.synced()
        async with DirectoryClient(coordinator.address, deadline_s=5.0) as client:
            assert (await client.lookup(node.digest, BLOCKS)).hits == 200
            coordinator.process.send_signal(signal.SIGSTOP)
            try:
                loop = asyncio.get_running_loop()
                started_s = loop.time()
                with pytest.raises((DeadlineExceeded, Unavailable)):
                    await client.lookup(node.digest, BLOCKS, deadline_s=0.3)
                assert loop.time() - started_s < 2.0
                node.remove(BLOCKS.slice(0, 10))
            finally:
                coordinator.process.send_signal(signal.SIGCONT)
            await node.synced()
            assert (await client.lookup(node.digest, BLOCKS)).hits == 190


async def test_exit_code_and_message_name_the_address_when_the_port_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for flag, other in (("--listen", "--http-listen"), ("--http-listen", "--listen")):
            process = await start(flag, address, other, "127.0.0.1:0")
            async with asyncio.timeout(20):
                out, error = await process.communicate()
            assert process.returncode == 3
            assert address in json.loads(out)["error"]
            assert "give another port" in error.decode()


async def test_second_signal_skips_the_grace_when_the_first_is_still_draining() -> None:
    async with serving() as coordinator:
        coordinator.process.send_signal(signal.SIGINT)
        assert await coordinator.end(signal.SIGINT) == 0


async def test_newer_agent_wins_when_both_reconnect_after_a_restart() -> None:
    """A coordinator that restarted knows nobody: whoever registers last has the name, the other is told."""
    async with serving() as coordinator, FakeNode(coordinator.address, "twin", epoch=5) as older:
        await older.synced()
        async with FakeNode(coordinator.address, "twin", epoch=4) as newer:
            await newer.synced()
            await eventually(lambda: older.fenced)
            with contextlib.suppress(KvdirError):
                await coordinator.end(signal.SIGKILL)
            async with serving(coordinator.address):
                await newer.synced()
                assert older.fenced
                assert not newer.fenced

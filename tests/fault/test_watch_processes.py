"""A replica of a coordinator that is a process of its own: stopped, killed, started again, behind lookup workers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvdir.cli.bench_process import CoordinatorProcess, coordinator_process
from kvdir.client.replica_reader import ReplicaReader
from kvdir.testing.fake_node import EXAMPLE_NAMESPACE, FakeNode, some_fingerprints
from kvdir.testing.wait import eventually
from kvdir.testing.watching import replicating

BLOCKS = some_fingerprints(1_000, width=16)
MORE = some_fingerprints(100, width=16, seed=1)


def hits(reader: ReplicaReader) -> int:
    return reader.lookup(EXAMPLE_NAMESPACE.digest, BLOCKS).hits


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@contextlib.asynccontextmanager
async def serving_process(*flags: str) -> AsyncIterator[CoordinatorProcess]:
    """Started and ended beside the loop, which has a replica to keep."""
    process = coordinator_process(*flags)
    try:
        yield await asyncio.to_thread(process.__enter__)
    finally:
        await asyncio.to_thread(process.__exit__, None, None, None)


@pytest.mark.parametrize("flags", [(), ("--lookup-workers", "1")])
async def test_replica_gives_up_a_stopped_coordinator_and_goes_on_without_a_snapshot(
    flags: tuple[str, ...], tmp_path: Path
) -> None:
    async with (
        serving_process(*flags) as coordinator,
        FakeNode(coordinator.address, "a") as a,
        replicating(coordinator.address, tmp_path / "region", silence_s=1.0) as (replica, reader),
    ):
        a.store(BLOCKS)
        await eventually(lambda: hits(reader) == 1_000)
        os.kill(coordinator.pid, signal.SIGSTOP)
        try:
            await eventually(lambda: not replica.figures().connected)
            assert hits(reader) == 1_000
            assert replica.figures().lag_s > 0.9
        finally:
            os.kill(coordinator.pid, signal.SIGCONT)
        a.store(MORE)
        await eventually(lambda: replica.figures().blocks == 1_100)
        figures = replica.figures()
        assert (figures.snapshots, figures.faults) == (1, 0)
        assert figures.resumes >= 1


async def test_region_is_served_until_the_copy_of_the_restarted_coordinator_is_whole(tmp_path: Path) -> None:
    address = free_address()
    async with FakeNode(address, "a") as a, replicating(address, tmp_path / "region") as (replica, reader):
        a.store(BLOCKS)
        async with serving_process("--listen", address) as coordinator:
            await eventually(lambda: hits(reader) == 1_000)
            os.kill(coordinator.pid, signal.SIGKILL)
            await eventually(lambda: not replica.figures().connected)
        assert hits(reader) == 1_000
        seen = set()

        def anew() -> bool:
            answer = reader.lookup(EXAMPLE_NAMESPACE.digest, BLOCKS)
            seen.add((answer.hits, answer.reason))
            return replica.figures().snapshots == 2 and replica.figures().lag_s < 1.0 and not replica.figures().warming

        async with serving_process("--listen", address):
            await eventually(anew)
            await eventually(lambda: hits(reader) == 1_000)
        assert {count for count, _ in seen} == {1_000}, f"hits vanished while the coordinator restarted: {seen}"

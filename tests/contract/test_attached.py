"""`kvdir.attach` against a real coordinator: shared memory first, then a call, then nobody, and no wait beyond the deadline."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time

import pytest

import kvdir
from kvdir.client.attached import PAUSE_S, Attached
from kvdir.client.replica_reader import ReplicaReader
from kvdir.core.region_roster import RegionRoster
from kvdir.core.roster import Beat
from kvdir.errors import TooLarge
from kvdir.fingerprint import Fingerprints
from kvdir.testing.fake_node import EXAMPLE_NAMESPACE, some_fingerprints
from kvdir.testing.fake_region import FakeReader, FakeRegion
from kvdir.testing.served import Served, batch, publishing, said, serving, stored

DIGEST = EXAMPLE_NAMESPACE.digest
BLOCKS = some_fingerprints(16)
NOWHERE = "127.0.0.1:1"


async def ask(attached: Attached, blocks: Fingerprints = BLOCKS) -> kvdir.Lookup:
    """In a thread: the coordinator answers from this loop."""
    return await asyncio.to_thread(attached.lookup, DIGEST, blocks, deadline_s=5.0)


async def fill(served: Served, call: object) -> None:
    await call.write(batch(1, stored(BLOCKS)))  # type: ignore[attr-defined]
    await said(call, "ack")


async def test_coordinator_answers_when_there_is_no_region() -> None:
    async with serving() as served, publishing(served) as call:
        await fill(served, call)
        with kvdir.attach("/dev/shm/kvdir-nobody.replica", coordinators=served.address) as attached:
            answer = await ask(attached)
            assert (answer.hits, answer.source, answer.lag_s, answer.reason) == (16, "coordinator", 0.0, "")
            assert not attached.replica.usable


async def test_region_of_a_directory_answers_without_a_call() -> None:
    region = FakeRegion()
    async with serving() as served, publishing(served) as call:
        directory = served.coordinator.directory
        roster = RegionRoster(region)
        directory.add_mirror(roster, now_s=time.monotonic())
        await fill(served, call)
        truth = await ask(Attached(ReplicaReader("/none"), coordinators=served.address))
        node = directory.nodes["raw"].stream
        assert node is not None
        (holder,) = node.holders.values()
        region.index.store(BLOCKS.packed, BLOCKS.width, scope=holder.namespace.scope, holder=holder.number, now_s=1)
        now_ns = time.monotonic_ns()
        roster.beat(Beat(beat_ns=now_ns, as_of_ns=now_ns))
        with Attached(ReplicaReader("/r", open_region=lambda _: FakeReader(region)), coordinators=NOWHERE) as attached:
            answer = attached.lookup(DIGEST, BLOCKS)
    assert (answer.source, answer.runs, answer.sets) == ("replica", truth.runs, truth.sets)
    assert [(node.node, node.epoch, node.state) for node in answer.nodes] == [
        (node.node, node.epoch, node.state) for node in truth.nodes
    ]


def test_nobody_answers_and_says_why_when_nothing_is_there() -> None:
    with kvdir.attach("/dev/shm/kvdir-nobody.replica", coordinators=NOWHERE, deadline_s=0.3) as attached:
        began_s = time.monotonic()
        answer = attached.lookup(DIGEST, BLOCKS)
        assert (answer.source, answer.hits, answer.asked) == ("none", 0, 16)
        assert "kvdir-nobody.replica" in answer.reason
        assert NOWHERE in answer.reason
        until_s = time.monotonic() + PAUSE_S / 2
        calls = 0
        while time.monotonic() < until_s and calls < 1000:
            assert attached.lookup(DIGEST, BLOCKS).source == "none"
            calls += 1
        assert calls == 1000, "coordinators that do not answer cost every lookup their deadline"
        assert time.monotonic() - began_s < 2.0
    assert attached.lookup(DIGEST, BLOCKS).reason == "this was closed"


async def test_unknown_namespace_is_an_answer_and_too_many_fingerprints_are_an_error() -> None:
    async with serving() as served:
        with kvdir.attach("/none", coordinators=served.address) as attached:
            answer = await ask(attached)
            assert answer.source == "none"
            assert "no node here serves namespace" in answer.reason
            async with publishing(served):
                with pytest.raises(TooLarge):
                    await ask(attached, Fingerprints(bytes(8 * 5000), 8))


async def test_child_makes_connections_of_its_own_after_a_fork() -> None:
    async with serving() as served, publishing(served) as call:
        await fill(served, call)
        attached = Attached(ReplicaReader("/none"), coordinators=served.address)
        assert (await ask(attached)).hits == 16
        mine = attached._client
        attached._pid -= 1  # what a child finds
        assert (await ask(attached)).hits == 16
        assert attached._client is not mine
        assert attached._pid == os.getpid()
        attached.close()
        assert mine is not None
        mine.close()


def test_attach_imports_neither_grpc_nor_asyncio() -> None:
    code = (
        "import sys, kvdir; a = kvdir.attach('/none'); "
        "assert not {'grpc', 'asyncio', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=20)

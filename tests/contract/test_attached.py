"""`kvdir.attach` against a real coordinator: shared memory first, then a call, then nobody, and no wait beyond the deadline."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

import kvdir
from kvdir.client.attached import PAUSE_S, Attached, _after_fork
from kvdir.client.replica_reader import ReplicaReader
from kvdir.core.region_roster import RegionRoster
from kvdir.core.roster import Beat, NamespaceRecord
from kvdir.errors import TooLarge
from kvdir.fingerprint import Fingerprints
from kvdir.index import RegionIndex, create_region
from kvdir.location import NodeTrust, StreamState, Tier
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
            region.torn = True
            partial = await asyncio.to_thread(attached.lookup, DIGEST, BLOCKS)
        torn = Attached(ReplicaReader("/r", open_region=lambda _: FakeReader(region)), coordinators=served.address)
        assert ((await ask(torn)).source, (await ask(torn)).hits) == ("coordinator", 16)
        torn.close()
    assert (partial.source, partial.incomplete) == ("replica", True)
    assert "changing some of these entries" in partial.reason
    assert NOWHERE in partial.reason
    assert (answer.source, answer.runs, answer.sets) == ("replica", truth.runs, truth.sets)
    assert [(node.node, node.epoch, node.state) for node in answer.nodes] == [
        (node.node, node.epoch, node.state) for node in truth.nodes
    ]


async def test_one_who_gives_no_time_does_not_keep_others_from_the_coordinators() -> None:
    async with serving() as served, publishing(served) as call:
        await fill(served, call)
        with kvdir.attach("/none", coordinators=served.address) as attached:
            hurried = await asyncio.to_thread(attached.lookup, DIGEST, BLOCKS, deadline_s=0.0)
            assert (hurried.source, hurried.hits) == ("none", 0)
            assert ((await ask(attached)).source, (await ask(attached)).hits) == ("coordinator", 16)


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


async def test_unknown_namespace_is_an_answer_and_too_many_fingerprints_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it took to say so: who answers is asked again at once."""
    monkeypatch.setattr("kvdir.client.attached.FAIR_S", 0.0)
    async with serving() as served:
        with kvdir.attach("/none", coordinators=served.address) as attached:
            answer = await ask(attached)
            assert answer.source == "none"
            assert "no node here serves namespace" in answer.reason
            async with publishing(served) as call:
                await said(call, "welcome")  # it is served from now on
                with pytest.raises(TooLarge):
                    pytest.fail((await ask(attached, Fingerprints(bytes(8 * 5000), 8))).reason)


async def test_child_makes_connections_of_its_own_after_a_fork() -> None:
    async with serving() as served, publishing(served) as call:
        await fill(served, call)
        attached = Attached(ReplicaReader("/none"), coordinators=served.address)
        assert (await ask(attached)).hits == 16
        mine = attached._client
        with attached._connecting:  # as a thread of the parent may
            _after_fork()  # in the child
            assert (await ask(attached)).hits == 16
            assert attached._client is not mine
            attached.close()
        assert mine is not None
        mine.close()


FORK = """
import os, sys
import kvdir
from kvdir.testing.fake_node import EXAMPLE_NAMESPACE, some_fingerprints

attached = kvdir.attach(sys.argv[1], dead_after_s=60.0)
def hits():
    return attached.lookup(EXAMPLE_NAMESPACE.digest, some_fingerprints(16)).hits
assert hits() == 16
child = os.fork()
if not child:
    os._exit(0 if hits() == 16 else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def test_child_looks_up_in_the_same_mapping_after_a_fork(tmp_path: Path) -> None:
    region = create_region(tmp_path / "region")
    filled_region(region)
    subprocess.run([sys.executable, "-c", FORK, str(tmp_path / "region")], check=True, timeout=20)
    region.close()


async def test_threads_look_up_while_regions_come_and_go(tmp_path: Path) -> None:
    """Each answer is of one whole region, or nobody's while there is none; nothing is unmapped under a lookup."""
    path = str(tmp_path / "region")
    attached = kvdir.attach(path, dead_after_s=60.0)
    over = threading.Event()
    seen: list[Counter[tuple[str, int]]] = []

    def ask_on() -> None:
        counts: Counter[tuple[str, int]] = Counter()
        seen.append(counts)
        while not over.is_set():
            answer = attached.lookup(DIGEST, BLOCKS)
            counts[answer.source, answer.hits] += 1
            assert not answer.fault()

    threads = [threading.Thread(target=ask_on) for _ in range(4)]
    for thread in threads:
        thread.start()
    region = create_region(path)
    for number in range(24):
        if number % 8 == 7:
            region.close()
            region = create_region(path)
        successor = region.successor()
        filled_region(successor)
        successor.publish()
        region.close()
        region = successor
        await asyncio.sleep(0.005)
    over.set()
    for thread in threads:
        thread.join()
    region.close()
    total = sum(seen, Counter())
    assert set(total) <= {("replica", 16), ("none", 0)}, total
    assert total["replica", 16] > 100


def filled_region(region: RegionIndex) -> None:
    roster = RegionRoster(region)
    scope = int.from_bytes(DIGEST[:8], "little")
    roster.put_namespace(NamespaceRecord(DIGEST, "example", 1, 1))
    trust = NodeTrust("n", 1, StreamState.SYNCED, "", 0.0, 0, "")
    roster.put_node(0, trust, heard_s=time.monotonic(), hidden=False)
    roster.put_holder(0, 0, Tier.CPU, visible=True)
    region.store(BLOCKS.packed, BLOCKS.width, scope=scope, holder=0, now_s=1)
    now_ns = time.monotonic_ns()
    roster.beat(Beat(beat_ns=now_ns, as_of_ns=now_ns))


def test_attach_imports_neither_grpc_nor_asyncio() -> None:
    code = (
        "import sys, kvdir; a = kvdir.attach('/none'); "
        "assert not {'grpc', 'asyncio', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=20)

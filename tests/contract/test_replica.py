"""A replica against real coordinators: equal answers, fail-over, resuming, ageing, and feeds that make no sense."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from kvdir.client import replica as replica_module
from kvdir.client.replica import Replica
from kvdir.client.replica_reader import ReplicaReader
from kvdir.core.answer import Lookup
from kvdir.core.feed_items import (
    Beat,
    End,
    HolderItem,
    Item,
    NamespaceItem,
    NodeItem,
    Page,
    Response,
    SnapshotEnd,
    Stored,
    Welcome,
)
from kvdir.core.namespaces import Announced
from kvdir.fingerprint import Fingerprints
from kvdir.index import RegionError
from kvdir.location import NodeTrust, StreamState, Tier
from kvdir.rpc.watch_codec import decode_start, encode_item, encode_response
from kvdir.testing.fake_node import EXAMPLE_NAMESPACE, FakeNode, some_fingerprints
from kvdir.testing.served import FAST_CONFIG, serving
from kvdir.testing.wait import eventually
from kvdir.testing.watching import replicating
from kvdir.v1 import directory_pb2

DIGEST = EXAMPLE_NAMESPACE.digest
BLOCKS = some_fingerprints(300, width=16)


def ask(reader: ReplicaReader, blocks: Fingerprints = BLOCKS) -> Lookup:
    return reader.lookup(DIGEST, blocks)


def held(answer: Lookup) -> set[tuple[int, str, Tier]]:
    """(position, node, tier)"""
    return {
        (at, answer.nodes[node].node, tier)
        for run in answer
        for node, tier in run.holders
        for at in range(run.start, run.start + run.count)
    }


async def test_replica_answers_like_its_coordinator_when_nodes_store_and_remove(tmp_path: Path) -> None:
    async with serving() as served, FakeNode(served.address, "a") as a, FakeNode(served.address, "b") as b:
        a.store(BLOCKS.slice(0, 200))
        await a.synced()
        async with replicating(served.address, tmp_path / "region") as (replica, reader):
            await eventually(lambda: ask(reader).hits == 200, what="the snapshot")
            b.store(BLOCKS.slice(100, 200), Tier.DISK)
            a.remove(BLOCKS.slice(0, 50))
            await a.synced()
            await b.synced()
            await eventually(lambda: len(held(ask(reader))) == 350, what="the changes")
            here, there = ask(reader), await served.client.lookup(DIGEST, BLOCKS)
            assert held(here) == held(there)
            assert {(n.node, n.epoch, n.state, n.peer_address) for n in here.nodes} == {
                (n.node, n.epoch, n.state, n.peer_address) for n in there.nodes
            }
            assert here.source == "replica"
            assert here.lag_s < 5.0
            figures = replica.figures()
            assert (figures.snapshots, figures.complete, figures.nodes, figures.faults) == (1, True, 2, 0)
            assert served.coordinator.watching.figures.snapshots == 1


async def test_nothing_is_left_of_the_region_when_the_replica_was_cancelled(tmp_path: Path) -> None:
    async with serving() as served, FakeNode(served.address, "a") as a:
        a.store(BLOCKS)
        await a.synced()
        async with replicating(served.address, tmp_path / "region") as (_, reader):
            await eventually(lambda: ask(reader).hits == 300)
        await eventually(lambda: ask(reader).source == "none")
        assert not (tmp_path / "region").exists()
        await eventually(lambda: not served.coordinator.watching.calls)


async def test_replica_goes_on_without_a_snapshot_when_its_call_was_ended(tmp_path: Path) -> None:
    async with (
        serving() as served,
        FakeNode(served.address, "a") as a,
        replicating(served.address, tmp_path / "region") as (replica, reader),
    ):
        a.store(BLOCKS.slice(0, 100))
        await eventually(lambda: ask(reader).hits == 100)
        for call in served.coordinator.watching.calls:
            call.watcher.end("for a test")
        a.store(BLOCKS.slice(100, 100))
        await eventually(lambda: ask(reader).hits == 200)
        assert (replica.figures().snapshots, replica.figures().resumes) == (1, 1)
        assert "for a test" in replica.figures().last_error or replica.figures().connected


async def test_replica_serves_on_and_takes_another_coordinator_when_its_own_is_gone(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as first, serving() as second:
        one = await first.enter_async_context(serving())
        a = await first.enter_async_context(FakeNode(one.address, "a"))
        async with FakeNode(second.address, "a", epoch=a.epoch) as twin:
            a.store(BLOCKS)
            twin.store(BLOCKS)
            await a.synced()
            await twin.synced()
            async with replicating([one.address, second.address], tmp_path / "region", name="") as (replica, reader):
                await eventually(lambda: ask(reader).hits == 300)
                await first.aclose()
                twin.store(some_fingerprints(10, width=16, seed=1))
                more = some_fingerprints(10, width=16, seed=1)
                seen = []

                def taken() -> bool:
                    answer = ask(reader)
                    seen.append((answer.hits, answer.reason))
                    return ask(reader, more).hits == 10

                await eventually(taken)
                assert {hits for hits, _ in seen} == {300}, f"hits vanished for the fail-over: {set(seen)}"
                assert replica.figures().snapshots == 2


async def test_lag_and_ages_grow_and_nodes_become_stale_when_the_only_coordinator_is_gone(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        served = await stack.enter_async_context(serving())
        a = await stack.enter_async_context(FakeNode(served.address, "a"))
        a.store(BLOCKS)
        await a.synced()
        async with replicating(served.address, tmp_path / "region") as (replica, reader):
            await eventually(lambda: ask(reader).hits == 300 and ask(reader).nodes[0].state is StreamState.SYNCED)
            await stack.aclose()
            await eventually(lambda: ask(reader).lag_s > 1.3, what="the lag grows")
            answer = ask(reader)
            assert answer.hits == 300
            assert answer.nodes[0].state in (StreamState.STALE, StreamState.FENCED)  # the latter if it still said goodbye
            assert answer.nodes[0].age_s > 1.0
            await eventually(lambda: not replica.figures().connected and replica.figures().last_error)


async def test_only_the_namespaces_asked_for_are_replicated_when_there_are_others(tmp_path: Path) -> None:
    other = dataclasses.replace(EXAMPLE_NAMESPACE, model="another")
    async with (
        serving() as served,
        FakeNode(served.address, "a") as a,
        FakeNode(served.address, "b", namespace=other) as b,
    ):
        a.store(BLOCKS)
        b.store(BLOCKS)
        await a.synced()
        await b.synced()
        async with replicating(served.address, tmp_path / "region", digests=[DIGEST]) as (replica, reader):
            await eventually(lambda: ask(reader).hits == 300)
            b.store(some_fingerprints(10, width=16, seed=1))
            a.store(some_fingerprints(10, width=16, seed=1))
            await eventually(lambda: ask(reader, some_fingerprints(10, width=16, seed=1)).hits == 10)
            assert replica.figures().blocks == 310
            assert reader.lookup(other.digest, BLOCKS).source == "none"


async def test_path_is_refused_when_another_replica_writes_there(tmp_path: Path) -> None:
    first = Replica("127.0.0.1:1", path=tmp_path / "region")
    first.open()
    with pytest.raises(RegionError, match="has a writer already"):
        Replica("127.0.0.1:1", path=tmp_path / "region").open()
    first.close()
    second = Replica("127.0.0.1:1", path=tmp_path / "region")
    second.open()
    second.close()


async def test_answers_say_incomplete_when_the_region_has_no_room_for_everything(tmp_path: Path) -> None:
    many = some_fingerprints(400_000, width=16)
    async with serving() as served, FakeNode(served.address, "a") as a:
        a.store(many)
        await a.synced()
        async with replicating(served.address, tmp_path / "region", max_bytes=6 * 2**20) as (replica, reader):
            await eventually(lambda: ask(reader, many.slice(0, 10)).source == "replica")
            assert ask(reader, many.slice(0, 10)).incomplete
            assert replica.figures().lost_blocks > 0
            assert replica.figures().connected


async def test_replica_loses_what_its_coordinator_evicts_and_says_incomplete(tmp_path: Path) -> None:
    config = dataclasses.replace(FAST_CONFIG, max_index_bytes=2**18)
    async with serving(config) as served, FakeNode(served.address, "a") as a:
        first = some_fingerprints(8_000, width=16)
        a.store(first)
        await a.synced()
        async with replicating(served.address, tmp_path / "region") as (replica, reader):
            await eventually(lambda: replica.figures().complete)
            for seed in range(1, 5):
                a.store(some_fingerprints(2_500, width=16, seed=seed))
            await a.synced()
            index = served.coordinator.directory.index
            newest = some_fingerprints(2_500, width=16, seed=4).slice(1_500, 1_000)
            await eventually(lambda: ask(reader, newest).hits > 700 and replica.figures().blocks == index.stats().blocks)
            assert index.stats().blocks < 18_000
            await eventually(lambda: ask(reader, newest).incomplete)
            for blocks in (newest, first.slice(0, 4_000)):
                assert held(ask(reader, blocks)) == held(await served.client.lookup(DIGEST, blocks))
            assert replica.figures().lost_blocks == 0


# -- feeds that make no sense --------------------------------------------------------------------------------------------

TRUST = NodeTrust("a", 7, StreamState.SYNCED, "", 0.0, 0, "a:1", 1.0)
ANNOUNCED = Announced(DIGEST, EXAMPLE_NAMESPACE.canonical().encode(), EXAMPLE_NAMESPACE.block_bytes)
WHO: list[Item] = [NamespaceItem(ANNOUNCED), NodeItem(3, TRUST, False), HolderItem(5, 3, DIGEST, 2, True)]
KEY = (1).to_bytes(8, "little")
PAGE = Page(KEY, bytes(4), bytes(4), ((5).to_bytes(4, "little"),), 1)
WHOLE: list[Item] = [*WHO, PAGE, SnapshotEnd(1)]

NONSENSE = {
    "a holder that was not told": [*WHOLE, Stored(6, bytes(8))],
    "half a block": [*WHOLE, Stored(5, bytes(7))],
    "a holder that is somebody else": [*WHOLE, HolderItem(5, 3, DIGEST, 3, True)],
    "a node that is not known": [*WHOLE, HolderItem(8, 9, DIGEST, 2, True)],
    "a namespace that is not known": [*WHOLE, HolderItem(8, 3, bytes(32), 2, True)],
    "a page behind the end": [*WHOLE, PAGE],
    "a page twice": [*WHO, PAGE, PAGE, SnapshotEnd(2)],
    "a page that counts wrongly": [*WHO, PAGE._replace(done=4), SnapshotEnd(1)],
    "an end that counts wrongly": [*WHO, PAGE, SnapshotEnd(2)],
    "a page of a set that is not there": [*WHO, PAGE._replace(sets=(9).to_bytes(4, "little")), SnapshotEnd(1)],
    "a page cut short": [*WHO, PAGE._replace(ages=b""), SnapshotEnd(1)],
    "a node out of range": [*WHOLE, NodeItem(2**16, TRUST, False)],
    "a holder out of range": [*WHO, HolderItem(2**31, 3, DIGEST, 2, True), Stored(2**31, bytes(8))],
}


class Liar:
    """A coordinator that sends what a test wrote, with every call the next script, and the last one again and again."""

    def __init__(self, *scripts: list[bytes]) -> None:
        self.scripts = scripts
        self.starts: list[tuple[int, int]] = []
        """Log and position that each call went on from."""

    @property
    def calls(self) -> int:
        return len(self.starts)

    async def watch(self, request_iterator: Any, context: Any) -> None:
        script = self.scripts[min(self.calls, len(self.scripts) - 1)]
        start = decode_start(await context.read())
        self.starts.append((start.log_id, start.position))
        for message in script:
            await context.write(message)
        while await context.read() is not grpc.aio.EOF:
            pass


@contextlib.asynccontextmanager
async def lying(liar: Liar, *, method: str = "Watch") -> AsyncIterator[str]:
    server = grpc.aio.server()
    handler: Any = grpc.stream_stream_rpc_method_handler(
        liar.watch, request_deserializer=directory_pb2.WatchRequest.FromString, response_serializer=None
    )
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("kvdir.v1.Directory", {method: handler})])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


WELCOME = Welcome(coordinator="liar", log_id=9, seed=1, blocks=1, beat_interval_s=0.1, stale_after_s=60.0, expire_after_s=600.0)
BYE = encode_response(Response(end=End("going down")))


def said(*items: Item, **terms: Any) -> list[bytes]:
    """A welcome, the items, and a beat."""
    welcome = dataclasses.replace(WELCOME, **terms)
    beat = encode_response(Response(position=1, beat=Beat(1, 0.0, False, False, 1)))
    return [encode_response(Response(welcome=welcome)), *map(encode_item, items), beat]


@pytest.mark.parametrize("name", NONSENSE)
async def test_replica_begins_anew_and_is_not_trusted_meanwhile_when_the_feed_makes_no_sense(name: str, tmp_path: Path) -> None:
    liar = Liar(said(*NONSENSE[name]), said(*WHOLE, log_id=10))
    async with lying(liar) as address, replicating(address, tmp_path / "region") as (replica, _):
        await eventually(lambda: replica.figures().complete and liar.calls >= 2 and replica.figures().connected, what=name)
        assert replica.figures().faults == 1
        assert replica.figures().blocks == 1
        assert replica.figures().snapshots == 2


async def test_nodes_lose_their_trust_at_once_when_the_feed_made_no_sense(tmp_path: Path) -> None:
    liar = Liar([*said(*WHOLE), encode_item(Stored(6, bytes(8)))], [])
    async with lying(liar) as address, replicating(address, tmp_path / "region", silence_s=30.0) as (replica, reader):
        await eventually(lambda: replica.figures().faults == 1)
        await eventually(lambda: liar.calls == 2)
        trust = only_node(reader)
        assert trust.state is StreamState.GAP
        assert "replica in doubt" in trust.reason


def only_node(reader: ReplicaReader) -> NodeTrust:
    region = reader.region()
    beat = region.beat() if region else None
    assert region is not None
    assert beat is not None
    ((trust, _),) = region.nodes(beat, beat.beat_ns)
    return trust


async def test_copy_in_doubt_is_not_gone_on_with_when_the_next_call_was_ended_too_soon(tmp_path: Path) -> None:
    again = encode_response(Response(welcome=WELCOME))
    liar = Liar([*said(*WHOLE), encode_item(Stored(6, bytes(8)))], [again, BYE], said(*WHOLE, log_id=10))
    async with lying(liar) as address, replicating(address, tmp_path / "region") as (replica, _):
        await eventually(lambda: replica.figures().complete and liar.calls == 3 and replica.figures().connected)
        assert liar.starts == [(0, 0)] * 3


async def test_served_copy_keeps_its_trust_and_place_when_a_copy_beside_it_makes_no_sense(tmp_path: Path) -> None:
    resumed = said(snapshot=False)
    liar = Liar([*said(*WHOLE), BYE], said(*WHO, PAGE, PAGE, log_id=10), resumed)
    async with lying(liar) as address, replicating(address, tmp_path / "region") as (replica, reader):
        await eventually(lambda: replica.figures().resumes == 1)
        assert replica.figures().faults == 1
        assert liar.starts == [(0, 0), (9, 1), (9, 1)]
        assert only_node(reader).state is StreamState.SYNCED


async def test_snapshot_is_asked_for_when_what_comes_next_cannot_be_read(tmp_path: Path) -> None:
    liar = Liar([*said(*WHOLE), b"\xff\xff\xff"], said(*WHOLE, log_id=10))
    async with lying(liar) as address, replicating(address, tmp_path / "region") as (replica, _):
        await eventually(lambda: replica.figures().snapshots == 2)
        assert liar.starts == [(0, 0)] * 2


async def test_silence_has_an_end_when_the_coordinator_means_to_send_no_beats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_module, "PATIENCE_MAX_S", 0.3)
    liar = Liar(said(*WHOLE, beat_interval_s=1e6))
    async with lying(liar) as address, replicating(address, tmp_path / "region", silence_s=0.2) as (replica, _):
        await eventually(lambda: liar.calls == 2)
        assert "nothing heard for 0.3 s" in replica.figures().last_error or replica.figures().connected


async def test_replica_tries_again_when_a_snapshot_is_larger_than_any_region(tmp_path: Path) -> None:
    liar = Liar(said(*WHOLE, blocks=2**63), said(*WHOLE))
    async with lying(liar) as address, replicating(address, tmp_path / "region") as (replica, _):
        await eventually(lambda: replica.figures().complete)
        assert liar.calls == 2


@pytest.mark.parametrize("script", [[b"\xff\xff\xff"], [encode_item(Stored(1, b""))], []])
async def test_replica_tries_again_when_the_coordinator_speaks_nonsense_or_nothing(script: list[bytes], tmp_path: Path) -> None:
    liar = Liar(script, said(*WHOLE))
    async with lying(liar) as address, replicating(address, tmp_path / "region", silence_s=0.3) as (replica, _):
        await eventually(lambda: replica.figures().complete)
        assert liar.calls == 2


async def test_reason_is_the_coordinators_own_when_it_refuses_to_be_watched(tmp_path: Path) -> None:
    async with lying(Liar(), method="Other") as address, replicating(address, tmp_path / "region") as (replica, _):
        for calls in range(1, 4):
            await eventually(lambda: replica.figures().calls > calls)  # noqa: B023
            assert "Method not found" in replica.figures().last_error


def test_log_says_once_what_is_wrong_when_coordinators_take_turns_at_failing(caplog: pytest.LogCaptureFixture) -> None:
    replica = Replica("127.0.0.1:1,127.0.0.1:2", path="/none")
    with caplog.at_level("INFO", "kvdir.replica"):
        for address in ["127.0.0.1:1", "127.0.0.1:2"] * 3:
            replica._failed(address, f"{address}: refused")
        replica._failed("127.0.0.1:1", "going down")
    assert [record.fields["error"] for record in caplog.records] == [
        "127.0.0.1:1: refused",
        "127.0.0.1:2: refused",
        "127.0.0.1:1: going down",
    ]


async def test_lag_is_infinite_when_no_coordinator_was_ever_there(tmp_path: Path) -> None:
    async with replicating("127.0.0.1:1", tmp_path / "region") as (replica, reader):
        await eventually(lambda: replica.figures().last_error)
        assert math.isinf(replica.figures().lag_s)
        assert ask(reader).source == "none"

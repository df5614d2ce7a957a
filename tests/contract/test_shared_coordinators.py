"""Coordinators over one store: any of them answers for all, streams go from one to another, what cannot be done is said."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest

from kvdir.client.standby import Standby
from kvdir.core.answer import Lookup
from kvdir.core.feedback import Feedback, StaleReport
from kvdir.errors import InvalidInput, KvdirError, TooLarge, UnknownNamespace, Unsupported
from kvdir.fingerprint import Fingerprints
from kvdir.location import MinTrust, StreamState, Tier
from kvdir.store.base import Change, ChangeKind, StoreFull, StoreUnavailable, Writer
from kvdir.store.memory import Blocks, MemoryBlockStore
from kvdir.testing.fake_node import EXAMPLE_NAMESPACE, FakeNode, some_fingerprints
from kvdir.testing.shared import Shared, shared
from kvdir.testing.wait import eventually
from kvdir.v1 import directory_pb2, directory_pb2_grpc

DIGEST = EXAMPLE_NAMESPACE.digest


@contextlib.asynccontextmanager
async def two(blocks: Blocks, **settings: Any) -> AsyncIterator[tuple[Shared, Shared]]:
    """Two coordinators over one store."""
    async with shared(MemoryBlockStore(blocks), "a", **settings) as a, shared(MemoryBlockStore(blocks), "b", **settings) as b:
        yield a, b


async def hits(at: Shared, fingerprints: Fingerprints) -> int:
    return (await at.client.lookup(DIGEST, fingerprints)).hits


async def until_hits(at: Shared, fingerprints: Fingerprints, expected: int) -> Lookup:
    end_s = time.monotonic() + 10
    while time.monotonic() < end_s:
        answer = await at.client.lookup(DIGEST, fingerprints)
        if answer.hits == expected:
            return answer
    raise AssertionError(f"not within 10 s: {expected} hits, there are {answer.hits}")


def get(address: str, path: str) -> str:
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=5) as response:
            return str(response.read().decode())
    except urllib.error.HTTPError as error:
        return str(error.read().decode())


async def test_any_coordinator_answers_with_trust_for_what_was_published_to_another():
    blocks, fingerprints = Blocks(), some_fingerprints(100)
    async with two(blocks) as (a, b):
        async with FakeNode(a.address, "n") as node:
            node.store(fingerprints)
            await node.synced()
            assert await hits(a, fingerprints) == 100
            await eventually(lambda: b.held("n") == 100, what="b has read that n is whole")
            answer = await b.client.lookup(DIGEST, fingerprints, min_trust=MinTrust.SYNCED)
            (trust,) = answer.nodes
            assert (answer.hits, trust.node, trust.epoch, trust.state) == (100, "n", node.epoch, StreamState.SYNCED)
            assert (trust.peer_address, trust.confirmed) == ("n:7500", 1.0)
            assert trust.age_s < 1.0
            node.remove(fingerprints.slice(0, 40))
            await node.synced()
            assert await hits(b, fingerprints) == 60
            (view,) = await b.client.nodes()
            assert view.trust.node == "n"
            assert (await b.client.status()).streams_synced == 1
        await eventually(lambda: _state(b, "n") is StreamState.STALE, what="n is stale when nobody hears it")
        await eventually(lambda: _reason(b, "n").startswith("not heard"), what="and b says why")
        await until_hits(b, fingerprints, 0)


def _state(at: Shared, node: str) -> StreamState | None:
    views = at.coordinator.link.fleet.views(at.coordinator.now_s())
    return next((view.trust.state for view in views if view.trust.node == node), None)


def _reason(at: Shared, node: str) -> str:
    views = at.coordinator.link.fleet.views(at.coordinator.now_s())
    return next((view.trust.reason for view in views if view.trust.node == node), "")


async def test_losses_are_repaired_by_replay_when_the_ring_reaches_back():
    blocks = Blocks()
    async with shared(MemoryBlockStore(blocks)) as a, FakeNode(a.address, "n", loss=0.3) as node:
        await node.synced()
        for seed in range(60):
            node.store(some_fingerprints(3, seed=seed))
            await asyncio.sleep(0.002)
        await node.synced()
        stats = node.publisher.stats()
        assert stats.lost_events > 0
        assert stats.snapshots == 0
        assert await hits(a, Fingerprints.of(sorted(node.held[Tier.CPU]))) == 180


async def test_stream_goes_on_at_another_coordinator_without_a_snapshot_when_its_own_dies():
    blocks, fingerprints, standby = Blocks(), some_fingerprints(100), Standby()
    async with shared(MemoryBlockStore(blocks), "b") as b, shared(MemoryBlockStore(blocks), "a") as a:
        node = FakeNode(a.address, "n", standby=standby)
        other = node.also(b.address, standby)
        async with node, other:
            pair = (node, other), (other, node)
            await eventually(lambda: any(map(_settled, pair)), what="one of them speaks, the other stands by")
            speaker, _ = next(filter(_settled, pair))
            beats = speaker.publisher.stats().heartbeats
            await eventually(lambda: speaker.publisher.stats().heartbeats > beats + 3, what="and so it stays")
            assert node.publisher.stats().calls + other.publisher.stats().calls <= 5  # nobody takes turns
            node.store(fingerprints)
            await speaker.synced()
            at, left = (a, other) if speaker is node else (b, node)
            for connection in at.coordinator.connections:
                connection.end()
            at.coordinator.draining = True
            node.store(some_fingerprints(5, seed=1))
            await left.synced(within_s=5)
            assert left.publisher.stats().snapshots == 0
            await eventually(lambda: not _speaks(speaker), what="one speaks")
            assert await hits(a, fingerprints) == await hits(b, fingerprints) == 100


def _settled(pair: tuple[FakeNode, FakeNode]) -> bool:
    speaker, other = (node.publisher.stats() for node in pair)
    return speaker.state is StreamState.SYNCED and other.standby


def _speaks(node: FakeNode) -> bool:
    return node.publisher.stats().connected


async def test_newer_epoch_fences_the_older_when_they_publish_to_different_coordinators():
    blocks, old_blocks, new_blocks = Blocks(), some_fingerprints(10), some_fingerprints(10, seed=1)
    async with two(blocks) as (a, b), FakeNode(a.address, "n") as old:
        old.store(old_blocks)
        await old.synced()
        async with FakeNode(b.address, "n") as new:
            new.store(new_blocks)
            await new.synced()
            await eventually(lambda: bool(old.fenced), what="the older one is told")
            assert f"epoch {new.epoch:016x} of node n registered later" in old.fenced
            await until_hits(a, new_blocks, 10)
            assert await hits(a, old_blocks) == await hits(b, old_blocks) == 0
            async with FakeNode(a.address, "n", epoch=old.epoch) as again:
                await eventually(lambda: bool(again.fenced), what="a late hello of the older one is refused")
            assert not new.fenced


async def test_blocks_vanish_at_once_when_the_owner_says_goodbye():
    blocks, fingerprints = Blocks(), some_fingerprints(10)
    async with two(blocks) as (a, b):
        async with FakeNode(a.address, "n") as node:
            node.store(fingerprints)
            await node.synced()
            await until_hits(b, fingerprints, 10)
            node.publisher.leave()
            await eventually(lambda: _state(b, "n") is StreamState.FENCED, what="b has read that n left")
            assert await hits(a, fingerprints) == await hits(b, fingerprints) == 0
        async with FakeNode(b.address, "n", epoch=node.epoch) as again:
            await eventually(lambda: bool(again.fenced), what="the epoch is over")


async def test_lookups_answer_in_time_and_events_wait_when_the_store_is_away():
    blocks, fingerprints = Blocks(), some_fingerprints(50)
    async with shared(MemoryBlockStore(blocks)) as a, FakeNode(a.address, "n") as node:
        await node.synced()  # from its beginning, so that what follows can be resumed at once
        node.store(fingerprints)
        await node.synced()
        acked = node.publisher.stats().acked_seq
        blocks.fault = StoreUnavailable("it is down")
        await eventually(lambda: bool(a.coordinator.link.away), what="the coordinator knows")
        for _ in range(5):
            began_s = time.monotonic()
            answer = await a.client.lookup(DIGEST, fingerprints)
            assert (answer.hits, answer.warming, answer.incomplete) == (0, True, True)
            assert time.monotonic() - began_s < 0.5
        node.store(some_fingerprints(5, seed=1))
        await eventually(lambda: "the store is away: it is down" in node.publisher.stats().last_error, what="the agent is told")
        assert node.publisher.stats().acked_seq == acked
        assert "the store is away: it is down" in await asyncio.to_thread(get, a.http, "/readyz")
        status = await a.client.status()
        assert (status.store, status.store_fault, status.warming) == ("redis://the-test-gives-one", "it is down", True)
        metrics = await asyncio.to_thread(get, a.http, "/metrics")
        assert "kvdir_store_up 0.0" in metrics
        assert 'kvdir_store_rpc_calls_total{method="nodes",code="store-unavailable"}' in metrics
        blocks.fault = None
        await node.synced()
        assert node.publisher.stats().snapshots == 0
        await until_hits(a, fingerprints, 50)
        assert (await asyncio.to_thread(get, a.http, "/readyz")).startswith("ok")


async def test_streams_restate_when_the_store_was_emptied():
    blocks, fingerprints = Blocks(), some_fingerprints(50)
    store = MemoryBlockStore(blocks)
    async with shared(store) as a, FakeNode(a.address, "n") as node:
        await node.synced()
        node.store(fingerprints)
        await node.synced()
        store.blocks = Blocks()
        node.store(some_fingerprints(1, seed=1))
        await eventually(lambda: node.publisher.stats().snapshots == 1, what="the node restates")
        await node.synced()
        assert await hits(a, fingerprints) == 50


async def test_namespaces_are_told_to_the_new_store_when_the_old_one_was_emptied():
    store = MemoryBlockStore(Blocks())
    async with shared(store) as a, FakeNode(a.address, "n") as node:
        node.store(some_fingerprints(5))
        await node.synced()
        store.blocks = emptied = Blocks()
        await eventually(lambda: DIGEST in emptied.namespaces, what="the new store knows the namespace")
        await node.synced()
        async with shared(MemoryBlockStore(emptied), "late") as late:
            await until_hits(late, some_fingerprints(5), 5)


class ForgetfulStore(MemoryBlockStore):
    """Does not take the first description of a namespace."""

    refused = 0

    async def put_namespace(self, digest: bytes, record: bytes, *, deadline_s: float) -> None:
        if not self.refused:
            self.refused += 1
            raise StoreUnavailable("not now")
        await super().put_namespace(digest, record, deadline_s=deadline_s)


async def test_namespace_is_told_to_the_others_when_the_first_try_failed():
    blocks = Blocks()
    store = ForgetfulStore(blocks)
    async with shared(store) as a, FakeNode(a.address, "n") as node:
        await node.synced()
        assert (store.refused, set(blocks.namespaces)) == (1, {DIGEST})


class SlowToTell(MemoryBlockStore):
    """Takes a moment to say which namespaces there are."""

    async def namespaces(self, *, deadline_s: float) -> dict[bytes, bytes]:
        found = await super().namespaces(deadline_s=deadline_s)
        await asyncio.sleep(0.02)
        return found


async def test_no_lookup_is_refused_when_several_ask_for_a_namespace_that_another_coordinator_has_just_heard_of():
    blocks, fingerprints = Blocks(), some_fingerprints(3)
    async with (
        shared(SlowToTell(blocks), "b") as b,
        shared(MemoryBlockStore(blocks), "a") as a,
        FakeNode(a.address, "n") as node,
    ):
        node.store(fingerprints)
        await node.synced()
        b.coordinator.link.namespaces.keep(())  # as if b had not read of it yet
        answers = await asyncio.gather(*(b.client.lookup(DIGEST, fingerprints) for _ in range(8)))
        assert all(answer.asked == 3 for answer in answers)


async def test_lookup_is_answered_without_hits_when_the_store_is_away_and_the_namespace_unknown():
    blocks = Blocks()
    async with shared(MemoryBlockStore(blocks)) as a:
        blocks.fault = StoreUnavailable("it is down")
        for _ in range(3):
            answer = await a.client.lookup(DIGEST, some_fingerprints(3))
            assert (answer.hits, answer.incomplete) == (0, True)


async def test_what_the_store_lost_alone_is_found_by_the_owners_counts():
    blocks, fingerprints = Blocks(), some_fingerprints(50)
    async with shared(MemoryBlockStore(blocks)) as a, FakeNode(a.address, "n") as node:
        await node.synced()
        node.store(fingerprints)
        await node.synced()
        (number,) = blocks.roster.holders
        scope = EXAMPLE_NAMESPACE.digest[:8]
        blocks.index.remove(fingerprints.packed[:320], 32, scope=int.from_bytes(scope, "little"), holder=number)
        a.coordinator.sessions["n"].stream.retracted((DIGEST, int(Tier.CPU)), 10)  # asks now instead of in RECOUNT_S
        await eventually(lambda: node.publisher.stats().snapshots == 1, what="the node restates")
        await node.synced()
        assert await hits(a, fingerprints) == 50


async def test_holder_that_a_failover_brought_back_answers_no_more_when_the_store_was_away():
    blocks, removed = Blocks(), some_fingerprints(50)
    async with shared(MemoryBlockStore(blocks)) as a, FakeNode(a.address, "n") as node:
        await node.synced()
        node.store(removed)
        await node.synced()
        ((number, line),) = blocks.roster.holders.items()
        node.remove(removed)
        await node.synced()
        blocks.numbers += 1
        back = blocks.numbers
        blocks.relist({back: replace(line, number=back)})
        scope = int.from_bytes(DIGEST[:8], "little")
        blocks.index.store(removed.packed, 32, scope=scope, holder=back, now_s=0)
        assert await hits(a, removed) == 50
        blocks.fault = StoreUnavailable("it fails over")
        node.store(some_fingerprints(1, seed=1))
        await eventually(lambda: "it fails over" in a.coordinator.sessions["n"].stream.stalled, what="the session has seen it")
        blocks.fault = None
        await until_hits(a, removed, 0)
        assert set(blocks.roster.holders) == {number}


class FullStore(MemoryBlockStore):
    """Takes no more blocks than `room`, as a Redis that evicts nothing."""

    room = 20

    async def write(self, writer: Writer, changes: list[Change], *, deadline_s: float) -> tuple[int, ...]:  # type: ignore[override]
        stored = sum(len(change.packed) // change.width for change in changes if change.kind is ChangeKind.STORE)
        held = self.blocks.index.stats().blocks
        if held + stored > self.room:
            raise StoreFull("its maxmemory of 20 blocks is used up")
        return await super().write(writer, changes, deadline_s=deadline_s)


async def test_removals_go_on_and_the_stream_says_why_when_the_store_is_full():
    blocks, fingerprints = Blocks(), some_fingerprints(20)
    store = FullStore(blocks)
    async with shared(store, replay_idle_s=0.2) as a, FakeNode(a.address, "n") as node:
        node.store(fingerprints)
        await node.synced()
        node.store(some_fingerprints(5, seed=1))
        node.remove(fingerprints.slice(0, 10))
        await eventually(lambda: "the store is full" in _reason(a, "n"), what="the stream is untrusted, with the reason")
        await until_hits(a, fingerprints, 10)
        assert a.coordinator.rejected["store-full"] >= 1
        assert node.publisher.stats().connected
        store.room = 1000
        await node.synced()
        assert await hits(a, fingerprints) == 10
        assert await hits(a, some_fingerprints(5, seed=1)) == 5


async def test_report_of_a_reader_counts_wherever_it_arrives():
    blocks, fingerprints = Blocks(), some_fingerprints(10)
    async with (
        two(blocks, heartbeat_interval_ms=1000, stale_after_s=5, expire_after_s=10) as (a, b),
        FakeNode(a.address, "n") as node,
    ):
        node.store(fingerprints)
        await node.synced()
        await eventually(lambda: b.held("n") == 10, what="b knows n")
        beats = node.publisher.stats().heartbeats
        await eventually(lambda: node.publisher.stats().heartbeats > beats, what="the next heartbeat is a second away")

        def report(count: int, **fields: int) -> StaleReport:
            fields = {"epoch": node.epoch, "owner_seq": node.outbox.last_seq, **fields}
            some = fingerprints.slice(0, count)
            return StaleReport("n", fields["epoch"], fields["owner_seq"], DIGEST, int(Tier.CPU), some)

        assert await b.client.report_stale(report(2, epoch=1)) == Feedback(0, "old epoch")
        assert await b.client.report_stale(report(2, owner_seq=0)) == Feedback(0, "coordinator a may have heard a newer store")
        node.forget(fingerprints.slice(0, 3))
        assert await b.client.report_stale(report(2)) == Feedback(2)
        assert await a.client.report_stale(report(3)) == Feedback(1)
        assert await hits(a, fingerprints) == await hits(b, fingerprints) == 7
        await eventually(lambda: node.publisher.stats().heartbeats > beats + 1, what="the owner counts as the store does")
        assert _state(a, "n") is StreamState.SYNCED


async def test_reader_that_was_wrong_costs_a_restatement_and_no_block():
    blocks, fingerprints = Blocks(), some_fingerprints(10)
    async with shared(MemoryBlockStore(blocks)) as a, FakeNode(a.address, "n") as node:
        node.store(fingerprints)
        await node.synced()
        wrong = StaleReport("n", node.epoch, node.outbox.last_seq, DIGEST, int(Tier.CPU), fingerprints.slice(0, 2))
        assert (await a.client.report_stale(wrong)).removed == 2
        await until_hits(a, fingerprints, 10)


async def test_refuses_as_a_coordinator_with_a_directory_of_its_own():
    async with shared(MemoryBlockStore()) as a, FakeNode(a.address, "n") as node:
        await node.synced()
        with pytest.raises(UnknownNamespace, match="known: example"):
            await a.client.lookup(b"x" * 32, some_fingerprints(1))
        with pytest.raises(TooLarge, match="max_fingerprints is 4096"):
            await a.client.lookup(DIGEST, some_fingerprints(4097))


async def test_who_left_makes_room_when_there_are_as_many_nodes_as_may_be():
    async with shared(MemoryBlockStore(), max_streams=2) as a, FakeNode(a.address, "one") as one:
        await one.synced()
        async with FakeNode(a.address, "two") as two:
            await two.synced()
            async with FakeNode(a.address, "three") as three:
                await eventually(lambda: "max_streams" in three.publisher.stats().last_error, what="there is no room")
                two.publisher.leave()
                await three.synced()
        assert {view.trust.node for view in await a.client.nodes()} == {"one", "three"}


async def test_says_who_can_when_it_cannot():
    blocks = Blocks()
    async with two(blocks) as (a, b), FakeNode(a.address, "n") as node:
        node.store(some_fingerprints(3))
        await node.synced()
        await eventually(lambda: b.held("n") == 3, what="b knows n")
        for asked in (a.client.story(node="n"), a.client.quotas()):
            with pytest.raises(Unsupported, match="not with --store"):
                await asked
        with pytest.raises(KvdirError, match="not with --store"):
            async for _ in a.client.dump():
                pass
        with pytest.raises(InvalidInput, match="published last to coordinator a of this store: ask that one"):
            await b.client.reconcile("n")
        with pytest.raises(InvalidInput, match="no live node 'm'"):
            await b.client.reconcile("m")
        before = node.publisher.stats().snapshots
        assert (await a.client.reconcile("n")).done
        assert node.publisher.stats().snapshots > before  # a snapshot that comes too late is asked for again
        async with grpc.aio.insecure_channel(a.address) as channel:
            call = directory_pb2_grpc.DirectoryStub(channel).Watch()
            start = directory_pb2.WatchRequest(start=directory_pb2.WatchStart(protocol_version=1, watcher="w"))
            with contextlib.suppress(grpc.aio.AioRpcError):  # the answer may be here before it
                await call.write(start)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call.read()
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


class SlowStore(MemoryBlockStore):
    """Takes `pause_s` for every write; counts how many are under way."""

    pause_s = 0.02
    running = most = 0

    async def write(self, writer: Writer, changes: list[Change], *, deadline_s: float) -> tuple[int, ...]:  # type: ignore[override]
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(self.pause_s)
        self.running -= 1
        return await super().write(writer, changes, deadline_s=deadline_s)


async def test_streams_go_side_by_side_and_one_streams_writes_in_order_when_the_store_is_slow():
    store = SlowStore()
    async with shared(store) as a:
        nodes = [FakeNode(a.address, f"n{number}", seed=number) for number in range(3)]
        for node in nodes:
            await node.__aenter__()
        try:
            for seed in range(40):
                for node in nodes:
                    node.store(some_fingerprints(2, seed=seed))
                    node.remove(some_fingerprints(2, seed=seed - 1))
                await asyncio.sleep(0.001)
            for node in nodes:
                await node.synced()
        finally:
            for node in nodes:
                await node.__aexit__(None, None, None)
        assert store.most == 3
        assert await hits(a, some_fingerprints(2, seed=39)) == 2
        assert sum([await hits(a, some_fingerprints(2, seed=seed)) for seed in range(39)]) == 0


async def test_stream_is_repaired_when_it_never_rests():
    store = SlowStore()
    store.pause_s = 0.1
    async with shared(store, stale_after_s=5.0) as a, FakeNode(a.address, "n") as node:
        await node.synced()
        over = asyncio.Event()

        async def publish() -> None:
            for seed in itertools.count():
                if over.is_set():
                    return
                node.store(some_fingerprints(1, seed=seed))
                await asyncio.sleep(0.005)

        publishing = asyncio.create_task(publish())
        try:
            session = a.coordinator.sessions["n"]
            await eventually(lambda: not session.idle, what="it is busy")
            session.stream.cursor.damage("something was not understood", now_s=time.monotonic())
            await eventually(lambda: node.publisher.stats().snapshots == 1, within_s=10, what="it is asked to restate")
            await eventually(lambda: session.stream.cursor.exact, within_s=10, what="it has")
        finally:
            over.set()
            await publishing

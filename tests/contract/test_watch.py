"""Directory.Watch over gRPC: snapshot and log, resuming, filters, beats, and watchers that are slow, many, or say nonsense."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from typing import Any

import grpc
import grpc.aio
import pytest

from kvdir.core.feed_items import Beat, End, HolderItem, NodeItem, Page, SnapshotEnd, Stored, Welcome
from kvdir.core.watcher import MESSAGE_BYTES, MIN_CREDIT_BYTES
from kvdir.location import StreamState
from kvdir.rpc.watch_codec import encode_credit
from kvdir.testing.fake_node import EXAMPLE_NAMESPACE, FakeNode, some_fingerprints
from kvdir.testing.served import FAST_CONFIG, serving
from kvdir.testing.wait import eventually
from kvdir.testing.watching import RawWatch, watching
from kvdir.v1 import directory_pb2, directory_pb2_grpc

DIGEST = EXAMPLE_NAMESPACE.digest
BLOCKS = some_fingerprints(300, width=16)


def stored_blocks(watch: RawWatch) -> int:
    return sum(len(item.packed) // 8 for item in watch.items if isinstance(item, Stored))


async def test_watcher_is_sent_everything_then_every_change_when_it_begins() -> None:
    async with serving() as served, FakeNode(served.address, "a") as a:
        a.store(BLOCKS)
        await a.synced()
        async with watching(served.address) as watch:
            welcome = await watch.until(Welcome)
            assert welcome.snapshot
            end = await watch.until(SnapshotEnd)
            assert end.blocks == 300
            assert [item.trust.node for item in watch.items if isinstance(item, NodeItem)] == ["a"]
            assert sum(len(item.keys) // 8 for item in watch.items if isinstance(item, Page)) == 300
            a.store(some_fingerprints(20, width=16, seed=1))
            stored = await watch.until(Stored)
            assert len(stored.packed) == 20 * 8
            assert stored.packed[:8] == some_fingerprints(20, width=16, seed=1)[0][:8]


async def test_watcher_goes_on_without_a_snapshot_when_the_log_still_reaches_back() -> None:
    async with serving() as served, FakeNode(served.address, "a") as a:
        a.store(BLOCKS)
        await a.synced()
        async with watching(served.address) as watch:
            welcome = await watch.until(Welcome)
            await watch.until(SnapshotEnd)
            await watch.until(Beat)
            position = watch.position
        await eventually(lambda: not served.coordinator.watching.calls)
        a.store(some_fingerprints(20, width=16, seed=1))
        await a.synced()
        async with watching(served.address, log_id=welcome.log_id, position=position) as watch:
            assert not (await watch.until(Welcome)).snapshot
            await watch.until(Stored)
            assert stored_blocks(watch) == 20
            assert not [item for item in watch.items if isinstance(item, Page)]


@pytest.mark.parametrize("start", [{"log_id": 12345, "position": 1}, {"position": 1}])
async def test_snapshot_is_sent_when_the_position_is_of_another_log(start: dict[str, int]) -> None:
    async with serving() as served, watching(served.address, **start) as watch:
        assert (await watch.until(Welcome)).snapshot
        await watch.until(SnapshotEnd)


async def test_snapshot_is_sent_when_the_position_has_left_the_log() -> None:
    async with serving(dataclasses.replace(FAST_CONFIG, watch_log_bytes=2**20)) as served, FakeNode(served.address, "a") as a:
        async with watching(served.address) as watch:
            welcome = await watch.until(Welcome)
            await watch.until(SnapshotEnd)
        for seed in range(4):
            a.store(some_fingerprints(60_000, width=16, seed=seed))
        await a.synced()
        async with watching(served.address, log_id=welcome.log_id, position=1) as watch:
            assert (await watch.until(Welcome)).snapshot


async def test_only_wanted_namespaces_are_sent_when_some_are_named() -> None:
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
        async with watching(served.address, digests=frozenset([DIGEST])) as watch:
            assert (await watch.until(Welcome)).blocks == 300, "memory for others' blocks would be taken"
            assert (await watch.until(SnapshotEnd)).blocks == 300
            b.store(some_fingerprints(10, width=16, seed=1))
            await b.synced()
            a.store(some_fingerprints(20, width=16, seed=1))
            await watch.until(Stored)
            assert {item.digest for item in watch.items if isinstance(item, HolderItem)} == {DIGEST}
            assert stored_blocks(watch) == 20


async def test_beats_come_and_echo_the_credit_when_nothing_happens() -> None:
    async with serving() as served, watching(served.address) as watch:
        await watch.until(SnapshotEnd)
        total_bytes = await watch.grant(8 * MIN_CREDIT_BYTES)
        seen: list[Beat] = []

        async def echoed() -> None:
            while not seen or seen[-1].credit_bytes != total_bytes:
                seen.append(await watch.until(Beat))

        async with asyncio.timeout(5.0):
            await echoed()
        assert seen[-1].behind_s == 0.0


async def test_state_of_a_node_is_told_when_it_goes_silent() -> None:
    async with serving() as served, FakeNode(served.address, "a") as a:
        a.store(BLOCKS)
        await a.synced()
        async with watching(served.address) as watch:
            await watch.until(SnapshotEnd)
            a.publisher.leave()
            while (await watch.until(NodeItem)).trust.state is not StreamState.FENCED:
                pass


async def test_call_ends_with_a_reason_when_the_coordinator_drains() -> None:
    async with serving() as served, watching(served.address) as watch:
        await watch.until(SnapshotEnd)
        served.coordinator.drain()
        end: End = await watch.until(End)
        assert "going down" in end.reason
        assert await watch.read() is None
        async with watching(served.address) as late:
            with pytest.raises(grpc.aio.AioRpcError, match="going down"):
                await late.read()


async def test_watcher_is_refused_when_there_are_enough() -> None:
    async with serving(dataclasses.replace(FAST_CONFIG, max_watchers=1)) as served, watching(served.address) as watch:
        await watch.until(Welcome)
        async with watching(served.address) as other:
            with pytest.raises(grpc.aio.AioRpcError, match="max_watchers"):
                await other.read()


@pytest.mark.parametrize(
    ("start", "words"),
    [({"credit_bytes": 5}, "at least"), ({"digests": frozenset([b"short"])}, "32 bytes")],
)
async def test_start_is_refused_with_the_fix_when_it_cannot_work(start: dict[str, Any], words: str) -> None:
    async with serving() as served, watching(served.address, **start) as watch:
        with pytest.raises(grpc.aio.AioRpcError, match=words):
            await watch.read()


async def test_call_is_refused_when_it_does_not_begin_with_start() -> None:
    async with serving() as served, grpc.aio.insecure_channel(served.address) as channel:
        call = directory_pb2_grpc.DirectoryStub(channel).Watch()
        await call.write(encode_credit(5))
        with pytest.raises(grpc.aio.AioRpcError, match="begins with start"):
            await call.read()


async def test_another_version_is_refused_when_it_starts() -> None:
    async with serving() as served, grpc.aio.insecure_channel(served.address) as channel:
        call = directory_pb2_grpc.DirectoryStub(channel).Watch()
        await call.write(directory_pb2.WatchRequest(start=directory_pb2.WatchStart(protocol_version=99)))
        with pytest.raises(grpc.aio.AioRpcError, match="protocol version"):
            await call.read()


async def test_no_more_than_the_credit_is_sent_when_a_watcher_grants_no_more() -> None:
    async with serving() as served, FakeNode(served.address, "a") as a:
        a.store(some_fingerprints(120_000, width=16))
        await a.synced()
        async with watching(served.address, credit_bytes=MIN_CREDIT_BYTES) as watch:
            while watch.received_bytes < MIN_CREDIT_BYTES - MESSAGE_BYTES:
                await watch.read()
            with contextlib.suppress(TimeoutError):
                while await watch.read(within_s=0.4) is not None and watch.responses[-1].items:
                    pass
            assert watch.received_bytes <= MIN_CREDIT_BYTES + MESSAGE_BYTES // 8  # beats go all the same
            assert not any(isinstance(item, SnapshotEnd) for item in watch.items)
            await watch.grant(8 * MIN_CREDIT_BYTES)
            await watch.until(SnapshotEnd)


async def test_slow_one_is_cut_off_and_told_and_nobody_else_minds_when_64_watch_and_one_never_reads() -> None:
    config = dataclasses.replace(FAST_CONFIG, watch_log_bytes=2 * 2**20, watch_stall_s=3.0)
    async with serving(config) as served, FakeNode(served.address, "a") as a, contextlib.AsyncExitStack() as stack:
        feed_side = served.coordinator.watching
        sleeper = await stack.enter_async_context(watching(served.address, watcher="sleeper", credit_bytes=MIN_CREDIT_BYTES))
        await eventually(lambda: len(feed_side.calls) == 1)
        (slow,) = feed_side.calls
        readers = [await stack.enter_async_context(watching(served.address, watcher=f"w{n}")) for n in range(63)]
        for reader in readers:
            await reader.until(SnapshotEnd)
        told, most_log_bytes = [0] * 63, 0

        async def follow(number: int, reader: RawWatch) -> None:
            while told[number] < 600_000:
                response = await reader.read()
                assert response is not None
                told[number] += sum(len(item.packed) // 8 for item in response.items if isinstance(item, Stored))
                reader.responses.clear()
                if response.beat is not None or reader.received_bytes % (1 << 20) < MESSAGE_BYTES:
                    await reader.grant(4 * MIN_CREDIT_BYTES)

        async def publish() -> None:
            nonlocal most_log_bytes
            for seed in range(30):
                a.store(some_fingerprints(20_000, width=16, seed=seed))
                await a.synced()
                await eventually(lambda at=seed: min(told) >= 20_000 * at)
                assert feed_side.feed is not None
                most_log_bytes = max(most_log_bytes, feed_side.feed.log_bytes)

        async with asyncio.timeout(60.0):
            await asyncio.gather(publish(), *(follow(number, reader) for number, reader in enumerate(readers)))
        assert set(told) == {600_000}
        assert most_log_bytes <= config.watch_log_bytes
        await eventually(lambda: slow not in feed_side.calls, what="the sleeper is cut off")
        assert slow.watcher.sent_bytes <= MIN_CREDIT_BYTES + MESSAGE_BYTES
        assert len(feed_side.calls) == 63
        list(served.coordinator.gather_metrics())
        metrics = {sample.name: sample.value for family in served.coordinator.metrics.collect() for sample in family.samples}
        assert (metrics["kvdir_watchers"], metrics["kvdir_watch_cut_off_total"]) == (63, 1)
        assert feed_side.figures.cut_off == 1
        words = await _last_word(sleeper)
        assert any(told in words for told in ("too slow", "cut off", "no credit")), words


async def _last_word(watch: RawWatch) -> str:
    """What a watcher finds when it reads on after all."""
    try:
        end = await watch.until(End)
    except grpc.aio.AioRpcError as error:
        return str(error.details())
    return str(end.reason)


async def test_feed_begins_with_the_first_watcher_and_ends_a_while_after_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdir.server.watching.KEEP_S", 0.1)
    async with serving() as served:
        assert served.coordinator.watching.feed is None
        async with watching(served.address) as watch:
            first = await watch.until(Welcome)
        await eventually(lambda: served.coordinator.watching.feed is None)
        async with watching(served.address, log_id=first.log_id, position=0) as watch:
            assert (await watch.until(Welcome)).log_id != first.log_id

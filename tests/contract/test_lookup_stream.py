"""Lookups one by one and over one call: the same answers and the same errors; and what only a stream can do wrong."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
import grpc.aio
import pytest

from kvdir.client.aio import DirectoryClient
from kvdir.core.answer import LookupMode
from kvdir.errors import DeadlineExceeded, InvalidInput, KvdirError, TooLarge, Unavailable, UnknownNamespace
from kvdir.fingerprint import Fingerprints
from kvdir.server import lookup_stream
from kvdir.testing.fake_node import EXAMPLE_NAMESPACE, FakeNode, some_fingerprints
from kvdir.testing.lookup_servers import Deaf, Old, directory_server, silent_server
from kvdir.testing.served import FAST_CONFIG, Served, serving
from kvdir.testing.wait import eventually
from kvdir.v1 import directory_pb2, directory_pb2_grpc

DIGEST = EXAMPLE_NAMESPACE.digest
BLOCKS = some_fingerprints(64)


@contextlib.asynccontextmanager
async def holding(served: Served) -> AsyncIterator[FakeNode]:
    async with FakeNode(served.address, "n1") as node:
        await node.synced()
        node.store(BLOCKS)
        await node.synced()
        yield node


@contextlib.asynccontextmanager
async def raw_stream(address: str) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(address) as channel:
        call = directory_pb2_grpc.DirectoryStub(channel).LookupStream()
        yield call
        call.cancel()


def streamed(id: int, fingerprints: Fingerprints = BLOCKS, *, digest: bytes = DIGEST, **fields: Any) -> Any:
    packed = {"packed": fingerprints.packed, "width": fingerprints.width}
    lookup = {"namespace_digest": digest, "fingerprints": packed}
    return directory_pb2.StreamedLookup(id=id, lookup=lookup, **fields)


def message(*lookups: Any) -> Any:
    return directory_pb2.LookupStreamRequest(lookups=lookups)


async def answers(call: Any, count: int) -> dict[int, Any]:
    out: dict[int, Any] = {}
    while len(out) < count:
        response = await call.read()
        assert response is not grpc.aio.EOF
        out |= {item.id: item.lookup for item in response.answers}
    return out


@pytest.fixture(params=[True, False], ids=["stream", "unary"])
def stream(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


async def test_answers_are_those_of_the_directory_when_asked_in_any_way(stream: bool) -> None:
    asked = Fingerprints(BLOCKS.packed + some_fingerprints(8, seed=9).packed, BLOCKS.width)
    async with serving() as served, holding(served), DirectoryClient(served.address, stream=stream) as client:
        for mode in LookupMode:
            answer = await client.lookup(DIGEST, asked, mode=mode)
            direct = served.coordinator.directory.lookup(
                DIGEST, asked, prefix=mode is LookupMode.PREFIX, now_s=served.coordinator.now_s()
            )
            assert (answer.runs, answer.sets, answer.hits, answer.asked) == (direct.runs, direct.sets, 64, 72)
            assert [item.node for item in answer.nodes] == ["n1"]


async def test_refusals_are_the_same_errors_when_asked_in_any_way(stream: bool) -> None:
    async with serving() as served, holding(served), DirectoryClient(served.address, stream=stream) as client:
        with pytest.raises(UnknownNamespace, match="example"):
            await client.lookup(bytes(32), BLOCKS)
        with pytest.raises(TooLarge, match="4096"):
            await client.lookup(DIGEST, some_fingerprints(4097))
        assert (await client.lookup(DIGEST, BLOCKS)).hits == 64


async def test_lookup_ends_by_its_deadline_when_the_coordinator_hangs(stream: bool) -> None:
    async with silent_server() as silent, DirectoryClient(silent.address, stream=stream) as client:
        began_s = time.monotonic()
        with pytest.raises((DeadlineExceeded, Unavailable)):
            await client.lookup(DIGEST, BLOCKS, deadline_s=0.3)
        assert time.monotonic() - began_s < 1.0


async def test_lookup_moves_on_within_its_deadline_when_the_first_coordinator_hangs(stream: bool) -> None:
    async with serving() as served, holding(served), silent_server() as silent:
        client = DirectoryClient([silent.address, served.address], stream=stream, deadline_s=2.0)
        async with client:
            assert (await client.lookup(DIGEST, BLOCKS)).hits == 64


async def test_thousand_lookups_share_one_call_when_they_are_under_way_together() -> None:
    async with serving() as served, holding(served), DirectoryClient(served.address, deadline_s=20.0) as client:
        found = await asyncio.gather(*(client.lookup(DIGEST, BLOCKS.slice(0, 1 + n % 64)) for n in range(1000)))
        assert [answer.hits for answer in found] == [1 + n % 64 for n in range(1000)]
        figures = served.coordinator.metrics.calls.methods
        assert figures["LookupStream"].running == 1
        assert "Lookup" not in figures
        assert figures[lookup_stream.METHOD].by_code == {"OK": 1000}
        assert served.coordinator.directory.counters.lookups == 1000
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


async def test_bad_lookups_are_answers_when_others_are_in_the_same_message() -> None:
    async with serving() as served, holding(served), raw_stream(served.address) as call:
        short = streamed(2)
        short.lookup.fingerprints.packed = b"short"
        odd = streamed(4)
        odd.lookup.min_trust = 99
        await call.write(message(streamed(1), short, streamed(3, digest=b"nobody's"), odd, directory_pb2.StreamedLookup(id=5)))
        found = await answers(call, 5)
        assert (found[1].hits, found[1].error) == (64, "")
        assert found[2].error.startswith(InvalidInput.code)
        assert found[3].error.startswith(UnknownNamespace.code)
        assert found[4].error.startswith(InvalidInput.code)
        assert found[5].error
        await call.write(message(streamed(6)))
        assert (await answers(call, 1))[6].hits == 64


async def test_call_ends_with_an_error_when_a_message_cannot_be_read() -> None:
    async with serving() as served, grpc.aio.insecure_channel(served.address) as channel:
        call: Any = channel.stream_stream("/kvdir.v1.Directory/LookupStream")()
        await call.write(b"\xff\xff\xff not a message")
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()
        assert served.coordinator.directory.counters.lookups == 0


async def test_other_calls_go_on_when_a_client_does_not_read_its_answers() -> None:
    """A slow reader is not read from: it can have so much waiting as gRPC buffers, and no more of ours."""
    many = some_fingerprints(4096, seed=3)
    async with serving() as served, holding(served) as node, raw_stream(served.address) as slow:
        node.store(Fingerprints(b"".join(list(many)[::2]), many.width))  # every other one, so an answer is large
        await node.synced()
        writing = asyncio.create_task(_flood(slow, message(*(streamed(n, many) for n in range(8)))))
        counters = served.coordinator.directory.counters
        await eventually(lambda: counters.lookups > 100)
        before, stuck = -1, 0

        def settled() -> bool:
            nonlocal before, stuck
            stuck = stuck + 1 if counters.lookups == before else 0
            before = counters.lookups
            return stuck > 20

        await eventually(settled)
        assert not writing.done()
        assert (await served.client.lookup(DIGEST, BLOCKS)).hits == 64
        assert (await answers(slow, 8))[0].hits == 2048  # everything that was taken is answered once it reads
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)


async def test_lookup_is_not_done_when_its_deadline_passed_before_its_turn() -> None:
    class Slow:
        asked = 0

        def lookup(self, request: Any) -> Any:
            self.asked += 1
            time.sleep(0.02)  # stands for a long list
            return directory_pb2.LookupResponse(protocol_version=1)

    async with _served_source(Slow()) as (source, address), raw_stream(address) as call:
        await call.write(message(streamed(1, deadline_ms=1000), streamed(2, deadline_ms=10), streamed(3, deadline_ms=1000)))
        found = await answers(call, 3)
        assert [found[n].error.partition(":")[0] for n in (1, 2, 3)] == ["", DeadlineExceeded.code, ""]
        assert source.asked == 2


async def test_answers_come_in_any_order_when_the_source_has_to_wait() -> None:
    """And a bug of the source is told and logged, and costs nobody else anything."""

    class Waiting:
        def __init__(self) -> None:
            self.gate = asyncio.Event()

        def lookup(self, request: Any) -> Any:
            async def later(width: int) -> Any:
                if width == 1:
                    await self.gate.wait()
                if width == 2:
                    raise ZeroDivisionError
                return directory_pb2.LookupResponse(protocol_version=1, asked=width)

            return later(request.fingerprints.width)

    async with _served_source(Waiting()) as (source, address), raw_stream(address) as call:
        asked = [streamed(n, deadline_ms=10_000 if n else 20) for n in range(4)]
        for n, item in enumerate(asked):
            item.id, item.lookup.fingerprints.width = 10 + n, n or 1
        await call.write(message(*asked))
        found = await answers(call, 3)
        assert set(found) == {10, 12, 13}
        assert found[10].error.startswith(DeadlineExceeded.code)
        assert "internal error" in found[12].error
        source.gate.set()
        assert (await answers(call, 1))[11].asked == 1


async def test_drain_loses_no_lookup_when_streams_are_busy() -> None:
    async with serving() as first, serving() as second, holding(first), holding(second):
        client = DirectoryClient([first.address, second.address], deadline_s=10.0)
        async with client:
            answered = 0
            stop = False

            async def ask() -> None:
                nonlocal answered
                while not stop:
                    assert (await client.lookup(DIGEST, BLOCKS)).asked == 64
                    answered += 1

            asking = [asyncio.create_task(ask()) for _ in range(16)]
            await eventually(lambda: answered > 200)
            first.coordinator.drain()
            await eventually(lambda: first.coordinator.metrics.calls.methods["LookupStream"].running == 0)
            moved_at = answered
            await eventually(lambda: answered > moved_at + 200)
            stop = True
            await asyncio.gather(*asking)
            assert first.coordinator.metrics.calls.methods["LookupStream"].by_code["OK"] == 1


async def test_waiting_lookups_move_on_when_the_stream_breaks() -> None:
    async with serving() as served, holding(served), silent_server() as silent:
        client = DirectoryClient([silent.address, served.address], deadline_s=20.0)
        async with client:
            asked = [asyncio.create_task(client.lookup(DIGEST, BLOCKS)) for _ in range(50)]
            await eventually(lambda: silent.reads >= 50)
            began_s = time.monotonic()
            silent.broken.set()
            assert [answer.hits for answer in await asyncio.gather(*asked)] == [64] * 50
            assert time.monotonic() - began_s < 5.0


async def test_stream_is_given_up_when_nothing_comes_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdir.client.lookup_stream.SILENT_S", 0.1)
    async with silent_server() as silent, DirectoryClient(silent.address) as client:
        patient = asyncio.create_task(client.lookup(DIGEST, BLOCKS, deadline_s=30.0))
        await eventually(lambda: silent.reads == 2)  # it asks again, over a connection of its own, and then waits
        with pytest.raises(DeadlineExceeded):
            await client.lookup(DIGEST, BLOCKS, deadline_s=0.05)
        silent.broken.set()
        with pytest.raises(Unavailable, match="broken"):
            await patient


async def test_silent_coordinator_is_not_connected_to_over_and_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fixed patience of 0.05 s these lookups, a new one every 10 ms, would go through a score of streams."""
    monkeypatch.setattr("kvdir.client.lookup_stream.SILENT_S", 0.05)
    async with silent_server() as silent, DirectoryClient(silent.address, deadline_s=30.0) as client:
        asked: list[asyncio.Task[Any]] = []

        def another() -> bool:
            asked.append(asyncio.create_task(client.lookup(DIGEST, BLOCKS)))
            return len(asked) >= 100

        await eventually(another)
        assert 2 <= silent.calls <= 10  # given up after 0.05, 0.1, 0.2, 0.4, 0.8 s
        assert not any(task.done() for task in asked)
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


async def test_stream_is_given_up_when_every_deadline_is_shorter_than_the_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdir.client.lookup_stream.SILENT_S", 0.3)
    async with silent_server() as silent, DirectoryClient(silent.address) as client, asyncio.timeout(20):
        while silent.calls < 2:
            with pytest.raises((DeadlineExceeded, Unavailable)):
                await client.lookup(DIGEST, BLOCKS, deadline_s=0.1)


async def test_stream_is_kept_when_the_lookups_that_ended_were_never_sent() -> None:
    """As in a hedge that was won while the slower one still connected: nothing is owed."""
    async with serving() as served, holding(served), DirectoryClient(served.address) as client:
        asking = asyncio.create_task(client.lookup(DIGEST, BLOCKS))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        (stream,) = client._streams._streams.values()  # type: ignore[union-attr]
        await eventually(lambda: "LookupStream" in served.coordinator.metrics.calls.methods, what="it is connected")
        patience_s, stream.patience_s = stream.patience_s, 0.0
        assert not stream.given_up()
        stream.patience_s = patience_s
        assert (await client.lookup(DIGEST, BLOCKS)).hits == 64
        assert client._streams._streams[served.address] is stream  # type: ignore[union-attr]


async def test_lookups_go_call_by_call_when_there_are_too_many_streams() -> None:
    config = replace(FAST_CONFIG, max_lookup_streams=1)
    async with serving(config) as served, holding(served), DirectoryClient(served.address) as second:
        for client in (served.client, second, second):
            assert (await client.lookup(DIGEST, BLOCKS)).hits == 64
        figures = served.coordinator.metrics.calls.methods
        assert figures["LookupStream"].by_code == {"RESOURCE_EXHAUSTED": 1}
        assert figures["Lookup"].by_code == {"OK": 2}


async def test_nothing_is_kept_of_lookups_that_ended_unsent_when_the_coordinator_does_not_read() -> None:
    many = some_fingerprints(4096)
    async with directory_server(Deaf()) as address, DirectoryClient(address) as client:
        ask = partial(client.lookup, DIGEST, many, deadline_s=0.2)
        ended = await asyncio.gather(*(ask() for _ in range(50)), return_exceptions=True)
        assert {type(error) for error in ended} == {DeadlineExceeded}
        (stream,) = client._streams._streams.values()  # type: ignore[union-attr]
        assert not stream._out


async def test_lookups_go_call_by_call_when_the_coordinator_knows_no_streams() -> None:
    async with directory_server(Old()) as address, DirectoryClient(address) as client:
        found = await asyncio.gather(*(client.lookup(DIGEST, BLOCKS) for _ in range(20)))
        assert {answer.asked for answer in found} == {64}


async def test_lookups_under_way_end_when_the_client_is_closed() -> None:
    async with silent_server() as silent:
        client = DirectoryClient(silent.address)
        asked = asyncio.create_task(client.lookup(DIGEST, BLOCKS, deadline_s=30.0))
        await eventually(lambda: silent.reads >= 1)
        await client.close()
        with pytest.raises(KvdirError):
            await asked


@contextlib.asynccontextmanager
async def _served_source(source: Any) -> AsyncIterator[tuple[Any, str]]:
    from kvdir.obs.call_figures import CallFigures
    from kvdir.server.directory_service import DirectoryService

    bugs: list[Exception] = []
    streams = lookup_stream.LookupStreams(
        source, CallFigures(), max_streams=4, max_deadline_s=5.0, on_bug=lambda method, request_id, error: bugs.append(error)
    )
    async with directory_server(DirectoryService(source, streams, max_fingerprints=4096)) as address:
        yield source, address


async def _flood(call: Any, item: Any) -> None:
    while True:
        await call.write(item)

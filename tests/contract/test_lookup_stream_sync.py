"""The blocking client's lookups over one call, from many threads: answers, errors, deadlines, fail-over, nothing left."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvdir.client.lookup_stream import NoStream, StreamLost
from kvdir.client.lookup_stream_sync import Asked, Stream
from kvdir.client.sync import Client
from kvdir.errors import DeadlineExceeded, TooLarge, Unavailable, UnknownNamespace
from kvdir.testing.fake_node import EXAMPLE_NAMESPACE, FakeNode, some_fingerprints
from kvdir.testing.lookup_servers import Deaf, Old, directory_server, silent_server
from kvdir.testing.served import Served, serving
from kvdir.testing.wait import eventually

DIGEST = EXAMPLE_NAMESPACE.digest
BLOCKS = some_fingerprints(64)

run = asyncio.to_thread


@asynccontextmanager
async def holding(served: Served) -> AsyncIterator[FakeNode]:
    async with FakeNode(served.address, "n1") as node:
        await node.synced()
        node.store(BLOCKS)
        await node.synced()
        yield node


@pytest.fixture(params=[True, False], ids=["stream", "unary"])
def stream(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def _streams() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("lookups ")]


async def test_answers_and_errors_are_the_same_when_asked_in_any_way(stream: bool) -> None:
    async with serving() as served, holding(served):
        with Client(served.address, stream=stream) as client:
            answer = await run(client.lookup, DIGEST, BLOCKS)
            assert (answer.hits, [item.node for item in answer.nodes]) == (64, ["n1"])
            with pytest.raises(UnknownNamespace, match="example"):
                await run(client.lookup, bytes(32), BLOCKS)
            with pytest.raises(TooLarge, match="4096"):
                await run(client.lookup, DIGEST, some_fingerprints(4097))
        figures = served.coordinator.metrics.calls.methods
        assert ("LookupStream" in figures) == stream
        assert ("Lookup" in figures) != stream


async def test_lookups_share_one_call_when_many_threads_ask() -> None:
    async with serving() as served, holding(served):
        with Client(served.address, deadline_s=20.0) as client, ThreadPoolExecutor(16) as pool:

            def ask(n: int) -> int:
                return client.lookup(DIGEST, BLOCKS.slice(0, 1 + n % 64)).hits

            found = await run(lambda: list(pool.map(ask, range(500))))
            assert found == [1 + n % 64 for n in range(500)]
            assert served.coordinator.metrics.calls.methods["LookupStream"].running == 1
            assert len(_streams()) == 1
        assert not _streams()


async def test_lookup_ends_by_its_deadline_when_the_coordinator_hangs(stream: bool) -> None:
    async with silent_server() as silent:
        with Client(silent.address, stream=stream) as client:
            began_s = time.monotonic()
            with pytest.raises(DeadlineExceeded):
                await run(client.lookup, DIGEST, BLOCKS, deadline_s=0.3)
            assert time.monotonic() - began_s < 1.5


@pytest.mark.parametrize("hedge", [True, False])
async def test_lookup_moves_on_within_its_deadline_when_the_first_coordinator_hangs(stream: bool, hedge: bool) -> None:
    async with serving() as served, holding(served), silent_server() as silent:
        with Client([silent.address, served.address], stream=stream, deadline_s=2.0) as client:
            if not hedge:
                client._addresses._savings = 0
            for _ in range(3):
                assert (await run(client.lookup, DIGEST, BLOCKS)).hits == 64


async def test_waiting_lookups_move_on_when_the_stream_breaks() -> None:
    async with serving() as served, holding(served), silent_server() as silent:
        with Client([silent.address, served.address], deadline_s=20.0) as client, ThreadPoolExecutor(16) as pool:
            client._addresses._savings = -1000  # no hedges: only the broken call may end the wait
            asked = [pool.submit(client.lookup, DIGEST, BLOCKS) for _ in range(16)]
            await eventually(lambda: silent.reads >= 16)
            silent.broken.set()
            found = await asyncio.gather(*(asyncio.wrap_future(item) for item in asked))
            assert [answer.hits for answer in found] == [64] * 16


async def test_stream_is_given_up_when_nothing_comes_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdir.client.lookup_stream_sync.SILENT_S", 0.1)
    async with silent_server() as silent:
        with Client(silent.address) as client, ThreadPoolExecutor(1) as pool:
            patient = pool.submit(client.lookup, DIGEST, BLOCKS, deadline_s=30.0)
            await eventually(lambda: silent.reads == 2)  # it asks again, over a connection of its own, and then waits
            with pytest.raises(DeadlineExceeded):
                await run(client.lookup, DIGEST, BLOCKS, deadline_s=0.05)
            silent.broken.set()
            with pytest.raises(Unavailable, match="broken"):
                await asyncio.wrap_future(patient)


async def test_stream_is_given_up_when_every_deadline_is_shorter_than_the_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdir.client.lookup_stream_sync.SILENT_S", 0.3)
    async with silent_server() as silent, asyncio.timeout(20):
        with Client(silent.address) as client:
            while silent.calls < 2:
                with pytest.raises((DeadlineExceeded, Unavailable)):
                    await run(client.lookup, DIGEST, BLOCKS, deadline_s=0.1)


async def test_next_coordinator_is_asked_when_a_stream_is_lost_too_late_to_ask_there_again() -> None:
    class LostLate:
        """A stream to a coordinator that breaks just when the share of the deadline is over."""

        asked = 0

        def ask(self, address: str, request: object, *, end_s: float) -> Asked:
            if address != "127.0.0.1:1":
                raise NoStream
            self.asked += 1
            if self.asked > 1:
                raise DeadlineExceeded("the deadline passed before the call")
            lost: Future[Any] = Future()
            lost.set_exception(StreamLost("broken"))
            return Asked(Stream(address, (), 0.1, patience_s=1.0, on_refused=lambda: None), 1, end_s, lost)

        def close(self) -> None:
            pass

    async with serving() as served, holding(served):
        with Client(["127.0.0.1:1", served.address], stream=False) as client:
            client._streams = breaking = LostLate()  # type: ignore[assignment]
            assert (await run(client.lookup, DIGEST, BLOCKS)).hits == 64
            assert breaking.asked == 2


async def test_nothing_is_kept_of_lookups_that_ended_unsent_when_the_coordinator_does_not_read() -> None:
    many = some_fingerprints(4096)
    async with directory_server(Deaf()) as address:
        with Client(address) as client, ThreadPoolExecutor(50) as pool:
            asked = [pool.submit(client.lookup, DIGEST, many, deadline_s=0.2) for _ in range(50)]
            ended = await asyncio.gather(*map(asyncio.wrap_future, asked), return_exceptions=True)
            assert {type(error) for error in ended} == {DeadlineExceeded}
            (stream,) = client._streams._streams.values()  # type: ignore[union-attr]
            assert not stream._unsent


async def test_lookups_go_call_by_call_when_the_coordinator_knows_no_streams() -> None:
    old = Old()
    async with directory_server(old) as address:
        with Client(address) as client:
            assert [(await run(client.lookup, DIGEST, BLOCKS)).asked for _ in range(3)] == [64] * 3
    assert old.asked == 3


async def test_no_lookup_is_lost_when_a_coordinator_drains() -> None:
    async with serving() as first, serving() as second, holding(first), holding(second):
        with Client([first.address, second.address], deadline_s=10.0) as client, ThreadPoolExecutor(4) as pool:
            stop = threading.Event()
            counts = [0] * 4

            def ask(number: int) -> None:
                while not stop.is_set():
                    assert client.lookup(DIGEST, BLOCKS).asked == 64
                    counts[number] += 1

            asking = [pool.submit(ask, number) for number in range(4)]
            await eventually(lambda: sum(counts) > 50)
            first.coordinator.drain()
            await eventually(lambda: first.coordinator.metrics.calls.methods["LookupStream"].running == 0)
            moved_at = sum(counts)
            await eventually(lambda: sum(counts) > moved_at + 50)
            stop.set()
            await asyncio.gather(*(asyncio.wrap_future(item) for item in asking))
            assert first.coordinator.metrics.calls.methods["LookupStream"].by_code["OK"] >= 1


async def test_lookups_under_way_end_when_the_client_is_closed() -> None:
    async with silent_server() as silent:
        client = Client(silent.address)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(client.lookup, DIGEST, BLOCKS, deadline_s=30.0)
            await eventually(lambda: silent.reads >= 1)
            await run(client.close)
            with pytest.raises(Unavailable):
                await asyncio.wrap_future(asked)
        assert not _streams()


async def test_lookup_fails_at_once_when_the_connection_is_refused(stream: bool, unused_port: int) -> None:
    with Client(f"127.0.0.1:{unused_port}", stream=stream, connect_timeout_s=5.0) as client:
        began_s = time.monotonic()
        with pytest.raises(Unavailable):
            await run(client.lookup, DIGEST, BLOCKS, deadline_s=10.0)
        assert time.monotonic() - began_s < 3.0


@pytest.fixture
def unused_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

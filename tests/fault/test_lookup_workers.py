"""Lookup workers as processes: killed, stopped, orphaned and drained under load; a main process that hangs or dies."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvdir.client.aio import DirectoryClient
from kvdir.core.answer import LookupMode
from kvdir.errors import KvdirError
from kvdir.location import StreamState
from kvdir.rpc.lookup_codec import encode_lookup_request
from kvdir.server.worker_place import PLACE
from kvdir.testing.fake_node import EXAMPLE_NAMESPACE, FakeNode, some_fingerprints
from kvdir.testing.wait import eventually
from kvdir.v1 import directory_pb2
from peer_agent.demo.processes import Child

pytestmark = pytest.mark.slow

Ask = Callable[..., Any]

DIGEST = EXAMPLE_NAMESPACE.digest
BLOCKS = some_fingerprints(500)
FLAGS = ("--heartbeat-interval-ms", "100", "--stale-after-s", "1", "--expire-after-s", "30", "--grace-s", "3")


class Serving:
    """A running `kvdir serve --lookup-workers 2`."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self.address = str(child.ready["grpc"])
        self.http = str(child.ready["http"])
        self.workers = self.now_workers()

    def now_workers(self) -> list[psutil.Process]:
        return [item for item in psutil.Process(self.child.pid).children() if item.status() != psutil.STATUS_ZOMBIE]

    async def page(self, name: str) -> str:
        def get() -> str:
            with urllib.request.urlopen(f"http://{self.http}/{name}", timeout=5.0) as response:
                return str(response.read().decode())

        return await asyncio.to_thread(get)

    async def metric(self, name: str) -> float:
        lines = (await self.page("metrics")).splitlines()
        return float(next(line for line in lines if line.startswith(name)).rpartition(" ")[2])


@contextlib.asynccontextmanager
async def serving(home: Path, *more: str, name: str = "coordinator", listen: str = "127.0.0.1:0") -> AsyncIterator[Serving]:
    arguments = ["-m", "kvdir", "serve", "--listen", listen, "--http-listen", "127.0.0.1:0", "--output", "json"]
    flags = [*FLAGS, "--lookup-workers", "2", *more]
    child = await Child.start(name, [*arguments, *flags], log=home / f"{name}.log", ready_s=30)
    try:
        yield Serving(child)
    finally:
        await child.end(grace_s=8)


@contextlib.asynccontextmanager
async def holding(*addresses: str) -> AsyncIterator[list[FakeNode]]:
    async with contextlib.AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(FakeNode(address, "n1")) for address in addresses]
        for node in nodes:
            node.store(BLOCKS)
        for node in nodes:
            await node.synced()
        yield nodes


class Load:
    """Clients that look up without pause. `answered`, and `failed` with the reasons."""

    def __init__(self, addresses: list[str], *, clients: int = 8, deadline_s: float = 10.0) -> None:
        self._clients = [DirectoryClient(addresses, deadline_s=deadline_s, name=str(number)) for number in range(clients)]
        self._stop = False
        self._tasks: list[asyncio.Task[None]] = []
        self.answered = 0
        self.failed: list[str] = []

    async def __aenter__(self) -> Load:
        self._tasks = [asyncio.create_task(self._ask(client)) for client in self._clients for _ in range(2)]
        await self.more(100)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop = True
        await asyncio.gather(*self._tasks)
        for client in self._clients:
            await client.close()

    async def more(self, count: int) -> None:
        """Until so many more were answered."""
        until = self.answered + count
        await eventually(lambda: self.answered >= until, within_s=30.0, what=f"{count} more lookups; failed: {self.failed[:3]}")

    async def _ask(self, client: DirectoryClient) -> None:
        while not self._stop:
            try:
                assert (await client.lookup(DIGEST, BLOCKS)).asked == len(BLOCKS)
            except KvdirError as error:
                self.failed.append(str(error))
            else:
                self.answered += 1
            await asyncio.sleep(0.005)


async def test_no_lookup_fails_when_workers_are_killed_under_load(tmp_path: Path) -> None:
    async with serving(tmp_path) as coordinator, holding(coordinator.address), Load([coordinator.address]) as load:
        assert len(coordinator.workers) == 2
        for number in range(2):
            coordinator.workers[number].kill()
            await load.more(200)
        await eventually(lambda: len(coordinator.now_workers()) == 2, what="both workers replaced")
        await load.more(200)
        assert await coordinator.metric("kvdir_lookup_worker_restarts_total") == 2
        assert await coordinator.metric("kvdir_lookups_total") >= load.answered * 0.5  # what the dead counted last is lost
    assert load.failed == []


async def test_no_lookup_fails_when_a_worker_is_stopped_under_load(tmp_path: Path) -> None:
    """Its clients give its stream up and ask again; the coordinator kills it, and starts another."""
    async with serving(tmp_path) as coordinator, holding(coordinator.address), Load([coordinator.address]) as load:
        stopped = coordinator.workers[0]
        stopped.suspend()
        await eventually(lambda: not _lives(stopped), what="the stopped one is killed")
        await eventually(lambda: len(coordinator.now_workers()) == 2)
        await load.more(300)
        assert await coordinator.metric("kvdir_lookup_worker_kills_total") == 1
    assert load.failed == []


async def test_workers_end_and_the_port_is_free_when_main_is_killed(tmp_path: Path) -> None:
    async with serving(tmp_path) as coordinator:
        places = await asyncio.to_thread(lambda: set(PLACE.glob("kvdir-serve-*")))
        coordinator.workers[1].suspend()  # not even this one stays
        await coordinator.child.kill()
        await eventually(lambda: not any(_lives(worker) for worker in coordinator.workers), what="the workers ended")
        left = {path for path in places if not _held(path)}
        assert left
        async with serving(tmp_path, name="second", listen=coordinator.address) as second, holding(second.address) as (node,):
            assert node.state is StreamState.SYNCED
            assert not any(path.exists() for path in left)  # the next start tidied up
            assert await second.page("readyz") != ""


async def test_answers_age_and_health_says_so_when_main_hangs(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        coordinator = await stack.enter_async_context(serving(tmp_path))
        (node,) = await stack.enter_async_context(holding(coordinator.address))
        async with _worker_channel(coordinator) as (channel, lookup):
            answer = await lookup()
            assert (answer.hits, answer.nodes[0].state, answer.lag_ms) == (500, int(StreamState.SYNCED), 0)
            os.kill(coordinator.child.pid, signal.SIGSTOP)
            try:
                await _eventually_answer(lookup, lambda item: item.nodes and item.nodes[0].state == int(StreamState.STALE))
                await _eventually_answer(lookup, lambda item: item.lag_ms > 1000)
                answer = await lookup(touch=True)  # main cannot be asked, and nobody waits for it
                assert (answer.hits, answer.nodes[0].state) == (500, int(StreamState.STALE))
                stub = health_pb2_grpc.HealthStub(channel)
                status = health_pb2.HealthCheckResponse.SERVING
                deadline_s = time.monotonic() + 20.0
                while status == health_pb2.HealthCheckResponse.SERVING and time.monotonic() < deadline_s:
                    status = (await stub.Check(health_pb2.HealthCheckRequest(), timeout=2.0)).status
                    await asyncio.sleep(0.05)
                assert status == health_pb2.HealthCheckResponse.NOT_SERVING
            finally:
                os.kill(coordinator.child.pid, signal.SIGCONT)
            await _eventually_answer(lookup, lambda item: item.nodes[0].state == int(StreamState.SYNCED) and item.lag_ms == 0)
            assert len(coordinator.now_workers()) == 2
            await node.synced()


async def test_no_lookup_fails_when_one_of_two_coordinators_drains_under_load(tmp_path: Path) -> None:
    async with serving(tmp_path) as first, serving(tmp_path, name="second") as second, holding(first.address, second.address):
        async with Load([first.address, second.address]) as load:
            main = psutil.Process(first.child.pid)
            main.terminate()
            await load.more(300)
            await eventually(lambda: not _lives(main), what="it ended")
            await load.more(300)
        assert load.failed == []
        assert not any(_lives(worker) for worker in first.workers)


@contextlib.asynccontextmanager
async def _worker_channel(coordinator: Serving) -> AsyncIterator[tuple[grpc.aio.Channel, Ask]]:
    """A connection that ends at a worker: it answers while the main process is stopped."""
    for _ in range(100):
        async with grpc.aio.insecure_channel(coordinator.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            method: Any = channel.unary_unary(
                "/kvdir.v1.Directory/Lookup",
                request_serializer=directory_pb2.LookupRequest.SerializeToString,
                response_deserializer=directory_pb2.LookupResponse.FromString,
            )

            async def lookup(*, touch: bool = False, timeout_s: float = 2.0, method: Any = method) -> Any:
                request = encode_lookup_request(DIGEST, BLOCKS, mode=LookupMode.SPARSE, touch=touch)
                return await method(request, timeout=timeout_s)

            await lookup()  # connected
            os.kill(coordinator.child.pid, signal.SIGSTOP)
            try:
                answered = bool(await lookup(timeout_s=0.3))
            except grpc.aio.AioRpcError:
                answered = False
            finally:
                os.kill(coordinator.child.pid, signal.SIGCONT)
            if answered:
                yield channel, lookup
                return
    raise AssertionError("100 connections and none to a worker")


async def _eventually_answer(lookup: Ask, condition: Callable[[Any], object], *, within_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not condition(answer := await lookup()):
        assert time.monotonic() < deadline_s, answer
        await asyncio.sleep(0.02)


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _held(place: Path) -> bool:
    with open(place / "lock") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False

"""Lookup workers beside a coordinator in this process: who answers what, what is passed on, and what is counted."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import socket
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvdir.client.aio import DirectoryClient
from kvdir.core.answer import LookupMode
from kvdir.core.event import Event
from kvdir.core.region_directory import RegionDirectory
from kvdir.errors import ConfigError, KvdirError, TooLarge, UnknownNamespace
from kvdir.fingerprint import Fingerprints
from kvdir.index import LEAST_MAX_BYTES, RegionError, RegionReader
from kvdir.location import MinTrust, StreamState, Tier
from kvdir.rpc.lookup_codec import decode_lookup, encode_lookup_request
from kvdir.server import lookup_workers
from kvdir.server.app import build_coordinator
from kvdir.server.lookup_workers import LookupWorkers
from kvdir.server.region_source import RegionSource, WorkerCounters
from kvdir.server.serve import Bound, Stop, running, serve
from kvdir.server.shared_port import SharedPort
from kvdir.server.worker_place import WorkerPlace
from kvdir.testing.fake_node import EXAMPLE_NAMESPACE, FakeNode, some_fingerprints
from kvdir.testing.served import FAST_CONFIG, Served, serving
from kvdir.testing.wait import eventually
from kvdir.v1 import directory_pb2, directory_pb2_grpc

DIGEST = EXAMPLE_NAMESPACE.digest
BLOCKS = some_fingerprints(64)
WITH_WORKERS = replace(FAST_CONFIG, lookup_workers=1)


@contextlib.asynccontextmanager
async def holding(served: Served, name: str = "n1") -> AsyncIterator[FakeNode]:
    async with FakeNode(served.address, name) as node:
        await node.synced()
        node.store(BLOCKS)
        await node.synced()
        yield node


def workers_of(served: Served) -> LookupWorkers:
    workers = served.coordinator.metrics.workers
    assert isinstance(workers, LookupWorkers)
    return workers


@contextlib.asynccontextmanager
async def at_worker(served: Served) -> AsyncIterator[grpc.aio.Channel]:
    """A connection that the kernel gave to a worker: main counts no health check there."""
    for _ in range(200):
        async with grpc.aio.insecure_channel(served.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            checks = served.coordinator.metrics.calls.methods
            before = sum(checks["Check"].by_code.values()) if "Check" in checks else 0
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            if before == (sum(checks["Check"].by_code.values()) if "Check" in checks else 0):
                yield channel
                return
    raise AssertionError("200 connections and none to a worker")


async def test_worker_answers_as_the_directory_does_and_passes_on_the_rest() -> None:
    async with serving(WITH_WORKERS) as served, holding(served), at_worker(served) as channel:
        lookup: Any = channel.unary_unary(
            "/kvdir.v1.Directory/Lookup",
            request_serializer=directory_pb2.LookupRequest.SerializeToString,
            response_deserializer=directory_pb2.LookupResponse.FromString,
        )

        async def ask(fingerprints: Fingerprints, *, digest: bytes = DIGEST, touch: bool = False) -> Any:
            return await lookup(encode_lookup_request(digest, fingerprints, mode=LookupMode.SPARSE, touch=touch), timeout=5.0)

        counters, methods = served.coordinator.directory.counters, served.coordinator.metrics.calls.methods
        answer = decode_lookup(await ask(BLOCKS))
        assert (answer.hits, answer.nodes[0].node, answer.nodes[0].state) == (64, "n1", StreamState.SYNCED)
        assert (answer.lag_s, answer.source) == (0.0, "coordinator")
        assert counters.lookups == 0
        assert (await ask(BLOCKS, touch=True)).hits == 64
        assert counters.lookups == 1  # only main may write
        with pytest.raises(grpc.aio.AioRpcError, match="example") as caught:
            await ask(BLOCKS, digest=bytes(32))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert ("kvdir-code", UnknownNamespace.code) in tuple(caught.value.trailing_metadata() or ())
        with pytest.raises(grpc.aio.AioRpcError, match="4096") as caught:
            await ask(some_fingerprints(4097))
        assert ("kvdir-code", TooLarge.code) in tuple(caught.value.trailing_metadata() or ())
        status: Any = channel.unary_unary("/kvdir.v1.Admin/Status")
        await status(b"", timeout=5.0)
        assert methods["Status"].by_code == {"OK": 1}
        list(served.coordinator.gather_metrics())
        await eventually(lambda: workers_of(served).figures()[0].counters["passed_on"] == 2)
        counted = served.coordinator.status()
        assert (counted.lookups, counted.lookup_blocks, counted.lookup_hits) == (2, 128, 128)
        page = await asyncio.to_thread(_page, f"http://{served.http}/metrics")
        assert "kvdir_lookups_total 2.0" in page
        assert "kvdir_lookups_passed_on_total 2.0" in page
        assert "kvdir_lookup_workers 1.0" in page
        ready = await asyncio.to_thread(_page, f"http://{served.http}/readyz")
        assert ready.startswith("ok")


async def test_node_is_synced_when_its_stream_passes_through_a_worker() -> None:
    """Many connections, so that both processes get some; every stream works, and a killed worker only costs a reconnect."""
    async with serving(WITH_WORKERS) as served, contextlib.AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(holding(served, f"n{number}")) for number in range(8)]
        assert len(served.coordinator.directory.nodes) == 8
        pid = workers_of(served).pids()[0]
        os.kill(pid, 9)
        await eventually(lambda: workers_of(served).restarts == 1 and workers_of(served).up == {0})
        for node in nodes:
            node.store(some_fingerprints(8, seed=5))
        for node in nodes:
            await node.synced()
        for _ in range(4):
            async with DirectoryClient(served.address) as client:
                answer = await client.lookup(DIGEST, some_fingerprints(8, seed=5))
                assert (answer.hits, len(answer.nodes)) == (8, 8)


async def test_blocks_that_are_there_are_never_missed_when_everything_around_them_changes() -> None:
    """The index grows from empty and others come and go; what a worker cannot read whole, it passes on."""
    async with contextlib.AsyncExitStack() as stack:
        served = await stack.enter_async_context(serving(WITH_WORKERS))
        await stack.enter_async_context(holding(served))
        channel = await stack.enter_async_context(at_worker(served))
        churning = await stack.enter_async_context(FakeNode(served.address, "churn"))
        lookup: Any = channel.unary_unary(
            "/kvdir.v1.Directory/Lookup",
            request_serializer=directory_pb2.LookupRequest.SerializeToString,
            response_deserializer=directory_pb2.LookupResponse.FromString,
        )
        request = encode_lookup_request(DIGEST, BLOCKS, mode=LookupMode.SPARSE, touch=False)
        stats = served.coordinator.directory.index.stats
        for number in range(300):
            if number % 3 == 0:
                churning.store(some_fingerprints(1000, seed=number))
            if number % 9 == 8:
                churning.remove(some_fingerprints(1000, seed=number - 8))
            answer = await lookup(request, timeout=5.0)
            assert (answer.hits, answer.asked) == (64, 64)
        await churning.synced()
        assert stats().blocks > 60_000
        await eventually(lambda: workers_of(served).figures()[0].counters["lookups"] > 200)


async def test_region_gives_the_directorys_answers_when_it_lies_there() -> None:
    """Nodes synced and not, several tiers and sets, a hidden node: as a worker reads it, without a process of its own."""

    async def no_main(request: Any) -> Any:
        raise KvdirError("passed on")

    async with serving(WITH_WORKERS) as served, holding(served, "n1") as first, holding(served, "n2") as second:
        directory, place = served.coordinator.directory, served.coordinator.place
        assert place is not None
        first.remove(BLOCKS.slice(16, 8))
        first.store(BLOCKS.slice(0, 8), Tier.DISK)
        await first.synced()
        second.outbox.lose()
        second.outbox.append(Event.removed(Tier.CPU, DIGEST, BLOCKS.slice(40, 4)))
        source = RegionSource(
            RegionDirectory(RegionReader(place.path / "index")), no_main, WorkerCounters(), max_fingerprints=4096
        )
        asked = Fingerprints(BLOCKS.packed + some_fingerprints(8, seed=9).packed, BLOCKS.width)

        def same(mode: LookupMode, min_trust: MinTrust) -> bool:
            request = encode_lookup_request(DIGEST, asked, mode=mode, touch=False, min_trust=min_trust)
            answer: Any = source.lookup(request)
            found = decode_lookup(answer)
            direct = directory.lookup(
                DIGEST, asked, prefix=mode is LookupMode.PREFIX, min_trust=min_trust, now_s=served.coordinator.now_s()
            )
            return _readable(found) == _readable(direct) and found.below_trust == direct.below_trust

        for mode, min_trust in itertools.product(LookupMode, MinTrust):
            await eventually(
                functools.partial(same, mode, min_trust), what=f"the same answer within a tick: {mode}, {min_trust}"
            )
        assert source.counters.lookups > 0


def _readable(answer: Any) -> Any:
    names = [(node.node, node.epoch, node.state) for node in answer.nodes]
    runs = [(run.start, run.count, sorted((names[index], tier) for index, tier in run.holders)) for run in answer]
    return runs, answer.hits, answer.asked, sorted(names)


async def test_coordinator_is_refused_when_the_port_is_in_use_by_any_kind_of_server() -> None:
    alone, shared = FAST_CONFIG, WITH_WORKERS
    for first in (alone, shared):
        async with serving(first) as served:
            for second in (alone, shared):
                config = replace(second, listen=served.address, http_listen="")
                with pytest.raises(ConfigError, match="cannot be used"):
                    async with running(build_coordinator(config)):
                        raise AssertionError("two coordinators on one port")


async def test_nothing_is_left_when_a_coordinator_with_workers_ends(tmp_path: Path) -> None:
    async with serving(WITH_WORKERS) as served:
        place = served.coordinator.place
        assert place is not None
        assert (place.path / "main").is_socket()
        pids = workers_of(served).pids()
        assert len(pids) == 1
    assert not place.path.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


async def test_worker_is_killed_when_it_stays_silent_and_not_when_all_of_us_were_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lookup_workers, "LOOK_S", 0.01)
    async with serving(WITH_WORKERS) as served:
        workers, silent_s = workers_of(served), [9.0, 0.0] * 10
        monkeypatch.setattr(workers, "_silent_s", lambda number: silent_s.pop() if silent_s else 0.0)
        await eventually(lambda: not silent_s)
        assert (workers.kills, workers.up) == (0, {0})
        monkeypatch.setattr(workers, "_silent_s", lambda number: 9.0)
        await eventually(lambda: workers.kills >= 1)


async def test_worker_says_incomplete_when_the_index_is_full() -> None:
    config = replace(WITH_WORKERS, max_index_bytes=LEAST_MAX_BYTES)
    many = some_fingerprints(6_000, seed=7)
    async with serving(config) as served, FakeNode(served.address, "n1") as node, at_worker(served) as channel:
        lookup: Any = channel.unary_unary(
            "/kvdir.v1.Directory/Lookup",
            request_serializer=directory_pb2.LookupRequest.SerializeToString,
            response_deserializer=directory_pb2.LookupResponse.FromString,
        )
        request = encode_lookup_request(DIGEST, many.slice(0, 4096), mode=LookupMode.SPARSE, touch=False)
        node.store(many.slice(0, 1000))
        await node.synced()
        first = await lookup(request, timeout=5.0)
        assert (first.hits, first.incomplete) == (1000, False)
        node.store(many.slice(1000, 5000))
        await node.synced()
        served.coordinator.tick()  # it says so from there on
        found = decode_lookup(await lookup(request, timeout=5.0))
        direct = served.coordinator.directory.lookup(DIGEST, many.slice(0, 4096), now_s=served.coordinator.now_s())
        assert found.incomplete
        assert 0 < found.hits == direct.hits < 4096
        assert served.coordinator.directory.counters.lookups == 1  # ours; the others were the worker's


async def test_workers_run_the_coordinators_code_when_another_lies_in_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kvdir.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    async with serving(WITH_WORKERS) as served:
        assert workers_of(served).up == {0}


async def test_grace_is_one_and_ends_at_a_second_request_when_clients_do_not_go() -> None:
    """Streams that nobody ends, at workers and at the main process: without a second request they cost the whole grace."""
    config = replace(WITH_WORKERS, http_listen="", grace_s=30.0)
    stop, ready = Stop(), asyncio.Event()
    addresses: list[str] = []

    def on_ready(bound: Bound) -> None:
        addresses.append(bound.grpc)
        ready.set()

    async with contextlib.AsyncExitStack() as stack:
        serving_it = asyncio.create_task(serve(config, stop=stop, on_ready=on_ready))
        await asyncio.wait({serving_it, asyncio.ensure_future(ready.wait())}, return_when=asyncio.FIRST_COMPLETED)
        processes: set[str] = set()
        for _ in range(200):
            if len(processes) == 2:
                break
            options = [("grpc.use_local_subchannel_pool", 1)]
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(addresses[0], options=options))
            call = directory_pb2_grpc.DirectoryStub(channel).LookupStream()
            await call.write(directory_pb2.LookupStreamRequest())
            processes.add(str(dict(await call.initial_metadata())["kvdir-process"]))
        assert processes == {"main", "worker-0"}
        stop.request()
        done, _ = await asyncio.wait({serving_it}, timeout=0.5)
        assert not done
        stop.request()
        async with asyncio.timeout(10.0):
            await serving_it


def test_grace_runs_from_the_first_request_when_it_is_asked_for_later(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("kvdir.server.serve.time.monotonic", lambda: now_s)
    stop = Stop()
    stop.request()
    now_s = 103.0
    assert (stop.left_s(5.0), stop.left_s(2.0)) == (2.0, 0.0)


def test_leftovers_are_removed_when_their_coordinator_is_dead(tmp_path: Path) -> None:
    living = WorkerPlace(tmp_path)
    dead = WorkerPlace(tmp_path)
    os.close(dead._lock)  # as the kernel does at its end
    third = WorkerPlace(tmp_path)
    assert living.path.exists()
    assert not dead.path.exists()
    living.close()
    third.close()
    assert not list(tmp_path.iterdir())


def test_directory_of_another_user_is_left_alone_when_its_lock_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody may make one in /dev/shm, with links in it."""
    trap, victim = tmp_path / "kvdir-serve-trap", tmp_path / "victim"
    trap.mkdir()
    (trap / "lock").symlink_to(victim)
    WorkerPlace(tmp_path).close()
    assert (trap.is_dir(), victim.exists()) == (True, False)  # a link is not followed, even in one of ours
    (trap / "lock").unlink()
    me = os.geteuid()
    monkeypatch.setattr("kvdir.server.worker_place.os.geteuid", lambda: me + 1)
    WorkerPlace(tmp_path).close()
    assert trap.is_dir()


def test_nothing_is_left_when_a_coordinator_cannot_be_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(path: Path, **_: Any) -> Any:
        raise RegionError(f"{path}: no room")

    monkeypatch.setattr("kvdir.server.app.WorkerPlace", lambda: WorkerPlace(tmp_path))
    monkeypatch.setattr("kvdir.server.worker_place.create_region", no_room)
    with pytest.raises(ConfigError, match="no room"):
        build_coordinator(WITH_WORKERS)
    assert not list(tmp_path.iterdir())


def test_configuration_is_refused_with_the_fix_when_there_is_no_shared_memory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tmpfs"):
        WorkerPlace(tmp_path / "none")


def test_port_is_nobodys_when_nobody_listens_on_it() -> None:
    port = SharedPort("127.0.0.1", 0)
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port.port)):
        pass
    with pytest.raises(ConfigError, match="cannot be used"):
        SharedPort("127.0.0.1", port.port)
    port.close()
    SharedPort("127.0.0.1", port.port).close()


def _page(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5.0) as response:
        return str(response.read().decode())

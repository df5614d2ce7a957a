"""Coordinators over real Redis servers: what they answer, and what is left of it when servers die, hang, fill or forget."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from kvdir.client.standby import Standby
from kvdir.core.answer import Lookup, LookupMode
from kvdir.core.repair import RepairPolicy
from kvdir.errors import ConfigError, KvdirError
from kvdir.fingerprint import Fingerprints
from kvdir.location import StreamState, Tier
from kvdir.store import make_store
from kvdir.store.slots import meta_tag
from kvdir.testing.fake_node import EXAMPLE_NAMESPACE, FakeNode, some_fingerprints
from kvdir.testing.redis_servers import Server, redis_cluster, redis_sentinel, redis_server, until, valkey_program
from kvdir.testing.shared import Shared, shared
from kvdir.testing.wait import eventually

pytestmark = [pytest.mark.redis, pytest.mark.timeout(120)]

DIGEST = EXAMPLE_NAMESPACE.digest
SLOW_ENOUGH = {"heartbeat_interval_ms": 250, "stale_after_s": 2.0, "expire_after_s": 20.0, "store_timeout_s": 0.5}

KINDS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "single": redis_server,
    "cluster": redis_cluster,
    "sentinel": redis_sentinel,
    "valkey": lambda: redis_server(program=valkey_program()),
}
_prefixes = itertools.count()


@pytest.fixture(scope="module", params=KINDS)
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    with KINDS[request.param]() as servers:
        yield servers.url


@contextlib.asynccontextmanager
async def coordinators(url: str, count: int = 2, **settings: Any) -> AsyncIterator[list[Shared]]:
    """In this process, each with connections of its own, over one prefix that is empty."""
    address = f"{url}?prefix=served{next(_prefixes)}"
    async with contextlib.AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(shared(make_store(address), f"c{number}", **{**SLOW_ENOUGH, **settings}))
            for number in range(count)
        ]


@contextlib.asynccontextmanager
async def publishing(name: str, at: Sequence[Shared]) -> AsyncIterator[FakeNode]:
    """A node that publishes to one of the coordinators at a time, from its beginning on."""
    standby = Standby()
    first = FakeNode(at[0].address, name, standby=standby)
    voices = [first, *(first.also(each.address, standby) for each in at[1:])]
    async with contextlib.AsyncExitStack() as stack:
        for voice in voices:
            await stack.enter_async_context(voice)
        await whole(voices)
        first.voices = voices  # type: ignore[attr-defined]
        yield first


async def whole(voices: Sequence[FakeNode], *, within_s: float = 30.0) -> None:
    """Until whoever speaks was told that all is taken and synced."""

    def is_whole() -> bool:
        stats = [voice.publisher.stats() for voice in voices]
        return any(
            item.connected and item.state is StreamState.SYNCED and item.acked_seq == voices[0].outbox.last_seq
            for item in stats
        )

    await eventually(is_whole, within_s=within_s, what=f"{voices[0].name} is whole")


async def settled(node: FakeNode, at: Sequence[Shared], *, within_s: float = 30.0) -> None:
    """Until the node is whole, and every coordinator answers exactly what it holds."""
    await whole(node.voices, within_s=within_s)  # type: ignore[attr-defined]
    truth = Fingerprints.of(sorted(node.held[Tier.CPU]))
    end_s = time.monotonic() + within_s
    for each in at:
        while True:
            answer = await each.client.lookup(DIGEST, truth)
            mine = sum(run.count for run in answer if any(answer.nodes[index].node == node.name for index, _ in run.holders))
            if mine == len(truth) and not answer.warming and each.held(node.name) == len(truth):
                break
            assert time.monotonic() < end_s, f"{mine} of {len(truth)} blocks of {node.name}, {answer.nodes}"


async def answered(at: Shared, fingerprints: Fingerprints, *, mode: LookupMode = LookupMode.SPARSE) -> Lookup:
    """What the store answers. On a busy machine it may not do so within store_lookup_s: then we ask again."""
    questions, end_s = at.coordinator.questions, time.monotonic() + 30
    while True:
        before = questions.without_store
        answer = await at.client.lookup(DIGEST, fingerprints, mode=mode)
        if questions.without_store == before:
            return answer
        assert time.monotonic() < end_s, "the store never answered in time"
        await asyncio.sleep(0.05)


async def test_any_coordinator_answers_what_was_published_to_another(url: str):
    chain = some_fingerprints(300)
    async with coordinators(url) as (a, b), publishing("n", [a]) as node:
        node.store(chain)
        await settled(node, [a, b])
        node.remove(chain.slice(200, 100))
        await settled(node, [a, b])
        asked = [await answered(each, chain) for each in (a, b)]
        assert [(item.hits, item.asked, item.nodes[0].state) for item in asked] == [(200, 300, StreamState.SYNCED)] * 2
        prefix = await answered(b, chain, mode=LookupMode.PREFIX)
        assert (prefix.hits, next(iter(prefix)).start) == (200, 0)
        async with publishing("m", [b]) as other:
            other.store(chain.slice(0, 250))
            await settled(other, [a, b])
            found = await answered(a, chain)
            assert (found.hits, {trust.node for trust in found.nodes}) == (250, {"n", "m"})
            other.publisher.leave()
            await eventually(lambda: other.publisher.stats().calls > 0 and not other.publisher.stats().connected, what="m left")
            assert (await answered(a, chain)).hits == 200
        await eventually(lambda: b.held("m") == 0 and a.held("m") == 0, what="both have read that m left")
        assert (await a.client.status()).streams_total == 1


async def test_streams_are_repaired_when_events_are_lost(url: str):
    async with coordinators(url, 1) as (a,), FakeNode(a.address, "n", loss=0.3) as node:
        await node.synced()
        for seed in range(80):
            node.store(some_fingerprints(3, seed=seed))
            node.remove(some_fingerprints(1, seed=seed - 5))
            await asyncio.sleep(0.002)
        await node.synced()
        assert node.publisher.stats().lost_events > 0
        assert (await answered(a, Fingerprints.of(sorted(node.held[Tier.CPU])))).hits == len(node.held[Tier.CPU])


@dataclass(slots=True)
class Load:
    """Lookups without a pause, and events. misses: of blocks that the node holds all the time."""

    lookups: int = 0
    misses: int = 0
    slowest_s: float = 0.0
    failures: list[str] = field(default_factory=list)
    lies: list[str] = field(default_factory=list)

    def take(self, answer: Lookup, took_s: float) -> None:
        self.lookups += 1
        self.misses += answer.asked - answer.hits
        self.slowest_s = max(self.slowest_s, took_s)


@contextlib.asynccontextmanager
async def under_load(nodes: Sequence[FakeNode], at: Sequence[Shared], held: Fingerprints) -> AsyncIterator[Load]:
    """Lookups of what the nodes hold all the time, at every coordinator, while other blocks come and go."""
    load, over = Load(), asyncio.Event()

    async def ask(each: Shared) -> None:
        while not over.is_set():
            began_s = time.monotonic()
            try:
                load.take(await each.client.lookup(DIGEST, held, deadline_s=1.0), time.monotonic() - began_s)
            except KvdirError as error:
                load.failures.append(repr(error))
            await asyncio.sleep(0.005)

    async def publish(node: FakeNode) -> None:
        for seed in itertools.count(1000):
            if over.is_set():
                return
            node.store(some_fingerprints(20, seed=seed))
            node.remove(some_fingerprints(20, seed=seed - 10))
            await asyncio.sleep(0.02)

    async with asyncio.TaskGroup() as group:
        for each in at:
            group.create_task(ask(each))
        for node in nodes:
            group.create_task(publish(node))
        try:
            yield load
        finally:
            over.set()


async def test_no_lookup_fails_and_all_is_whole_again_when_a_master_dies_under_load():
    held = some_fingerprints(500)
    with redis_cluster() as cluster:
        async with coordinators(cluster.url) as (a, b), publishing("n", [a, b]) as node, publishing("m", [b, a]) as other:
            node.store(held)
            other.store(held)
            await settled(node, [a, b])
            async with under_load([node, other], [a, b], held) as load:
                await eventually(lambda: load.lookups > 20, what="the load runs")
                await asyncio.to_thread(cluster.masters[1].kill)
                lookups = load.lookups
                survivors = [server for server in cluster.servers if server is not cluster.masters[1]]
                await asyncio.to_thread(until, lambda: cluster.whole(survivors), "the replica has taken over")
                await eventually(lambda: load.lookups > lookups + 300, within_s=30, what="lookups go on")
            assert load.failures == []
            assert load.slowest_s < 1.0
            assert load.misses > 0  # said as misses, while the slots had no master
            await settled(node, [a, b])
            await settled(other, [a, b])
            answer = await answered(a, held)
            assert (answer.hits, {trust.state for trust in answer.nodes}) == (500, {StreamState.SYNCED})


async def test_no_lookup_fails_and_all_is_whole_again_when_sentinels_fail_over():
    held = some_fingerprints(200)
    with redis_sentinel() as group:
        async with coordinators(group.url) as (a, b), publishing("n", [a, b]) as node:
            node.store(held)
            await settled(node, [a, b])
            async with under_load([node], [a, b], held) as load:
                await eventually(lambda: load.lookups > 20, what="the load runs")
                await asyncio.to_thread(group.master.kill)
                await asyncio.to_thread(until, lambda: group.replica.info("role") == "master", "the replica is master")
                lookups = load.lookups
                await eventually(lambda: load.lookups > lookups + 200, within_s=30, what="lookups go on")
            assert load.failures == []
            await settled(node, [a, b])


async def test_streams_restate_and_nothing_is_claimed_when_the_server_comes_back_empty():
    held = some_fingerprints(200)
    with redis_server() as server:
        async with coordinators(server.url) as (a, b), publishing("n", [a, b]) as node:
            node.store(held)
            await settled(node, [a, b])
            await asyncio.to_thread(server.kill)
            await eventually(lambda: bool(a.coordinator.link.away and b.coordinator.link.away), what="both know")
            for each in (a, b, a, b):
                answer = await each.client.lookup(DIGEST, held)
                assert (answer.hits, answer.warming, answer.incomplete) == (0, True, True)
                assert each.coordinator.not_ready().startswith("the store is away: ")
            node.store(some_fingerprints(5, seed=1))
            await asyncio.to_thread(server.start)
            await settled(node, [a, b])
            assert sum(voice.publisher.stats().snapshots for voice in node.voices) >= 1  # type: ignore[attr-defined]
            answer = await answered(b, held)
            assert (answer.hits, answer.nodes[0].state) == (200, StreamState.SYNCED)


async def test_lookups_answer_in_time_when_the_server_hangs():
    held = some_fingerprints(200)
    with redis_server() as server:
        async with coordinators(server.url) as (a, b), publishing("n", [a, b]) as node:
            node.store(held)
            await settled(node, [a, b])

            def asked() -> int:
                return sum(a.coordinator.link.calls.methods["lookup"].by_code.values())

            server.pause()
            try:
                node.store(some_fingerprints(5, seed=1))
                waits, before = [], asked()
                for _ in range(10):
                    began_s = time.monotonic()
                    answer = await a.client.lookup(DIGEST, held)
                    waits.append(time.monotonic() - began_s)
                    assert (answer.hits, answer.incomplete) == (0, True)
                assert max(waits) < 0.5
                assert asked() - before <= 5  # the others were answered without asking
                await eventually(lambda: bool(a.coordinator.link.away), what="it is said")
                acked = max(voice.publisher.stats().acked_seq for voice in node.voices)  # type: ignore[attr-defined]
                assert acked < node.outbox.last_seq
            finally:
                server.resume()
            await settled(node, [a, b])
            assert sum(voice.publisher.stats().snapshots for voice in node.voices) == 0  # type: ignore[attr-defined]


async def test_stream_says_that_the_store_is_full_and_removals_go_on():
    with redis_server("--maxmemory", "4mb") as server:
        async with often_restating(server.url) as a, publishing("n", [a]) as node:
            base = some_fingerprints(1000, seed=10**6)
            node.store(base)
            await settled(node, [a])
            more = await asyncio.to_thread(lambda: [some_fingerprints(2000, seed=seed) for seed in range(120)])
            for blocks in more:
                node.store(blocks)
                await asyncio.sleep(0)  # the coordinator is on this loop, too
            await eventually(lambda: "the store is full" in _reason(a), within_s=30, what="it is said")
            for blocks in more:
                node.remove(blocks)
                await asyncio.sleep(0)
            await settled(node, [a])
            assert (await answered(a, base)).hits == 1000


@contextlib.asynccontextmanager
async def often_restating(url: str) -> AsyncIterator[Shared]:
    """A coordinator that asks again for a snapshot that came to nothing after a second, instead of up to 30."""
    async with coordinators(url, 1) as (a,):
        a.coordinator.limits = replace(a.coordinator.limits, repair=RepairPolicy(idle_s=0.3, retry_max_s=1.0))
        yield a


def _reason(at: Shared) -> str:
    return " ".join(view.trust.reason for view in at.coordinator.link.fleet.views(at.coordinator.now_s()))


async def test_answers_say_that_they_are_incomplete_when_the_store_evicts():
    with redis_server("--maxmemory", "4mb", "--maxmemory-policy", "allkeys-lru") as server:
        async with coordinators(server.url, 1) as (a,), publishing("n", [a]) as node:
            before = await answered(a, some_fingerprints(1))
            assert not before.incomplete
            for seed in range(100):
                node.store(some_fingerprints(2000, seed=seed))
                await asyncio.sleep(0.01)
            end_s = time.monotonic() + 30
            while not (await answered(a, some_fingerprints(2000, seed=0))).incomplete:
                assert time.monotonic() < end_s, "it never said so"
            await eventually(lambda: a.coordinator.link.evicting or a.coordinator.link.away, what="known for all answers")


async def test_wrong_credentials_are_refused_at_start_and_shown_nowhere():
    with redis_server(password="right") as server:
        for wrong in (f"redis://:s3cret@127.0.0.1:{server.port}", f"redis://127.0.0.1:{server.port}"):
            with pytest.raises(ConfigError, match="check user, password") as refused:
                async with shared(make_store(wrong)):
                    pass
            assert "s3cret" not in str(refused.value)


async def test_another_schema_version_is_refused_at_start():
    with redis_server() as server:
        server.command("HSET", meta_tag("kvdir") + b":m", "schema", 99, "id", "1")
        with pytest.raises(ConfigError, match=r"holds schema version 99.*another prefix"):
            async with shared(make_store(server.url)):
                pass


async def test_missing_slots_are_named_at_start_and_lookups_go_on_where_it_runs():
    with redis_cluster() as cluster:
        async with coordinators(cluster.url, 1) as (a,), publishing("n", [a]) as node:
            node.store(some_fingerprints(100))
            await settled(node, [a])
            await asyncio.to_thread(_lose_slots, cluster.servers)
            for _ in range(5):
                answer = await a.client.lookup(DIGEST, some_fingerprints(100))
                assert answer.hits in (0, 100)
                assert answer.hits or answer.incomplete
            with pytest.raises(ConfigError, match=r"slots 16000-16383 are served by no master"):
                async with shared(make_store(f"{cluster.url}?prefix=late"), **SLOW_ENOUGH):
                    pass


def _lose_slots(servers: Sequence[Server]) -> None:
    for server in servers:
        server.command("CONFIG", "SET", "cluster-require-full-coverage", "no")
    for server in servers:
        with contextlib.suppress(Exception):
            server.command("CLUSTER", "DELSLOTSRANGE", 16000, 16383)
    until(lambda: max(slots[1] for slots in servers[0].command("CLUSTER", "SLOTS")) == 15999, "the slots are gone")


async def test_a_coordinator_that_starts_before_the_store_serves_when_that_is_there():
    with redis_server() as server:
        await asyncio.to_thread(server.kill)
        async with coordinators(server.url, 1) as (a,):
            assert a.coordinator.not_ready().startswith("the store is away: ")
            assert (await a.client.lookup(DIGEST, some_fingerprints(3))).hits == 0
            await asyncio.to_thread(server.start)
            await eventually(lambda: not a.coordinator.link.away, what="it has found the store")
            async with publishing("n", [a]) as node:
                node.store(some_fingerprints(3))
                await settled(node, [a])

"""Three coordinator processes under lookups and events: restarted one after the other, killed, stopped, cut off, slow."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from kvdir.client.aio import DirectoryClient
from kvdir.client.sync import Client
from kvdir.core.answer import Lookup
from kvdir.errors import KvdirError
from kvdir.location import StreamState
from kvdir.testing.fake_node import EXAMPLE_NAMESPACE, some_fingerprints
from kvdir.testing.wait import eventually
from peer_agent.testing.coordinators import Coordinators, NodeEverywhere, coordinators, publishing_everywhere
from peer_agent.testing.link import link_to

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

DIGEST = EXAMPLE_NAMESPACE.digest
BASE = some_fingerprints(500)
DEADLINE_S = 2.0


@dataclass(slots=True)
class Load:
    """Lookups of BASE by clients of every kind, and events. lies: answers that lack blocks, and say that all is well."""

    lookups: int = 0
    misses: int = 0
    failures: list[str] = field(default_factory=list)
    lies: list[str] = field(default_factory=list)
    slowest_s: float = 0.0

    def take(self, answer: Lookup, took_s: float) -> None:
        self.lookups += 1
        self.misses += answer.asked - answer.hits
        self.slowest_s = max(self.slowest_s, took_s)
        whole = [trust for trust in answer.nodes if trust.state is StreamState.SYNCED]
        if answer.hits < answer.asked and not answer.warming and whole:
            self.lies.append(f"{answer.hits} of {answer.asked} blocks, and {whole[0]}")


async def ask(load: Load, client: DirectoryClient) -> None:
    while True:
        began_s = time.monotonic()
        try:
            answer = await client.lookup(DIGEST, BASE, deadline_s=DEADLINE_S)
        except KvdirError as error:
            load.failures.append(repr(error))
        else:
            load.take(answer, time.monotonic() - began_s)
        await asyncio.sleep(0.002)


async def ask_blocking(load: Load, client: Client) -> None:
    while True:
        began_s = time.monotonic()
        try:
            answer = await asyncio.to_thread(client.lookup, DIGEST, BASE, deadline_s=DEADLINE_S)
        except KvdirError as error:
            load.failures.append(repr(error))
        else:
            load.take(answer, time.monotonic() - began_s)
        await asyncio.sleep(0.002)


async def publish(node: NodeEverywhere) -> None:
    """Blocks beside BASE come and go."""
    for number in itertools.count(1):
        blocks = some_fingerprints(20, seed=number)
        node.store(blocks)
        await asyncio.sleep(0.005)
        if number % 2:
            node.remove(blocks)


@contextlib.asynccontextmanager
async def under_load(trio: Coordinators, *nodes: NodeEverywhere) -> AsyncIterator[Load]:
    """Clients with names of their own, so that each coordinator is somebody's first."""
    load = Load()
    async with contextlib.AsyncExitStack() as stack:
        clients = [DirectoryClient(trio.addresses, name=f"client-{number}") for number in range(4)]
        for client in clients:
            await stack.enter_async_context(client)
        blocking = stack.enter_context(Client(trio.addresses, name="blocking"))
        work = [*(ask(load, client) for client in clients), ask_blocking(load, blocking), *map(publish, nodes)]
        tasks = [asyncio.create_task(item) for item in work]
        try:
            yield load
        finally:
            for task in tasks:
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [item for item in outcomes if not isinstance(item, asyncio.CancelledError)] == []


@contextlib.asynccontextmanager
async def three(*more: str) -> AsyncIterator[tuple[Coordinators, NodeEverywhere, NodeEverywhere]]:
    """Two nodes hold BASE, known everywhere."""
    async with (
        coordinators(3, *more) as trio,
        publishing_everywhere(trio.addresses, "n1") as one,
        publishing_everywhere(trio.addresses, "n2") as two,
    ):
        for node in (one, two):
            node.store(BASE)
        for node in (one, two):
            await node.synced()
        await trio.equal()
        yield trio, one, two


async def some_lookups(load: Load, count: int = 50) -> None:
    wanted = load.lookups + count
    await eventually(lambda: load.lookups >= wanted, what=f"{count} more lookups; failures: {load.failures[:3]}")


@pytest.mark.parametrize("how", ["asked to end", "killed"])
async def test_no_lookup_fails_when_one_after_the_other_is_restarted_under_load(how: str) -> None:
    async with three() as (trio, one, two):
        async with under_load(trio, one, two) as load:
            await some_lookups(load)
            for number in range(3):
                await (trio.end(number) if how == "asked to end" else trio.kill(number))
                await some_lookups(load)
                await trio.start_again(number)
                await trio.synced(number, streams=2)
                await some_lookups(load)
        assert load.failures == []
        assert load.lies == []
        await trio.equal()
        async with DirectoryClient(trio.addresses) as client:
            assert (await client.lookup(DIGEST, BASE)).hits == len(BASE)


async def test_no_lookup_fails_and_it_catches_up_when_one_is_stopped_for_a_while() -> None:
    async with three() as (trio, one, two):
        async with under_load(trio, one, two) as load:
            await some_lookups(load)
            trio.stop(0)
            await some_lookups(load, 200)
            trio.go_on(0)
            await some_lookups(load)
        assert load.failures == []
        assert load.lies == []
        assert load.slowest_s < DEADLINE_S / 2, "a hang costs the patience, not the share of the deadline"
        await trio.equal()


async def test_a_node_cut_off_from_one_coordinator_is_doubted_there_only_and_converges() -> None:
    async with coordinators(2, "--stale-after-s", "0.5") as pair:
        host, _, port = pair.addresses[0].rpartition(":")
        async with link_to(host, int(port)) as link:
            through = [f"127.0.0.1:{link.port}", pair.addresses[1]]
            async with publishing_everywhere(through, "n1") as node:
                node.store(BASE)
                await node.synced()
                link.up.cut()
                link.down.cut()
                node.remove(BASE.slice(0, 100))
                async with DirectoryClient(pair.addresses[0]) as cut_off, DirectoryClient(pair.addresses[1]) as other:
                    async with asyncio.timeout(20):
                        answer = await cut_off.lookup(DIGEST, BASE)
                        while answer.nodes[0].state is not StreamState.STALE:
                            answer = await cut_off.lookup(DIGEST, BASE)
                        assert answer.hits == len(BASE), "still hints, and said to be no more"
                        answer = await other.lookup(DIGEST, BASE)
                        while answer.hits != len(BASE) - 100:
                            answer = await other.lookup(DIGEST, BASE)
                    assert answer.nodes[0].state is StreamState.SYNCED
                link.up.restore()
                link.down.restore()
                await pair.equal()


async def test_events_and_lookups_go_on_when_one_coordinator_is_slow_but_alive() -> None:
    async with three() as (trio, one, two):
        host, _, port = trio.addresses[0].rpartition(":")
        async with link_to(host, int(port)) as link:
            link.down.lose(1.0, retransmit_s=0.3)
            through = [f"127.0.0.1:{link.port}", *trio.addresses[1:]]
            async with DirectoryClient(through, deadline_s=DEADLINE_S) as client:
                times = []
                for _ in range(40):
                    began_s = time.monotonic()
                    assert (await client.lookup(DIGEST, BASE)).hits == len(BASE)
                    times.append(time.monotonic() - began_s)
                assert max(times) < 0.3, "never as slow as the slow one"
                assert link.up.passed_bytes < 8 * len(BASE.packed), "and of 40 few were asked there"
            one.remove(BASE.slice(0, 10))
            await asyncio.gather(one.synced(), two.synced())
            await trio.equal()

"""Coordinator processes over one Redis: one is killed, one is stopped in the middle of its writes and goes on much later."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest

from kvdir.client.aio import DirectoryClient
from kvdir.client.standby import Standby
from kvdir.core.answer import Lookup
from kvdir.errors import InvalidInput, KvdirError
from kvdir.fingerprint import Fingerprints
from kvdir.location import StreamState, Tier
from kvdir.testing.fake_node import EXAMPLE_NAMESPACE, FakeNode, some_fingerprints
from kvdir.testing.redis_servers import redis_server
from kvdir.testing.wait import POLL_S, eventually
from peer_agent.testing.coordinators import Coordinators, coordinators

pytestmark = [pytest.mark.redis, pytest.mark.timeout(120)]

DIGEST = EXAMPLE_NAMESPACE.digest
BASE = some_fingerprints(300)
SOON_S = 4.5
"""Sooner than a publisher that nobody stands by for gives up on a silent coordinator, which takes it 5 s."""


@contextlib.asynccontextmanager
async def cluster() -> AsyncIterator[tuple[Coordinators, FakeNode, FakeNode]]:
    """Two processes over one store, and a node that publishes to one of them: (processes, who speaks, who stands by)."""
    settings = ("--stale-after-s", "1", "--store-timeout-s", "0.2", "--store-lookup-s", "0.1")
    with redis_server() as server:
        async with coordinators(2, "--store", server.url, *settings) as both:
            standby = Standby()
            first = FakeNode(both.addresses[0], "n", standby=standby)
            async with first, first.also(both.addresses[1], standby) as second:
                pair = (first, second), (second, first)
                await eventually(lambda: any(map(_settled, pair)), what="one speaks and is whole, the other one stands by")
                speaker, other = next(filter(_settled, pair))
                first.store(BASE)
                await speaker.synced()
                yield both, speaker, other


def _settled(pair: tuple[FakeNode, FakeNode]) -> bool:
    speaker, other = (node.publisher.stats() for node in pair)
    return speaker.state is StreamState.SYNCED and other.standby


def _speaks(node: FakeNode) -> bool:
    return node.publisher.stats().connected


async def _has_given_up(address: str) -> None:
    """Until that coordinator no more takes itself for the one that the node publishes to."""
    async with DirectoryClient(address) as client, asyncio.timeout(20):
        while True:
            try:
                await client.reconcile("n", deadline_s=1.0)
            except InvalidInput:
                return  # "published last to coordinator ..."
            except KvdirError:
                pass  # it has only just come back
            await asyncio.sleep(POLL_S)


async def held_everywhere(both: Coordinators, node: FakeNode, gone: Fingerprints, *, within_s: float = 20.0) -> None:
    """Until every coordinator that answers names exactly what the node holds, of what it holds or held."""
    truth = Fingerprints.of(sorted(node.held[Tier.CPU]))
    end_s = time.monotonic() + within_s
    for address in both.addresses:
        async with DirectoryClient(address) as client:
            while True:
                answers = [await client.lookup(DIGEST, item) for item in (truth, gone)]
                states = {trust.state for answer in answers for trust in answer.nodes}
                if (answers[0].hits, answers[1].hits, states) == (len(truth), 0, {StreamState.SYNCED}):
                    break
                assert time.monotonic() < end_s, (answers[0].hits, len(truth), answers[1].hits, states)


async def test_late_writes_change_nothing_when_a_stopped_coordinator_goes_on():
    async with cluster() as (both, speaker, other):
        number = both.addresses.index(speaker.publisher.stats().address)
        coming = [some_fingerprints(50, seed=seed) for seed in range(1, 21)]
        for blocks in coming[:10]:
            speaker.store(blocks)
        both.stop(number)  # in the middle of them
        for blocks in coming[10:]:
            speaker.store(blocks)
        began_s = time.monotonic()
        await eventually(lambda: other.state is StreamState.SYNCED, what="the other one has taken over")
        assert time.monotonic() - began_s < SOON_S
        for blocks in coming:
            other.remove(blocks)
        await other.synced()
        gone = Fingerprints(b"".join(blocks.packed for blocks in coming), 32)
        both.go_on(number)  # what it was about to write, it writes now
        await _has_given_up(both.addresses[number])
        await held_everywhere(both, other, gone)
        assert not _speaks(speaker)
        assert not other.fenced
        assert other.publisher.stats().snapshots == 0


async def test_stream_and_lookups_go_on_when_a_coordinator_is_killed():
    async with cluster() as (both, speaker, other):
        number = both.addresses.index(speaker.publisher.stats().address)
        failures, answers, misses, over = [], 0, 0, asyncio.Event()

        async def ask() -> None:
            nonlocal answers, misses
            async with DirectoryClient(both.addresses) as client:
                while not over.is_set():
                    try:
                        answer = await client.lookup(DIGEST, BASE, deadline_s=1.0)
                        if not answer.incomplete:  # else Redis was too slow for one lookup on this machine
                            answers, misses = answers + 1, misses + answer.asked - answer.hits
                    except KvdirError as error:
                        failures.append(repr(error))
                    await asyncio.sleep(0.002)

        asking = asyncio.create_task(ask())
        for seed in range(1, 30):
            other.store(some_fingerprints(5, seed=seed))
            await asyncio.sleep(0.002)
        began_s = time.monotonic()
        await both.kill(number)
        await eventually(lambda: other.state is StreamState.SYNCED, what="the other one has taken over")
        took_s = time.monotonic() - began_s
        await other.synced()
        over.set()
        await asking
        assert failures == []
        assert (answers > 0, misses) == (True, 0)  # what is in the store is there whoever answers
        assert took_s < SOON_S
        assert other.publisher.stats().snapshots == 0
        answer = await _complete(both.addresses[1 - number], Fingerprints.of(sorted(other.held[Tier.CPU])))
        assert answer.hits == 300 + 29 * 5
        await both.start_again(number)
        answer = await _complete(both.addresses[number], BASE)
        assert (answer.hits, answer.nodes[0].node) == (300, "n")


async def _complete(address: str, fingerprints: Fingerprints) -> Lookup:
    """The first answer that the store gave in time."""
    async with DirectoryClient(address) as client, asyncio.timeout(20):
        while True:
            answer = await client.lookup(DIGEST, fingerprints)
            if not answer.incomplete:
                return answer
            await asyncio.sleep(POLL_S)

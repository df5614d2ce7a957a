"""Clients beside coordinators that are gone, hang, or are slow but alive: the answer comes inside the deadline."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

import pytest

from kvdir.client.aio import DirectoryClient
from kvdir.client.race import RaceCounters
from kvdir.client.sync import Client
from kvdir.core.answer import Lookup
from kvdir.core.feedback import StaleReport
from kvdir.core.outbox import OwnerOutbox
from kvdir.errors import Unavailable, UnknownNamespace
from kvdir.location import Tier
from kvdir.testing.fake_node import EXAMPLE_NAMESPACE, FakeNode, some_fingerprints
from kvdir.testing.lookup_servers import silent_server
from kvdir.testing.served import Served, serving
from kvdir.testing.wait import eventually
from peer_agent.testing.link import Link, link_to

BLOCKS = some_fingerprints(50)
SLOW_S = 0.3
Ask = Callable[[], "asyncio.Future[Lookup]"]


@contextlib.asynccontextmanager
async def two_coordinators() -> AsyncIterator[tuple[Served, Served, Link]]:
    """Both know the same node, and warm no more; the first is reached over a link."""
    async with serving() as first, serving() as second:
        host, _, port = first.address.rpartition(":")
        outbox = OwnerOutbox(max_events=1000)
        async with (
            link_to(host, int(port)) as link,
            FakeNode(first.address, "n1", outbox=outbox) as one,
            FakeNode(second.address, "n1", epoch=one.epoch, outbox=outbox) as other,
        ):
            one.store(BLOCKS)
            other.held = one.held
            await one.synced()
            await other.synced()
            for served in (first, second):
                await eventually(lambda served=served: not served.coordinator.directory.warming, what="it is warm")
            yield first, second, link


@pytest.fixture(params=["aio", "sync"])
async def client_of(request: pytest.FixtureRequest) -> AsyncIterator[Callable[[str], tuple[object, Ask]]]:
    """Makes a client of some addresses, and what asks it."""
    async with contextlib.AsyncExitStack() as stack:

        def make(addresses: str) -> tuple[object, Ask]:
            if request.param == "aio":
                client = DirectoryClient(addresses, deadline_s=5.0)
                stack.push_async_callback(client.close)
                return client, lambda: asyncio.ensure_future(client.lookup(EXAMPLE_NAMESPACE.digest, BLOCKS))
            blocking = Client(addresses, deadline_s=5.0)
            stack.callback(blocking.close)
            return blocking, lambda: asyncio.ensure_future(asyncio.to_thread(blocking.lookup, EXAMPLE_NAMESPACE.digest, BLOCKS))

        yield make


async def eventually_asked_first(ask: Ask, link: Link, races: RaceCounters) -> None:
    """Until both are connected to, and the one behind the link answers alone: on a busy machine connecting may cost a hedge."""
    async with asyncio.timeout(20):
        while True:
            passed, hedges = link.up.passed_bytes, races.hedges
            assert (await ask()).hits == 50
            if link.up.passed_bytes - passed > 500 and races.hedges == hedges:
                return


async def test_slow_coordinator_costs_one_patience_and_is_asked_later(client_of: Callable[[str], tuple[object, Ask]]) -> None:
    async with two_coordinators() as (_, second, link):
        client, ask = client_of(f"127.0.0.1:{link.port},{second.address}")
        races = client.races  # type: ignore[attr-defined]
        await eventually_asked_first(ask, link, races)
        hedges, won = races.hedges, races.hedges_won
        link.down.lose(1.0, retransmit_s=SLOW_S)
        began_s = time.monotonic()
        assert (await ask()).hits == 50
        assert time.monotonic() - began_s < SLOW_S, "it did not wait for the slow one"
        assert races.hedges_won - won == 1
        passed = link.up.passed_bytes
        for _ in range(8):
            assert (await ask()).hits == 50
        # On a busy machine one more may be needed to tell slow from busy, and a pause of 0.5 s may be over meanwhile.
        assert races.hedges - hedges <= 3, "most did not ask the slow one first"
        assert link.up.passed_bytes - passed < 3 * len(BLOCKS.packed), "nor beside the other"


async def test_answer_comes_from_the_other_when_the_first_hangs(client_of: Callable[[str], tuple[object, Ask]]) -> None:
    async with two_coordinators() as (_, second, link):
        _, ask = client_of(f"127.0.0.1:{link.port},{second.address}")
        assert (await ask()).hits == 50
        link.down.cut()
        began_s = time.monotonic()
        answers = await asyncio.gather(*(ask() for _ in range(20)))
        assert [answer.hits for answer in answers] == [50] * 20
        assert time.monotonic() - began_s < 1.0, "a hang costs the patience, not a share of the deadline"


async def test_answer_comes_from_the_other_when_the_first_is_gone(client_of: Callable[[str], tuple[object, Ask]]) -> None:
    async with two_coordinators() as (_, second, _):
        client, ask = client_of(f"127.0.0.1:1,{second.address}")
        assert (await ask()).hits == 50
        assert client.races.moved_on + client.races.hedges == 1  # type: ignore[attr-defined]


async def test_answer_comes_from_the_other_when_the_first_has_just_started(
    client_of: Callable[[str], tuple[object, Ask]],
) -> None:
    """A coordinator to which no agent has come yet knows no namespace at all; only if nobody does, that is the answer."""
    async with serving() as fresh, two_coordinators() as (_, second, _):
        _, ask = client_of(f"{fresh.address},{second.address}")
        assert (await ask()).hits == 50
        _, ask = client_of(fresh.address)
        with pytest.raises(UnknownNamespace):
            await ask()
        _, ask = client_of(f"127.0.0.1:1,{fresh.address}")
        with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1"):  # which might know it
            await ask()


async def test_connections_to_a_coordinator_that_is_listed_no_more_end(client_of: Callable[[str], tuple[object, Ask]]) -> None:
    async with two_coordinators() as (_, second, link):
        client, ask = client_of(f"127.0.0.1:{link.port},{second.address}")
        assert (await ask()).hits == 50
        assert link.connections > 0
        client._addresses.replace([second.address])  # type: ignore[attr-defined]
        assert (await ask()).hits == 50
        await eventually(lambda: link.connections == 0, what="none is left")


async def test_each_connection_is_let_go_of_once_when_several_calls_notice_that_coordinators_went() -> None:
    class Slow:
        closed = 0

        async def close(self) -> None:
            self.closed += 1
            await asyncio.sleep(0)  # as a close that waits for something

    channels = {f"10.0.0.{number}:1": Slow() for number in range(3)}
    async with DirectoryClient("127.0.0.1:1") as client:
        client._channels.update(channels)  # type: ignore[arg-type]
        client._addresses.replace(["127.0.0.1:2"])
        await asyncio.gather(*(client._prune() for _ in range(3)))
        assert client._channels == {}
        assert client._using == {}
    assert [item.closed for item in channels.values()] == [1, 1, 1]


async def test_calls_end_with_an_error_when_the_client_is_closed_under_them_and_none_begins_afterwards() -> None:
    async with silent_server() as silent:
        client = DirectoryClient(silent.address, stream=False, deadline_s=30.0)
        asked = asyncio.create_task(client.lookup(EXAMPLE_NAMESPACE.digest, BLOCKS))
        await eventually(lambda: silent.asked, what="it is asked")
        await client.close()
        with pytest.raises(Unavailable, match="closed"):
            await asked
        with pytest.raises(Unavailable, match="closed"):
            await client.nodes()
        assert client._channels == {}
        blocking = Client(silent.address)
        blocking.close()
        with pytest.raises(Unavailable, match="closed"):
            await asyncio.to_thread(blocking.nodes)
        assert blocking._channels == {}


async def test_dump_ends_with_an_error_when_the_client_is_closed_under_it() -> None:
    async with serving() as served, FakeNode(served.address, "n1") as node:
        node.store(some_fingerprints(2000))
        await node.synced()
        client = DirectoryClient(served.address)
        parts = client.dump(chunk_blocks=1)
        await anext(parts)
        await client.close()
        with pytest.raises(Unavailable, match="closed"):
            async for _ in parts:
                pass


async def test_error_names_the_address_when_nobody_is_there(client_of: Callable[[str], tuple[object, Ask]]) -> None:
    _, ask = client_of("127.0.0.1:1,127.0.0.1:2")
    began_s = time.monotonic()
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:[12]"):
        await ask()
    assert time.monotonic() - began_s < 5.0


async def test_nothing_runs_on_when_a_hedged_question_is_cancelled() -> None:
    async with two_coordinators() as (_, _, link), DirectoryClient(f"127.0.0.1:{link.port},127.0.0.1:1") as client:
        await client.lookup(EXAMPLE_NAMESPACE.digest, BLOCKS)
        link.down.cut()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.lookup(EXAMPLE_NAMESPACE.digest, BLOCKS), 0.1)
        assert [task for task in asyncio.all_tasks() if "DirectoryClient" in repr(task)] == []


async def test_every_coordinator_hears_of_stale_blocks_also_when_one_is_away(
    client_of: Callable[[str], tuple[object, Ask]],
) -> None:
    async with two_coordinators() as (first, second, link):
        client, ask = client_of(f"127.0.0.1:{link.port},127.0.0.1:1,{second.address}")
        answer = await ask()
        report = StaleReport(
            "n1", answer.nodes[0].epoch, 10, EXAMPLE_NAMESPACE.digest, Tier.CPU, BLOCKS.slice(0, 3), reporter="test"
        )
        told = await asyncio.to_thread(client.report_stale, report)  # type: ignore[attr-defined]
        feedback = await told if asyncio.iscoroutine(told) else told
        assert feedback.removed == 3
        for served in (first, second):
            assert (await served.client.lookup(EXAMPLE_NAMESPACE.digest, BLOCKS)).hits == 47

"""Our events in the standard envelope, over real sockets, read by our own decoder and its cursor like an engine's."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from kvdir.client.events_out import EventsOut
from kvdir.core.event import Event
from kvdir.core.outbox import OwnerOutbox
from kvdir.engines import END_SEQ, Cleared, EngineIdentity, Residency, decode, read_frame
from kvdir.errors import Unavailable
from kvdir.fingerprint import Fingerprints
from kvdir.location import Tier
from kvdir.namespace import Namespace
from kvdir.testing.fake_engine import FakeEngine
from kvdir.testing.fake_engine import stored as engine_stored
from kvdir.testing.wait import eventually
from peer_agent.server.config import AgentConfig
from peer_agent.testing import local_cluster

NAMESPACE = Namespace.announced(
    model="tiny", block_tokens=16, hash_scheme="dynamo:xxh3", hash_seed="builtin", adapter="sql", tenant="salt:" + "a" * 32
)
LOCAL = "tcp://127.0.0.1:0"


def prints(*numbers: int, width: int = 8) -> Fingerprints:
    return Fingerprints.of([number.to_bytes(width, "big") for number in numbers])


def stored(*numbers: int) -> Event:
    return Event.stored(Tier.CPU, NAMESPACE.digest, prints(*numbers))


def new_outbox(*numbers: int, **more: Any) -> OwnerOutbox:
    outbox = OwnerOutbox(**more)
    for number in numbers:
        outbox.append(stored(number))
    return outbox


class Consumer:
    """A subscriber written only from the RFC's text and vLLM's framing: SUB, DEALER, numbers."""

    def __init__(self, endpoint: str, replay_endpoint: str) -> None:
        self.context = zmq.asyncio.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.sub.setsockopt(zmq.SUBSCRIBE, b"")
        self.sub.connect(endpoint)
        self.replay_endpoint = replay_endpoint
        self.residency = Residency(EngineIdentity(model="other", hash_scheme="dynamo:xxh3"), copies=False)
        self.numbers: list[int] = []

    def take(self, number: int, payload: bytes) -> None:
        batch = decode("mooncake", payload)
        assert not batch.rejected
        self.numbers.append(number)
        self.residency.apply(batch)

    async def until(self, met: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not met():
                frame = read_frame(await self.sub.recv_multipart())
                assert frame is not None
                self.take(*frame)

    async def ask(self, first: int) -> list[int]:
        dealer = self.context.socket(zmq.DEALER)
        dealer.connect(self.replay_endpoint)
        await dealer.send_multipart([b"", first.to_bytes(8, "big")])
        got = []
        async with asyncio.timeout(10):
            while (frame := read_frame(await dealer.recv_multipart())) is not None and frame.seq != END_SEQ:
                got.append(frame.seq)
                if frame.seq not in self.numbers:
                    self.take(*frame)
        dealer.close(0)
        return got

    @property
    def held(self) -> int:
        return sum(count.blocks for count in self.residency.counts())


@asynccontextmanager
async def telling(**more: Any) -> AsyncIterator[tuple[EventsOut, Consumer]]:
    out = EventsOut(LOCAL, LOCAL, **more)
    out.open()
    consumer = Consumer(out.endpoint, out.replay_endpoint)
    try:
        yield out, consumer
    finally:
        consumer.context.destroy(linger=0)
        await out.close()


async def joined(out: EventsOut, consumer: Consumer, outbox: OwnerOutbox) -> None:
    """A subscription takes effect somewhat later: says one block until it is heard, then asks for what was before."""
    deadline_s = time.monotonic() + 10
    while not await consumer.sub.poll(20):
        assert time.monotonic() < deadline_s
        outbox.append(stored(1))
    await consumer.ask(0)


async def test_a_reader_of_the_rfc_holds_the_same_when_it_follows() -> None:
    async with telling() as (out, consumer):
        outbox = new_outbox(1, 2, 3)
        out.follow("node-a", outbox, lambda: {NAMESPACE.digest: NAMESPACE})
        await joined(out, consumer, outbox)
        outbox.append(Event.removed(Tier.CPU, NAMESPACE.digest, prints(2)))
        outbox.append(stored(4, 5))
        await consumer.until(lambda: consumer.held == 4)
        (namespace,) = consumer.residency.namespaces.values()
        assert namespace == NAMESPACE


async def test_what_was_said_before_is_replayed_when_a_reader_comes_late() -> None:
    async with telling(ring_messages=2) as (out, consumer):
        outbox = OwnerOutbox()
        out.follow("node-a", outbox, lambda: {NAMESPACE.digest: NAMESPACE})
        for number in (1, 2, 3):
            outbox.append(stored(number))
            await eventually(lambda number=number: out.messages >= number)  # type: ignore[misc]
        assert await consumer.ask(0) == [1, 2]
        assert await consumer.ask(2) == [2]
        assert await consumer.ask(9) == []


async def test_a_loss_is_a_hole_in_the_numbers_when_the_outbox_dropped_events() -> None:
    async with telling() as (out, consumer):
        outbox = new_outbox(1)
        out.follow("node-a", outbox, lambda: {NAMESPACE.digest: NAMESPACE})
        await joined(out, consumer, outbox)
        outbox.lose(3)
        outbox.append(stored(7))
        await consumer.until(lambda: consumer.held == 2)
        numbers = sorted(set(consumer.numbers))
        assert numbers[-1] - numbers[-2] == 2
        assert out.lost_events == 3


async def test_the_old_life_is_cleared_when_an_engine_restarts() -> None:
    async with telling() as (out, consumer):
        outbox = new_outbox(1, 2)
        out.follow("node-a/vllm-0", outbox, lambda: {NAMESPACE.digest: NAMESPACE})
        await joined(out, consumer, outbox)
        out.follow("node-a/vllm-0", new_outbox(9), lambda: {NAMESPACE.digest: NAMESPACE})
        await consumer.until(lambda: consumer.held == 1)


async def test_the_old_life_says_no_more_when_an_engine_restarts_in_the_middle_of_a_burst() -> None:
    async with telling() as (out, consumer):
        out.follow("node-a/vllm-0", new_outbox(*range(10_000)), lambda: {NAMESPACE.digest: NAMESPACE})
        for _ in range(50):  # of 157 messages, one in each turn of the loop
            await asyncio.sleep(0)
        assert 0 < out.messages < 100
        out.follow("node-a/vllm-0", new_outbox(1, 2), lambda: {NAMESPACE.digest: NAMESPACE})
        await holds(consumer, 2)
        await eventually(lambda: out.messages == len(consumer.numbers))
        assert consumer.held == 2


async def test_the_ring_is_bounded_when_messages_are_large() -> None:
    async with telling(ring_bytes=1) as (out, consumer):
        outbox = OwnerOutbox()
        out.follow("node-a", outbox, lambda: {NAMESPACE.digest: NAMESPACE})
        for number in range(4):
            outbox.append(stored(*range(100 * number, 100 * number + 100)))
            await eventually(lambda number=number: out.messages > number)  # type: ignore[misc]
        assert await consumer.ask(0) == [3]


async def test_a_namespace_is_told_when_its_adapter_is_no_name_of_ours() -> None:
    odd = Namespace.announced(model="m", block_tokens=16, hash_scheme="dynamo:xxh3", hash_seed="builtin", adapter='"odd')
    async with telling() as (out, consumer):
        outbox = OwnerOutbox()
        out.follow("node-a", outbox, lambda: {odd.digest: odd})
        outbox.append(Event.stored(Tier.CPU, odd.digest, prints(1)))
        await holds(consumer, 1)


async def test_a_cleared_tier_names_its_medium_when_it_is_told() -> None:
    async with telling() as (out, consumer):
        outbox = new_outbox(1)
        out.follow("node-a", outbox, lambda: {NAMESPACE.digest: NAMESPACE})
        await joined(out, consumer, outbox)
        outbox.append(Event.cleared(Tier.CPU, NAMESPACE.digest))
        frame = read_frame(await asyncio.wait_for(consumer.sub.recv_multipart(), 10))
        while frame is not None and not any(isinstance(item, Cleared) for item in decode("mooncake", frame.payload).events):
            frame = read_frame(await asyncio.wait_for(consumer.sub.recv_multipart(), 10))
        assert frame is not None
        assert Cleared(Tier.CPU) in decode("mooncake", frame.payload).events


async def test_garbage_is_passed_over_when_the_replay_socket_gets_some() -> None:
    async with telling() as (out, consumer):
        dealer = consumer.context.socket(zmq.DEALER)
        dealer.connect(out.replay_endpoint)
        for parts in ([b"x"], [b"", b"short"], [b"", b"12345678", b"more"]):
            await dealer.send_multipart(parts)
        dealer.close(100)
        assert await consumer.ask(0) == []


async def test_an_agent_tells_of_its_arena_when_events_out_is_set() -> None:
    with tempfile.TemporaryDirectory(prefix="kvdir-") as directory:
        async with local_cluster(Path(directory), coordinator=False) as cluster:
            out, replay = f"ipc://{directory}/out", f"ipc://{directory}/replay"
            await cluster.start_agent("a", events_out=out, events_replay=replay)
            engine = await cluster.engine("a")
            fingerprints = cluster.blocks.chain(3)
            assert (await engine.store(fingerprints, cluster.blocks.data(fingerprints))).stored == 3
            consumer = Consumer(out, replay)
            await holds(consumer, 3)
            told = {event.packed[at : at + 8] for event in consumer.residency.held() for at in range(0, 8 * event.blocks, 8)}
            assert told == {item[:8] for item in fingerprints}
            consumer.context.destroy(linger=0)


async def test_an_agent_tells_of_its_engines_when_one_restarts() -> None:
    source = FakeEngine()
    try:
        with tempfile.TemporaryDirectory(prefix="kvdir-") as directory:
            async with local_cluster(Path(directory), coordinator=False) as cluster:
                out, replay = f"ipc://{directory}/out", f"ipc://{directory}/replay"
                options = (f"vllm={source.endpoint}", "model=test", "hash=opaque", f"replay={source.replay_endpoint}")
                source.publish(engine_stored(range(8)))
                await cluster.start_agent("a", events_out=out, events_replay=replay, engine=options)
                consumer = Consumer(out, replay)
                await holds(consumer, 8)
                source.kill()
                source.start()
                source.publish(engine_stored(range(3)))
                await holds(consumer, 3)
                consumer.context.destroy(linger=0)
    finally:
        source.close()


async def holds(consumer: Consumer, blocks: int) -> None:
    async with asyncio.timeout(20):
        while consumer.held != blocks:
            await consumer.ask(0)


def test_addresses_are_refused_in_words_when_they_are_wrong() -> None:
    def faults(**more: str) -> str:
        return "; ".join(AgentConfig(accept_bytes=1 << 20, node="a", **more).faults())  # type: ignore[arg-type]

    assert "neither tcp://HOST:PORT" in faults(events_out="127.0.0.1:7460")
    assert "say --insecure" in faults(events_out="tcp://0.0.0.0:7460")
    assert "say --insecure" in faults(events_out="tcp://*:7460")
    assert "needs events_out" in faults(events_replay="tcp://127.0.0.1:7461")
    assert not faults(events_out="tcp://127.0.0.1:7460", events_replay="ipc:///tmp/replay")


async def test_it_says_so_when_the_port_is_taken() -> None:
    async with telling() as (out, _):
        other = EventsOut(out.endpoint)
        with pytest.raises(Unavailable, match="choose another port"):
            other.open()
        await other.close()

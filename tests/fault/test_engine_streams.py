"""Engine streams when something breaks: floods, garbage, engines and coordinators that come and go, in any order."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvdir.client import engine_stream
from kvdir.client.discovery import Discovery
from kvdir.client.engine_findings import FindingKind
from kvdir.client.engine_life import Publishing
from kvdir.client.engine_options import parse_engine
from kvdir.client.engine_streams import EngineStreams
from kvdir.location import StreamState
from kvdir.testing.fake_engine import CLEARED, FakeEngine, described, removed, server_that_says, stored
from kvdir.testing.served import FAST_CONFIG, Served, serving
from kvdir.testing.wait import eventually

STREAM = "n1/vllm-0"
PASSING = ("asked for again", "nobody serves", "not known yet")
"""Doubts that end by themselves."""


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    made = FakeEngine()
    yield made
    made.close()


def streams_of(coordinators: Discovery, engine: FakeEngine, *more: str) -> EngineStreams:
    streams = EngineStreams("n1", Publishing(coordinators=coordinators), gone_s=5.0, probe_s=0.3)
    said = (f"vllm={engine.endpoint}", f"replay={engine.replay_endpoint}", "model=m", "hash=opaque")
    streams.add(parse_engine(",".join((*said, *more))))
    return streams


def seen(served: Served, name: str = STREAM) -> tuple[StreamState | None, int]:
    node = served.coordinator.directory.nodes.get(name)
    if node is None or node.stream is None:
        return None, 0
    return node.stream.state, sum(holder.blocks for holder in node.stream.holders.values())


async def equal(served: Served, engine: FakeEngine) -> None:
    truth = (StreamState.SYNCED, len(engine.held))
    await eventually(lambda: seen(served) == truth, what=f"{truth}, is {seen(served)}")


async def test_flood_is_taken_whole_and_the_loop_goes_on(engine: FakeEngine):
    """400,000 blocks at once. CPU time of the loop between two looks at it, since this machine may be busy otherwise."""
    async with serving() as served:
        with Discovery(served.address) as coordinators:
            streams = streams_of(coordinators, engine)
            engine.publish(CLEARED)
            await equal(served, engine)
            for number in range(40):
                engine.publish(stored(range(number * 10_000, (number + 1) * 10_000), parent=number * 10_000 - 1))
            longest_s = 0.0

            def all_there() -> bool:
                nonlocal longest_s, looked_s
                now_s = time.thread_time()
                longest_s, looked_s = max(longest_s, now_s - looked_s), now_s
                return seen(served) == (StreamState.SYNCED, 400_000)

            looked_s = time.thread_time()
            await eventually(all_there, within_s=40)
            assert longest_s < 0.25  # some 4 ms for us; here the coordinator's index is on the same loop
            assert streams.figures()[0].lost_batches == 0
            await streams.close()


async def test_flood_of_garbage_is_passed_over_and_counted(engine: FakeEngine):
    async with serving() as served:
        with Discovery(served.address) as coordinators:
            streams = streams_of(coordinators, engine)
            engine.publish(stored([1, 2]))
            await equal(served, engine)
            for number in range(5_000):
                engine.send_raw(b"?" * (number % 9))
            engine.publish(stored([3], parent=2))
            await equal(served, engine)
            assert streams.figures()[0].malformed > 500  # what the publisher did not drop
            await streams.close()


def random_step(engine: FakeEngine, rng: random.Random) -> None:
    match rng.randrange(60):
        case 0:
            engine.kill()
            engine.replay_loses = set()
            engine.start()
        case 1:
            engine.publish(CLEARED)
        case 2:
            engine.send_raw(bytes(rng.randrange(40)), bytes(8)[: rng.randrange(9)], bytes(rng.randrange(40)))
        case _:
            blocks = rng.sample(range(200), 5)
            held = [block for block in blocks if engine.held[block]]
            events = [stored(blocks, parent=7)] if rng.random() < 0.6 or not held else [removed(held)]
            engine.publish(*events, lost=rng.random() < 0.2)


@pytest.mark.parametrize("seed", range(3))
async def test_what_is_vouched_for_is_right_after_any_history(engine: FakeEngine, seed: int):
    """Random batches, losses, garbage, restarts, silent replays: then the stream equals the engine, or says that it may not."""
    rng, doubts, equals = random.Random(seed), 0, 0
    async with serving() as served:
        with Discovery(served.address) as coordinators:
            streams = streams_of(coordinators, engine)
            for _ in range(12):
                await eventually(lambda: streams.figures()[0].connected)
                engine.replay_loses = set(rng.sample(range(engine.next_seq, engine.next_seq + 32), rng.choice([0, 20])))
                engine.publish(CLEARED)
                for _ in range(30):
                    random_step(engine, rng)
                engine.replay_loses.discard(engine.next_seq)  # whoever loses the end everywhere and always is not found out
                engine.publish(stored([1], parent=7))

                def decided() -> bool:
                    doubt = streams.figures()[0].doubt
                    for_good = doubt and not any(words in doubt for words in PASSING)
                    return for_good or seen(served) == (StreamState.SYNCED, len(engine.held))

                await eventually(decided)
                doubts += bool(streams.figures()[0].doubt)
                equals += not streams.figures()[0].doubt
            assert min(doubts, equals) > 0, f"{doubts} in doubt, {equals} equal"
            engine.replay_loses = set()
            engine.publish(CLEARED)  # whatever is in doubt for ever ends here
            engine.publish(stored([1, 2, 3]))
            await equal(served, engine)
            await streams.close()


async def test_stream_is_restated_when_the_coordinator_comes_back_without_memory(engine: FakeEngine):
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        listen = f"127.0.0.1:{bound.getsockname()[1]}"
    config = replace(FAST_CONFIG, listen=listen)
    with Discovery(listen) as coordinators:
        streams = streams_of(coordinators, engine)
        engine.publish(stored(range(100)))
        async with serving(config) as served:
            await equal(served, engine)
        engine.publish(stored(range(100, 150)))  # while nobody is there
        async with serving(config) as served:
            await equal(served, engine)
        await streams.close()


async def test_doubt_outlives_the_coordinator(engine: FakeEngine):
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        listen = f"127.0.0.1:{bound.getsockname()[1]}"
    config = replace(FAST_CONFIG, listen=listen)
    engine.replay_loses = {1}
    with Discovery(listen) as coordinators:
        streams = streams_of(coordinators, engine)
        async with serving(config) as served:
            await eventually(lambda: streams.figures()[0].connected)
            for number in range(4):
                engine.publish(stored([number]), lost=number == 1)
            await eventually(lambda: seen(served) == (StreamState.GAP, 3) and "are lost" in streams.in_words())
        async with serving(config) as served:
            await eventually(lambda: seen(served) == (StreamState.GAP, 3))
            directory = served.coordinator.directory
            assert "are lost" in directory.nodes[STREAM].stream.cursor.reason
            assert directory.nodes[STREAM].stream.cursor.complete  # all that we say of it has arrived
        await streams.close()


async def test_engine_that_is_gone_during_a_replay_costs_nothing_but_its_blocks(engine: FakeEngine):
    async with serving() as served:
        with Discovery(served.address) as coordinators:
            for number in range(2000):
                engine.publish(stored([number]))
            streams = streams_of(coordinators, engine)
            await eventually(lambda: engine.replays > 0)
            engine.kill()
            await eventually(lambda: seen(served)[0] is StreamState.GAP)
            engine.start()
            engine.publish(stored([5]))
            await equal(served, engine)
            await streams.close()


async def test_new_agent_takes_the_stream_over_and_the_old_one_says_so(engine: FakeEngine):
    async with serving() as served:
        with Discovery(served.address) as coordinators:
            old = streams_of(coordinators, engine)
            engine.publish(stored(range(10)))
            await equal(served, engine)
            new = streams_of(coordinators, engine)
            await eventually(lambda: any(finding.kind == "fenced" for finding in old.findings()))
            assert "Give every engine a name of its own" in old.in_words()
            await equal(served, engine)
            await old.close()
            engine.publish(stored(range(10, 20)))
            await equal(served, engine)
            await new.close()


async def test_engine_that_restarts_while_it_is_removed_leaves_nothing_behind(engine: FakeEngine):
    """The coordinator accepts and says nothing, so that a goodbye takes its time."""
    with socket.create_server(("127.0.0.1", 0)) as silent, Discovery(f"127.0.0.1:{silent.getsockname()[1]}") as coordinators:
        streams = streams_of(coordinators, engine)
        engine.publish(stored(range(10)))
        await eventually(lambda: streams.figures()[0].blocks == 10)
        before = asyncio.all_tasks()
        closing = asyncio.create_task(streams.close())
        for _ in range(3):
            engine.kill()
            engine.start()
            for _ in range(5):
                engine.publish(stored([1], parent=7))
                await asyncio.sleep(0.02)
        await closing
        left = [task for task in asyncio.all_tasks() - {asyncio.current_task()} if not task.done()]
        assert not left, f"{left}, of {before}"


async def test_ranks_are_followed_where_they_are_now_when_the_engine_comes_back_with_fewer(engine: FakeEngine):
    other = FakeEngine(rank=1)
    sources = {str(rank): described(each) for rank, each in enumerate((engine, other))}
    with server_that_says(sources, "m") as url:
        async with serving() as served:
            with Discovery(served.address) as coordinators:
                streams = EngineStreams("n1", Publishing(coordinators=coordinators), look_again_s=0.2)
                streams.add(parse_engine(f"vllm={url},hash=opaque"))
                other.publish(stored(range(5)))
                await eventually(lambda: seen(served, f"{STREAM}@1") == (StreamState.SYNCED, 5))
                del sources["1"]
                other.close()
                engine.publish(stored(range(3)))
                await equal(served, engine)  # as the only one it is no rank
                assert [item.stream for item in streams.figures()] == [STREAM]
                assert [seen(served, f"{STREAM}@{rank}")[0] for rank in (0, 1)] == [StreamState.FENCED] * 2
                await streams.close()


async def test_model_is_asked_for_again_when_the_engine_begins_anew_at_the_same_address(engine: FakeEngine):
    models = ["m"]
    with server_that_says({"0": described(engine)}, models) as url:
        async with serving() as served:
            with Discovery(served.address) as coordinators:
                streams = EngineStreams("n1", Publishing(coordinators=coordinators), look_again_s=0.2)
                streams.add(parse_engine(f"vllm={url},hash=opaque"))
                await eventually(lambda: bool(streams.figures()))
                engine.publish(stored(range(3)))
                await equal(served, engine)
                models.append("other")
                engine.forget()
                engine.publish(stored([1]))
                await eventually(lambda: [item.model for item in streams.figures()] == ["other"])
                await equal(served, engine)
                await streams.close()


async def test_finding_ends_with_the_life_that_it_is_about(engine: FakeEngine):
    async with serving() as served:
        with Discovery(served.address) as coordinators:
            streams = streams_of(coordinators, engine)
            engine.publish(stored([1], lora_id=3))
            await eventually(lambda: [finding.kind for finding in streams.findings()] == [FindingKind.ADAPTER])
            engine.kill()
            engine.start()
            engine.publish(stored([1, 2]))
            await equal(served, engine)
            await eventually(lambda: not streams.findings())
            await streams.close()


async def test_stream_that_fails_says_so_and_vouches_for_nothing(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch):
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("a fault of ours")

    async with serving() as served:
        with Discovery(served.address) as coordinators:
            streams = streams_of(coordinators, engine)
            engine.publish(stored(range(10)))
            await equal(served, engine)
            monkeypatch.setattr(engine_stream, "decode", fails)
            engine.publish(stored([77]))
            await eventually(lambda: [finding.kind for finding in streams.findings()] == [FindingKind.FAILED])
            assert "restart this process" in streams.in_words()
            await eventually(lambda: seen(served)[0] is StreamState.FENCED)  # with a goodbye: nothing stays as a hint
            await streams.close()

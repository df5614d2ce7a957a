"""Engines' events fill the directory: over real ZeroMQ and gRPC, from a publisher that does what vLLM's does."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from kvdir.client.discovery import Discovery
from kvdir.client.engine_findings import FindingKind
from kvdir.client.engine_life import Publishing
from kvdir.client.engine_options import parse_engine
from kvdir.client.engine_streams import EngineFigures, EngineStreams
from kvdir.core.instance import parse
from kvdir.errors import InvalidInput
from kvdir.fingerprint import Fingerprints
from kvdir.location import StreamState
from kvdir.namespace import Namespace
from kvdir.server.shared.coordinator import SharedCoordinator
from kvdir.store.memory import MemoryBlockStore
from kvdir.testing.fake_engine import CLEARED, FakeEngine, described, removed, server_that_says, stored
from kvdir.testing.served import Served, serving
from kvdir.testing.shared import shared
from kvdir.testing.wait import eventually

MODEL = "tiny"
OPAQUE = Namespace.announced(model=MODEL, block_tokens=16, hash_scheme="opaque", hash_seed="builtin")
STREAM = "n1/vllm-0"


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    made = FakeEngine()
    yield made
    made.close()


def option(engine: FakeEngine, *more: str, replay: bool = True) -> str:
    said = [f"vllm={engine.endpoint}", f"model={MODEL}", "hash=opaque"]
    return ",".join([*said, *([f"replay={engine.replay_endpoint}"] if replay else []), *more])


@contextlib.asynccontextmanager
async def following(address: str, *engines: str, **settings: Any) -> AsyncIterator[EngineStreams]:
    with Discovery(address) as coordinators:
        streams = EngineStreams("n1", Publishing(coordinators=coordinators), **settings)
        try:
            for text in engines:
                streams.add(parse_engine(text))
            yield streams
        finally:
            await streams.close()


def figures(streams: EngineStreams) -> EngineFigures:
    (only,) = streams.figures()
    return only


def state(served: Served, name: str = STREAM) -> tuple[StreamState | None, str]:
    node = served.coordinator.directory.nodes.get(name)
    return (None, "") if node is None or node.stream is None else (node.stream.state, node.stream.cursor.reason)


def hashes_of(numbers: Any) -> Fingerprints:
    return Fingerprints.of([number.to_bytes(8, "big") for number in numbers])


def held(served: Served, name: str = STREAM) -> int:
    node = served.coordinator.directory.nodes.get(name)
    return sum(holder.blocks for holder in node.stream.holders.values()) if node and node.stream else -1


async def joined(served: Served, engine: FakeEngine, name: str = STREAM) -> None:
    """Until what the engine publishes arrives. Without a replay, nobody knows before it clears what it said before."""

    def synced() -> bool:
        engine.publish(CLEARED)
        return state(served, name)[0] is StreamState.SYNCED

    await eventually(synced)


async def equal(served: Served, engine: FakeEngine, name: str = STREAM) -> None:
    """The directory says of the engine what it holds, and vouches for it."""
    await eventually(lambda: state(served, name)[0] is StreamState.SYNCED, what=f"synced, is {state(served, name)}")
    await eventually(lambda: held(served, name) == len(engine.held), what=f"{len(engine.held)} blocks")
    if engine.held:
        answer = await served.client.lookup(OPAQUE.digest, hashes_of(engine.held))
        assert answer.hits == len(engine.held)
        assert {trust.node for trust in answer.nodes} == {name}


async def test_directory_holds_what_the_engine_holds_when_it_stores_removes_and_clears(engine: FakeEngine) -> None:
    async with serving() as served, following(served.address, option(engine)):
        engine.publish(stored(range(100)))
        engine.publish(stored(range(100, 200), parent=99), removed(range(10)))
        await equal(served, engine)
        engine.publish(stored([50], parent=49))  # a second copy, so one removal leaves one
        engine.publish(removed([50, 51]))
        await equal(served, engine)
        assert engine.held[50] == 1
        engine.publish(CLEARED)
        engine.publish(stored(range(5)))
        await equal(served, engine)
        assert parse(STREAM) == ("n1", "vllm-0", None)


async def test_what_was_said_before_us_is_replayed_when_the_ring_reaches_back(engine: FakeEngine) -> None:
    for number in range(50):
        engine.publish(stored([number]))
    async with serving() as served, following(served.address, option(engine)) as streams:
        await equal(served, engine)
        assert figures(streams).lost_batches == 0


async def test_stream_is_in_doubt_until_the_engine_clears_when_the_ring_reaches_back_too_little() -> None:
    engine = FakeEngine(ring_batches=10)
    for number in range(50):
        engine.publish(stored([number]))
    async with serving() as served, following(served.address, option(engine)) as streams:
        await eventually(lambda: held(served) == 10)
        assert state(served)[0] is StreamState.GAP
        assert "reaches back to 40 only" in state(served)[1]
        assert [finding.kind for finding in streams.findings()] == [FindingKind.LOST]
        engine.publish(CLEARED)
        engine.publish(stored([7]))
        await equal(served, engine)
        assert not streams.findings()
    engine.close()


async def test_lost_batches_are_replayed_in_order_when_the_engine_has_them(engine: FakeEngine) -> None:
    async with serving() as served, following(served.address, option(engine)) as streams:
        engine.publish(stored(range(10)))
        await equal(served, engine)
        engine.publish(removed(range(5)), lost=True)
        engine.publish(stored(range(100, 110)), lost=True)
        engine.publish(removed([100]))
        await equal(served, engine)
        assert figures(streams).lost_batches == 0


async def test_end_of_a_silent_stream_is_found_when_nothing_comes_after_it(engine: FakeEngine) -> None:
    async with serving() as served, following(served.address, option(engine), probe_s=0.3):
        engine.publish(stored(range(10)))
        await equal(served, engine)
        engine.publish(stored(range(20, 30)), lost=True)
        await equal(served, engine)


async def test_loss_is_a_doubt_with_its_words_when_there_is_no_replay(engine: FakeEngine) -> None:
    async with serving() as served, following(served.address, option(engine, replay=False)) as streams:
        await joined(served, engine)
        engine.publish(stored(range(10)))
        await equal(served, engine)
        lost = engine.publish(stored([77]), lost=True)
        engine.publish(stored([78]))
        await eventually(lambda: held(served) == 11)
        assert state(served)[0] is StreamState.GAP
        assert f"batches {lost} to {lost} are lost" in state(served)[1]
        (view,) = await served.client.nodes()
        assert f"batches {lost} to {lost} are lost" in view.trust.reason
        assert [finding.kind for finding in streams.findings()] == [FindingKind.LOST]
        assert not any(holding.blocks.trusted for holding in view.holdings)
        engine.publish(CLEARED)
        await equal(served, engine)


async def test_hole_inside_a_replay_is_repaired_or_in_doubt(engine: FakeEngine) -> None:
    for number in range(20):
        engine.publish(stored([number]))
    engine.replay_loses = {7}
    async with serving() as served, following(served.address, option(engine)):
        await eventually(lambda: "7" in state(served)[1] or held(served) == 19)
        await eventually(lambda: state(served)[0] is StreamState.GAP and held(served) == 19)
        engine.replay_loses = set()
        engine.publish(CLEARED)
        await equal(served, engine)


async def test_entries_of_the_old_life_are_gone_at_once_when_the_engine_restarts(engine: FakeEngine) -> None:
    async with serving() as served, following(served.address, option(engine)) as streams:
        engine.publish(stored(range(100)))
        await equal(served, engine)
        before = figures(streams).epoch
        engine.kill()
        await eventually(lambda: "nobody serves" in state(served)[1])
        assert held(served) == 100  # as hints, for a moment
        engine.start()
        engine.publish(stored(range(200, 203)))
        await equal(served, engine)
        assert figures(streams).epoch != before
        answer = await served.client.lookup(OPAQUE.digest, hashes_of(range(100)))
        assert answer.hits == 0


async def test_restarted_engine_is_a_new_life_when_there_is_no_replay(engine: FakeEngine) -> None:
    async with serving() as served, following(served.address, option(engine, replay=False)) as streams:
        await joined(served, engine)
        for number in range(100):
            engine.publish(stored([number]))
        await equal(served, engine)
        engine.kill()
        engine.start()

        def begun_anew() -> bool:
            engine.publish(stored([200 + engine.next_seq]))  # the first ones may pass before the subscription is there again
            return figures(streams).restarts == 1

        await eventually(begun_anew)
        await eventually(lambda: held(served) > 0 and held(served) != 100)
        answer = await served.client.lookup(OPAQUE.digest, hashes_of(range(100)))
        assert answer.hits == 0
        assert state(served)[0] is not StreamState.SYNCED or held(served) == len(engine.held)


async def test_blocks_are_taken_out_when_the_engine_stays_away(engine: FakeEngine) -> None:
    async with serving() as served, following(served.address, option(engine), gone_s=0.5):
        engine.publish(stored(range(100)))
        await equal(served, engine)
        engine.kill()
        await eventually(lambda: held(served) == 0)
        state_now, reason = state(served)
        assert state_now is StreamState.GAP
        assert f"nobody serves {engine.endpoint}" in reason
        engine.start()
        engine.publish(stored(range(3)))
        await equal(served, engine)


async def test_engine_that_connects_to_us_is_followed_when_we_bind() -> None:
    engine = FakeEngine()
    free = engine.endpoint
    engine.close()
    connecting = FakeEngine(connect=free, replay=False)
    async with serving() as served, following(served.address, f"vllm=bind:{free},model={MODEL},hash=opaque") as streams:
        await joined(served, connecting)
        assert figures(streams).connected
        connecting.publish(stored(range(10)))
        await equal(served, connecting)
        for _ in range(3):  # whoever looks whether the port is open is no engine that goes
            with socket.create_connection(("127.0.0.1", int(free.rpartition(":")[2]))) as probe:
                probe.shutdown(socket.SHUT_WR)
                while probe.recv(1000):
                    pass
        connecting.publish(stored(range(10, 20)))
        await equal(served, connecting)
        assert figures(streams).connected
        connecting.kill()
        await eventually(lambda: not figures(streams).connected)
    connecting.close()


async def test_ranks_are_streams_of_their_own_and_duplicates_are_refused(engine: FakeEngine) -> None:
    other = FakeEngine(rank=1)
    first, second = (option(each, f"rank={rank}", "name=e") for rank, each in enumerate((engine, other)))
    async with serving() as served, following(served.address, first, second) as streams:
        engine.publish(stored(range(4)))
        other.publish(stored(range(4, 9)))
        await equal(served, engine, "n1/e@0")
        await equal(served, other, "n1/e@1")
        with pytest.raises(InvalidInput, match="rank 1 of 'e' is given twice"):
            streams.add(parse_engine("vllm=tcp://127.0.0.1:9,model=m,name=e,rank=1"))
        with pytest.raises(InvalidInput, match=r"listens to tcp:.* already"):
            streams.add(parse_engine(option(engine, "name=other")))
        streams.add(parse_engine(first))  # the same again
        assert len(streams) == 2
        assert await streams.remove("e", 1)
        await eventually(lambda: state(served, "n1/e@1")[0] is StreamState.FENCED)
        assert (await served.client.lookup(OPAQUE.digest, hashes_of(range(4, 9)))).hits == 0
        assert not await streams.remove("e", 1)
    other.close()


async def test_wrong_rank_is_a_finding(engine: FakeEngine) -> None:
    async with serving() as served, following(served.address, option(engine, "rank=3")) as streams:
        engine.publish(stored(range(4)))
        await eventually(lambda: [finding.kind for finding in streams.findings()] == [FindingKind.RANK])
        assert "is that of rank 0, not of rank 3" in streams.in_words()
        assert served.address


@pytest.mark.parametrize(
    ("event", "more", "kind", "words"),
    [
        (stored([1], block_tokens=32), "", FindingKind.BLOCK_SIZE, "blocks of 32 tokens, the namespace served here"),
        (stored([1], lora_id=3), "", FindingKind.ADAPTER, "lora_name"),
        (stored([1]), "salted=required", FindingKind.SALT, "cache_salt in every request"),
        (stored([1], medium="PAPER"), "", FindingKind.REJECTED, "medium whose tier is not known"),
        (stored([1]), "hash=vllm:sha256", FindingKind.PROBE, "no block would ever be found"),
    ],
)
async def test_finding_says_what_to_do(
    engine: FakeEngine, event: dict[str, Any], more: str, kind: FindingKind, words: str
) -> None:
    text = option(engine).replace("hash=opaque,", "") if more.startswith("hash=") else option(engine)
    async with serving() as served, following(served.address, f"{text},{more}", expected=lambda: {MODEL: {16}}) as streams:
        engine.publish(event)
        await eventually(lambda: [finding.kind for finding in streams.findings()] == [kind], what=streams.in_words())
        assert words in streams.findings()[0].words
        assert words in streams.in_words()


async def test_mismatching_hashes_are_a_doubt(engine: FakeEngine) -> None:
    async with serving() as served, following(served.address, option(engine).replace("opaque", "vllm:sha256")):
        engine.publish(stored([1, 2, 3]))
        await eventually(lambda: "no block would ever be found" in state(served)[1])
        assert state(served)[0] is StreamState.GAP


async def test_silence_is_a_finding_that_says_how_to_switch_events_on(engine: FakeEngine) -> None:
    async with serving() as served, following(served.address, option(engine, "quiet_s=0.2")) as streams:
        await eventually(lambda: [finding.kind for finding in streams.findings()] == [FindingKind.SILENT])
        assert "enable_kv_cache_events" in streams.in_words()
        engine.publish(stored([1]))
        await equal(served, engine)
        assert streams.in_words() == f"{STREAM}: following"


async def test_endpoint_that_nobody_serves_is_a_finding() -> None:
    async with serving() as served, following(served.address, "vllm=tcp://127.0.0.1:9,model=m") as streams:
        await eventually(lambda: [finding.kind for finding in streams.findings()] == [FindingKind.NOBODY])
        await eventually(lambda: "nobody serves tcp://127.0.0.1:9" in state(served)[1])


async def test_garbage_costs_itself_only(engine: FakeEngine) -> None:
    async with serving() as served, following(served.address, option(engine)) as streams:
        engine.publish(stored(range(10)))
        await equal(served, engine)
        engine.send_raw(b"only one")
        engine.send_raw(b"", b"short", b"\xff" * 40)
        engine.publish(stored(range(10, 20)), {"type": "BlockDreamt", "block_hashes": [1]})
        await eventually(lambda: held(served) == 20)
        assert figures(streams).malformed == 2
        assert state(served)[0] is StreamState.GAP  # the event that was not understood may have changed something
        engine.send(b"\xc1 no msgpack")
        engine.publish(stored([99]))
        await eventually(lambda: held(served) == 21)
        engine.publish(CLEARED)
        engine.publish(stored(range(3)))
        await equal(served, engine)


async def test_engine_is_found_by_its_server_when_that_says_where_its_events_are(engine: FakeEngine) -> None:
    other = FakeEngine(rank=1)
    sources = {"0": described(engine), "1": described(other)}
    with server_that_says(sources, MODEL) as url:
        async with serving() as served, following(served.address, f"vllm={url},hash=opaque") as streams:
            engine.publish(stored(range(4)))
            other.publish(stored(range(4, 9)))
            await equal(served, engine, "n1/vllm-0@0")
            await equal(served, other, "n1/vllm-0@1")
            assert {item.model for item in streams.figures()} == {MODEL}
    other.close()


async def test_engine_without_events_is_a_finding_when_its_server_says_so() -> None:
    with server_that_says({}, MODEL) as url:
        async with serving() as served, following(served.address, f"vllm={url}") as streams:
            await eventually(lambda: [finding.kind for finding in streams.findings()] == [FindingKind.DISCOVERY])
            assert "enable_kv_cache_events" in streams.in_words()
            assert not served.coordinator.directory.nodes


async def test_doubt_is_seen_by_every_coordinator_of_a_shared_store(engine: FakeEngine) -> None:
    store, text = MemoryBlockStore(), option(engine, replay=False)
    async with shared(store, "a") as one, shared(store, "b") as two, following(one.address, text) as streams:
        await eventually(lambda: figures(streams).connected)
        engine.publish(stored(range(10)))
        await eventually(lambda: one.held(STREAM) == 10 and two.held(STREAM) == 10)
        engine.publish(stored([1]), lost=True)
        engine.publish(stored([77]))

        def reasons(coordinator: SharedCoordinator) -> list[str]:
            return [view.trust.reason for view in coordinator.link.fleet.views(coordinator.now_s())]

        for each in (one, two):
            await eventually(lambda each=each: any("are lost" in reason for reason in reasons(each.coordinator)))

"""A real vLLM's own events fill the directory: equal to its block pool, through evictions, duplicates, restarts and losses."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvdir.client.discovery import Discovery
from kvdir.client.engine_findings import FindingKind
from kvdir.client.engine_life import Publishing
from kvdir.client.engine_options import parse_engine
from kvdir.client.engine_streams import EngineStreams
from kvdir.core.node import Stream
from kvdir.location import StreamState, Tier
from kvdir.testing.check_engine_publisher import CHECKS, Publisher
from kvdir.testing.served import Served, serving
from kvdir.testing.wait import eventually
from tests.vllm.engines import Engine, shared_prompts

STREAM = "n1/vllm-0"
ALGORITHM = "sha256_cbor"


class Ports:
    """Where one engine after another publishes."""

    def __init__(self) -> None:
        self.events, self.replay = _free_port(), _free_port()

    def option(self, *more: str) -> str:
        where = f"vllm=tcp://127.0.0.1:{self.events},replay=tcp://127.0.0.1:{self.replay}"
        return ",".join([where, "model=tiny", f"hash=vllm:{ALGORITHM}", *more])

    def engine(self, model: Path, *, buffer_steps: int = 10_000, **options: Any) -> Engine:
        from vllm.config import KVEventsConfig

        events = KVEventsConfig(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint=f"tcp://*:{self.events}",
            replay_endpoint=f"tcp://*:{self.replay}",
            buffer_steps=buffer_steps,
        )
        return Engine(model, kv_events_config=events, prefix_caching_hash_algo=ALGORITHM, **options)


def _free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


@contextlib.asynccontextmanager
async def following(served: Served, text: str) -> AsyncIterator[EngineStreams]:
    with Discovery(served.address) as coordinators:
        streams = EngineStreams("n1", Publishing(coordinators=coordinators), probe_s=0.5)
        streams.add(parse_engine(text))
        await eventually(lambda: streams.figures()[0].connected)
        yield streams
        await streams.close()


def pool_of(engine: Engine) -> dict[int, set[bytes]]:
    """What the engine's block pool has cached: low 64 bits of the hashes, by group."""
    held: dict[int, set[bytes]] = {}
    for key in engine.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block._cache:
        held.setdefault(int.from_bytes(key[-4:], "big"), set()).add(bytes(key[:-4][-8:]))
    return held


def directory_of(served: Served) -> tuple[StreamState | None, str]:
    """State of the stream, and why it is not synced."""
    stream = _stream(served)
    return (None, "") if stream is None else (stream.state, stream.cursor.reason)


def _stream(served: Served) -> Stream | None:
    node = served.coordinator.directory.nodes.get(STREAM)
    return node.stream if node else None


async def equals(served: Served, engine: Engine) -> None:
    """The directory vouches for exactly what the pool has: per kind of group what all groups of that kind have."""
    by_kind: dict[tuple[str, int], list[set[bytes]]] = {}
    pool = pool_of(engine)
    for index, group in enumerate(engine.scheduler.kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        window = getattr(spec, "sliding_window", None) or 0
        by_kind.setdefault(("sliding_window" if window else "full", window), []).append(pool.get(index, set()))
    wanted = sorted((kind, window, len(set.intersection(*sets))) for (kind, window), sets in by_kind.items())

    def seen() -> list[tuple[str, int, int]]:
        stream = _stream(served)
        if stream is None or stream.state is not StreamState.SYNCED:
            return []
        groups = [
            (holder.namespace.namespace.groups[0], holder) for holder in stream.holders.values() if holder.tier == Tier.GPU
        ]
        return sorted((group.kind, group.window_tokens, holder.blocks) for group, holder in groups)

    await eventually(lambda: seen() == wanted, what=f"pool has {wanted}, directory {seen()} ({directory_of(served)})")
    stream = _stream(served)
    assert stream is not None
    for (_, tier), holder in stream.holders.items():
        group = holder.namespace.namespace.groups[0]
        held = set.intersection(*by_kind[group.kind, group.window_tokens])
        index, packed = served.coordinator.directory.index, b"".join(sorted(held))
        assert tier == Tier.GPU
        assert not held or index.lookup(packed, 8, scope=holder.namespace.scope).hits == len(held)


class Living:
    """One engine after another at the same addresses. Shared by tests, because a start takes seconds: each begins with what
    the ones before have left, and none relies on it.
    """

    def __init__(self, model: Path, blocks: int, *, ring: int) -> None:
        self.ports = Ports()
        self._model = model
        self._blocks = blocks
        self._ring = ring
        self.engine = self._start()

    def _start(self) -> Engine:
        return self.ports.engine(self._model, buffer_steps=self._ring, num_gpu_blocks_override=self._blocks)

    def begin_anew(self, *, ring: int) -> None:
        self.engine.close()
        self._ring = ring
        self.engine = self._start()

    def reach_back(self, ring: int) -> None:
        """Its replay knows so many batches from now on."""
        if ring != self._ring:
            self.begin_anew(ring=ring)

    async def generate(self, *prompts: list[int], forget: bool = False) -> None:
        """forget: the engine empties itself before."""
        if forget:
            await asyncio.to_thread(self.engine.forget)
        for prompt in prompts:
            await asyncio.to_thread(self.engine.generate, prompt)


@pytest.fixture(scope="module")
def living(tiny_llama: Path) -> Iterator[Living]:
    made = Living(tiny_llama, 40, ring=3)
    yield made
    made.engine.close()


async def follows(living: Living) -> None:
    """Through duplicates, evictions, and a clearing."""
    living.reach_back(10_000)
    prompts = shared_prompts()
    async with serving() as served, following(served, living.ports.option()) as streams:
        await living.generate(*prompts, prompts[0][:64], prompts[0][:64], *prompts[::-1])  # of whole blocks again: copies
        await equals(served, living.engine)
        assert not streams.findings()
        await living.generate(prompts[1], forget=True)  # an idle engine does not say that it was emptied
        await equals(served, living.engine)


async def test_directory_equals_the_block_pool_of_a_hybrid_model_with_duplicates_and_evictions(tiny_gemma3: Path) -> None:
    living = Living(tiny_gemma3, 120, ring=10_000)
    await follows(living)
    living.engine.close()


async def test_whoever_comes_late_says_so_when_the_ring_does_not_reach_back(living: Living) -> None:
    prompts = shared_prompts()
    living.reach_back(3)
    await living.generate(*prompts)
    async with serving() as served, following(served, living.ports.option()):
        await eventually(lambda: "reaches back to" in directory_of(served)[1])
        await living.generate(prompts[2], forget=True)
        await equals(served, living.engine)  # it has cleared since, so nothing of what was missed matters


async def test_old_entries_are_gone_at_once_when_the_engine_restarts(living: Living) -> None:
    prompts = shared_prompts()
    async with serving() as served, following(served, living.ports.option()) as streams:
        await living.generate(*prompts[:4], forget=True)
        await equals(served, living.engine)
        (before,) = streams.figures()
        living.begin_anew(ring=10_000)
        await living.generate(prompts[5])
        await equals(served, living.engine)
        (after,) = streams.figures()
        assert before.epoch != after.epoch
        assert after.blocks < before.blocks


async def test_directory_equals_the_block_pool_with_duplicates_and_evictions(living: Living) -> None:
    await follows(living)


async def test_wrong_seed_is_explained_when_the_first_block_comes(living: Living) -> None:
    async with serving() as served, following(served, living.ports.option("seed=7")) as streams:
        await living.generate(shared_prompts()[0], forget=True)
        await eventually(lambda: [finding.kind for finding in streams.findings()] == [FindingKind.PROBE])
        assert 'hash_seed = "builtin"' in streams.in_words()
        await eventually(lambda: directory_of(served)[0] is StreamState.GAP)


async def test_whoever_comes_late_knows_all_when_the_ring_reaches_back(living: Living) -> None:
    prompts = shared_prompts()
    living.reach_back(10_000)
    await living.generate(*prompts)
    async with serving() as served:
        async with following(served, living.ports.option()):
            await equals(served, living.engine)
        await living.generate(prompts[3])  # while nobody listens
        async with following(served, living.ports.option()):
            await equals(served, living.engine)


class _Real:
    """vLLM's own publisher, as the suite wants it."""

    def __init__(self) -> None:
        from vllm.distributed.kv_events import ZmqEventPublisher

        ports = Ports()
        self._made = ZmqEventPublisher(0, f"tcp://*:{ports.events}", f"tcp://*:{ports.replay}")
        self.endpoint, self.replay_endpoint = f"tcp://127.0.0.1:{ports.events}", f"tcp://127.0.0.1:{ports.replay}"

    def publish_stored(self, hashes: list[int]) -> None:
        from vllm.distributed.kv_events import BlockStored, KVEventBatch

        event = BlockStored(
            block_hashes=hashes, parent_block_hash=None, token_ids=[1] * 32 * len(hashes), block_size=32, lora_id=None,
            medium="GPU", lora_name=None,
        )  # fmt: skip
        self._made.publish(KVEventBatch(ts=1.0, events=[event]))

    def close(self) -> None:
        self._made.shutdown()


@pytest.fixture
def real() -> Iterator[_Real]:
    made = _Real()
    yield made
    made.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_vllm_publisher_is_what_the_fake_one_is(real: _Real, check: Callable[[Publisher], None]) -> None:
    check(real)

"""An agent that is told of its host's engines: their events in the directory, in its metrics and its inventory."""

from __future__ import annotations

import asyncio
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from kvdir.config import load
from kvdir.errors import ConfigError
from kvdir.location import StreamState
from kvdir.testing.fake_engine import FakeEngine, stored
from kvdir.testing.wait import eventually
from peer_agent.server.config import AgentConfig
from peer_agent.testing.cluster import LocalCluster, local_cluster
from peer_agent.v1 import engine_pb2, engine_pb2_grpc

STREAM = "a/vllm-0"


@pytest.fixture
def directory() -> Iterator[Path]:
    """Short, because socket paths end at 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="kvdir-") as path:
        yield Path(path)


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    made = FakeEngine()
    yield made
    made.close()


def options(engine: FakeEngine, *more: str) -> tuple[str, ...]:
    return (f"vllm={engine.endpoint}", "model=test", "hash=opaque", f"replay={engine.replay_endpoint}", *more)


def stream_state(cluster: LocalCluster) -> StreamState | None:
    assert cluster.coordinator is not None
    node = cluster.coordinator.directory.nodes.get(STREAM)
    return node.stream.state if node and node.stream else None


def _scraped(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
        return str(answer.read().decode())


async def test_engine_is_in_directory_inventory_and_metrics_when_the_agent_follows_it(directory: Path, engine: FakeEngine):
    async with local_cluster(directory, "a", engine=options(engine), http_listen="127.0.0.1:0") as cluster:
        ready = cluster.agents["a"].ready
        engine.publish(stored(range(40)))
        await eventually(lambda: stream_state(cluster) is StreamState.SYNCED and cluster.known_blocks(STREAM) == 40)
        async with grpc.aio.insecure_channel(ready.engine) as channel:
            answer = await engine_pb2_grpc.EngineStub(channel).Inventory(engine_pb2.InventoryRequest())
        (item,) = answer.engine_streams
        assert (item.stream, item.connected, item.blocks, item.state) == (STREAM, True, 40, "following")
        shown = await asyncio.to_thread(_scraped, ready.http)
        assert f'peer_agent_engine_blocks{{stream="{STREAM}"}} 40.0' in shown
        assert f'peer_agent_engine_in_doubt{{stream="{STREAM}"}} 0.0' in shown


async def test_engine_is_gone_from_the_directory_when_its_agent_leaves(directory: Path, engine: FakeEngine):
    async with local_cluster(directory, "a", engine=options(engine)) as cluster:
        engine.publish(stored(range(40)))
        await eventually(lambda: stream_state(cluster) is StreamState.SYNCED)
        await cluster.stop_agent("a")
        assert stream_state(cluster) is StreamState.FENCED


async def test_block_size_of_the_namespace_served_here_is_held_against_the_engine(directory: Path, engine: FakeEngine):
    async with local_cluster(directory, "a", engine=options(engine)) as cluster:
        served = cluster.namespace.block_tokens
        engine.publish(stored([1], block_tokens=2 * served))
        async with grpc.aio.insecure_channel(cluster.agents["a"].ready.engine) as channel:
            stub = engine_pb2_grpc.EngineStub(channel)

            async def words() -> str:
                return (await stub.Inventory(engine_pb2.InventoryRequest())).engine_streams[0].state

            async with asyncio.timeout(20):
                while "blocks of" not in (seen := await words()):
                    pass
        assert f"blocks of {2 * served} tokens" in seen
        assert f"--block-size {served}" in seen


def test_all_faults_of_engines_are_named_at_once(tmp_path: Path):
    file = tmp_path / "agent.toml"
    file.write_text(
        """
        accept_bytes = "1MiB"
        [[engine]]
        vllm = "tcp://*:5557"
        modle = "llama"
        [[engine]]
        vllm = "tcp://127.0.0.1:5557"
        model = "llama"
        name = "x"
        ranks = 0
        [[engine]]
        sglang = "http://127.0.0.1:30000"
        """
    )
    with pytest.raises(ConfigError) as caught:
        load(AgentConfig, prefix="PEER_AGENT_", file=file, environ={})
    words = str(caught.value)
    for fault in (
        "modle= is unknown", "'*' is where the engine listens", "model= is required", "ranks=0", "has no server that says",
    ):  # fmt: skip
        assert fault in words, words


def test_tables_and_lists_and_flags_say_the_same(tmp_path: Path):
    file = tmp_path / "agent.toml"
    tables = '[[engine]]\nvllm = "tcp://h:1"\nmodel = "m"\nranks = 2\n[[engine]]\nsglang = "tcp://h:9"\nmodel = "m"\n'
    lists = 'engine = ["vllm=tcp://h:1,model=m", "ranks=2", "sglang=tcp://h:9,model=m"]\n'
    read = []
    for text in (f'accept_bytes = "1MiB"\n{tables}', f'accept_bytes = "1MiB"\n{lists}'):
        file.write_text(text)
        config, _ = load(AgentConfig, prefix="PEER_AGENT_", file=file, environ={})
        read.append(",".join(config.engine))
    assert read[0] == read[1] == "vllm=tcp://h:1,model=m,ranks=2,sglang=tcp://h:9,model=m"

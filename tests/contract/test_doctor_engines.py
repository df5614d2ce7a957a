"""The doctors where engines publish events: seeds that differ for routers, other block sizes, endpoints that nobody serves."""

from __future__ import annotations

import asyncio
import json
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from kvdir.cli.main import main as kvdir_main
from kvdir.testing.fake_engine import FakeEngine, stored
from peer_agent.cli.main import main as agent_main
from peer_agent.testing import local_cluster


@pytest.fixture
def directory() -> Iterator[Path]:
    """Short, because socket paths end at 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="kvdir-") as path:
        yield Path(path)


@pytest.fixture
def engines() -> Iterator[list[FakeEngine]]:
    made = [FakeEngine(), FakeEngine()]
    yield made
    for engine in made:
        engine.close()


async def until_found(program: click.Command, check: str, *arguments: str, publish: Callable[[], object]) -> dict[str, Any]:
    """What a check has against something; asked for until it has, while the engines go on publishing."""
    end_s = time.monotonic() + 30
    while True:
        publish()
        result = await asyncio.to_thread(CliRunner().invoke, program, ["doctor", "--output", "json", *arguments])
        document = json.loads(result.stdout)
        for item in document["findings"]:
            if item["check"] == check and item["verdict"] != "ok":
                return dict(item)
        assert time.monotonic() < end_s, result.stdout


async def test_seeds_are_compared_for_routers_when_two_engines_hash_differently(
    directory: Path, engines: list[FakeEngine]
) -> None:
    async with local_cluster(directory) as cluster:
        for node, seed, engine in zip("ab", ("0", "17"), engines, strict=True):
            await cluster.start_agent(node, engine=(f"vllm={engine.endpoint}", "model=llama", "hash=opaque", f"seed={seed}"))
        found = await until_found(
            kvdir_main, "hash seed", cluster.coordinator_address, publish=lambda: [e.publish(stored(range(4))) for e in engines]
        )
        assert (found["verdict"], found["subject"]) == ("fault", "a/vllm-0 and b/vllm-0")
        assert "hash_seed: '0' here, '17' there" in found["seen"]
        assert "PYTHONHASHSEED" in found["fix"]


async def test_block_sizes_are_named_by_the_nodes_doctor_when_engine_and_namespace_differ(
    directory: Path, engines: list[FakeEngine]
) -> None:
    engine = engines[0]
    async with local_cluster(directory, "a", engine=(f"vllm={engine.endpoint}", "model=test", "hash=opaque")) as cluster:
        served = cluster.namespace.block_tokens
        address = cluster.agents["a"].ready.engine
        publish = lambda: engine.publish(stored([1], block_tokens=2 * served))  # noqa: E731
        found = await until_found(agent_main, "block size", address, "--no-cluster", publish=publish)
        assert (found["verdict"], found["subject"]) == ("fault", "a/vllm-0")
        assert f"blocks of {2 * served} tokens" in found["seen"]


async def test_an_endpoint_is_named_when_nobody_serves_it_and_the_agent_is_down(directory: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{taken.getsockname()[1]}"
        file = directory / "agent.toml"
        file.write_text(f'accept_bytes = "1MiB"\narena_path = "{directory}/a"\nengine = ["vllm=tcp://{nobody},model=m"]\n')
        found = await until_found(agent_main, "engine events", "--config", str(file), publish=lambda: None)
        assert (found["verdict"], found["subject"]) == ("fault", f"tcp://{nobody}")

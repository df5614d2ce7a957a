"""The doctors on real set-ups that are broken on purpose: what they say, and that they say nothing of healthy ones."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvdir.cli.doctor import why_not_reached
from kvdir.cli.main import main as kvdir_main
from kvdir.errors import UnknownNamespace
from kvdir.namespace import Namespace
from kvdir.testing.wait import eventually
from peer_agent.cli.main import main as agent_main
from peer_agent.client import aio
from peer_agent.testing import LocalCluster, local_cluster


async def kvdir_doctor(*arguments: str) -> tuple[Result, dict[str, Any]]:
    result = await asyncio.to_thread(CliRunner().invoke, kvdir_main, ["doctor", "--output", "json", *arguments])
    return result, json.loads(result.stdout)


async def agent_doctor(*arguments: str) -> tuple[Result, dict[str, Any]]:
    result = await asyncio.to_thread(CliRunner().invoke, agent_main, ["doctor", "--output", "json", *arguments])
    return result, json.loads(result.stdout)


def found(document: dict[str, Any], check: str) -> list[dict[str, str]]:
    """What a check has to say against something."""
    return [item for item in document["findings"] if item["check"] == check and item["verdict"] != "ok"]


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address at which nobody listens, and nobody else will."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


def write(directory: Path, namespace: Namespace) -> str:
    fields = json.loads(namespace.canonical())
    fields.pop("version")
    file = directory / f"{namespace.digest.hex()[:12]}.json"
    file.write_text(json.dumps(fields))
    return str(file)


async def store(cluster: LocalCluster, node: str) -> None:
    engine = await cluster.engine(node)
    blocks = cluster.blocks.chain(4)
    assert (await engine.store(blocks, cluster.blocks.data(blocks))).stored == 4
    await cluster.wait_known(node)


async def heard(cluster: LocalCluster, *nodes: str) -> None:
    await eventually(lambda: all(map(cluster.is_synced, nodes)), what=f"{', '.join(nodes)} are heard and trusted")


async def until_well(
    doctor: Callable[..., Awaitable[tuple[Result, dict[str, Any]]]], *arguments: str
) -> tuple[Result, dict[str, Any]]:
    """The answer once all is well: on a busy machine, an agent may be unheard for a moment."""
    end_s = time.monotonic() + 20
    while True:
        result, document = await doctor(*arguments)
        if document["verdict"] == "ok" or time.monotonic() > end_s:
            return result, document


async def test_a_healthy_cluster_is_well_when_the_doctor_looks(tmp_path: Path) -> None:
    async with local_cluster(tmp_path, "a", "b") as cluster:
        for node in ("a", "b"):
            await store(cluster, node)
        await heard(cluster, "a", "b")
        result, document = await until_well(kvdir_doctor, cluster.coordinator_address)
        assert (result.exit_code, document["verdict"]) == (0, "ok"), result.stdout
        assert document["counts"]["ok"] >= 10


async def test_the_doctor_names_the_seed_and_the_fix_when_two_agents_have_different_ones(tmp_path: Path) -> None:
    async with local_cluster(tmp_path, "a") as cluster:
        other = dataclasses.replace(cluster.namespace, hash_seed="17")
        await cluster.start_agent("b", namespaces=(write(tmp_path, other),))
        await heard(cluster, "a", "b")
        result, document = await kvdir_doctor(cluster.coordinator_address)
        (finding,) = found(document, "hash seed")
        assert (result.exit_code, finding["verdict"], finding["subject"]) == (1, "fault", "a and b")
        assert "hash_seed: '0' here, '17' there" in finding["seen"]
        assert "PYTHONHASHSEED" in finding["fix"]
        assert "hash seed" in result.stderr
        table = await asyncio.to_thread(CliRunner().invoke, kvdir_main, ["doctor", cluster.coordinator_address])
        assert "PYTHONHASHSEED" in table.stdout


async def test_the_doctor_names_the_agent_when_nobody_can_be_reached_at_its_address(tmp_path: Path, nobody: str) -> None:
    async with local_cluster(tmp_path, "a") as cluster:
        await cluster.start_agent("b", advertise=nobody)
        await heard(cluster, "a", "b")
        result, document = await kvdir_doctor(cluster.coordinator_address)
        (finding,) = found(document, "peers")
        assert (result.exit_code, finding["subject"]) == (1, "b")
        assert nobody in finding["seen"]
        result, document = await kvdir_doctor(cluster.coordinator_address, "--no-reach")
        assert found(document, "peers") == []


async def test_the_doctor_says_which_name_is_taken_over_again_and_again_when_agents_take_turns(tmp_path: Path) -> None:
    async with local_cluster(tmp_path) as cluster:
        for turn in range(3):
            if turn:
                await cluster.stop_agent("same")
            await cluster.start_agent("same")
            await heard(cluster, "same")
        _, document = await kvdir_doctor(cluster.coordinator_address)
        (finding,) = found(document, "one name, one agent")
        assert (finding["subject"], finding["verdict"]) == ("same", "fault")


async def test_the_doctor_sees_what_nobody_finds_when_lookups_never_hit(tmp_path: Path) -> None:
    from kvdir.client.aio import DirectoryClient

    async with local_cluster(tmp_path, "a") as cluster:
        await store(cluster, "a")
        async with DirectoryClient(cluster.coordinator_address) as client:
            await client.lookup(cluster.namespace.digest, cluster.blocks.chain(200, root="computed otherwise"))
        _, document = await kvdir_doctor(cluster.coordinator_address)
        (finding,) = found(document, "lookups")
        assert "0 found, although 4 blocks are known" in finding["seen"]


async def test_the_doctor_ends_in_time_when_a_coordinator_is_not_there(nobody: str) -> None:
    result, document = await kvdir_doctor(nobody, "--timeout-s", "0.5")
    (finding,) = found(document, "coordinator")
    assert (result.exit_code, finding["subject"]) == (1, nobody)
    result, document = await kvdir_doctor("no:such:address", "--timeout-s", "0.5")
    assert found(document, "coordinator")


@pytest.mark.parametrize("address", ["127.0.0.1", "host:port"])
def test_an_address_is_a_finding_and_no_bug_when_it_is_none(address: str) -> None:
    assert why_not_reached(address, 0.5) == "that is not host:port"


def config_file(cluster: LocalCluster, node: str, **settings: Any) -> str:
    """The configuration of an agent, as a file."""
    config = cluster.config(node, **settings)
    wanted = {
        name: getattr(config, name) for name in ("node", "namespaces", "arena_path", "arena_bytes", "listen", "coordinators")
    }
    lines = [f"{name} = {json.dumps(value)}" for name, value in (wanted | settings).items()]
    file = cluster.directory / f"{node}.toml"
    file.write_text("\n".join(lines))
    return str(file)


async def test_a_healthy_node_is_well_when_its_doctor_looks(tmp_path: Path) -> None:
    async with local_cluster(tmp_path, "a", "b") as cluster:
        for node in ("a", "b"):
            await store(cluster, node)
        await heard(cluster, "a", "b")
        result, document = await until_well(agent_doctor, "--config", config_file(cluster, "a"))
        against = [item for item in document["findings"] if item["verdict"] != "ok"]
        assert (result.exit_code, against) == (0, []), result.stdout
        assert {"agent", "publishing", "shared memory", "data planes", "hash seed"} <= {
            i["check"] for i in document["findings"]
        }
        left = [name for name in await asyncio.to_thread(os.listdir, tmp_path) if name.startswith("kvdir-doctor")]
        assert left == [], "the doctor leaves nothing behind"


async def test_the_nodes_doctor_finds_both_when_the_agent_is_down_and_an_endpoint_is_served_by_nobody(
    tmp_path: Path, nobody: str
) -> None:
    async with local_cluster(tmp_path) as cluster:
        file = config_file(cluster, "a")
        result, document = await agent_doctor("--config", file, "--endpoint", f"tcp://{nobody}", "--timeout-s", "0.5")
        assert result.exit_code == 1
        assert "no agent is at" in found(document, "agent")[0]["seen"]
        assert nobody in found(document, "engine events")[0]["seen"]


async def test_the_nodes_doctor_says_who_took_its_name_when_it_was_fenced(tmp_path: Path) -> None:
    async with local_cluster(tmp_path, "a") as cluster:
        await heard(cluster, "a")
        first = cluster.agents["a"]
        await cluster.start_agent("a", arena_path=str(tmp_path / "other.arena"))
        try:
            await eventually(lambda: first.publishing.fenced, what="the older agent is fenced")
            _, document = await agent_doctor(first.ready.engine, "--no-cluster")
            (finding,) = found(document, "publishing")
            assert (finding["verdict"], finding["subject"]) == ("fault", "a")
            assert "name of its own" in finding["fix"]
        finally:
            await first.close()


async def test_the_nodes_doctor_says_who_answers_when_two_agents_are_said_to_be_at_one_address(tmp_path: Path) -> None:
    async with local_cluster(tmp_path, "a") as cluster:
        await cluster.start_agent("b", advertise=cluster.agents["a"].ready.peer)
        await heard(cluster, "a", "b")
        _, document = await agent_doctor("--config", config_file(cluster, "a"))
        (finding,) = found(document, "peers")
        assert (finding["subject"], finding["verdict"]) == ("b", "fault")
        assert "the agent of node a answers there" in finding["seen"]


async def test_the_nodes_doctor_says_that_no_agent_answers_when_another_service_is_at_the_address(tmp_path: Path) -> None:
    async with local_cluster(tmp_path, "a") as cluster:
        await cluster.start_agent("b", advertise=cluster.coordinator_address)
        await heard(cluster, "a", "b")
        _, document = await agent_doctor("--config", config_file(cluster, "a"))
        (finding,) = found(document, "peers")
        assert finding["subject"] == "b"
        assert "no peer agent" in finding["seen"]


async def test_the_nodes_doctor_lists_every_fault_when_the_configuration_is_wrong(tmp_path: Path) -> None:
    async with local_cluster(tmp_path) as cluster:
        file = config_file(cluster, "a", listen="0.0.0.0:7410", transports=["shm", "pigeon"])
        result, document = await agent_doctor("--config", file, "--no-cluster")
        seen = " ".join(item["seen"] for item in found(document, "configuration"))
        assert result.exit_code == 1
        assert "listen: 0.0.0.0:7410 is reachable from elsewhere" in seen
        assert "transports: pigeon" in seen


async def test_the_nodes_doctor_says_what_a_plane_lacks_when_it_cannot_open(tmp_path: Path) -> None:
    async with local_cluster(tmp_path) as cluster:
        file = config_file(cluster, "a", transports=["shm", "ucx"], ucp_library="/nowhere/libucp.so.0")
        _, document = await agent_doctor("--config", file, "--no-cluster", "--timeout-s", "10")
        (finding,) = (item for item in found(document, "data planes") if item["verdict"] == "fault")
        assert finding["subject"] == "ucx"
        assert "/nowhere/libucp.so.0" in finding["seen"]


async def test_the_nodes_doctor_says_why_an_engine_was_refused_when_it_hashes_with_another_seed(tmp_path: Path) -> None:
    async with local_cluster(tmp_path, "a") as cluster:
        other = dataclasses.replace(cluster.namespace, hash_seed="17")
        address = cluster.agents["a"].ready.engine
        with pytest.raises(UnknownNamespace):
            await aio.connect(address, namespace=other, engine="vllm-0")  # and here it would go on without its agent
        result, document = await agent_doctor(address, "--no-cluster")
        (finding,) = found(document, "hash seed")
        assert (result.exit_code, finding["subject"], finding["verdict"]) == (1, "vllm-0", "fault")
        assert "hash_seed: '17' here, '0' there" in finding["seen"]
        shown = await asyncio.to_thread(CliRunner().invoke, agent_main, ["inventory", address])
        assert "vllm-0" in shown.stdout
        engine = await aio.connect(address, namespace=cluster.namespace, engine="vllm-0")
        _, document = await agent_doctor(address, "--no-cluster")
        assert found(document, "hash seed") == [], "it was let in since"
        await engine.close()

"""`peer-agent serve`, `inventory` and `probe` as people and scripts meet them: a real process, tables and JSON, exit codes."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from peer_agent.client import aio
from peer_agent.demo.processes import Child
from peer_agent.testing import Blocks, sample_namespace

pytestmark = pytest.mark.slow


def namespace_file(directory: Path) -> Path:
    fields = json.loads(sample_namespace().canonical())
    fields.pop("version")
    file = directory / "namespace.json"
    file.write_text(json.dumps(fields | {"share": 2}))
    return file


@pytest.fixture
async def agent() -> AsyncIterator[Child]:
    with tempfile.TemporaryDirectory(prefix="kvdir-test-", dir="/dev/shm") as path:
        file = namespace_file(Path(path))
        child = await Child.start(
            "agent",
            [
                "-m", "peer_agent", "serve", "--node", "n1", "--namespaces", str(file), "--arena-path", f"{path}/n1",
                "--arena-bytes", "1MiB", "--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0", "--output", "json",
            ],
            log=Path(path, "agent.log"),
            ready_s=20,
        )  # fmt: skip
        try:
            yield child
        finally:
            await child.end(grace_s=5)


async def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "peer_agent", *arguments]
    wide = os.environ | {"COLUMNS": "160"}
    return await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=30, env=wide)


async def test_ready_line_says_where_everything_is(agent: Child):
    ready = agent.ready
    assert {"event", "node", "epoch", "peer", "data", "engine", "http"} <= ready.keys()
    assert (ready["event"], ready["node"]) == ("ready", "n1")
    assert ready["capacity"]["classes"][0]["slots"] == 247
    for path, words in (("healthz", "ok"), ("readyz", "ok"), ("metrics", 'peer_agent_slots{kv_namespace="test@')):
        with await asyncio.to_thread(urllib.request.urlopen, f"http://{ready['http']}/{path}") as answer:
            assert words in answer.read().decode()


async def test_inventory_shows_what_is_held(agent: Child):
    namespace = sample_namespace()
    blocks = Blocks(namespace)
    fingerprints = blocks.chain(9)
    engine = await aio.connect(agent.ready["engine"], namespace=namespace, engine="test")
    await engine.store(fingerprints, blocks.data(fingerprints))
    await engine.pin(fingerprints.slice(0, 2), pin_s=60)
    shown = json.loads((await run("inventory", agent.ready["engine"], "--output", "json")).stdout)
    assert shown["node"] == "n1"
    assert shown["sessions"] == 1
    held = shown["namespaces"][0]
    assert (held["committed"], held["pinned"], held["free"], held["slots"]) == (9, 2, 238, 247)
    table = (await run("inventory", agent.ready["engine"])).stdout
    assert "9 / 247" in table
    assert "no coordinator configured" in table
    await engine.close()


async def test_probe_names_the_plane_that_would_be_used(agent: Child):
    shown = json.loads((await run("probe", agent.ready["peer"], "--output", "json")).stdout)
    assert (shown["node"], shown["epoch"], shown["would_use"]) == ("n1", agent.ready["epoch"], "shm")
    assert [item["connects"] for item in shown["planes"]] == [True, True]
    assert all("holds no block" in item["reason"] for item in shown["planes"])
    only_tcp = json.loads((await run("probe", agent.ready["peer"], "--transports", "tcp", "--output", "json")).stdout)
    assert only_tcp["would_use"] == "tcp"
    shm = only_tcp["planes"][1]
    assert (shm["plane"], shm["offered"], shm["connects"]) == ("shm", True, False)
    assert shm["reason"] == "not tried: name it in --transports"
    assert "would use" in (await run("probe", agent.ready["peer"])).stdout


async def test_probe_measures_each_plane_when_the_peer_holds_blocks(agent: Child):
    namespace = sample_namespace()
    blocks = Blocks(namespace)
    fingerprints = blocks.chain(9)
    engine = await aio.connect(agent.ready["engine"], namespace=namespace, engine="test")
    await engine.store(fingerprints, blocks.data(fingerprints))
    shown = json.loads((await run("probe", agent.ready["peer"], "--output", "json")).stdout)
    for plane in shown["planes"]:
        assert (plane["blocks"], plane["block_bytes"]) == (9, namespace.block_bytes)
        assert plane["latency_us"] > 0
        assert plane["gb_per_s"] > 0
        assert plane["reason"] == ""
    few = ("--read-bytes", str(2 * namespace.block_bytes))
    shown = json.loads((await run("probe", agent.ready["peer"], *few, "--output", "json")).stdout)
    assert [plane["blocks"] for plane in shown["planes"]] == [2, 2]
    none = json.loads((await run("probe", agent.ready["peer"], "--read-bytes", "0", "--output", "json")).stdout)
    assert {plane["reason"] for plane in none["planes"]} == {"nothing was to be read"}
    locks = json.loads((await run("inventory", agent.ready["engine"], "--output", "json")).stdout)["locks"]
    assert locks == 0, "a probe leaves no lock behind"
    await engine.close()


@pytest.mark.parametrize("command", ["inventory", "probe"])
async def test_exit_4_when_nobody_answers(command: str):
    ended = await run(command, "127.0.0.1:1", "--output", "json")
    assert ended.returncode == 4
    assert json.loads(ended.stdout)["exit"] == 4


async def test_dry_run_prints_what_the_memory_holds(agent: Child, tmp_path: Path):
    file = tmp_path / "namespace.toml"
    file.write_text(
        'model = "m"\nweights = "r"\nkv_dtype = "float16"\nlayout = "NHD"\nblock_tokens = 16\nposition = "none"\n'
        'parallel = "replicated"\nadapter = "none"\nhash_scheme = "h"\nhash_seed = "0"\ncache_policy = "exact"\n'
        'groups = [{kind = "full", layers = 2, kv_heads = 2, head_dim = 64}]\n'
    )
    arguments = ("serve", "--namespaces", str(file), "--arena-bytes", "10MiB", "--dry-run")
    shown = json.loads((await run(*arguments, "--output", "json")).stdout)
    (only,) = shown["classes"]
    assert (only["block_bytes"], only["blocks"], only["tokens"]) == (16_384, 634, 634 * 16)
    assert shown["payload_bytes"] + shown["overhead_bytes"] == shown["configured_bytes"] == 10 << 20
    assert "634" in (await run(*arguments)).stdout


async def test_exit_3_with_every_fault_when_a_namespace_file_is_wrong(tmp_path: Path):
    file = tmp_path / "namespace.toml"
    file.write_text('model = "m"\nkv_dtype = "auto"\nshare = 1\nlayers = 3\n')
    ended = await run("serve", "--namespaces", f"{file},{tmp_path}/none.json", "--dry-run")
    assert ended.returncode == 3
    for words in ("layers: unknown field", "kv_dtype: 'auto' is not allowed", "weights: required", "none.json: "):
        assert words in ended.stderr

"""The demo as a user runs it: real processes, real bytes, one answer, nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvdir.client.aio import DirectoryClient
from kvdir.testing.wait import eventually
from peer_agent.demo.cluster import SHARED_MEMORY, locked_directory, remove_leftovers
from peer_agent.testing.chats import write_chats

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

KEYS = frozenset(
    {
        *("requests", "hit_local", "hit_peer", "recomputed", "stale", "late", "corrupt", "peer_bytes", "failed_requests"),
        *("lookup_p50_us", "lookup_p99_us", "load_p50_us", "load_p99_us", "hit_ratio", "hit_ratio_without_peers"),
        *("streams_synced", "views_trusted", "views_equal_owner_counts", "untrusted_seconds", "repairs"),
    }
)
SMALL = ["--nodes", "3", "--block-bytes", "8KiB", "--blocks-per-node", "80", "--deadline-s", "20"]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_chats(tmp_path / "trace.jsonl")


@pytest.fixture(autouse=True)
def no_process_left_behind() -> Iterator[None]:
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) <= before


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvdir", "demo", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)


def figures(result: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert result.returncode == 0, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    assert set(document) >= KEYS
    assert document["blocks"] == document["hit_local"] + document["hit_peer"] + document["recomputed"]
    assert (document["corrupt"], document["failed_requests"]) == (0, 0)
    return document


def test_peers_save_blocks_and_the_directory_agrees_with_its_owners(trace: Path) -> None:
    document = figures(run("--trace", str(trace), "--output", "json", *SMALL))
    assert document["requests"] == 60
    assert document["hit_peer"] > 0
    assert document["hit_ratio"] > document["hit_ratio_without_peers"]
    assert 0 < document["peer_bytes"] <= document["hit_peer"] * 8192  # two requests may share one transfer
    assert (document["streams_synced"], document["views_trusted"], document["directory_agrees"]) == (3, 3, True)
    assert document["views_equal_owner_counts"] is True


@pytest.mark.parametrize("how", [("--transport", "shm"), ("--transport", "tcp", "--replica")], ids=" ".join)
def test_bytes_are_right_over_either_plane_and_with_replicas(trace: Path, how: tuple[str, ...]) -> None:
    document = figures(run("--trace", str(trace), "--output", "json", *how, "--requests", "40", *SMALL))
    assert document["hit_peer"] > 0


def test_streams_settle_and_no_byte_is_wrong_when_events_are_lost_and_an_agent_is_killed(trace: Path) -> None:
    document = figures(run("--trace", str(trace), "--output", "json", "--loss", "0.2", "--kill", "--compute-ms", "5", *SMALL))
    assert document["killed"] is True
    assert (document["streams_synced"], document["views_trusted"]) == (3, document["views_total"])
    assert document["views_equal_owner_counts"] is True
    assert document["directory_agrees"] is True
    assert all(stream["trusted"] and stream["equal"] for stream in document["streams"])
    assert document["untrusted_seconds"] > 0
    assert set(document["repairs"]) == {"replay", "sketch", "snapshot"}
    assert sum(document["repairs"].values()) > 0


def test_no_request_fails_and_all_agree_when_one_of_three_coordinators_is_killed(trace: Path) -> None:
    document = figures(
        run("--trace", str(trace), "--output", "json", "--coordinators", "3", "--kill-coordinator", "--compute-ms", "5", *SMALL)
    )
    assert (document["coordinators"], document["coordinator_killed"]) == (3, True)
    assert document["coordinator_down_s"] > 0
    assert document["coordinators_agree"] is True
    assert document["directory_agrees"] is True


def test_table_is_for_people(trace: Path) -> None:
    result = run("--trace", str(trace), "--requests", "10", *SMALL)
    assert result.returncode == 0, result.stderr
    for expected in (
        "hit local",
        "hit peer",
        "corrupt",
        "lookup p50 / p99",
        "without peers",
        "equals the agent's own",
        "repairs asked for",
    ):
        assert expected in result.stdout
    assert "\x1b" not in result.stdout


def test_memory_is_checked_before_anything_starts() -> None:
    result = run("--blocks-per-node", "1000000000", "--output", "json")
    assert result.returncode == 3
    assert json.loads(result.stdout)["code"] == "no-space"
    assert "--blocks-per-node" in result.stderr


def test_bad_trace_costs_nothing_and_is_named(trace: Path) -> None:
    trace.write_text(trace.read_text() + "\nnonsense")
    result = run("--trace", str(trace))
    assert result.returncode == 2
    assert f"{trace}:61: not JSON" in result.stderr


@contextlib.asynccontextmanager
async def running(trace: Path) -> AsyncIterator[psutil.Process]:
    """A demo that is serving requests and will for a long time."""
    command = [sys.executable, "-m", "kvdir", "demo", "--trace", str(trace), "--compute-ms", "60000", *SMALL]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE, preexec_fn=_heed_sigint)
    demo = psutil.Process(process.pid)
    try:
        await eventually(lambda: len(demo.children()) >= 4 and _arenas(demo.pid), within_s=60, what="the cluster runs")
        yield demo
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


def _heed_sigint() -> None:
    """Whoever runs the tests in the background of a script has them, and so their children, ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _arenas(pid: int) -> list[Path]:
    return list(SHARED_MEMORY.glob(f"kvdir-demo-{pid}-*/node-*.sock"))


def _gone(processes: list[psutil.Process]) -> bool:
    return not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)


def _left(pid: int) -> list[Path]:
    return [path for parent in (SHARED_MEMORY, Path(tempfile.gettempdir())) for path in parent.glob(f"kvdir-demo-{pid}-*")]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_everything_ends_when_the_demo_is_interrupted(trace: Path, number: signal.Signals) -> None:
    async with running(trace) as demo:
        children = demo.children()
        demo.send_signal(number)
        await eventually(lambda: _gone([demo, *children]), within_s=60, what="demo and children have ended")
        assert not _left(demo.pid)


async def test_it_serves_until_it_is_told_to_stop_when_held(trace: Path) -> None:
    options = ["--hold", "--rate", "200", "--trace", str(trace), "--output", "json", *SMALL]
    command = [sys.executable, "-m", "kvdir", "demo", *options]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    assert process.stdout is not None
    try:
        ready = json.loads(await asyncio.wait_for(process.stdout.readline(), 60))
        assert len(ready["metrics"]) == 4
        async with DirectoryClient(ready["coordinators"][0]["grpc"]) as client:
            views = await client.nodes(deadline_s=10)
        assert {view.trust.node for view in views} == {agent["node"] for agent in ready["agents"]}
        process.send_signal(signal.SIGTERM)
    except BaseException:
        process.kill()
        raise
    finally:
        rest, words = await process.communicate()
    assert (process.returncode, rest) == (0, b"")
    assert b"were hits" in words
    assert not _left(process.pid)


async def test_children_end_and_the_next_demo_cleans_up_when_the_demo_is_killed(trace: Path) -> None:
    async with running(trace) as demo:
        children = demo.children()
        demo.kill()
        await eventually(lambda: _gone(children), within_s=60, what="children have ended with their parent")
    for parent in (SHARED_MEMORY, Path(tempfile.gettempdir())):
        (left,) = parent.glob(f"kvdir-demo-{demo.pid}-*")
        with locked_directory(parent) as living:
            remove_leftovers(parent)
            assert not left.exists()
            assert living.exists()
        assert not living.exists()

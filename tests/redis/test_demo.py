"""`kvdir demo --store`: real agents over coordinators that share a Redis; and what it says when it cannot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvdir.cli.output import CommandFailed
from kvdir.testing import redis_servers
from kvdir.testing.redis_servers import redis_server
from peer_agent.demo.store import demo_store

pytestmark = [pytest.mark.redis, pytest.mark.timeout(180)]

SMALL = ("--requests", "60", "--nodes", "2", "--block-bytes", "4KiB", "--compute-ms", "0", "--output", "json")


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvdir", "demo", "--no-progress", *SMALL, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)


def test_no_request_fails_when_a_coordinator_of_a_shared_store_is_killed():
    result = demo("--store", "auto", "--coordinators", "2", "--kill-coordinator")
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout)
    assert (figures["failed_requests"], figures["corrupt"], figures["coordinators"]) == (0, 0, 2)
    assert (figures["streams_synced"], figures["directory_agrees"]) == (2, True)
    assert figures["store"].startswith("redis://127.0.0.1:")


def test_given_store_is_used_under_a_prefix_of_its_own_and_its_password_shown_nowhere():
    with redis_server(password="s3cret") as server:
        result = demo("--store", server.url)
        keys = {bytes(key) for key in server.command("KEYS", "*")}
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["directory_agrees"]
    assert "s3cret" not in result.stdout + result.stderr
    assert keys
    assert all(key.startswith(b"{kvdir-demo-") for key in keys)


def test_replica_is_refused_beside_a_store():
    result = demo("--store", "auto", "--replica")
    assert result.returncode == 2
    assert "--replica: not with --store" in result.stderr


def test_says_what_to_install_when_there_is_no_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(redis_servers.shutil, "which", lambda name: None)
    with (
        pytest.raises(CommandFailed, match=r"there is no redis-server on PATH: install it.*or give a server"),
        demo_store("auto"),
    ):
        pass
    with pytest.raises(CommandFailed, match="scheme"), demo_store("http://u:s3cret@h"):
        pass

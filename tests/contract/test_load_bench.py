"""`peer-agent bench load`, `fairness` and `idle` measure what they say, with real agents, and leave nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from peer_agent.cli.bench_beside import run_fairness_bench, run_idle_bench
from peer_agent.cli.bench_load import PARTS, run_load_bench

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def nothing_left():
    before = set(Path("/dev/shm").glob("kvdir-demo-*"))
    yield
    assert set(Path("/dev/shm").glob("kvdir-demo-*")) <= before


def test_load_bench_has_the_whole_and_its_parts_when_run_small():
    seen: list[str] = []
    result = run_load_bench(
        planes=["tcp"], owners=[(2, True)], blocks=8, block_bytes=4096, rounds=3, replica=True, progress=seen.append
    )
    (row,) = result["rows"]
    assert seen == ["tcp, 2 peers, each holds all"]
    assert all(row[f"{part}_ms"] > 0 for part in PARTS)
    assert row["whole_ms"] > row["copy_ms"]
    assert row["asked_ms"] > 0
    assert row["ratio"] > 0


def test_fairness_bench_moves_a_prefetch_beside_its_loads_when_run_small():
    result = run_fairness_bench(loads=10, prefetch_bytes=160 << 20)
    assert result["ratio"] > 0
    assert result["prefetched_gib"] > 0


def test_idle_bench_is_connected_to_every_peer_when_run_small():
    result = run_idle_bench(peers=3, seconds=1.0)
    assert result["connected"] == 3
    assert 0 <= result["core_percent"] < 100

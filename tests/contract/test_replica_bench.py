"""`kvdir bench replica` measures what it says, with real processes, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvdir.cli import bench_replica

pytestmark = pytest.mark.slow


def test_replica_bench_compares_every_way_idle_and_under_changes_when_run_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_replica, "ROUNDS", 1)
    before = set(Path("/dev/shm").glob("kvdir-bench-*"))
    result = bench_replica.run_replica_bench()
    assert set(Path("/dev/shm").glob("kvdir-bench-*")) <= before
    rows = {(row["load"], row["question"], row["way"]): row for row in result["rows"]}
    assert len(rows) == 2 * 2 * 6
    assert result["churn_blocks_per_s"] > 0
    assert all(row["p99_us"] >= row["p50_us"] > 0 and 0 <= row["torn"] <= 1 for row in rows.values())
    for load in ("idle", "churn"):
        assert rows[load, "one prompt", "kvdir.attach"]["times"] > 1, "slower than a call"

"""`kvdir bench feed` measures what it says: markers are found, and a run without a replica is beside it."""

from __future__ import annotations

import pytest

from kvdir.cli import bench_feed


def test_every_marker_is_found_in_the_replica_when_the_bench_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_feed, "EVENT_BLOCKS", (1_024,))
    monkeypatch.setattr(bench_feed, "BLOCKS_PER_S", 50_000)
    figures = bench_feed.run_feed_bench(seconds=0.5)
    (row,) = figures["rows"]
    assert row["unseen"] == 0
    assert 0 < row["lag_p50_ms"] <= row["lag_p99_ms"] <= row["lag_max_ms"]
    assert row["blocks_per_s"] > 0

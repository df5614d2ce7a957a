"""The benches of repair at a small size: they run, add their progress up, and measure what they say."""

from __future__ import annotations

import pytest

from kvdir.cli import bench_sketch


def test_bench_sketch_measures_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ITEMS": 20_000, "TRIALS": 2, "ROUNDS": 1}.items():
        monkeypatch.setattr(bench_sketch, name, value)
    shares = []
    figures = bench_sketch.run_sketch_bench(advance=lambda share=1.0, text=None: shares.append(share))
    assert sum(shares) == pytest.approx(1.0)
    assert (figures["decoded_exactly"], figures["trials"]) == (2, 2)
    assert figures["sketch_bytes"] <= 25 * 1024
    assert [row["differences"] for row in figures["rows"]] == [10, 100, 500]
    assert all(row["repair_bytes"] <= 30_000 for row in figures["rows"])


def test_bench_snapshot_measures_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_sketch, "SNAPSHOT_BLOCKS", 50_000)
    shares = []
    figures = bench_sketch.run_snapshot_bench(advance=lambda share=1.0, text=None: shares.append(share))
    assert sum(shares) == pytest.approx(1.0)
    assert figures["applied_entries_per_s"] > 0
    assert figures["extra_index_bytes_ratio"] < 1  # what is fixed weighs more at this size

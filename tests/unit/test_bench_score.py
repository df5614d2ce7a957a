"""The bench of scores at a small size: it runs, adds its progress up, and measures what it says."""

from __future__ import annotations

import pytest

from kvdir.cli import bench_score


def test_bench_score_measures_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ASKED": 64, "INSTANCES": (2, 8), "ROUNDS": 2, "COLD_ROUNDS": 1}.items():
        monkeypatch.setattr(bench_score, name, value)
    shares = []
    figures = bench_score.run_score_bench(advance=lambda share=1.0, text=None: shares.append(share))
    assert sum(shares) == pytest.approx(1.0)
    assert [row["instances"] for row in figures["rows"]] == [2, 8]
    assert all(row[part] > 0 for row in figures["rows"] for part in row if part.endswith("_us"))

"""The bench of the hash schemes at a small size: it runs, adds its progress up, and hashes as many bytes as it says."""

from __future__ import annotations

import pytest

from kvdir.cli import bench_hash
from kvdir.hashing import SCHEMES


def test_bench_hash_measures_every_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_hash, "TOKENS", 640)
    monkeypatch.setattr(bench_hash, "ROUNDS", 1)
    shares = []
    figures = bench_hash.run_hash_bench(advance=lambda share=1.0, text=None: shares.append(share))
    assert sum(shares) == pytest.approx(1.0)
    assert [row["scheme"] for row in figures["rows"]] == [name for name in SCHEMES for _ in bench_hash.BLOCK_TOKENS]
    assert all(row["tokens_per_s"] > 0 for row in figures["rows"])

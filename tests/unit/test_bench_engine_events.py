"""The engine-events bench measures what it says: its payloads are read without a refusal, and every way is timed."""

from __future__ import annotations

import pytest

from kvdir.cli import bench_engine_events as bench
from kvdir.engines import EngineIdentity, Residency, decode


@pytest.mark.parametrize("width", [8, 32])
def test_half_of_what_is_stored_is_left_when_a_round_is_over(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "BLOCKS", 256)
    monkeypatch.setattr(bench, "AGE_BLOCKS", 64)
    residency = Residency(EngineIdentity(model="m", hash_scheme="vllm:sha256"))
    for payload in bench._payloads(16, 2, width):
        assert not residency.apply(decode("vllm", payload)).rejected
    assert residency.blocks == 256 - (256 - 64) // 2
    assert residency.unknown_removals == residency.copied_blocks == 0


def test_every_shape_has_a_row_when_it_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "BLOCKS", 256)
    monkeypatch.setattr(bench, "ROUNDS", 1)
    rows = bench.run_engine_events_bench()["rows"]
    assert len(rows) == 2 * len(bench.SHAPES)
    assert all(row["blocks_per_s"] > 0 and row["bare_msgspec"] > 0 for row in rows)

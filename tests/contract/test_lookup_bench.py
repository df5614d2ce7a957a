"""`kvdir bench lookup`, made small: every way is measured, against real processes."""

from __future__ import annotations

import pytest

from kvdir.cli import bench_lookup

pytestmark = pytest.mark.slow


def test_bench_has_a_row_for_every_way_and_every_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("BLOCKS", 4096),
        ("ROUNDS", 1),
        ("CALLS", 16),
        ("PART_ROUNDS", 2),
        ("LOAD_ROUNDS", 1),
        ("LOAD_S", 0.2),
    ):
        monkeypatch.setattr(bench_lookup, name, value)
    monkeypatch.setattr(bench_lookup, "LOAD_ROUNDS", 1)
    document = bench_lookup.run_lookup_bench()
    rows = document["rows"]
    assert len({(row["client"], row["call"], row["under_way"]) for row in rows}) == len(rows) == 11
    assert all(row["lookups_per_s"] > 0 for row in rows)
    assert [row["call"] for row in rows if row["of_one"] == 1.0] == ["stream, 1 worker"]
    assert {row["of_unary"] for row in rows if row["call"] == "unary"} == {1.0}
    assert all(document[part] > 0 for part in ("index_us", "codec_us"))

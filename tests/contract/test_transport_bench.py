"""`peer-agent bench read` measures what it says, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from peer_agent.cli.bench_read import run_read_bench
from peer_agent.memory.arena import ArenaTooLarge

KEYS = {"plane", "block_bytes", "blocks", "gb_per_s", "ratio_to_memcpy", "ratio_to_raw_tcp", "p50_us", "p99_us", "rounds"}


@pytest.mark.slow
def test_bench_has_one_row_a_plane_and_cell_when_run(tmp_path: Path) -> None:
    seen: list[str] = []
    result = run_read_bench(
        block_bytes=(4096, 65536),
        blocks=(3,),
        seconds_per_cell=0.05,
        min_rounds=3,
        directory=str(tmp_path),
        progress=seen.append,
    )
    assert set(result) == {"machine", "rows"}
    assert [(row["plane"], row["block_bytes"], row["blocks"]) for row in result["rows"]] == [
        ("shm", 4096, 3),
        ("tcp", 4096, 3),
        ("shm", 65536, 3),
        ("tcp", 65536, 3),
    ]
    for row in result["rows"]:
        assert set(row) == KEYS
        assert row["rounds"] >= 3
        assert 0 < row["p50_us"] <= row["p99_us"]
        assert row["gb_per_s"] == pytest.approx(row["block_bytes"] * 3 / row["p50_us"] / 1e3, rel=0.01, abs=0.001)
        assert row["ratio_to_memcpy"] > 0
        assert row["ratio_to_raw_tcp"] > 0
    assert seen == ["4 KiB x 3", "64 KiB x 3"]
    assert list(tmp_path.iterdir()) == []


def test_bench_says_how_much_is_free_when_it_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(ArenaTooLarge, match="are free; use smaller or fewer blocks"):
        run_read_bench(block_bytes=(1 << 30,), blocks=(1 << 12,), directory=str(tmp_path))
    assert list(tmp_path.iterdir()) == []

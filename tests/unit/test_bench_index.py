"""`kvdir bench index` gives the same keys every time, and figures that can be true; how large they are is no test."""

import pytest

from kvdir.cli.bench_index import run_index_bench

KEYS = {
    "store_blocks_per_s",
    "dict_store_blocks_per_s",
    "lookup_sparse_8192_us",
    "lookup_prefix_8192_1_us",
    "lookup_prefix_8192_256_us",
    "gather_floor_8192_us",
    "bytes_per_block_unique",
    "bytes_per_block_256_holders",
    "drop_node_1m_ms",
    "churn_growth_bytes",
}


@pytest.mark.slow
def test_the_bench_reports_every_figure_and_its_whole_progress_when_run_small() -> None:
    shares: list[float] = []
    figures = run_index_bench(10_000, advance=lambda n=1.0, text=None: shares.append(n))
    assert figures.keys() >= KEYS
    for name in KEYS - {"churn_growth_bytes"}:
        value = figures[name]
        assert isinstance(value, float)
        assert value > 0, name
    assert figures["churn_growth_bytes"] == 0
    assert sum(shares) == pytest.approx(1.0, abs=0.05)

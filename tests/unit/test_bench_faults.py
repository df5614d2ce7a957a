"""`kvdir bench faults`: what docs/consistency.md promises of each fault, measured on the simulated cluster."""

from __future__ import annotations

import pytest

from kvdir.cli.bench_faults import FAULTS, HELD_BLOCKS, run_faults_bench

HEARTBEAT_S = 1.0
TICK_S = 0.05
WIDTH = 16
DUMPS = {"agent restart, arena kept", "coordinator restart", "clock step and restart"}


@pytest.mark.slow
def test_faults_are_noticed_within_a_heartbeat_and_repaired_at_the_cost_of_the_difference() -> None:
    shares: list[float] = []
    figures = run_faults_bench(advance=lambda n=1.0, text=None: shares.append(n), moments=1)
    rows = figures["rows"]
    assert isinstance(rows, list)
    assert [row["fault"] for row in rows] == list(FAULTS)
    assert sum(shares) == pytest.approx(1.0)
    for row in rows:
        name = row["fault"]
        if name in DUMPS:
            assert row["snapshot"] == 1, name
            assert HELD_BLOCKS * WIDTH <= row["bytes"] < 1.1 * HELD_BLOCKS * WIDTH, name
        else:
            assert row["snapshot"] == 0, name
            assert row["bytes"] < 4096, name
        if name not in {"coordinator restart", "partition of 30 s"}:
            assert row["exact_s"] <= HEARTBEAT_S + 4 * TICK_S, name
        if name != "coordinator restart":
            assert row["bystander_untrusted_s"] == 0, name

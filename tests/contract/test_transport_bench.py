"""`peer-agent bench read` measures what it says, says what it left out, and leaves nothing behind."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import psutil
import pytest

from peer_agent.cli.bench_read import BenchOptions, PeerSetup, run_read_bench
from peer_agent.cli.bench_read.peers import SETUPS
from peer_agent.cli.bench_read.rounds import merge
from peer_agent.cli.bench_read.view import read_view
from peer_agent.memory.arena import ArenaTooLarge

YARDSTICKS = ("memcpy", "raw_tcp")
PLANES = ("shm", "tcp")
TINY = {"block_bytes": (4096, 65536), "blocks": (3,), "seconds_per_cell": 0.05, "min_rounds": 3}


def options(directory: Path, **changes: object) -> BenchOptions:
    return BenchOptions(**{**TINY, "planes": PLANES, "runs": 1, "directory": str(directory), **changes})  # type: ignore[arg-type]


@pytest.mark.slow
def test_bench_has_one_row_a_subject_and_cell_when_run(tmp_path: Path) -> None:
    seen: list[tuple[float, str]] = []
    result = run_read_bench(options(tmp_path), progress=lambda share, text: seen.append((share, text)))
    assert [(row["plane"], row["block_bytes"], row["blocks"]) for row in result["rows"]] == [
        (name, size, 3) for size in (4096, 65536) for name in (*PLANES, *YARDSTICKS)
    ]
    for row in result["rows"]:
        assert row["rounds"] >= 3
        assert 0 < row["p50_us"] <= row["p99_us"]
        assert row["p99_over_p50"] == pytest.approx(row["p99_us"] / row["p50_us"], rel=0.01)
        assert row["gb_per_s"] == pytest.approx(row["block_bytes"] * 3 / row["p50_us"] / 1e3, rel=0.01, abs=0.001)
        assert row["ratio_to_memcpy"] > 0
        assert row["ratio_to_raw_tcp"] > 0
        assert row["reader_cpu_s_per_gb"] > 0
        assert row["owner_cpu_s_per_gb"] > 0 or row["plane"] in ("memcpy", "shm")
    assert sum(share for share, _ in seen) == pytest.approx(1)
    assert [text for share, text in seen if share] == ["run 1 of 1: 3 x 4 KiB", "run 1 of 1: 3 x 64 KiB"]
    assert list(tmp_path.iterdir()) == []
    read_view({**result, "machine": {}})


def test_bench_says_how_much_is_free_when_it_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(ArenaTooLarge, match="are free; use smaller or fewer blocks"):
        run_read_bench(options(tmp_path, block_bytes=(1 << 30,), blocks=(1 << 12,)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_bench_goes_on_and_says_why_when_a_peer_is_missing_or_crashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two libraries that are not there, and one whose reader dies in its first read."""
    program = tmp_path / "program.py"
    program.write_text(CRASHING_PEER)
    monkeypatch.setattr("peer_agent.cli.bench_read.peers.PROGRAM", program)
    setups = tuple(PeerSetup(name, name, "") for name in ("absent", "silent", "crashing"))
    memory = tmp_path / "memory"
    memory.mkdir()
    result = run_read_bench(options(memory, block_bytes=(4096,), peers_python=sys.executable, peer_setups=setups))
    assert result["subjects"] == {}
    assert (
        result["left_out"]["absent"]
        == "ModuleNotFoundError: No module named 'absent' (`make bench-read` installs what the bench compares with)"
    )
    assert result["left_out"]["silent"].startswith("ended with 3 while asked to serve: it said nothing (")
    assert result["left_out"]["crashing"] == "ended with -11 while asked to read: about to crash"
    assert {row["plane"] for row in result["rows"]} == {*PLANES, *YARDSTICKS}
    assert list(memory.iterdir()) == []
    assert [child for child in psutil.Process().children() if str(program) in child.cmdline()] == []


CRASHING_PEER = """
import json, os, signal, sys
library = sys.argv[1]
for line in sys.stdin:
    if library == "silent":
        os._exit(3)
    if library == "absent":
        print(json.dumps({"error": "ModuleNotFoundError: No module named 'absent'"}), flush=True)
    elif json.loads(line)["do"] == "read":
        print("about to crash", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    else:
        print(json.dumps({"ok": {}}), flush=True)
"""


@pytest.mark.slow
def test_bench_has_rows_of_another_library_when_it_is_installed(tmp_path: Path) -> None:
    """100 rounds: NIXL's thread spins, so its CPU time is seen in ticks, and a few rounds can fall between two of them."""
    setups = tuple(setup for setup in SETUPS if setup.name == "raw_nixl_tcp")
    result = run_read_bench(
        options(
            tmp_path, planes=("shm",), block_bytes=(65536,), min_rounds=100, peers_python=sys.executable, peer_setups=setups
        )
    )
    assert result["left_out"] == {}
    assert [row["plane"] for row in result["rows"]] == ["shm", *YARDSTICKS, "raw_nixl_tcp"]
    assert result["rows"][0]["ratio_to_raw_nixl_tcp"] > 0
    nixl = result["rows"][-1]
    assert (nixl["kind"], nixl["ratio_to_raw_nixl_tcp"]) == ("peer", 1.0)
    assert nixl["owner_cpu_s_per_gb"] > 0


def test_bars_say_met_missed_and_not_measured_when_judged() -> None:
    found = importlib.util.spec_from_file_location("bench_bars", Path(__file__).parents[2] / "bench" / "read.py")
    assert found is not None
    assert found.loader is not None
    bars = sys.modules[found.name] = importlib.util.module_from_spec(found)
    found.loader.exec_module(bars)
    rows = [
        {"plane": "shm", "block_bytes": 65536, "blocks": 32, "ratio_to_memcpy": 0.95, "p99_over_p50": 1.5},
        {"plane": "shm", "block_bytes": 65536, "blocks": 256, "ratio_to_memcpy": 0.85, "p99_over_p50": 2.5},
    ]
    judged = bars.judge({"rows": rows})
    met = {(bar["bar"], bar["read"]): bar["met"] for bar in judged["bars"]}
    assert met["shm ratio_to_memcpy >= 0.9", "32 x 64 KiB"] is True
    assert met["shm ratio_to_memcpy >= 0.9", "256 x 64 KiB"] is False
    assert met["shm p99_over_p50 <= 2.0", "32 x 64 KiB"] is True
    assert met["shm p99_over_p50 <= 2.0", "256 x 64 KiB"] is False
    assert met["shm ratio_to_mooncake >= 1.7", "32 x 64 KiB"] is None
    assert judged["bars_missed"] == 2


def test_merged_figures_are_medians_when_there_are_several_runs() -> None:
    runs = [
        [{"plane": "shm", "block_bytes": 1, "blocks": 2, "gb_per_s": speed, "ratio_to_raw_nixl": 2.0, "rounds": 5}]
        for speed in (1.0, 9.0, 2.0)
    ]
    del runs[1][0]["ratio_to_raw_nixl"]  # a peer that was left out from then on
    assert merge(runs) == [
        {"plane": "shm", "block_bytes": 1, "blocks": 2, "gb_per_s": 2.0, "ratio_to_raw_nixl": 2.0, "rounds": 15, "runs": 3}
    ]

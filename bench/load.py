"""Whole loads, fairness and idleness of agents (`peer-agent bench load`, `fairness`, `idle`) against the bars of this project.

    .venv/bin/python bench/load.py        prints JSON; exit code 1 when a bar is missed

A load has no bar of its own: the ratio to the sum of its parts is printed for both planes.
"""

from __future__ import annotations

import json
import sys

from peer_agent.cli.bench_beside import run_fairness_bench, run_idle_bench
from peer_agent.cli.bench_load import run_load_bench

FAIRNESS_MAX = 3.0
IDLE_MAX_PERCENT = 1.0


def main() -> int:
    load = run_load_bench()
    fairness = [run_fairness_bench(plane=plane) for plane in ("shm", "tcp")]
    idle = run_idle_bench()
    missed = [f"fairness over {item['plane']}: {item['ratio']}" for item in fairness if item["ratio"] > FAIRNESS_MAX]
    if idle["core_percent"] > IDLE_MAX_PERCENT:
        missed.append(f"idle: {idle['core_percent']} % of a core")
    print(json.dumps({"load": load, "fairness": fairness, "idle": idle, "bars_missed": missed}, indent=1))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

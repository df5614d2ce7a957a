"""Read speed of the data planes against the bars of this project: shm >= 0.7 of memcpy, tcp >= 0.8 of a raw stream.

    .venv/bin/python bench/read.py [--output json] [--seconds 3]

Exit code 1 when a bar is missed. Same figures as `peer-agent bench read`.
"""

from __future__ import annotations

import argparse
import json
import sys

from peer_agent.cli.bench_read import run_read_bench

BARS = {"shm": ("ratio_to_memcpy", 0.7), "tcp": ("ratio_to_raw_tcp", 0.8)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", choices=("table", "json"), default="table")
    parser.add_argument("--seconds", type=float, default=3.0, help="per cell of block size and count")
    options = parser.parse_args()
    result = run_read_bench(
        seconds_per_cell=options.seconds, progress=lambda cell: print(f"... {cell}", file=sys.stderr, flush=True)
    )
    missed = [row for row in result["rows"] if row[BARS[row["plane"]][0]] < BARS[row["plane"]][1]]
    if options.output == "json":
        print(json.dumps({**result, "bars_missed": len(missed)}))
        return 1 if missed else 0
    print(result["machine"])
    for row in result["rows"]:
        key, bar = BARS[row["plane"]]
        verdict = "ok" if row[key] >= bar else f"below {bar}"
        print(
            f"{row['plane']:4} {row['block_bytes'] >> 10:5} KiB x {row['blocks']:<4} {row['gb_per_s']:7.2f} GB/s"
            f"  memcpy {row['ratio_to_memcpy']:.2f}  raw tcp {row['ratio_to_raw_tcp']:.2f}"
            f"  p50 {row['p50_us']:9.0f} us  p99 {row['p99_us']:9.0f} us  {verdict}"
        )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

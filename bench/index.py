"""The block index against its bars: a dict of sets, the gather floor, and the absolute ones of an idle machine.

    .venv/bin/python bench/index.py [--entries 1000000] [--output json]

Exit code 1 when a bar is missed. Same figures as `kvdir bench index`.
"""

from __future__ import annotations

import argparse
import json
import sys

from kvdir.cli.bench import machine, show
from kvdir.cli.bench_index import run_index_bench

# figure: (bar, whether more is better)
BARS = {
    "store_to_dict_ratio": (20.0, True),
    "sparse_to_floor_ratio": (3.5, False),
    "lookup_prefix_8192_1_us": (20.0, False),
    "lookup_prefix_8192_256_us": (20.0, False),
    "bytes_per_block_unique": (24.0, False),
    "bytes_per_block_256_holders": (24.0, False),
    "drop_node_1m_ms": (2.0, False),
    "churn_growth_bytes": (0.0, False),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", choices=("table", "json"), default="table")
    parser.add_argument("--entries", type=int, default=1_000_000)
    options = parser.parse_args()
    figures = run_index_bench(
        options.entries, advance=lambda n=1.0, text=None: print(f"\r... {text:16}", end="", file=sys.stderr, flush=True)
    )
    print("\r" + " " * 20, end="\r", file=sys.stderr)
    missed = [name for name, bar in BARS.items() if not _meets(figures[name], *bar)]
    if options.output == "json":
        print(json.dumps({"bench": "index", "machine": machine(), **figures, "bars_missed": missed}))
        return 1 if missed else 0
    for name, value in [*machine().items(), *figures.items()]:
        bar = BARS.get(name)
        verdict = "" if bar is None else f"   bar {bar[0]:g}: {'missed' if name in missed else 'ok'}"
        print(f"{name:32} {show(value):>24}{verdict}")
    return 1 if missed else 0


def _meets(value: object, bar: float, more_is_better: bool) -> bool:
    assert isinstance(value, int | float)
    return value >= bar if more_is_better else value <= bar


if __name__ == "__main__":
    sys.exit(main())

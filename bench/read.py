"""`peer-agent bench read` against the bars of this project. Exit code 1 when one is missed.

    make bench-read                       installs NIXL and Mooncake in an environment of their own
    .venv/bin/python bench/read.py --help

A plane is compared with its like: shm with NIXL as installed on one host; tcp with NIXL over TCP, which polls and is faster so
on few cores; both with Mooncake as installed; ucx on emulated lanes with NIXL over the same, with the same segment size.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import click

from peer_agent.cli.bench import measure_reads, read_options
from peer_agent.cli.bench_read.cells import Cell

KIB = 1 << 10
LARGE = tuple(Cell(size, blocks) for blocks in (32, 256) for size in (64 * KIB, 512 * KIB, 2048 * KIB))
MIDDLE, SMALL = Cell(512 * KIB, 32), Cell(4 * KIB, 256)


@dataclass(frozen=True, slots=True)
class Bar:
    plane: str
    figure: str
    bound: float
    cells: tuple[Cell, ...]
    at_most: bool = False

    def __str__(self) -> str:
        return f"{self.plane} {self.figure} {'<=' if self.at_most else '>='} {self.bound}"

    def judge(self, rows: Mapping[tuple[str, Cell], Mapping[str, Any]]) -> list[dict[str, Any]]:
        verdicts = []
        for cell in self.cells:
            figure = rows.get((self.plane, cell), {}).get(self.figure)
            met = None if figure is None else (figure <= self.bound if self.at_most else figure >= self.bound)
            verdicts.append({"bar": str(self), "read": cell.label, "figure": figure, "met": met})
        return verdicts


BARS = (
    Bar("shm", "ratio_to_memcpy", 0.9, LARGE),
    Bar("shm", "ratio_to_raw_nixl_default", 1.7, LARGE),
    Bar("shm", "ratio_to_mooncake", 1.7, LARGE),
    Bar("shm", "p99_over_p50", 2.0, LARGE, at_most=True),
    Bar("tcp", "ratio_to_raw_tcp", 0.95, (MIDDLE,)),
    Bar("tcp", "ratio_to_raw_tcp", 0.8, (SMALL,)),
    Bar("tcp", "ratio_to_raw_nixl_tcp", 1.7, (MIDDLE, SMALL)),
    Bar("tcp", "ratio_to_mooncake", 1.7, (MIDDLE, SMALL)),
    Bar("tcp", "p99_over_p50", 2.0, (MIDDLE, SMALL), at_most=True),
    Bar("ucx", "ratio_to_raw_nixl_tcp_tuned", 1.0, (MIDDLE,)),
)
"""p99 counts on an idle machine only; the answer's `machine` has its load."""


def judge(document: Mapping[str, Any]) -> dict[str, Any]:
    rows = {(row["plane"], Cell(row["block_bytes"], row["blocks"])): row for row in document["rows"]}
    verdicts = [verdict for bar in BARS for verdict in bar.judge(rows)]
    return {"bars": verdicts, "bars_missed": sum(verdict["met"] is False for verdict in verdicts)}


@click.command(help=__doc__)
@read_options
def main(output: str, progress: bool | None, **options: Any) -> None:
    document = measure_reads(output=output, progress=progress, judge=judge, **options)
    sys.exit(1 if document["bars_missed"] else 0)


if __name__ == "__main__":
    main()

"""The table of `bench read` for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvdir.cli.output import facts, stack, table
from peer_agent.cli.bench_read.cells import Cell
from peer_agent.cli.bench_read.rounds import YARDSTICKS

_NAMES = {"memcpy": "memcpy", "raw_tcp": "raw TCP", "nixl": "NIXL", "nixl_tcp": "NIXL TCP", "mooncake": "Mooncake"}


def read_view(document: Mapping[str, Any]) -> object:
    rows: Sequence[Mapping[str, Any]] = document["rows"]
    beside = [name for name in YARDSTICKS if any(f"ratio_to_{name}" in row for row in rows)]
    heads = ["read", "subject", "GB/s #", *(f"of {_NAMES[name]} #" for name in beside)]
    heads += ["p50 us #", "p99 us #", "p99/p50 #", "CPU s/GB reader #", "owner #", "rounds #"]
    parts = [
        facts(document["machine"], title="bench read"),
        table(heads, _lines(rows, beside), caption="Ratios are speeds: 2.00 is twice as fast. Medians; CPU while a read runs."),
    ]
    if document["subjects"]:
        parts.append(facts(document["subjects"], title="Other libraries, between the same pages, in processes of their own"))
    if document["left_out"]:
        parts.append(facts(document["left_out"], title="Left out"))
    if verdicts := document.get("bars"):
        parts.append(table(["bar", "read", "figure #", "met"], [_verdict(verdict) for verdict in verdicts]))
    return stack(*parts)


def _lines(rows: Sequence[Mapping[str, Any]], beside: Sequence[str]) -> list[list[str]]:
    lines: list[list[str]] = []
    last = None
    for row in rows:
        cell = Cell(row["block_bytes"], row["blocks"])
        ratios = [f"{row[f'ratio_to_{name}']:.2f}" if f"ratio_to_{name}" in row else "-" for name in beside]
        times = [f"{row['p50_us']:,.0f}", f"{row['p99_us']:,.0f}", f"{row['p99_over_p50']:.1f}"]
        cpu = [f"{row['reader_cpu_s_per_gb']:.2f}", f"{row['owner_cpu_s_per_gb']:.2f}"]
        named = cell.label if cell != last else ""
        lines.append([named, row["plane"], f"{row['gb_per_s']:.2f}", *ratios, *times, *cpu, f"{row['rounds']:,}"])
        last = cell
    return lines


def _verdict(verdict: Mapping[str, Any]) -> list[str]:
    figure = verdict["figure"]
    met = {True: "yes", False: "NO", None: "not measured"}[verdict["met"]]
    return [verdict["bar"], verdict["read"], "-" if figure is None else f"{figure:.2f}", met]

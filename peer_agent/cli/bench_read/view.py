"""The table of `bench read` for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvdir.cli.output import facts, stack, table
from peer_agent.cli.bench_read.cells import Cell

NAMES = {
    "tcp_tls": "tcp, TLS",
    "raw_tcp": "raw TCP",
    "raw_nixl_default": "NIXL",
    "raw_nixl": "NIXL polled",
    "raw_nixl_tcp": "NIXL TCP",
    "raw_nixl_tcp_tuned": "NIXL TCP tuned",
    "mooncake": "Mooncake",
    "mooncake_tuned": "Mooncake tuned",
}
"""Of subjects, where people call them otherwise than rows do."""
BESIDE = ("memcpy", "raw_tcp", "raw_nixl_default", "raw_nixl", "raw_nixl_tcp", "mooncake")
"""Whose speed stands beside each subject's, of those that took part."""


def read_view(document: Mapping[str, Any]) -> object:
    rows: Sequence[Mapping[str, Any]] = document["rows"]
    beside = [name for name in BESIDE if any(f"ratio_to_{name}" in row for row in rows)]
    heads = ["read", "subject", "GB/s #", *(f"{NAMES.get(name, name)} #" for name in beside)]
    heads += ["p50 ms #", "p99 ms #", "p99/p50 #", "CPU reader #", "owner #", "rounds #"]
    caption = (
        f"Between GB/s and p50: the subject's speed in parts of {', '.join(NAMES.get(name, name) for name in beside)}; "
        "2.00 is twice as fast. CPU: seconds per GB."
    )
    parts = [facts(document["machine"], title="bench read"), table(heads, _lines(rows, beside), caption=caption)]
    if document["subjects"]:
        says = {NAMES.get(name, name): text for name, text in document["subjects"].items()}
        parts.append(facts(says, title="Other libraries, between the same pages, in processes of their own"))
    if document["left_out"]:
        reasons = {NAMES.get(name, name): text for name, text in document["left_out"].items()}
        parts.append(facts(reasons, title="Left out"))
    if verdicts := document.get("bars"):
        parts.append(table(["bar", "read", "figure #", "met"], [_verdict(verdict) for verdict in verdicts]))
    return stack(*parts)


def _lines(rows: Sequence[Mapping[str, Any]], beside: Sequence[str]) -> list[list[str]]:
    lines: list[list[str]] = []
    last = None
    for row in rows:
        cell = Cell(row["block_bytes"], row["blocks"])
        ratios = [f"{row[f'ratio_to_{name}']:.2f}" if f"ratio_to_{name}" in row else "-" for name in beside]
        times = [f"{row['p50_us'] / 1e3:.3g}", f"{row['p99_us'] / 1e3:.3g}", f"{row['p99_over_p50']:.1f}"]
        cpu = [f"{row['reader_cpu_s_per_gb']:.2f}", f"{row['owner_cpu_s_per_gb']:.2f}"]
        named = [cell.label if cell != last else "", NAMES.get(row["plane"], row["plane"])]
        lines.append([*named, f"{row['gb_per_s']:.2f}", *ratios, *times, *cpu, f"{row['rounds']:,}"])
        last = cell
    return lines


def _verdict(verdict: Mapping[str, Any]) -> list[str]:
    figure = verdict["figure"]
    met = {True: "yes", False: "NO", None: "not measured"}[verdict["met"]]
    return [verdict["bar"], verdict["read"], "-" if figure is None else f"{figure:.2f}", met]

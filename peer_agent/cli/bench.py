"""`peer-agent bench`: the data planes on this machine, beside a plain memcpy and a raw TCP stream from the same run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from kvdir.cli.bench import Advance, run_bench
from kvdir.cli.output import output_option, progress_option


@click.group()
def bench() -> None:
    """Measure the data planes: each figure beside its yardstick, all in one run."""


@bench.command()
@click.option(
    "--seconds-per-cell",
    type=click.FloatRange(min=0.05),
    default=3.0,
    show_default=True,
    help="Time for one block size and count; more is steadier.",
)
@output_option
@progress_option
def read(seconds_per_cell: float, output: str, progress: bool | None) -> None:
    """Verified reads by shm and tcp, at several block sizes and counts; ratios to memcpy and to a raw TCP stream."""

    def measure(advance: Advance) -> Mapping[str, Any]:
        from peer_agent.cli.bench_read import BLOCK_BYTES, BLOCKS, run_read_bench

        share = 1 / (len(BLOCK_BYTES) * len(BLOCKS))
        return run_read_bench(seconds_per_cell=seconds_per_cell, progress=lambda text: advance(share, text))

    run_bench("read", measure, output=output, progress=progress)

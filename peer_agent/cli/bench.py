"""`peer-agent bench`: the data planes on this machine, beside a plain memcpy and a raw TCP stream from the same run."""

from __future__ import annotations

import click

from kvdir.cli.bench import run_bench
from kvdir.cli.output import output_option, progress_option


@click.group()
def bench() -> None:
    """Measure the data planes: each figure beside its yardstick, all in one run."""


@bench.command()
@output_option
@progress_option
def read(output: str, progress: bool | None) -> None:
    """Verified reads by shm and tcp, at several block sizes and counts; ratios to memcpy and to a raw TCP stream."""
    run_bench("peer_agent.cli.bench_read:run_read_bench", "read", output=output, progress=progress)

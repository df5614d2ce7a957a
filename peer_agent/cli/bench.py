"""`peer-agent bench`: the data planes on this machine, beside memcpy, a raw TCP stream and other libraries in the same run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from kvdir.cli.bench import Advance, Document, run_bench
from kvdir.cli.output import output_option, progress_option

F = TypeVar("F", bound=Callable[..., Any])


@click.group()
def bench() -> None:
    """Measure the data planes: each figure beside its yardstick, all in one run."""


def read_options(function: F) -> F:
    """The options of `bench read`, shared with bench/read.py."""
    for option in reversed(
        (
            click.option(
                "--seconds-per-cell",
                type=click.FloatRange(min=0.05),
                default=3.0,
                show_default=True,
                help="Time for one run of one block size and count; more is steadier.",
            ),
            click.option("--runs", type=click.IntRange(min=1), default=3, show_default=True, help="Medians are of so many."),
            click.option(
                "--peers-python",
                metavar="PATH",
                default=sys.executable,
                show_default="this one",
                help='A Python that has NIXL or Mooncake Transfer Engine installed; "" leaves them out.',
            ),
            click.option(
                "--allow-emulated-rma",
                is_flag=True,
                help="ucx and nixl without RDMA: over loopback TCP, where for that time any local process may read the blocks.",
            ),
            output_option,
            progress_option,
        )
    ):
        function = option(function)
    return function


@bench.command(short_help="Verified reads, all planes, beside memcpy, raw TCP, NIXL, Mooncake.")
@read_options
def read(output: str, progress: bool | None, **options: Any) -> None:
    """Verified reads by every plane, at several block sizes and counts, beside memcpy and a raw TCP stream.

    Planes, NIXL and Mooncake Transfer Engine take part where they can; what is left out is said, with the reason.

    \b
    Examples:
      peer-agent bench read
      peer-agent bench read --runs 1 --seconds-per-cell 0.5 --peers-python ""
      make bench-read                              installs both libraries apart, and judges
    """
    measure_reads(output=output, progress=progress, **options)


def measure_reads(
    *,
    output: str,
    progress: bool | None,
    judge: Callable[[Document], Mapping[str, Any]] = lambda document: {},
    **options: Any,
) -> Document:
    """Runs the bench and prints its table or document; what `judge` says about it becomes part of both.

    options: of BenchOptions, as `read_options` collects them.
    """
    from peer_agent.cli.bench_read import BenchOptions, run_read_bench
    from peer_agent.cli.bench_read.view import read_view

    def measure(advance: Advance) -> Document:
        figures = run_read_bench(BenchOptions(**options), progress=advance)
        return {**figures, **judge(figures)}

    return run_bench("read", measure, output=output, progress=progress, view=read_view)


@bench.command(short_help="Whole loads from one and four peers, beside the sum of their parts.")
@click.option("--rounds", type=click.IntRange(min=3), default=15, show_default=True, help="Loads a row; medians count.")
@click.option("--blocks", type=click.IntRange(min=1), default=256, show_default=True, help="Of a load; 256 KiB each.")
@click.option("--replica", is_flag=True, help="The reader keeps a replica and asks it instead of the coordinator.")
@output_option
@progress_option
def load(rounds: int, blocks: int, replica: bool, output: str, progress: bool | None) -> None:
    """64 MiB in 256 blocks, from the engine's call to verified bytes, with real agents; needs 2 GiB of shared memory.

    parts_ms is the sum of an engine call, lookup, lock, read, copy and unlock, each done alone in the same round; asked_ms is
    what the lookup took inside the load.
    """

    def measure(advance: Advance) -> Document:
        from peer_agent.cli.bench_load import CASES, run_load_bench

        return run_load_bench(rounds=rounds, blocks=blocks, replica=replica, progress=lambda text: advance(1 / CASES, text))

    run_bench("load", measure, output=output, progress=progress)


@bench.command(short_help="A small load alone and beside a large prefetch.")
@click.option("--plane", type=click.Choice(["shm", "tcp"]), default="tcp", show_default=True, help="Data plane to use.")
@click.option("--loads", type=click.IntRange(min=10), default=150, show_default=True, help="Foreground loads, each time.")
@output_option
@progress_option
def fairness(plane: str, loads: int, output: str, progress: bool | None) -> None:
    """Loads of 2 MiB from one peer, alone and while prefetches from the same peer go on; 1.3 GiB of shared memory."""

    def measure(advance: Advance) -> Document:
        from peer_agent.cli.bench_beside import run_fairness_bench

        return run_fairness_bench(plane=plane, loads=loads, progress=lambda text: advance(1 / 3, text))

    run_bench("fairness", measure, output=output, progress=progress)


@bench.command(short_help="What connected peers cost an agent that does nothing.")
@click.option("--peers", type=click.IntRange(min=1), default=64, show_default=True, help="Connected agents.")
@click.option("--seconds", type=click.FloatRange(min=1), default=10.0, show_default=True, help="How long it is watched.")
@output_option
@progress_option
def idle(peers: int, seconds: float, output: str, progress: bool | None) -> None:
    """CPU time, in percent of a core, of an agent that is connected to peers and asked for nothing."""

    def measure(advance: Advance) -> Document:
        from peer_agent.cli.bench_beside import run_idle_bench

        return run_idle_bench(peers=peers, seconds=seconds, progress=lambda text: advance(1 / 2, text))

    run_bench("idle", measure, output=output, progress=progress)

"""`kvdir bench`: figures on this machine, each beside its yardstick from the same run.

Owns: the commands, the progress bar and the print; the measuring is in bench_*.py. Ratios count, absolutes depend on the
machine, which is printed with them. Does not: judge a figure.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from kvdir.cli.output import CommandFailed, Exit, emit, facts, output_option, progress_bar, progress_option, stack, table

Advance = Callable[..., None]
Document = Mapping[str, Any]
Measure = Callable[[Advance], Document]


@click.group()
def bench() -> None:
    """Measure this machine: each figure beside its yardstick, medians, all in one run.

    \b
    Examples:
      kvdir bench index --entries 1000000
      kvdir bench ingest --output json
    """


@bench.command(short_help="The native index beside a dict of sets and the gather floor.")
@click.option("--entries", type=click.IntRange(min=10_000), default=1_000_000, show_default=True, help="Blocks in the index.")
@output_option
@progress_option
def index(entries: int, output: str, progress: bool | None) -> None:
    """The native index against a dict of sets and the gather floor (random 16-byte reads with prefetch)."""

    def measure(advance: Advance) -> Mapping[str, Any]:
        from kvdir.cli.bench_index import run_index_bench

        return run_index_bench(entries, advance=advance)

    run_bench("index", measure, output=output, progress=progress)


@bench.command("hash", short_help="Fingerprints from tokens beside the bare hash.")
@output_option
@progress_option
def hash_(output: str, progress: bool | None) -> None:
    """Fingerprints from tokens, every scheme: tokens a second beside the bare hash over the same bytes."""

    def measure(advance: Advance) -> Mapping[str, Any]:
        from kvdir.cli.bench_hash import run_hash_bench

        return run_hash_bench(advance=advance)

    run_bench("hash", measure, output=output, progress=progress)


@bench.command(short_help="Events over gRPC into one coordinator.")
@output_option
@progress_option
def ingest(output: str, progress: bool | None) -> None:
    """Events over gRPC into one coordinator: blocks a second, per core and on the wall clock."""

    def measure(advance: Advance) -> Mapping[str, Any]:
        from kvdir.cli.bench_ingest import run_ingest_bench

        return run_ingest_bench(advance=advance)

    run_bench("ingest", measure, output=output, progress=progress)


@bench.command("engine-events", short_help="Events of engines, from their payload to the outbox.")
@output_option
@progress_option
def engine_events(output: str, progress: bool | None) -> None:
    """Events of an engine decoded, counted and appended to an outbox, beside bare msgspec on the same payloads. One core."""

    def measure(advance: Advance) -> Mapping[str, Any]:
        from kvdir.cli.bench_engine_events import run_engine_events_bench

        return run_engine_events_bench(advance=advance)

    run_bench("engine-events", measure, output=output, progress=progress)


@bench.command(short_help="How far a replica is behind, at a set rate of events.")
@output_option
@progress_option
def feed(output: str, progress: bool | None) -> None:
    """From a publisher's event to a lookup in a replica that finds it, at 200,000 blocks a second: p50, p99, CPU of both."""

    def measure(advance: Advance) -> Mapping[str, Any]:
        from kvdir.cli.bench_feed import run_feed_bench

        return run_feed_bench(advance=advance)

    run_bench("feed", measure, output=output, progress=progress)


@bench.command(short_help="Lookups over gRPC: time, CPU, and where it goes.")
@output_option
@progress_option
def lookup(output: str, progress: bool | None) -> None:
    """Lookups over gRPC: p50, p99, CPU a call, and where the time goes."""

    def measure(advance: Advance) -> Mapping[str, Any]:
        from kvdir.cli.bench_lookup import run_lookup_bench

        return run_lookup_bench(advance=advance)

    run_bench("lookup", measure, output=output, progress=progress)


@bench.command(short_help="One prompt scored at many instances, beside its lookup.")
@output_option
@progress_option
def score(output: str, progress: bool | None) -> None:
    """What a router's question costs beside the lookup it is made of, at 4 to 256 instances that each hold some."""

    def measure(advance: Advance) -> Mapping[str, Any]:
        from kvdir.cli.bench_score import run_score_bench

        return run_score_bench(advance=advance)

    run_bench("score", measure, output=output, progress=progress)


@bench.command(short_help="Lookups in shared memory beside those over gRPC.")
@output_option
@progress_option
def replica(output: str, progress: bool | None) -> None:
    """Lookups of 1,024 blocks in shared memory beside the same over gRPC: p50, p99, idle and while much changes."""

    def measure(advance: Advance) -> Mapping[str, Any]:
        from kvdir.cli.bench_replica import run_replica_bench

        return run_replica_bench(advance=advance)

    run_bench("replica", measure, output=output, progress=progress)


@bench.command(short_help="Repair by difference: decoding, updates, bytes beside a snapshot.")
@output_option
@progress_option
def sketch(output: str, progress: bool | None) -> None:
    """Repair by sketch: differences decoded, cost of an update beside the index's store, bytes beside a snapshot."""

    def measure(advance: Advance) -> Mapping[str, Any]:
        from kvdir.cli.bench_sketch import run_sketch_bench

        return run_sketch_bench(advance=advance)

    run_bench("sketch", measure, output=output, progress=progress)


@bench.command(short_help="Four million blocks taken in: speed and memory.")
@output_option
@progress_option
def snapshot(output: str, progress: bool | None) -> None:
    """A snapshot of four million blocks taken in: entries a second, longest pause, extra memory."""

    def measure(advance: Advance) -> Mapping[str, Any]:
        from kvdir.cli.bench_sketch import run_snapshot_bench

        return run_snapshot_bench(advance=advance)

    run_bench("snapshot", measure, output=output, progress=progress)


@bench.command(short_help="Every fault, simulated: how long it shows, what repair costs.")
@output_option
@progress_option
def faults(output: str, progress: bool | None) -> None:
    """Every fault of docs/consistency.md, simulated: seconds until noticed, untrusted and exact again, and bytes of repair."""

    def measure(advance: Advance) -> Mapping[str, Any]:
        from kvdir.cli.bench_faults import run_faults_bench

        return run_faults_bench(advance=advance)

    run_bench("faults", measure, output=output, progress=progress)


@bench.command(short_help="The directory in Redis: speed and bytes a block, beside memory and a hash per block.")
@click.option("--blocks", type=click.IntRange(min=20_000), default=200_000, show_default=True, help="Blocks in each store.")
@output_option
@progress_option
def redis(blocks: int, output: str, progress: bool | None) -> None:
    """The block store in Redis, Valkey and a cluster, beside memory and a hash per block. Starts servers of its own."""

    def measure(advance: Advance) -> Mapping[str, Any]:
        from kvdir.cli.bench_redis import run_redis_bench
        from kvdir.testing.redis_servers import NotInstalled

        try:
            return run_redis_bench(blocks, advance=advance)
        except NotInstalled as error:
            raise CommandFailed(str(error), exit=Exit.START) from error

    run_bench("redis", measure, output=output, progress=progress)


def run_bench(
    name: str, measure: Measure, *, output: str, progress: bool | None, view: Callable[[Document], object] | None = None
) -> Document:
    """Runs `measure(advance)`, prints the mapping it returns and gives it back, the machine added.

    `advance(share, text)` reports progress, shares sum to 1. For people, `view` draws the answer; without one the key `rows` (a
    list of mappings), if there is one, becomes a table of its own.
    """
    with progress_bar(name, 1.0, show=progress) as advance:
        try:
            figures = measure(advance)
        except ModuleNotFoundError as error:
            if not (error.name or "").endswith("._native"):
                raise
            raise CommandFailed(
                f"bench {name} needs the native modules: {error}. Run `make setup`.", exit=Exit.START
            ) from error
    document = {"bench": name, **figures, "machine": machine()}
    emit(document, lambda: view(document) if view is not None else _view(name, document), output=output)
    return document


def machine() -> dict[str, Any]:
    """What a reader needs to place a figure."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load_1m": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
        "python": sys.version.split()[0],
    }


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model"))]
    except OSError:
        names = []
    return names[0] if names else platform.machine()


def _view(name: str, document: Mapping[str, Any]) -> object:
    parts = [facts(document["machine"], title=f"bench {name}")]
    plain = {key: show(value) for key, value in document.items() if key not in ("bench", "machine", "rows")}
    if plain:
        parts.append(facts(plain))
    rows: Sequence[Mapping[str, Any]] = document.get("rows", ())
    if rows:
        columns = list(rows[0])
        numeric = {column for column in columns if isinstance(rows[0][column], int | float)}
        heads = [f"{column} #" if column in numeric else column for column in columns]
        parts.append(table(heads, [[show(row.get(column)) for column in columns] for row in rows]))
    return stack(*parts)


def show(value: object) -> str:
    """A figure with at most four significant digits, and thousands separated."""
    match value:
        case None:
            return "-"
        case bool() | str():
            return str(value)
        case int():
            return f"{value:,}"
        case float() if abs(value) >= 1000:
            return f"{value:,.0f}"
        case float():
            return f"{value:.4g}"
    return str(value)

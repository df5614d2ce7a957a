"""`kvdir demo`: the command line of the demo. Light to import: `kvdir --help` loads it for its first line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvdir.cli.output import CommandFailed, emit, facts, note, output_option, progress_bar, progress_option

if TYPE_CHECKING:
    from peer_agent.demo.run import DemoOptions

SHIPPED = "conversation_1000.jsonl.gz"


class Size(click.ParamType[int]):
    """Bytes as 4096, 128KiB or 1.5MiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from kvdir.config import parse_bytes

        if isinstance(value, int):
            return value
        try:
            return parse_bytes(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.command(short_help="Real agents move real bytes for a real trace.")
@click.option(
    "--trace",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Trace in Mooncake format, .jsonl or .jsonl.gz.  [default: 1,000 requests of its conversation trace]",
)
@click.option("--requests", type=click.IntRange(min=1), default=1000, show_default=True, help="Only the first N requests.")
@click.option("--nodes", type=click.IntRange(1, 64), default=4, show_default=True, help="Agents, one process each.")
@click.option("--block-bytes", type=Size(), default="128KiB", show_default=True, help="Bytes stored for one trace block.")
@click.option(
    "--blocks-per-node", type=click.IntRange(min=1), default=2000, show_default=True, help="Memory of an agent, in blocks."
)
@click.option(
    "--loss",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.0,
    show_default=True,
    help="Share of event batches the agents drop.",
)
@click.option("--kill", is_flag=True, help="SIGKILL an agent half way and start it again; the last quarter waits for it.")
@click.option("--coordinators", type=click.IntRange(1, 9), default=1, show_default=True, help="Processes, too.")
@click.option("--kill-coordinator", is_flag=True, help="SIGKILL the last coordinator half way and start it again, empty.")
@click.option(
    "--store",
    default="memory",
    show_default=True,
    metavar="URL",
    help="Where the directory lies: redis://..., as for kvdir serve, or auto for a Redis server of the demo's own.",
)
@click.option("--replica", is_flag=True, help="Agents keep replicas of the directory and look up in them, without a call.")
@click.option("--tls", is_flag=True, help="Everything over mTLS, control and data plane; certificates are made for it.")
@click.option(
    "--deadline-s",
    type=click.FloatRange(min=0, min_open=True),
    default=2.0,
    show_default=True,
    help="Longest a load may take; what is late is recomputed.",
)
@click.option(
    "--compute-ms",
    type=click.FloatRange(min=0),
    default=2.0,
    show_default=True,
    help='How long "recomputing" a block takes; a GPU needs more for 512 tokens of a large model.',
)
@click.option(
    "--transport",
    "transports",
    type=click.Choice(["shm", "tcp"]),
    multiple=True,
    help="Data planes to use, best first.  [default: shm, tcp]",
)
@click.option("--hold", is_flag=True, help="Serve the trace again and again until Ctrl-C, and say where page and metrics are.")
@click.option(
    "--rate",
    type=click.FloatRange(min=0, min_open=True),
    default=5.0,
    show_default=True,
    help="Requests a second, at most, with --hold.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the routing.")
@output_option
@progress_option
def demo(
    trace: Path | None,
    requests: int,
    kill: bool,
    kill_coordinator: bool,
    transports: tuple[str, ...],
    hold: bool,
    rate: float,
    output: str,
    progress: bool | None,
    **rest: Any,
) -> None:
    """Coordinators and agents, real processes on loopback, move real bytes for a real trace.

    Every request goes to the less busy of two nodes; the node loads what it or a peer has, every byte is checked against what
    its fingerprint says it must be, and the rest is "recomputed" (made) and stored. At the end: how many blocks were
    saved, with and without peers. Nothing outlives the command: processes, ports and memory are its own.

    \b
    Examples:
      kvdir demo
      kvdir demo --loss 0.2 --kill           lost events, a crashed agent: slower, never wrong
      kvdir demo --coordinators 3 --kill-coordinator   one of them crashes; at the end all agree
      kvdir demo --store auto --coordinators 2 --kill-coordinator   coordinators that share a Redis
      kvdir demo --tls                       with certificates; needs the openssl tool
      kvdir demo --hold --loss 0.05          something to look at: page and metrics, until Ctrl-C
      kvdir demo --trace full.jsonl --requests 5000 --nodes 8 --output json

    Exit code 1 if a byte was wrong or a request failed.
    """
    # Children are started while gRPC runs; they exec at once, so its fork handlers (and their warning) have nothing to do.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    from peer_agent.demo.report import view
    from peer_agent.demo.run import DemoOptions, run_demo

    blocks = read_requests(trace, requests)
    if rest["replica"] and rest["store"] != "memory":
        raise click.UsageError("--replica: not with --store: coordinators that share a store give no feed for replicas")
    half = len(blocks) // 2
    options = DemoOptions(
        kill_at=half if kill else None,
        kill_coordinator_at=half if kill_coordinator else None,
        transports=transports or ("shm", "tcp"),
        **rest,
    )
    if hold:
        _hold(options, blocks, rate, output)
        return
    with progress_bar("starting", len(blocks), show=progress) as advance:
        figures = run_demo(options, blocks, progress=lambda: advance(1, "requests"))
    emit(figures, lambda: view(figures), output=output)
    for failure in figures["failures"]:
        note(failure)
    if figures["corrupt"] or figures["failed_requests"]:
        raise CommandFailed(
            f"{figures['corrupt']} corrupt blocks, {figures['failed_requests']} failed requests: both must be 0, report it"
        )


def _hold(options: DemoOptions, requests: list[Any], per_s: float, output: str) -> None:
    from peer_agent.demo.hold import run_held

    def ready(said: dict[str, Any]) -> None:
        emit(said, lambda: _ready_view(said), output=output)

    held = run_held(options, requests, per_s=per_s, ready=ready)
    note(f"stopped after {held.requests:,} requests: {held.hits:,} of {held.blocks:,} blocks were hits; nothing is left behind")
    if held.wrong:
        raise CommandFailed(f"{held.wrong} blocks were handed out with wrong bytes: must be 0, report it")


def _ready_view(said: dict[str, Any]) -> object:
    return facts(
        [
            ("page", said["page"]),
            *(("coordinator", child["grpc"]) for child in said["coordinators"]),
            *(("metrics", url) for url in said["metrics"]),
            *(("export", f"KVDIR_TLS_{name.upper()}={path}") for name, path in said["tls"].items()),  # as a shell reads it
            ("stop it", "with Ctrl-C; nothing is left behind"),
        ]
    )


def read_requests(trace: Path | None, limit: int) -> list[Any]:
    """The requests to serve, read before anything is started so that a bad trace costs nothing."""
    from importlib import resources

    from kvdir.testing.trace import read_trace

    if trace is not None:
        return list(read_trace(trace, limit=limit))
    with resources.as_file(resources.files("peer_agent.demo") / SHIPPED) as path:
        return list(read_trace(path, limit=limit))

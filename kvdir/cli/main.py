"""The program `kvdir`: a group of commands, each loaded only when it runs.

Owns: the list of commands and their sections in --help, --version, and the mapping of errors to exit codes around them.
Commands of other packages come in through the entry point group "kvdir.commands". Does not: do any work itself.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any, TypeVar

import click

from kvdir.cli.output import EXIT_CODES_HELP, errors_to_exit

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Entry:
    """A command that is not imported yet. target: "module:attribute". section: heading in --help."""

    target: str
    help: str
    section: str


COMMANDS: Mapping[str, Entry] = {
    "serve": Entry("kvdir.cli.serve:serve", "Run a coordinator.", "Run"),
    "nodes": Entry("kvdir.cli.query:nodes", "The nodes, what they hold, and how far that is trusted.", "Ask"),
    "trust": Entry("kvdir.cli.trust:trust", "Which figures are trusted, since when not, and why.", "Ask"),
    "lookup": Entry("kvdir.cli.query:lookup", "Who holds these blocks.", "Ask"),
    "restore-points": Entry(
        "kvdir.cli.restore_points:restore_points", "Where a prompt of a hybrid model can be resumed.", "Ask"
    ),
    "score": Entry("kvdir.cli.score:score", "How much of a prompt each instance has.", "Ask"),
    "replica": Entry("kvdir.cli.replica:replica", "The copy of the directory in this node's shared memory.", "Ask"),
    "dump": Entry("kvdir.cli.query:dump", "Stream the whole directory.", "Ask"),
    "status": Entry("kvdir.cli.query:status", "The coordinator in one screen.", "Ask"),
    "story": Entry("kvdir.cli.story:story", "What touched a node or a block lately.", "Ask"),
    "quota": Entry("kvdir.cli.story:quota", "Quotas and orphans: what is, or would be, deleted.", "Ask"),
    "reconcile": Entry("kvdir.cli.query:reconcile", "Have a node restate what it holds.", "Ask"),
    "diff": Entry("kvdir.cli.diff:diff", "Whether several coordinators believe the same.", "Ask"),
    "whoami": Entry("kvdir.cli.policy:whoami", "What a coordinator takes me for, and what I may do there.", "Ask"),
    "policy": Entry("kvdir.cli.policy:policy", "Check a policy file, and show who may do what by it.", "Run"),
    "doctor": Entry("kvdir.cli.doctor:doctor", "Why nothing hits: checks of the cluster, each with its fix.", "Ask"),
    "replay": Entry("kvdir.cli.replay:replay", "Replay a trace in process: hit rate against staleness.", "Try"),
    "bench": Entry("kvdir.cli.bench:bench", "Measure this machine: index, ingest, lookup, repair.", "Try"),
}


class AskingCommand(click.Command):
    """A command of another package that stands under "Ask" in --help; others of them stand under "Try"."""


class LazyGroup(click.Group):
    """A group that imports a command when it is used. `entry_point_group` adds commands of installed packages."""

    def __init__(self, *args: Any, lazy: Mapping[str, Entry], entry_point_group: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lazy = dict(lazy)
        if entry_point_group:
            for point in metadata.entry_points(group=entry_point_group):
                self._lazy.setdefault(point.name, Entry(point.value, "", "Try"))

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self._lazy, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = self._lazy.get(cmd_name)
        if entry is None:
            return super().get_command(ctx, cmd_name)
        module, _, attribute = entry.target.partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        # gRPC reads it once, when it is imported. What it writes on stderr of its own accord, our errors say in words.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        with errors_to_exit(ctx):
            return super().invoke(ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for name, entry in self._lazy.items():
            if entry.help:
                sections.setdefault(entry.section, []).append((name, entry.help))
            elif (command := self.get_command(ctx, name)) is not None:
                section = "Ask" if isinstance(command, AskingCommand) else entry.section
                sections.setdefault(section, []).append((name, command.get_short_help_str(limit=100)))
        for section, rows in sections.items():
            with formatter.section(section):
                formatter.write_dl(rows)


def version_option(program: str, native: str) -> Callable[[F], F]:
    """--version: the program, its native module, and the libraries whose versions matter in a report."""

    def show(ctx: click.Context, _: click.Parameter, value: bool) -> None:
        if not value or ctx.resilient_parsing:
            return
        click.echo(f"{program} {_version('kvdir')}")
        click.echo(f"  python    {sys.version.split()[0]}")
        click.echo(f"  grpcio    {_version('grpcio')}")
        click.echo(f"  protobuf  {_version('protobuf')}")
        click.echo(f"  native    {native} {_native_state(native)}")
        ctx.exit(0)

    return click.option(
        "--version", is_flag=True, is_eager=True, expose_value=False, callback=show, help="Versions, for reports."
    )


def _native_state(module: str) -> str:
    try:
        importlib.import_module(module)
    except ImportError as error:
        return f"(not usable: {error}; run `make setup`)"
    return "(built)"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "(not installed)"


@click.group(
    cls=LazyGroup,
    lazy=COMMANDS,
    entry_point_group="kvdir.commands",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=EXIT_CODES_HELP,
)
@version_option("kvdir", "kvdir.index._native")
def main() -> None:
    """A directory of KV-cache blocks across inference nodes.

    Nodes tell the coordinator what they hold; engines and routers ask it who holds which block and how far that answer can be
    trusted. The bytes move between the nodes' agents (see `peer-agent --help`).

    \b
    Examples:
      kvdir demo                              four agents, real bytes, one table
      kvdir serve --listen 127.0.0.1:7400     a coordinator
      kvdir nodes --output json | jq          what it knows
      kvdir replay trace.jsonl --loss 0.05    hit rate under lost events
    """

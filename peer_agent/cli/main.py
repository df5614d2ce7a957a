"""The program `peer-agent`: a group of commands, each loaded only when it runs. See kvdir/cli/main.py for the machinery."""

from __future__ import annotations

from collections.abc import Mapping

import click

from kvdir.cli.main import Entry, LazyGroup, version_option
from kvdir.cli.output import EXIT_CODES_HELP

COMMANDS: Mapping[str, Entry] = {
    "serve": Entry("peer_agent.cli.serve:serve", "Run this node's agent.", "Run"),
    "inventory": Entry("peer_agent.cli.inventory:inventory", "What an agent holds, by namespace and size class.", "Ask"),
    "explain": Entry("peer_agent.cli.explain_load:explain", "Load blocks, and tell why it went as it did.", "Ask"),
    "probe": Entry("peer_agent.cli.probe:probe", "Is a peer reachable, by which planes, how fast.", "Ask"),
    "doctor": Entry("peer_agent.cli.doctor:doctor", "Why nothing hits: checks of this node, each with its fix.", "Ask"),
    "bench": Entry("peer_agent.cli.bench:bench", "Measure the data planes on this machine.", "Try"),
}


@click.group(
    cls=LazyGroup,
    lazy=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=EXIT_CODES_HELP,
)
@version_option("peer-agent", "peer_agent._native")
def main() -> None:
    """One node's agent: owns its block memory, answers peers, and reads blocks from them.

    It needs no coordinator to run: without one it serves what it has and engines see misses for the rest.

    \b
    Examples:
      peer-agent serve --config agent.toml            run it
      peer-agent serve --config agent.toml --dry-run  what would the memory hold?
      peer-agent probe 10.0.0.7:7410                  can I read from that peer?
      peer-agent bench read --output json             bytes per second, by plane
    """

"""`peer-agent serve`: run this node's agent, or say what its memory would hold."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from kvdir.cli.options import config_options
from kvdir.cli.output import emit, facts, output_option, stack, starting, table
from kvdir.config import show_bytes
from kvdir.obs.logs import configure
from peer_agent.server.config import AgentConfig


@click.command()
@click.option("--dry-run", is_flag=True, help="Print what the configured memory holds, take nothing, and end.")
@output_option
@config_options(AgentConfig, prefix="PEER_AGENT_")
def serve(config: AgentConfig, *, output: str, dry_run: bool) -> None:
    """Run this node's agent until SIGTERM.

    When it serves, it prints its addresses; with --output json as one line {"event": "ready", "node", "epoch", "peer", "data",
    "engine", "http", "health"}.

    \b
    Examples:
      peer-agent serve --namespaces llama.toml --arena-bytes 8GiB --coordinators 10.0.0.1:7400
      peer-agent serve --accept-bytes 256MiB
      peer-agent serve --config agent.toml --dry-run
    """
    from peer_agent.server.app import Agent, Ready
    from peer_agent.server.serve import serve as run

    if dry_run:
        with starting("agent"):
            document = _dry_run(config)
        emit(document, lambda: stack(*_capacity_view(document)), output=output)
        return

    def announce(ready: Ready, agent: Agent) -> None:
        document = {"event": "ready", **dataclasses.asdict(ready), "capacity": agent.capacity}
        emit(
            document,
            lambda: stack(facts(_ready_view(ready), title="peer-agent"), *_capacity_view(agent.capacity)),
            output=output,
        )

    configure(config.log_level, config.log_format)
    with starting("agent"):
        run(config, on_ready=announce)


def _dry_run(config: AgentConfig) -> dict[str, Any]:
    from peer_agent.server.capacity import capacity_document, plan_arena, refuse_without_room
    from peer_agent.server.namespaces import read_namespaces

    plan = plan_arena(read_namespaces(config.namespaces), config.arena_bytes, config.spare)
    free_bytes = refuse_without_room(config.arena_file, plan.arena_bytes)
    return {"event": "dry-run", "arena": config.arena_file, "free_bytes": free_bytes, **capacity_document(plan)}


def _ready_view(ready: Any) -> dict[str, object]:
    return {
        "node": ready.node,
        "epoch": f"{ready.epoch:016x}",
        "peers reach it at": ready.peer,
        "tcp plane": ready.data or "-",
        "engines attach at": ready.engine,
        "http": f"http://{ready.http}/metrics" if ready.http else "off",
        "health": ready.health or "off",
        "arena": ready.arena,
        "replica": ready.replica or "off",
    }


def _capacity_view(document: dict[str, Any]) -> list[object]:
    rows = [
        (
            item["namespace"],
            show_bytes(item["block_bytes"]),
            f"{item['slots']:,}",
            f"{item['tokens']:,}",
            show_bytes(item["payload_bytes"]),
            show_bytes(item["header_bytes"] + item["padding_bytes"]),
            show_bytes(item["lost_bytes"]),
        )
        for item in document["classes"]
    ]
    caption = f"{show_bytes(document['configured_bytes'])} configured, {show_bytes(document['payload_bytes'])} hold blocks"
    accepts = document["accepts"]
    if accepts["namespaces"]:
        each = show_bytes(accepts["each_bytes"])
        caption += f"; spare: {accepts['namespaces']} namespaces that engines bring along, {each} each"
    columns = ["namespace", "block #", "blocks #", "tokens #", "payload #", "headers #", "remainder #"]
    return [table(columns, rows, title="what the arena holds", caption=caption)]

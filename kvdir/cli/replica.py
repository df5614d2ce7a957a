"""`kvdir replica`: what is in a region, read as an engine of this host would read it, without asking anybody.

Says whether lookups are answered from it, how far it may be behind whom, and every node with the age and trust that answers
would carry now. Does not: change anything; a region is only ever read here.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvdir.cli.output import CommandFailed, Exit, emit, facts, output_option, stack, table
from kvdir.config import show_bytes

if TYPE_CHECKING:
    from kvdir.client.replica_reader import ReplicaStatus
    from kvdir.core.roster import NamespaceRecord
    from kvdir.location import NodeTrust


@dataclass(frozen=True, slots=True)
class Contents:
    """A region at one moment. nodes: each with whether answers leave it out. bytes: of memory that it takes."""

    path: str
    status: ReplicaStatus
    nodes: tuple[tuple[NodeTrust, bool], ...]
    namespaces: tuple[NamespaceRecord, ...]
    blocks: int
    bytes: int


@click.command()
@click.argument("path", required=False, type=click.Path(path_type=Path))
@output_option
def replica(path: Path | None, output: str) -> None:
    """What is in the replica that an agent keeps in shared memory. PATH: of its file; else the only one in /dev/shm.

    Exit code 4 if lookups are not answered from it, with the reason.

    \b
    Examples:
      kvdir replica
      kvdir replica /dev/shm/kvdir-node1.replica --output json
    """
    contents = read_region(None if path is None else str(path))
    status = contents.status
    emit(_document(contents), lambda: _view(contents), output=output)
    if not status.usable:
        raise CommandFailed(f"{contents.path}: {status.reason}", exit=Exit.UNREACHABLE, slug="unavailable")


def read_region(path: str | None) -> Contents:
    """Raises CommandFailed when there is no region to read."""
    from kvdir.client.replica_reader import ReplicaReader, find_region

    try:
        path = path or find_region()
    except FileNotFoundError as error:
        raise CommandFailed(str(error), exit=Exit.UNREACHABLE, slug="unavailable") from error
    reader = ReplicaReader(path)
    status, region = reader.status(), reader.region()
    if region is None:
        raise CommandFailed(status.reason, exit=Exit.UNREACHABLE, slug="unavailable")
    return Contents(
        path,
        status,
        tuple(region.nodes(status.beat, time.monotonic_ns())) if status.beat else (),
        tuple(region.namespaces().values()),
        region.stored_blocks(),
        os.stat(path).st_blocks * 512 if os.path.exists(path) else 0,
    )


def _document(contents: Contents) -> dict[str, Any]:
    status = contents.status
    beat = status.beat
    return {
        "path": contents.path,
        "usable": status.usable,
        "reason": status.reason,
        "coordinator": beat.source if beat else "",
        "writer_pid": beat.pid if beat else 0,
        "writer_silent_s": round(status.silent_s, 3) if beat else None,
        "lag_s": round(status.lag_s, 3) if beat else None,
        "warming": beat.warming if beat else False,
        "incomplete": beat.incomplete if beat else False,
        "blocks": contents.blocks,
        "bytes": contents.bytes,
        "namespaces": [{"digest": item.digest.hex(), "name": item.name} for item in contents.namespaces],
        "nodes": [
            {
                "node": node.node,
                "epoch": f"{node.epoch:016x}",
                "state": node.state.name.lower(),
                "reason": node.reason,
                "age_s": round(node.age_s, 3),
                "confirmed": round(node.confirmed, 4),
                "missing_events": node.missing_events,
                "peer_address": node.peer_address,
                "left_out": left_out,
            }
            for node, left_out in contents.nodes
        ],
    }


def _view(contents: Contents) -> object:
    document = _document(contents)
    flags = [name for name in ("warming", "incomplete") if document[name]]
    written = f"process {document['writer_pid']}, heard {document['writer_silent_s']} s ago"
    head = {
        "replica": contents.path,
        "answers": "lookups" if contents.status.usable else f"nothing: {contents.status.reason}",
        "coordinator": document["coordinator"] or "none yet",
        "lag": "unknown" if document["lag_s"] is None else f"{document['lag_s']} s" + "".join(f", {flag}" for flag in flags),
        "writer": written if document["writer_pid"] else "not heard yet",
        "blocks": f"{document['blocks']:,}",
        "memory": show_bytes(contents.bytes),
        "namespaces": ", ".join(item.name for item in contents.namespaces) or "none",
    }
    rows = [
        (
            node.node,
            node.state.name.lower() + (" (left out)" if left_out else ""),
            f"{node.age_s:.1f} s",
            f"{node.confirmed:.0%}",
            node.peer_address,
            node.reason,
        )
        for node, left_out in contents.nodes
    ]
    return stack(facts(head), table(["node", "state", "heard #", "confirmed #", "agent", "reason"], rows))

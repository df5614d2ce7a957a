"""`peer-agent inventory`: what a running agent holds."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from kvdir.cli.output import emit, facts, output_option, stack, table
from kvdir.cli.tls import tls_options
from kvdir.config import show_bytes

if TYPE_CHECKING:
    from kvdir.rpc.certificates import TlsFiles


@click.command()
@click.argument("address", default="")
@click.option("--timeout-s", default=2.0, show_default=True, help="Longest wait for the answer.")
@tls_options
@output_option
def inventory(address: str, timeout_s: float, tls: TlsFiles | None, output: str) -> None:
    """What the agent at ADDRESS holds, by namespace.

    ADDRESS is where engines attach, such as unix:/dev/shm/kvdir-node1.sock (`peer-agent serve` prints it). Without one, it is
    where an agent named after this host has its socket.
    """
    from peer_agent.server.config import AgentConfig

    document = ask(address or AgentConfig().engine_address, timeout_s, tls)
    emit(document, lambda: _view(document), output=output)


def ask(address: str, timeout_s: float, tls: TlsFiles | None = None) -> dict[str, Any]:
    """What `--output json` prints. Raises KvdirError."""
    import grpc

    from kvdir.errors import Unavailable
    from kvdir.rpc.channel import client_options
    from kvdir.rpc.status import from_rpc_error
    from kvdir.rpc.tls import Dialer
    from peer_agent.v1 import engine_pb2, engine_pb2_grpc

    socket = address.removeprefix("unix:")
    if socket != address and not os.path.exists(socket):
        raise Unavailable(f"no agent is at {address}: give the address under `engines attach at` of `peer-agent serve`")
    with Dialer.of(tls).blocking(address, options=client_options()) as channel:
        try:
            answer = engine_pb2_grpc.EngineStub(channel).Inventory(engine_pb2.InventoryRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            raise from_rpc_error(error, target=address) from error
    names = [field.name for field in engine_pb2.NamespaceInventory.DESCRIPTOR.fields if field.name != "digest"]
    streams = [field.name for field in engine_pb2.EngineStreamInventory.DESCRIPTOR.fields]
    return {
        "node": answer.node,
        "epoch": answer.epoch,
        "arena_path": answer.arena_path,
        "arena_bytes": answer.arena_bytes,
        "sessions": answer.sessions,
        "locks": answer.locks,
        "publishing": answer.publishing,
        "engine_streams": [
            {name: getattr(item, name) for name in streams} | {"findings": list(item.findings)}
            for item in answer.engine_streams
        ],
        "refused": [
            {"engine": item.engine, "words": item.words, "age_s": item.age_ms / 1000, "times": item.times}
            for item in answer.refused
        ],
        "arena_memory": answer.arena_memory,
        "namespaces": [
            {"digest": item.digest.hex(), **{name: getattr(item, name) for name in names}} for item in answer.namespaces
        ],
    }


def _view(document: dict[str, Any]) -> object:
    rows = [
        (
            item["name"],
            f"{item['committed']:,} / {item['slots']:,}",
            show_bytes(item["committed"] * item["block_bytes"]),
            f"{item['free']:,}",
            f"{item['locked']:,}",
            f"{item['pinned']:,}",
            f"{item['reserved']:,}",
            f"{item['quarantined'] + item['retired']:,}",
            f"{item['evicted']:,}",
        )
        for item in document["namespaces"]
    ]
    columns = ["namespace", "blocks #", "held #", "free #", "locked #", "pinned #", "being written #", "waiting #", "evicted #"]
    head = {
        "node": document["node"],
        "epoch": f"{document['epoch']:016x}",
        "arena": f"{document['arena_path']} ({show_bytes(document['arena_bytes'])})",
        "memory": document["arena_memory"],
        "engines attached": document["sessions"],
        "locks": document["locks"],
        "publishing": document["publishing"],
    }
    parts = [facts(head), table(columns, rows)]
    if document["engine_streams"]:
        parts.append(_engines(document["engine_streams"]))
    if document["refused"]:
        refused = [(item["engine"], f"{item['age_s']:.0f} s", item["words"]) for item in document["refused"]]
        parts.append(table(["engine that was refused", "ago #", "why"], refused))
    return stack(*parts)


def _engines(streams: list[dict[str, Any]]) -> object:
    rows = [
        (
            item["stream"],
            item["endpoint"],
            f"{item['blocks']:,}",
            f"{item['batches']:,}",
            f"{item['lost_batches']:,}",
            item["state"],
        )
        for item in streams
    ]
    return table(["engine's stream", "endpoint", "blocks #", "batches #", "lost #", "state"], rows)

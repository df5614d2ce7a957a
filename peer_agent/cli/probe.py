"""`peer-agent probe`: can blocks be read from that peer, by which plane, and how fast does it answer."""

from __future__ import annotations

import asyncio
import statistics
from typing import Any

import click

from kvdir.cli.output import emit, facts, output_option, stack, table
from kvdir.errors import Unavailable

HELLOS = 5


@click.command()
@click.argument("peer")
@click.option("--transports", default="shm,tcp", show_default=True, help="Planes to try, the preferred one first.")
@click.option("--timeout-s", default=2.0, show_default=True, help="Longest wait for each step.")
@output_option
def probe(peer: str, transports: str, timeout_s: float, output: str) -> None:
    """Say hello to the agent whose peers reach it at PEER (HOST:PORT), and try its data planes.

    Moves no blocks. The plane that would be used is the first one that connects.
    """
    document = asyncio.run(_probe(peer, tuple(transports.split(",")), timeout_s))
    emit(document, lambda: _view(document), output=output)


async def _probe(peer: str, names: tuple[str, ...], timeout_s: float) -> dict[str, Any]:
    import grpc.aio

    from kvdir.rpc.channel import client_options
    from peer_agent.server.peer import PeerFailure, say_hello

    async with grpc.aio.insecure_channel(peer, options=client_options()) as channel:
        times_s = []
        try:
            for _ in range(HELLOS):
                hello, round_trip_s = await say_hello(channel, me="probe", epoch=0, planes=names, timeout_s=timeout_s)
                times_s.append(round_trip_s)
        except PeerFailure as failure:
            raise Unavailable(f"{peer}: {failure}") from failure
        offers = {offer.transport: offer.descriptor for offer in hello.transports}
        planes = await _try_planes(offers, names, timeout_s)
    return {
        "peer": peer,
        "node": hello.node,
        "epoch": hello.epoch,
        "version": hello.agent_version,
        "protocol_version": hello.protocol_version,
        "hello_first_us": int(times_s[0] * 1e6),
        "hello_median_us": int(statistics.median(times_s) * 1e6),
        "planes": planes,
        "would_use": next((item["plane"] for item in planes if item["connects"]), ""),
    }


async def _try_planes(offers: dict[str, bytes], names: tuple[str, ...], timeout_s: float) -> list[dict[str, Any]]:
    """Connects each plane from a small arena of our own, which is gone afterwards."""
    import os
    import secrets

    from peer_agent.memory.arena import Arena
    from peer_agent.memory.layout import SizeClass
    from peer_agent.transport.registry import open_transports

    path = f"/dev/shm/kvdir-probe-{os.getpid()}"
    with Arena.create(path, [SizeClass(bytes(32), 4096, 1)], epoch=secrets.randbits(64) or 1) as arena:
        ours = open_transports(names, arena)
        known = [*ours, *(name for name in offers if name not in ours)]
        try:
            return [await _try_plane(name, ours.get(name), offers.get(name), timeout_s) for name in known]
        finally:
            for plane in ours.values():
                await plane.close()


async def _try_plane(name: str, plane: Any, descriptor: bytes | None, timeout_s: float) -> dict[str, Any]:
    row = {"plane": name, "offered": descriptor is not None, "connects": False, "connect_us": 0, "reason": ""}
    if plane is None or descriptor is None:
        return row | {"reason": "not known here" if plane is None else "the peer does not offer it"}
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    try:
        connection = await plane.connect(descriptor, deadline_s=timeout_s)
    except (ConnectionError, ValueError) as error:
        return row | {"reason": str(error)}
    row |= {"connects": True, "connect_us": int((loop.time() - began_s) * 1e6)}
    await connection.close()
    return row


def _view(document: dict[str, Any]) -> object:
    rows = [
        (
            item["plane"],
            "yes" if item["connects"] else "no",
            f"{item['connect_us']:,}" if item["connects"] else "-",
            item["reason"],
        )
        for item in document["planes"]
    ]
    head = {
        "node": document["node"],
        "epoch": f"{document['epoch']:016x}",
        "version": f"{document['version']} (protocol {document['protocol_version']})",
        "answers in": f"{document['hello_median_us']:,} us (the first time {document['hello_first_us']:,} us)",
        "would use": document["would_use"] or "nothing: no plane connects",
    }
    return stack(facts(head, title=document["peer"]), table(["plane", "connects", "connect us #", "why not"], rows))

"""`peer-agent probe`: can blocks be read from that peer, by which planes, and how fast.

Reads a few blocks that the peer holds anyway, over each plane that connects, into an arena of our own that is gone afterwards:
one block at a time for latency, all of them for bandwidth, every one verified as in a load. Bounded by --read-bytes. What could
not be measured says why.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import statistics
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from kvdir.cli.output import emit, facts, output_option, stack, table
from kvdir.cli.tls import tls_options
from kvdir.config import show_bytes
from kvdir.errors import Unavailable

if TYPE_CHECKING:
    from kvdir.rpc.certificates import TlsFiles
    from peer_agent.memory.arena import Arena
    from peer_agent.transport.base import Connection, ReadList, Transport
    from peer_agent.transport.registry import PlaneOptions
    from peer_agent.v1 import peer_pb2, peer_pb2_grpc

HELLOS = 5
SINGLE_READS = 9
WHOLE_READS = 3
MAX_BLOCKS = 512
LEASE_MS = 10_000


@dataclass(slots=True)
class Plane:
    """One row. lanes: paths in use, where the plane can tell. reason: why it does not connect, or was not measured."""

    plane: str
    offered: bool
    connects: bool = False
    connect_us: int = 0
    lanes: tuple[str, ...] = ()
    blocks: int = 0
    block_bytes: int = 0
    latency_us: float = 0.0
    gb_per_s: float = 0.0
    failed_blocks: int = 0
    reason: str = ""


@click.command()
@click.argument("peer")
@click.option("--transports", default="shm,tcp", show_default=True, help="Planes to try, the preferred one first.")
@click.option("--read-bytes", default=64 << 20, show_default=True, help="Bytes of blocks to measure with; 0 reads nothing.")
@click.option("--timeout-s", default=2.0, show_default=True, help="Longest wait for each step.")
@click.option(
    "--data-tls-cert",
    default="",
    help="Of the tcp plane, where it is not --tls-cert; likewise the others.",
)
@click.option("--data-tls-key", default="", help="Its key, PEM.")
@click.option("--data-tls-ca", default="", help="Certificates of the CAs that sign the peer's certificate.")
@tls_options
@output_option
def probe(
    peer: str,
    transports: str,
    read_bytes: int,
    timeout_s: float,
    data_tls_cert: str,
    data_tls_key: str,
    data_tls_ca: str,
    tls: TlsFiles | None,
    output: str,
) -> None:
    """Say hello to the agent whose peers reach it at PEER (HOST:PORT), and read some of its blocks over each data plane.

    The plane that would be used is the first one that connects.
    """
    from kvdir.rpc.certificates import TlsFiles
    from peer_agent.transport.registry import PlaneOptions

    options = PlaneOptions(tls=TlsFiles.given(data_tls_cert, data_tls_key, data_tls_ca) or tls)
    document = asyncio.run(run_probe(peer, tuple(transports.split(",")), read_bytes, timeout_s, options=options, tls=tls))
    emit(document, lambda: _view(document), output=output)


async def run_probe(
    peer: str,
    names: tuple[str, ...],
    read_bytes: int,
    timeout_s: float,
    *,
    options: PlaneOptions | None = None,
    tls: TlsFiles | None = None,
) -> dict[str, Any]:
    """What `--output json` prints. Raises Unavailable when the peer does not answer, ConfigError for planes that cannot be."""
    from kvdir.rpc.channel import client_options
    from kvdir.rpc.tls import Dialer
    from peer_agent.server.peer import PeerFailure, say_hello
    from peer_agent.v1 import peer_pb2_grpc

    async with Dialer.of(tls).aio(peer, options=client_options()) as channel:
        times_s = []
        try:
            for _ in range(HELLOS):
                hello, round_trip_s = await say_hello(channel, me="probe", epoch=0, planes=names, timeout_s=timeout_s)
                times_s.append(round_trip_s)
        except PeerFailure as failure:
            raise Unavailable(f"{peer}: {failure}") from failure
        stub = peer_pb2_grpc.PeerStub(channel)
        async with _sample(stub, read_bytes, timeout_s) as (sample, remark):
            planes = await _try_planes(hello, names, sample, remark, timeout_s, options)
    return {
        "peer": peer,
        "node": hello.node,
        "epoch": hello.epoch,
        "version": hello.agent_version,
        "protocol_version": hello.protocol_version,
        "hello_first_us": int(times_s[0] * 1e6),
        "hello_median_us": int(statistics.median(times_s) * 1e6),
        "planes": [asdict(plane) for plane in planes],
        "would_use": next((plane.plane for plane in planes if plane.connects), ""),
    }


# -- blocks to measure with ------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _sample(
    stub: peer_pb2_grpc.PeerStub, read_bytes: int, timeout_s: float
) -> AsyncIterator[tuple[peer_pb2.SampleResponse | None, str]]:
    """Some of the peer's blocks, locked meanwhile; or None, and why."""
    import grpc

    from peer_agent.v1 import peer_pb2

    if not read_bytes:
        yield None, "nothing was to be read"
        return
    request = peer_pb2.SampleRequest(max_blocks=MAX_BLOCKS, max_bytes=read_bytes, lease_ms=LEASE_MS, reader="probe")
    try:
        sample = await stub.Sample(request, timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        unknown = error.code() is grpc.StatusCode.UNIMPLEMENTED
        yield None, "the peer's release lends no blocks to measure with" if unknown else str(error.details())
        return
    if not sample.lock:
        yield None, f"the peer holds no block of at most {read_bytes} bytes to measure with"
        return
    try:
        yield sample, ""
    finally:
        with contextlib.suppress(grpc.aio.AioRpcError):  # then the lease ends it
            await stub.Unlock(peer_pb2.UnlockRequest(locks=[sample.lock]), timeout=timeout_s)


def _read_list(sample: peer_pb2.SampleResponse, arena: Arena, count: int) -> ReadList:
    """The first `count` blocks of the sample, into the first slots of our arena (which stay reserved for them)."""
    from peer_agent.core.effects import BLOCK_RECORD_BYTES
    from peer_agent.transport.base import ReadList

    width = sample.fingerprints.width
    return ReadList(
        lock=sample.lock,
        epoch=sample.epoch,
        namespace_digest=sample.namespace_digest,
        fingerprints=sample.fingerprints.packed[: count * width],
        width=width,
        records=sample.blocks[: count * BLOCK_RECORD_BYTES],
        destinations=_offsets(arena, count),
        capability=sample.capability,
    )


def _offsets(arena: Arena, count: int) -> bytes:
    return b"".join(arena.classes[0].offset(slot).to_bytes(8, "little") for slot in range(count))


# -- planes ----------------------------------------------------------------------------------------------------------------


async def _try_planes(
    hello: peer_pb2.HelloResponse,
    names: tuple[str, ...],
    sample: peer_pb2.SampleResponse | None,
    remark: str,
    timeout_s: float,
    options: PlaneOptions | None,
) -> list[Plane]:
    """Each plane that either side knows. remark: why there is no sample."""
    import numpy as np

    from peer_agent import _native
    from peer_agent.core.records import BLOCK_RECORD
    from peer_agent.memory.arena import Arena
    from peer_agent.memory.layout import SizeClass
    from peer_agent.transport.registry import open_transports

    shape = SizeClass(bytes(32), 4096, 1)
    if sample is not None:
        records = np.frombuffer(sample.blocks, BLOCK_RECORD)
        shape = SizeClass(sample.namespace_digest, int(records["length"].max()), len(records))
    offers = {offer.transport: offer.descriptor for offer in hello.transports}
    path = f"/dev/shm/kvdir-probe-{os.getpid()}"
    with Arena.create(path, [shape], epoch=secrets.randbits(64) or 1, prefault=True) as arena:
        _native.begin_write(arena.region, _offsets(arena, shape.slots))
        ours = open_transports(names, arena, options=options)
        rows = []
        try:
            for name in (*ours, *(name for name in offers if name not in ours)):
                row = Plane(name, name in offers)
                rows.append(row)
                if name not in ours or name not in offers:
                    row.reason = "not tried: name it in --transports" if name in offers else "the peer does not offer it"
                    continue
                connection = await _connect(row, ours[name], offers[name], timeout_s)
                if connection is None:
                    continue
                try:
                    await _measure(row, connection, sample, arena, timeout_s)
                finally:
                    row.reason = row.reason or remark
                    await connection.close()
        finally:
            for plane in ours.values():
                await plane.close()
    return rows


async def _connect(row: Plane, plane: Transport, descriptor: bytes, timeout_s: float) -> Connection | None:
    from kvdir.errors import ConfigError

    began_s = time.monotonic()
    try:
        connection = await plane.connect(descriptor, deadline_s=timeout_s)
    except (OSError, ValueError, ConfigError) as error:
        row.reason = str(error)
        return None
    row.connects, row.connect_us = True, int((time.monotonic() - began_s) * 1e6)
    row.lanes = tuple(getattr(connection, "lanes", ()))
    return connection


async def _measure(
    row: Plane, connection: Connection, sample: peer_pb2.SampleResponse | None, arena: Arena, timeout_s: float
) -> None:
    """Fills in latency and bandwidth: medians of verified reads of one block, and of all."""
    if sample is None:
        return
    row.blocks, row.block_bytes = arena.classes[0].slots, arena.classes[0].block_bytes
    singles = [await _read(row, connection, _read_list(sample, arena, 1), timeout_s) for _ in range(SINGLE_READS)]
    wholes = [await _read(row, connection, _read_list(sample, arena, row.blocks), timeout_s) for _ in range(WHOLE_READS)]
    if row.failed_blocks:
        row.reason = f"{row.failed_blocks} blocks did not arrive whole ({row.reason}): no figures"
        return
    row.latency_us = round(statistics.median(singles) * 1e6, 1)
    row.gb_per_s = round(row.blocks * row.block_bytes / statistics.median(wholes) / 1e9, 2)


async def _read(row: Plane, connection: Connection, blocks: ReadList, timeout_s: float) -> float:
    from peer_agent.transport.base import ReadStatus

    if row.failed_blocks:
        return 0.0
    began_s = time.monotonic()
    outcome = await connection.read(blocks, deadline_s=timeout_s)
    took_s = time.monotonic() - began_s
    failed = [ReadStatus(status) for status in outcome.statuses if status != ReadStatus.OK]
    row.failed_blocks += len(failed)
    row.reason = ", ".join(sorted({status.name.lower() for status in failed}))
    return took_s


# -- showing ---------------------------------------------------------------------------------------------------------------


def _view(document: dict[str, Any]) -> object:
    rows = [
        (
            item["plane"],
            "yes" if item["connects"] else "no",
            f"{item['connect_us']:,}" if item["connects"] else "-",
            " ".join(item["lanes"]) or "-",
            f"{item['blocks']} x {show_bytes(item['block_bytes'])}" if item["blocks"] else "-",
            f"{item['latency_us']:,}" if item["latency_us"] else "-",
            f"{item['gb_per_s']:.2f}" if item["gb_per_s"] else "-",
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
    columns = ["plane", "connects", "connect us #", "lanes", "read #", "1 block us #", "GB/s #", "remarks"]
    return stack(facts(head, title=document["peer"]), table(columns, rows))

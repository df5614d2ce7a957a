"""The owner process: fills an arena, serves it over our planes and as a raw TCP stream, until its pipe closes."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe

import uvloop

from kvdir.errors import KvdirError
from peer_agent import _native
from peer_agent.cli.bench_read.cells import LOCK, OWNER_EPOCH, Content, Grid, fill
from peer_agent.cli.bench_read.planes import PlaneSetup, mover_pids, open_planes, reason
from peer_agent.core.capability import KEY_BYTES, CapabilityMint
from peer_agent.memory.arena import Arena

DEADLINE_S = 30.0
"""Of every single wait in the bench: a read, a start, an end."""
_FILL_S = 120.0
RAW_REQUEST = struct.Struct("<QQ")
"""offset, bytes"""


@dataclass(frozen=True, slots=True)
class OfferedPlane:
    """pids: the processes that serve it."""

    descriptor: bytes
    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Offer:
    """What the owner process says it serves."""

    pid: int
    arena_path: str
    planes: dict[str, OfferedPlane]
    left_out: dict[str, str]
    raw_port: int
    capability: bytes
    content: dict[int, Content]


@contextlib.contextmanager
def owner_process(grid: Grid, path: str, planes: tuple[str, ...], setup: PlaneSetup) -> Iterator[Offer]:
    """Runs an owner for as long as the context lasts. RuntimeError if it does not get ready."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    owner = context.Process(target=_own, args=(theirs, grid, path, planes, setup), daemon=True)
    owner.start()
    theirs.close()
    try:
        if not ours.poll(_FILL_S):
            raise RuntimeError(f"the owner process was not ready within {_FILL_S:.0f} s")
        yield _offer(ours)
    finally:
        ours.close()  # the owner ends when its pipe does
        owner.join(DEADLINE_S)
        if owner.is_alive():
            owner.kill()
            owner.join()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def _offer(pipe: Pipe) -> Offer:
    try:
        offer = pipe.recv()
    except EOFError:
        raise RuntimeError("the owner process ended before it was ready; its traceback is above") from None
    assert isinstance(offer, Offer)
    return offer


def _own(pipe: Pipe, grid: Grid, path: str, planes: tuple[str, ...], setup: PlaneSetup) -> None:
    with Arena.create(path, grid.owner_classes(), epoch=OWNER_EPOCH, prefault=True) as arena:
        uvloop.run(_serve(pipe, arena, planes, setup))


async def _serve(pipe: Pipe, arena: Arena, planes: tuple[str, ...], setup: PlaneSetup) -> None:
    content = fill(arena)
    transports, left_out = open_planes(planes, arena, setup)
    records = b"".join(part.records for part in content.values())
    expires_s = time.monotonic() + 3600
    mint = CapabilityMint(secrets.token_bytes(KEY_BYTES), epoch=OWNER_EPOCH)
    capability = mint.capability(LOCK, records, reader="bench", expires_s=expires_s)
    offered: dict[str, OfferedPlane] = {}
    for name, transport in transports.items():
        try:
            descriptor = await transport.export()
        except KvdirError as error:
            left_out[name] = reason(error)
            continue
        transport.grant(LOCK, records, expires_s=expires_s, capability=capability)
        offered[name] = OfferedPlane(descriptor, (os.getpid(), *mover_pids(transport)))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(Offer(os.getpid(), arena.path, offered, left_out, listener.getsockname()[1], capability, content))
        raw = asyncio.create_task(asyncio.to_thread(_serve_raw, listener, arena))
        await asyncio.to_thread(_wait_until_closed, pipe)
        listener.shutdown(socket.SHUT_RDWR)  # an accept that nobody came for ends, too
        await raw
    for transport in transports.values():
        await transport.close()


def _wait_until_closed(pipe: Pipe) -> None:
    with contextlib.suppress(EOFError):
        pipe.recv()


def _serve_raw(listener: socket.socket, arena: Arena) -> None:
    """Answers each request with that many bytes of arena memory, until the reader goes away."""
    try:
        connection, _ = listener.accept()
    except OSError:
        return
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while len(request := connection.recv(RAW_REQUEST.size, socket.MSG_WAITALL)) == RAW_REQUEST.size:
            offset, size = RAW_REQUEST.unpack(request)
            _native.stream_send(connection.fileno(), arena.region[offset : offset + size], deadline_ns())


def deadline_ns() -> int:
    return time.monotonic_ns() + int(DEADLINE_S * 1e9)

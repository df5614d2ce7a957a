"""A tcp owner that misbehaves on demand, for contract and fault tests. Never used by an agent.

It speaks the frames of csrc/wire.hpp from Python, so it is also the second reading of that file: without a fault it serves
correctly, and a change of the native side that is not meant shows here.
"""

from __future__ import annotations

import asyncio
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from peer_agent.memory.arena import Arena
from peer_agent.memory.layout import HEADER_BYTES
from peer_agent.transport.base import ReadStatus
from peer_agent.transport.fake import Fault
from peer_agent.transport.tcp import DESCRIPTOR, PLAIN_VERSION, TLS_VERSION

HELLO = struct.Struct("<IIQI12x")
REQUEST = struct.Struct("<III4x64s")  # the last: a capability, peer_agent/core/capability.py
SLOT_REF = struct.Struct("<QQI4x")
GROUP = struct.Struct("<IIII")
TRAILER = struct.Struct("<QI4x")
HELLO_MAGIC = int.from_bytes(b"KVDT", "little")
REQUEST_MAGIC = int.from_bytes(b"KVRQ", "little")
GROUP_MAGIC = int.from_bytes(b"KVGR", "little")
VERSION = 2
MAX_REQUEST_BLOCKS = 4096
GROUP_BLOCKS = 64
GROUP_BYTES = 1 << 20


@asynccontextmanager
async def faulty_owner(arena: Arena, fault: Fault | None, *, tls: ssl.SSLContext | None = None) -> AsyncIterator[bytes]:
    """Serves every slot of `arena`, without locks, as `fault` says; with `tls`, encrypted. Gives the descriptor."""
    writers: set[asyncio.StreamWriter] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.add(writer)
        try:
            await _serve(reader, writer, arena, fault)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the reader went away
        finally:
            writers.discard(writer)
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    port = server.sockets[0].getsockname()[1]
    try:
        yield DESCRIPTOR.pack(PLAIN_VERSION if tls is None else TLS_VERSION, 0, port, arena.epoch) + b"127.0.0.1"
    finally:
        server.close()
        for writer in tuple(writers):
            writer.transport.abort()
        await server.wait_closed()


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, arena: Arena, fault: Fault | None) -> None:
    await reader.readexactly(HELLO.size)
    writer.write(HELLO.pack(HELLO_MAGIC, VERSION, arena.epoch, MAX_REQUEST_BLOCKS))
    while True:
        magic, count, tag, _capability = REQUEST.unpack(await reader.readexactly(REQUEST.size))
        assert magic == REQUEST_MAGIC
        refs = list(SLOT_REF.iter_unpack(await reader.readexactly(count * SLOT_REF.size)))
        answer = b"".join(_group(arena, tag, refs, first, end, fault) for first, end in groups(refs))
        match fault:
            case Fault.SLOW:
                await reader.read()  # until the other side closes
                return
            case Fault.CLOSING:
                writer.write(answer[: len(answer) // 2])
                await writer.drain()
                return
            case Fault.GARBAGE:
                writer.write(bytes(range(256)) * 64)
            case _:
                writer.write(answer)
        await writer.drain()


def groups(refs: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """group_end of wire.hpp, for a whole request."""
    found, first, size = [], 0, 0
    for index, (_, _, length) in enumerate(refs):
        if index > first and (index - first == GROUP_BLOCKS or size + length > GROUP_BYTES):
            found.append((first, index))
            first, size = index, 0
        size += length
    return [*found, (first, len(refs))]


def _group(arena: Arena, tag: int, refs: list[tuple[int, int, int]], first: int, end: int, fault: Fault | None) -> bytes:
    parts = [GROUP.pack(GROUP_MAGIC, tag, first, end - first)]
    parts.append(bytes([ReadStatus.OK] * (end - first)).ljust((end - first + 15) // 16 * 16, b"\0"))
    for offset, _, length in refs[first:end]:
        header = bytearray(arena.region[offset : offset + HEADER_BYTES])
        payload = bytearray(arena.region[offset + HEADER_BYTES : offset + HEADER_BYTES + length])
        if fault is Fault.WRONG_HEADER:
            header[32] ^= 0xFF
        if fault is Fault.WRONG_BYTES:
            payload[length // 2] ^= 0x01
        parts += [bytes(header), bytes(payload)]
    for position, (_, generation, _) in enumerate(refs[first:end], first):
        parts.append(TRAILER.pack(generation + (2 if fault is Fault.TORN else 0), position))
    return b"".join(parts)

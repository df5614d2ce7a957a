"""Servers of kvdir.v1.Directory that misbehave, for tests of whoever asks one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from kvdir.location import PROTOCOL_VERSION
from kvdir.rpc.channel import server_options
from kvdir.v1 import directory_pb2, directory_pb2_grpc


class Silent(directory_pb2_grpc.DirectoryServicer):
    """Takes lookups and does not answer, until `broken`: then calls break. `calls`, `reads`: streams, lookups over them.

    asked: by calls of their own.
    """

    address = ""

    def __init__(self) -> None:
        self.broken = asyncio.Event()
        self.calls = 0
        self.reads = 0
        self.asked = 0

    async def Lookup(self, request: Any, context: Any) -> Any:
        self.asked += 1
        await self.broken.wait()

    async def LookupStream(self, request_iterator: Any, context: Any) -> None:
        self.calls += 1
        reading = asyncio.create_task(self._count(context))
        try:
            await self.broken.wait()
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "broken")

    async def _count(self, context: Any) -> None:
        while (item := await context.read()) is not grpc.aio.EOF:
            self.reads += len(item.lookups)


@contextlib.asynccontextmanager
async def silent_server() -> AsyncIterator[Silent]:
    silent = Silent()
    async with directory_server(silent) as address:
        silent.address = address
        yield silent
        silent.broken.set()


class Deaf(directory_pb2_grpc.DirectoryServicer):
    """Lets a stream begin, and reads nothing from it, as a process that hangs."""

    async def LookupStream(self, request_iterator: Any, context: Any) -> None:
        await context.send_initial_metadata(())
        await asyncio.get_running_loop().create_future()


class Old(directory_pb2_grpc.DirectoryServicer):
    """Knows no streams. `asked`: calls so far."""

    def __init__(self) -> None:
        self.asked = 0

    async def Lookup(self, request: Any, context: Any) -> Any:
        self.asked += 1
        packed = request.fingerprints
        return directory_pb2.LookupResponse(protocol_version=PROTOCOL_VERSION, asked=len(packed.packed) // packed.width)


@contextlib.asynccontextmanager
async def directory_server(servicer: Any) -> AsyncIterator[str]:
    server = grpc.aio.server(options=server_options())
    directory_pb2_grpc.add_DirectoryServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0.5)

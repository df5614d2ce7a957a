"""kvdir/rpc/interceptors.py over a real connection: what a client hears of a stream that lost its right."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from kvdir.obs.call_figures import CallFigures
from kvdir.rpc.caller import Caller, caller
from kvdir.rpc.gate import CallLimits, Gate
from kvdir.rpc.interceptors import EdgeInterceptor
from kvdir.server.lookup_stream import LookupStreams
from kvdir.v1 import directory_pb2

LARGE = bytes(32 * 2**20)
"""More than any window, so that gRPC's write of it waits for who reads."""


Handlers = dict[str, Any]


@contextlib.asynccontextmanager
async def edge(handlers: Handlers) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a server with these methods of service "s", whose gate knows its callers."""
    gate = Gate(limits=CallLimits(max_streams=1))
    interceptor = EdgeInterceptor(CallFigures(), max_deadline_s=30.0, on_bug=lambda method, request_id, error: None, gate=gate)
    server = grpc.aio.server(interceptors=[interceptor])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("s", handlers),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        async with grpc.aio.insecure_channel(address, options=(("grpc.max_receive_message_length", -1),)) as channel:
            yield channel
    finally:
        await server.stop(None)


async def test_a_client_hears_why_when_its_right_goes_while_it_does_not_read() -> None:
    writing: asyncio.Queue[Caller] = asyncio.Queue()

    async def endless(request: bytes, context: Any) -> AsyncIterator[bytes]:
        while True:
            writing.put_nowait(caller())
            yield LARGE

    async with edge({"Endless": grpc.unary_stream_rpc_method_handler(endless)}) as channel:
        method: Any = channel.unary_stream("/s/Endless")
        call = method(b"", timeout=30.0)
        (await writing.get()).end("the right is gone")
        assert await call.read() == LARGE
        with pytest.raises(grpc.aio.AioRpcError, match="the right is gone"):
            await call.read()


async def test_a_lookup_stream_says_why_when_its_right_goes_while_answers_are_written() -> None:
    asked: asyncio.Queue[Caller] = asyncio.Queue()

    class Source:
        def lookup(self, request: directory_pb2.LookupRequest) -> directory_pb2.LookupResponse:
            asked.put_nowait(caller())
            return directory_pb2.LookupResponse(error=LARGE.decode())

    streams = LookupStreams(Source(), CallFigures(), max_streams=1, max_deadline_s=30.0, on_bug=lambda *bug: None)

    async def serve(request_iterator: Any, context: Any) -> None:
        await streams.serve(context)

    kinds = {"response_serializer": directory_pb2.LookupStreamResponse.SerializeToString}
    read = directory_pb2.LookupStreamRequest.FromString
    handler = grpc.stream_stream_rpc_method_handler(serve, request_deserializer=read, **kinds)
    async with edge({"LookupStream": handler}) as channel:
        call: Any = channel.stream_stream("/s/LookupStream")(timeout=30.0)
        request = directory_pb2.LookupStreamRequest(lookups=[directory_pb2.StreamedLookup(id=1)])
        await call.write(request.SerializeToString())
        (await asked.get()).end("the right is gone")
        assert len(await call.read()) > len(LARGE)
        with pytest.raises(grpc.aio.AioRpcError, match="the right is gone"):
            await call.read()

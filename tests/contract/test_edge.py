"""kvdir/rpc/interceptors.py over a real connection: what a client hears of a stream that lost its right."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from kvdir.obs.call_figures import CallFigures
from kvdir.rpc.caller import Caller, caller
from kvdir.rpc.gate import CallLimits, Gate
from kvdir.rpc.interceptors import EdgeInterceptor

LARGE = bytes(32 * 2**20)
"""More than any window, so that gRPC's write of it waits for who reads."""


async def test_a_client_hears_why_when_its_right_goes_while_it_does_not_read() -> None:
    writing: asyncio.Queue[Caller] = asyncio.Queue()

    async def endless(request: bytes, context: Any) -> AsyncIterator[bytes]:
        while True:
            writing.put_nowait(caller())
            yield LARGE

    gate = Gate(limits=CallLimits(max_streams=1))
    edge = EdgeInterceptor(CallFigures(), max_deadline_s=30.0, on_bug=lambda method, request_id, error: None, gate=gate)
    server = grpc.aio.server(interceptors=[edge])
    handlers = {"Endless": grpc.unary_stream_rpc_method_handler(endless)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("s", handlers),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        async with grpc.aio.insecure_channel(address, options=(("grpc.max_receive_message_length", -1),)) as channel:
            method: Any = channel.unary_stream("/s/Endless")
            call = method(b"", timeout=30.0)
            who = await writing.get()
            who.end("the right is gone")
            assert await call.read() == LARGE
            with pytest.raises(grpc.aio.AioRpcError, match="the right is gone"):
                await call.read()
    finally:
        await server.stop(None)

"""kvdir.v1.Directory.Watch: one task reads credit, one writes what the watcher is to get. Thin: core/watcher.py decides.

Responses are bytes already (an item is encoded once for all watchers), so the method is registered with a serializer of its
own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from kvdir.errors import DeadlineExceeded, RemoteProtocolError, Unavailable
from kvdir.rpc.caller import caller
from kvdir.rpc.watch_codec import decode_start
from kvdir.server.watching import WatchCall, Watching
from kvdir.v1 import directory_pb2

_START_S = 10.0


def add_watch(server: grpc.aio.Server, watching: Watching, *, stall_s: float) -> None:
    """Takes the place of the generated handler; call it after that was added. stall_s: a write may take so long."""
    handler: Any = grpc.stream_stream_rpc_method_handler(
        watch_handler(watching, stall_s=stall_s),
        request_deserializer=directory_pb2.WatchRequest.FromString,
        response_serializer=None,
    )
    service = directory_pb2.DESCRIPTOR.services_by_name["Directory"].full_name
    server.add_registered_method_handlers(service, {"Watch": handler})


def watch_handler(watching: Watching, *, stall_s: float) -> Callable[[Any, Any], Awaitable[None]]:
    """The coroutine that serves a call."""

    async def watch(request_iterator: Any, context: Any) -> None:
        start, who = decode_start(await _start(context)), caller()
        tenants = who.tenants
        call = watching.open(start, tenants)
        who.rests_on(
            lambda identity: "" if identity.tenants == tenants else "other tenants are to be seen now: watch anew",
            on_end=lambda: watching.end(call, who),
        )
        reader = asyncio.create_task(_read(watching, call, context))
        writer = asyncio.create_task(_write(watching, call, context, stall_s))
        try:
            await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
        finally:
            watching.close(call)  # first: what follows waits, and may be cancelled
            for task in (reader, writer):
                task.cancel()
            results = await asyncio.gather(reader, writer, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    return watch


async def _start(context: Any) -> directory_pb2.WatchRequest:
    try:
        async with asyncio.timeout(_START_S):
            request = await context.read()
    except TimeoutError:
        raise DeadlineExceeded(f"no start within {_START_S:g} s") from None
    if request is grpc.aio.EOF:
        raise RemoteProtocolError("a watch call begins with start")
    start: directory_pb2.WatchRequest = request
    return start


async def _read(watching: Watching, call: WatchCall, context: Any) -> None:
    """Until the watcher ends the call."""
    while (request := await context.read()) is not grpc.aio.EOF:
        if request.WhichOneof("message") == "credit":
            watching.credit(call, request.credit.total_bytes)


async def _write(watching: Watching, call: WatchCall, context: Any, stall_s: float) -> None:
    """Until the last word was said. A watcher that does not read blocks this; so that has a deadline, too."""
    while True:
        call.wake.clear()
        message = watching.next(call)
        if message:
            try:
                async with asyncio.timeout(stall_s):
                    await context.write(message)
            except TimeoutError:
                call.watcher.cut_off = True
                raise Unavailable(f"cut off: you have read nothing for {stall_s:g} s; come back when you can read") from None
            if call.watcher.said_end:
                return
        else:
            await call.wake.wait()

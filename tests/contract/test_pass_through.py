"""kvdir/server/pass_through.py: calls that a lookup worker carries to its main process."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from kvdir.rpc.channel import client_options, server_options
from kvdir.server.pass_through import pass_through
from kvdir.testing.wait import eventually

ECHO = {"Echo": True}


async def test_calls_take_turns_and_end_in_time_when_somebody_opens_many_and_sends_nothing() -> None:
    async def echo(request_iterator: Any, context: Any) -> None:
        await context.write(await context.read())
        await context.read()

    async def one(request: bytes, context: Any) -> bytes:
        raise AssertionError("there was no request")

    handlers = {"Echo": grpc.stream_stream_rpc_method_handler(echo), "One": grpc.unary_unary_rpc_method_handler(one)}
    async with contextlib.AsyncExitStack() as stack:
        main = await stack.enter_async_context(_server(handlers, ("grpc.max_concurrent_streams", 1)))
        options = client_options()  # a connection for each
        channels = [await stack.enter_async_context(grpc.aio.insecure_channel(main, options=options)) for _ in range(2)]
        methods = pass_through(channels, "test.Echo", ECHO | {"One": False}, max_deadline_s=0.1)
        client = await stack.enter_async_context(grpc.aio.insecure_channel(await stack.enter_async_context(_server(methods))))
        calls = [client.stream_stream(f"/test.Echo/{name}")(timeout=30.0) for name in ("One", "One", "Echo", "Echo")]
        for name, call in zip(("One", "One", "Echo", "Echo"), calls, strict=True):
            if name == "One":
                await call.done_writing()
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call.read()
                assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            else:  # the second one, too, while the first is open
                await call.write(b"a")
                assert await call.read() == b"a"


async def test_calls_pass_through_as_they_are() -> None:
    """Metadata, deadline, streams both ways, errors with trailing metadata, and the end from either side."""
    seen: dict[str, Any] = {"ended": 0}

    async def echo(request_iterator: Any, context: Any) -> None:
        seen["metadata"] = dict(context.invocation_metadata())
        seen["remaining_s"] = context.time_remaining()
        try:
            while (item := await context.read()) is not grpc.aio.EOF:
                if item == b"fail":
                    await context.abort(grpc.StatusCode.ABORTED, "as you wish", (("kvdir-code", "stale-epoch"),))
                await context.write(item * 2)
            context.set_trailing_metadata((("said", "goodbye"),))
        finally:
            seen["ended"] += 1

    async with contextlib.AsyncExitStack() as stack:
        main = await stack.enter_async_context(_server({"Echo": grpc.stream_stream_rpc_method_handler(echo)}))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(main))
        front = await stack.enter_async_context(_server(pass_through([channel], "test.Echo", ECHO, max_deadline_s=0.1)))
        client = await stack.enter_async_context(grpc.aio.insecure_channel(front))
        method: Any = client.stream_stream("/test.Echo/Echo")
        call = method(timeout=30.0, metadata=(("kvdir-request-id", "r1"), ("tenant", "t1")))
        for item in (b"a", b"b" * 100_000):
            await call.write(item)
            assert await call.read() == item * 2
        assert (seen["metadata"]["kvdir-request-id"], seen["metadata"]["tenant"]) == ("r1", "t1")
        assert 0 < seen["remaining_s"] <= 30.3  # gRPC rounds up to 0.1 s at every hop
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert dict(await call.trailing_metadata())["said"] == "goodbye"

        call = method()
        await call.write(b"fail")
        with pytest.raises(grpc.aio.AioRpcError, match="as you wish") as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.ABORTED
        assert dict(caught.value.trailing_metadata() or ())["kvdir-code"] == "stale-epoch"

        call = method()
        await call.write(b"a")
        await call.read()
        assert seen["ended"] == 2
        call.cancel()
        await eventually(lambda: seen["ended"] == 3)

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await method(timeout=0.1).read()
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        one: Any = client.unary_unary("/test.Echo/Echo")
        assert await one(b"x") == b"xx"


@contextlib.asynccontextmanager
async def _server(handlers: dict[str, Any], *options: tuple[str, int]) -> AsyncIterator[str]:
    server = grpc.aio.server(options=(*server_options(), *options))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0.5)

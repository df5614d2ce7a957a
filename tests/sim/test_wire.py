"""The simulated call behaves like one of grpc.aio: the same checks on both."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc
import grpc.aio
import pytest

from kvdir.core.feedback import StaleReport
from kvdir.errors import KvdirError, Overloaded
from kvdir.obs.call_figures import CallFigures
from kvdir.rpc.interceptors import EdgeInterceptor
from kvdir.rpc.status import from_rpc_error
from kvdir.testing import ManualClock
from kvdir.testing.sim.loop import SimulatedLoop
from kvdir.testing.sim.network import Faults, Network
from kvdir.testing.sim.wire import WINDOW_MESSAGES
from kvdir.v1 import events_pb2, events_pb2_grpc

Handler = Callable[[Any], Awaitable[None]]
HangUp = Callable[[], Awaitable[None]]
Rig = Callable[[Handler], AbstractAsyncContextManager[tuple[Any, HangUp]]]
"""Serves the handler and begins a call of it; the second value makes the client go away."""
Check = Callable[[Rig], Coroutine[Any, Any, None]]


class Service(events_pb2_grpc.EventsServicer):
    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def Publish(self, request_iterator: Any, context: Any) -> None:
        await self._handler(context)


class Nobody:
    def twice(self, first_s: float) -> Callable[[], None]:
        return lambda: None

    def feedback(self, report: StaleReport) -> Callable[[], None]:
        return lambda: None


@contextlib.asynccontextmanager
async def real(handler: Handler) -> AsyncIterator[tuple[Any, HangUp]]:
    edge = EdgeInterceptor(CallFigures(), max_deadline_s=10, on_bug=lambda *_: None)
    server = grpc.aio.server(interceptors=[edge])
    events_pb2_grpc.add_EventsServicer_to_server(Service(handler), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield events_pb2_grpc.EventsStub(channel).Publish(), channel.close
    await server.stop(None)


@contextlib.asynccontextmanager
async def simulated(handler: Handler) -> AsyncIterator[tuple[Any, HangUp]]:
    network = Network(asyncio.get_running_loop(), random.Random(1), Faults(jitter_s=0.01), Nobody())
    network.service = Service(handler)  # type: ignore[assignment]
    async with contextlib.AsyncExitStack() as stack:
        yield await stack.enter_async_context(network.dial("node-0", 1)), stack.aclose


async def messages_keep_their_order(rig: Rig) -> None:
    async def echo(context: Any) -> None:
        while (request := await context.read()) is not grpc.aio.EOF:
            await context.write(ack(request.heartbeat.last_seq))

    async with rig(echo) as (call, _):
        for number in range(50):
            await call.write(heartbeat(number))
        await call.done_writing()
        assert [(await call.read()).ack.seq for _ in range(50)] == list(range(50))
        assert await call.read() is grpc.aio.EOF


async def the_end_is_read_and_writing_fails(rig: Rig) -> None:
    async def say_one_word(context: Any) -> None:
        await context.write(ack(7))

    async with rig(say_one_word) as (call, _):
        assert (await call.read()).ack.seq == 7
        assert await call.read() is grpc.aio.EOF
        assert await call.read() is grpc.aio.EOF
        with pytest.raises((asyncio.InvalidStateError, grpc.RpcError)):
            await call.write(heartbeat(1))


async def an_error_of_the_handler_arrives(rig: Rig) -> None:
    async def refuse(context: Any) -> None:
        await context.read()
        raise Overloaded("come back later")

    async with rig(refuse) as (call, _):
        await call.write(heartbeat(1))
        try:
            await call.read()
        except (grpc.RpcError, KvdirError) as error:
            told = from_rpc_error(error, target="") if isinstance(error, grpc.RpcError) else error
        assert isinstance(told, Overloaded)
        assert "come back later" in str(told)


async def the_handler_is_cancelled_when_the_client_goes(rig: Rig) -> None:
    cancelled = asyncio.Event()

    async def wait(context: Any) -> None:
        await context.write(ack(1))
        try:
            while await context.read() is not grpc.aio.EOF:
                pass
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async with rig(wait) as (call, hang_up):
        await call.write(heartbeat(1))
        await call.read()
        await hang_up()
        async with asyncio.timeout(5):
            await cancelled.wait()


async def writing_waits_when_nobody_reads(rig: Rig) -> None:
    async def sleep(context: Any) -> None:
        await asyncio.sleep(60)

    async def write_for_2_s(call: Any) -> None:
        async with asyncio.timeout(2):
            for number in range(100 * WINDOW_MESSAGES):
                await call.write(heartbeat(number, b"x" * 65_536))

    async with rig(sleep) as (call, _):
        with pytest.raises(TimeoutError):
            await write_for_2_s(call)


def heartbeat(seq: int, payload: bytes = b"") -> Any:
    count = events_pb2.OwnerCount(namespace_digest=payload)
    return events_pb2.PublishRequest(heartbeat=events_pb2.Heartbeat(last_seq=seq, counts=[count]))


def ack(seq: int) -> Any:
    return events_pb2.PublishResponse(ack=events_pb2.Ack(seq=seq))


CHECKS = (
    messages_keep_their_order,
    the_end_is_read_and_writing_fails,
    an_error_of_the_handler_arrives,
    the_handler_is_cancelled_when_the_client_goes,
    writing_waits_when_nobody_reads,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_simulated_call_does_what_grpc_does(check: Check) -> None:
    loop = SimulatedLoop(ManualClock(1000.0))
    loop.run_until_complete(check(simulated))
    assert loop.faults == []
    loop.shut()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_grpc_does_what_is_simulated(check: Check) -> None:
    asyncio.run(check(real))

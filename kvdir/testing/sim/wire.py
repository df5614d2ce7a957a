"""One publish call without sockets: what the publisher takes for its gRPC call, and the events service for its context.

    publisher --write--> [ up: in flight -> arrived ] --read--> events service
              <--read--- [ arrived <- in flight :down ] <--write--

Rules: a direction keeps its order, whatever the delay; a message may be lost or come twice, as the network decides; the end of
the call travels in order, behind the last message. Messages are moved, never looked into, so a new kind needs no change here.
Behaves like grpc.aio (tests/sim/test_wire.py runs the same checks on both): reading after the end gives EOF or the error,
writing then raises, a client that goes away cancels the handler, and writing waits while too much is unread.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import grpc.aio

WINDOW_MESSAGES = 64
"""So many messages fill one direction; more have to wait, as HTTP/2 flow control makes them."""
HISTORY_MESSAGES = 16


class Carrier(Protocol):
    """What a pipe asks of the network.

    copies: what arrives of a message: nothing, it, or it twice. held: nothing gets through now; `release` follows.
    """

    def copies(self, pipe: Pipe, message: Any) -> list[Any]: ...
    def delay_s(self) -> float: ...
    def held(self, node: str) -> bool: ...
    def arrived(self, pipe: Pipe, message: Any) -> None: ...


class _End:
    """Behind it nothing comes. error: None for an orderly end."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error


class Pipe:
    """One direction. node: whose call it is. on_end: told when the end arrives, with its error.

    delivered: messages so far. history: the last of them that make sense again, for the network to repeat.
    """

    def __init__(self, carrier: Carrier, loop: asyncio.AbstractEventLoop, node: str, *, upward: bool) -> None:
        self.node = node
        self.upward = upward
        self.on_end: Callable[[Exception | None], None] = lambda _: None
        self.delivered = 0
        self.history: deque[Any] = deque(maxlen=HISTORY_MESSAGES)
        self.first_read_s: float | None = None
        """When what was read last was read for the first time, if it is the very message that was read before it."""
        self._carrier = carrier
        self._loop = loop
        self._in_flight: deque[Any] = deque()
        self._arrived: deque[Any] = deque()
        self._last_at_s = self._not_before_s = 0.0
        self._closed = False
        self._end: _End | None = None
        self._last: Any = None
        self._last_read_s = 0.0
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def closed(self) -> bool:
        """Nothing more is sent."""
        return self._closed

    @property
    def ended(self) -> bool:
        """The end has arrived."""
        return self._end is not None

    def send(self, message: Any) -> None:
        if not self._closed:
            for copy in self._carrier.copies(self, message):
                self._launch(copy)

    def close(self, error: Exception | None = None) -> None:
        """The sender ends the call; what is in flight arrives before that is known."""
        if not self._closed:
            self._closed = True
            self._launch(_End(error))

    def snap(self, error: Exception) -> None:
        """The connection breaks: what is under way is gone, and the receiver knows at once."""
        self._closed = True
        self._in_flight.clear()
        self._arrived.clear()
        self._finish(_End(error))

    def mute(self) -> None:
        """Nothing comes out any more, and the receiver is not told."""
        self._closed = True
        self._in_flight.clear()

    def hold_back(self, seconds: float) -> None:
        """What is in flight, and what follows, arrives no sooner than in so many seconds."""
        self._not_before_s = self._loop.time() + seconds

    def release(self) -> None:
        """The carrier holds no more: what is in flight goes on."""
        for _ in range(len(self._in_flight)):
            self._schedule()

    async def room(self) -> None:
        """Until the receiver has read enough."""
        while not self._closed and len(self._in_flight) + len(self._arrived) >= WINDOW_MESSAGES:
            await self._change()

    async def receive(self) -> Any:
        """The next message; EOF after an orderly end; raises the error of another one."""
        while not self._arrived:
            if self._end is not None:
                if self._end.error is not None:
                    raise self._end.error
                return grpc.aio.EOF
            await self._change()
        message = self._arrived.popleft()
        self.first_read_s = self._last_read_s if message is self._last else None
        self._last, self._last_read_s = message, self._loop.time()
        self._wake()
        return message

    def _launch(self, item: Any) -> None:
        self._in_flight.append(item)
        if not self._carrier.held(self.node):
            self._schedule()

    def _schedule(self) -> None:
        self._last_at_s = max(self._last_at_s, self._loop.time() + self._carrier.delay_s())
        self._loop.call_at(self._last_at_s, self._arrive)

    def _arrive(self) -> None:
        """One of those in flight is there: the oldest, so that order holds whatever the timers say."""
        if not self._in_flight or self._carrier.held(self.node):
            return
        if self._loop.time() < self._not_before_s:
            self._loop.call_at(self._not_before_s, self._arrive)
            return
        item = self._in_flight.popleft()
        if isinstance(item, _End):
            self._finish(item)
            return
        self.delivered += 1
        self._carrier.arrived(self, item)
        self._arrived.append(item)
        self._wake()

    def _finish(self, end: _End) -> None:
        if self._end is None:
            self._end, self._closed = end, True
            self.on_end(end.error)
        self._wake()

    async def _change(self) -> None:
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiters.append(waiter)
        await waiter

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


class Call:
    """Both directions of one publish call. life: epoch of the agent that made it."""

    def __init__(self, carrier: Carrier, loop: asyncio.AbstractEventLoop, node: str, life: int) -> None:
        self.node = node
        self.life = life
        self.up = Pipe(carrier, loop, node, upward=True)
        self.down = Pipe(carrier, loop, node, upward=False)


class ClientCall:
    """The publisher's end."""

    def __init__(self, call: Call) -> None:
        self._up, self._down = call.up, call.down

    async def write(self, request: Any) -> None:
        await self._up.room()
        if self._down.ended:
            raise asyncio.InvalidStateError("the call is over")
        self._up.send(request)
        await asyncio.sleep(0)

    async def read(self) -> Any:
        return await self._down.receive()

    async def done_writing(self) -> None:
        self._up.close()


class ServerContext:
    """The service's end.

    twice: called when a message comes again, before it is handled, with the time of the first; what it returns is called after.
    """

    def __init__(self, call: Call, *, twice: Callable[[float], Callable[[], None]]) -> None:
        self._up, self._down = call.up, call.down
        self._twice = twice
        self._handled: Callable[[], None] | None = None

    async def read(self) -> Any:
        if self._handled is not None:
            handled, self._handled = self._handled, None
            handled()
        message = await self._up.receive()
        if self._up.first_read_s is not None:
            self._handled = self._twice(self._up.first_read_s)
        return message

    async def write(self, response: Any) -> None:
        await self._down.room()
        self._down.send(response)
        await asyncio.sleep(0)

"""Directory.LookupStream, the asking side: one call to each coordinator carries all lookups of an aio client.

    lookup ──▶ _out ──(writer task: all that is ready, one message)──▶ coordinator
       ▲                                                                  │
       └── future by id ◀──(reader task)── answers, in any order ◀────────┘

Rules:
- A lookup ends by its own deadline, whatever the call does. When the call ends, everything under way ends with its error, so
  that the caller goes on to another coordinator within that deadline.
- A coordinator that knows no streams, or has no room for one, is asked call by call for UNARY_S; then a stream is tried again.
- A stream that owed an answer for SILENT_S, and said nothing, is given up together with its connection: behind one address
  there may be several processes, and another may answer. Lookups whose own deadlines are shorter add up. The next stream's
  patience is doubled, until one answers.
- Lookups that lose their stream are asked again over a new one, for the same reason, before another address is tried; then they
  wait for as long as they may, lest a slow coordinator be asked over and over.
- A draining coordinator gets nothing new; what it was sent is waited for.
- A stream has a connection of its own and one task, which owns both; the client's `close` awaits all of them.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from kvdir.errors import DeadlineExceeded, Overloaded, Unavailable
from kvdir.obs import trace
from kvdir.rpc.cancel import call_alone_cancelled
from kvdir.rpc.channel import NotConnected, Options
from kvdir.rpc.status import from_rpc_error, from_words
from kvdir.rpc.tls import PLAINTEXT, Dialer
from kvdir.v1 import directory_pb2

METHOD = "/kvdir.v1.Directory/LookupStream"
UNARY_S = 30.0
SILENT_S = 1.0
MOST_SILENT_S = 16.0
LEAST_WAIT_S = 0.05
MOST_LOST = 8
"""So often a lookup is asked again at one address; what nobody answers costs the connect timeout each time."""
REFUSED_LOSSES = 4
"""As many as a refused connection counts for: a dead coordinator is left for the next one soon."""
MESSAGE_BYTES = 256 * 1024
"""Lookups are put together into one message up to this size; a single one may be larger."""

MAX_DEADLINE_MS = 2**32 - 1


def streamed(id: int, request: directory_pb2.LookupRequest, deadline_ms: int) -> directory_pb2.StreamedLookup:
    """A lookup as it travels in a stream, with what a call of its own would say in metadata."""
    item = directory_pb2.StreamedLookup(id=id, lookup=request, deadline_ms=deadline_ms)
    carried = trace.metadata()
    if carried is not None:
        parent, state, name = trace.arrived(carried)
        item.context.traceparent, item.context.tracestate, item.context.request_id = parent, state, name
    return item


class NoStream(Exception):
    """This coordinator is to be asked call by call."""


class StreamLost(Unavailable):
    """A stream ended that had been connected. Worth a new connection: another process may listen at the same address."""


class LookupStreams:
    """One stream to each coordinator, made when needed."""

    def __init__(self, options: Options, *, connect_timeout_s: float, dialer: Dialer = PLAINTEXT) -> None:
        self._options = options
        self._dialer = dialer
        self._connect_timeout_s = connect_timeout_s
        self._streams: dict[str, _Stream] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._unary_until_s: dict[str, float] = {}
        self._closed = False

    async def lookup(self, address: str, request: directory_pb2.LookupRequest, *, end_s: float) -> directory_pb2.LookupResponse:
        """end_s: monotonic. Raises NoStream, the errors of a lookup, Unavailable, DeadlineExceeded."""
        if self._unary_until_s and self._unary_until_s.get(address, 0.0) > time.monotonic():
            raise NoStream
        losses = Losses()
        while True:
            try:
                answer = await self._stream(address).lookup(request, end_s=end_s, patient=bool(losses))
            except Unavailable as error:
                losses.add(error)
            else:
                break
        if answer.error:
            raise from_words(answer.error)
        return answer

    def forget(self, gone: Callable[[str], bool]) -> None:
        """Ends the streams to addresses that are gone, behind the last answer that is waited for."""
        for address in [address for address in self._streams if gone(address)]:
            self._streams.pop(address).retire()

    async def close(self) -> None:
        """Ends the streams; lookups under way fail."""
        self._closed = True
        self._streams.clear()
        tasks = tuple(self._running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _stream(self, address: str) -> _Stream:
        stream = self._streams.get(address)
        if stream is not None and stream.usable and not stream.given_up():
            return stream
        if self._closed:
            raise Unavailable(f"{address}: the client was closed")

        def refused() -> None:
            self._unary_until_s[address] = time.monotonic() + UNARY_S

        patience_s = SILENT_S if stream is None else stream.patience_s
        stream = _Stream(
            address, self._options, self._connect_timeout_s, dialer=self._dialer, patience_s=patience_s, on_refused=refused
        )
        self._streams[address] = stream
        task = asyncio.create_task(stream.run(), name=f"lookups {address}", context=trace.detached())
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return stream


class _Stream:
    """`usable`: takes new lookups. patience_s: how long it may be silent; afterwards, its successor."""

    def __init__(
        self,
        address: str,
        options: Options,
        connect_timeout_s: float,
        *,
        patience_s: float,
        on_refused: Callable[[], None],
        dialer: Dialer = PLAINTEXT,
    ) -> None:
        self.usable = True
        self.patience_s = patience_s
        self._on_refused = on_refused
        self._address = address
        self._options = options
        self._dialer = dialer
        self._connect_timeout_s = connect_timeout_s
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[directory_pb2.LookupResponse]] = {}
        self._out: OrderedDict[int, directory_pb2.StreamedLookup] = OrderedDict()  # only what somebody waits for
        self._wake: asyncio.Future[None] | None = None
        self._impatient: set[int] = set()
        self._watch: asyncio.TimerHandle | None = None
        self._asked = False  # and owes an answer
        self._quiet_since_s = 0.0
        self._call: Any = None

    async def lookup(
        self, request: directory_pb2.LookupRequest, *, end_s: float, patient: bool
    ) -> directory_pb2.LookupResponse:
        """patient: the stream is not given up for its sake before its deadline."""
        loop = asyncio.get_running_loop()
        remaining_s = end_s - time.monotonic()
        if remaining_s <= 0:
            raise DeadlineExceeded(f"{self._address}: the deadline passed before the call")
        id = next(self._ids)
        answer: asyncio.Future[directory_pb2.LookupResponse] = loop.create_future()
        self._waiting[id] = answer
        if not patient:
            self._impatient.add(id)
            if self._watch is None:
                self._watch = loop.call_later(self.patience_s, self._look)
        deadline_ms = min(int(remaining_s * 1000) + 1, MAX_DEADLINE_MS)
        self._send(streamed(id, request, deadline_ms))
        timer = loop.call_later(remaining_s, self._late, answer, remaining_s)
        try:
            return await answer
        finally:
            timer.cancel()
            self._waiting.pop(id, None)
            self._out.pop(id, None)
            self._impatient.discard(id)

    def retire(self) -> None:
        """Nothing new is sent; what is waited for still comes."""
        self.usable = False
        self._rouse()

    async def run(self) -> None:
        """The call, from connecting to its end, which ends whatever waits."""
        error: Exception = Unavailable(f"{self._address}: the client was closed")
        channel = self._dialer.aio(self._address, options=self._options)
        try:
            await self._dialer.connected(channel, target=self._address, timeout_s=self._connect_timeout_s)
            await self._exchange(channel)
            error = StreamLost(f"{self._address}: the coordinator ended the call")
        except grpc.RpcError as ended:
            error = reason(ended, self._address)
            if isinstance(error, NoStream):
                self._on_refused()
        except Unavailable as refused:
            error = refused
        except asyncio.CancelledError:
            if not call_alone_cancelled():
                raise
            error = StreamLost(f"{self._address}: connected, but no answer for too long")
        finally:
            self.usable = False
            if self._watch is not None:
                self._watch.cancel()
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(error)
            await channel.close()

    async def _exchange(self, channel: grpc.aio.Channel) -> None:
        method = channel.stream_stream(
            METHOD,
            request_serializer=directory_pb2.LookupStreamRequest.SerializeToString,
            response_deserializer=directory_pb2.LookupStreamResponse.FromString,
        )
        call = self._call = method()
        writer = asyncio.create_task(self._write(call))
        try:
            await self._read(call)
        finally:
            writer.cancel()
            (outcome,) = await asyncio.gather(writer, return_exceptions=True)
            if isinstance(outcome, Exception):
                raise outcome

    async def _read(self, call: Any) -> None:
        async for message in call:
            self.patience_s = SILENT_S
            for item in message.answers:
                answer = self._waiting.pop(item.id, None)
                if answer is not None and not answer.done():
                    answer.set_result(item.lookup)
            self._asked, self._quiet_since_s = bool(self._waiting), time.monotonic()
            if message.draining:
                self.retire()

    async def _write(self, call: Any) -> None:
        """Until cancelled, or the call has ended, which the reader learns too, with the reason."""
        try:
            while self.usable or self._out:
                if self._out:
                    await call.write(self._message())
                else:
                    self._wake = asyncio.get_running_loop().create_future()
                    await self._wake
            await call.done_writing()
        except (grpc.RpcError, asyncio.InvalidStateError):
            return
        except Exception:
            call.cancel()
            raise

    def _message(self) -> directory_pb2.LookupStreamRequest:
        message, size = directory_pb2.LookupStreamRequest(), 0
        while self._out and size < MESSAGE_BYTES:
            _, item = self._out.popitem(last=False)
            message.lookups.append(item)
            size += len(item.lookup.fingerprints.packed)
        if not self._asked:
            self._asked, self._quiet_since_s = True, time.monotonic()
        return message

    def _send(self, item: directory_pb2.StreamedLookup) -> None:
        self._out[item.id] = item
        self._rouse()

    def _rouse(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def _late(self, answer: asyncio.Future[Any], after_s: float) -> None:
        if answer.done():
            return
        answer.set_exception(DeadlineExceeded(f"{self._address}: no answer within {after_s:.3g} s"))
        self.given_up()

    def _look(self) -> None:
        """While somebody waits who would rather be asked for elsewhere."""
        self._watch = None
        if self._impatient and not self.given_up():
            quiet_s = time.monotonic() - self._quiet_since_s if self._asked else 0.0
            self._watch = asyncio.get_running_loop().call_later(max(LEAST_WAIT_S, self.patience_s - quiet_s), self._look)

    def given_up(self) -> bool:
        """Gives it up if it has been silent for too long."""
        if self._call is None or not self._asked or time.monotonic() - self._quiet_since_s < self.patience_s:
            return False
        if self.usable:
            self.patience_s = min(2 * self.patience_s, MOST_SILENT_S)
        self.usable = False
        self._call.cancel()
        return True


class Losses:
    """Of one lookup at one address: whether it is worth asking there again.

    A stream that ended is; behind one, so is a connection that fails, because the kernel may have given it to the very process
    that is ending, or that is stopped.
    """

    def __init__(self) -> None:
        self._count = 0

    def __bool__(self) -> bool:
        return self._count > 0

    def add(self, error: Unavailable) -> None:
        """Raises it again when it is not."""
        if self._count >= MOST_LOST or not (self._count or isinstance(error, StreamLost)):
            raise error
        self._count += 1 if isinstance(error, StreamLost | NotConnected) else REFUSED_LOSSES


def reason(error: grpc.RpcError, address: str) -> Exception:
    """Why the call ended, as those whose lookups were under way should see it: elsewhere, or here call by call."""
    ended: Any = error
    told = from_rpc_error(error, target=address)
    if isinstance(told, Overloaded) or ended.code() is grpc.StatusCode.UNIMPLEMENTED:
        return NoStream()
    return StreamLost(str(told))

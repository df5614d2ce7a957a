"""Directory.LookupStream, the receiving side: many lookups over one call.

    read a message ──▶ answer its lookups ──▶ write them as one message ──▶ read the next
                             └─ has to wait (a store, another process): a task, bounded; writes itself when done

Cost: gRPC costs per message (~70 us), a lookup of 1,024 blocks ~20 us; so whatever is ready goes into one message, and nothing
but a read and a write is awaited for it. Rules:
- The next message is read only when the answers to the last one were taken, so a client that does not read is not read
  from; what waits here is at most the answers to one message and MAX_WAITING more.
- A bad lookup is an answer with `error`, as is one whose deadline passed before its turn; what cannot be read ends the call.
- At drain the client is told, and everything it has sent until it ends its side is still answered.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc.aio

from kvdir.errors import DeadlineExceeded, KvdirError, Overloaded, Unavailable
from kvdir.location import PROTOCOL_VERSION
from kvdir.obs.spans import NO_TRACER, NOTHING, AnySpan, Kind, Tracer, rpc_span
from kvdir.rpc.caller import caller
from kvdir.rpc.interceptors import CallObserver, request_id_here
from kvdir.rpc.status import grpc_code, words
from kvdir.server.lookup_source import LookupSource
from kvdir.v1 import directory_pb2

MAX_WAITING = 256
"""Lookups of one call that wait for somebody else."""
TURN_LOOKUPS = 256
"""So many of one message are answered before others get a turn."""
TURN_POSITIONS = 65_536
PROCESS_KEY = "kvdir-process"
METHOD = "StreamedLookup"
"""Under this name single lookups are counted, when they are answered; the call itself is counted as LookupStream."""

LOOKUP = "kvdir.v1.Directory/Lookup"
"""What a lookup is called in a trace, whatever it travels in."""

OnBug = Callable[[str, str, Exception], None]


def describe(span: AnySpan, answer: directory_pb2.LookupResponse) -> None:
    """How much was asked, and how much of it is said to be somewhere."""
    if span:
        span.set("kvdir.blocks", answer.asked)
        span.set("kvdir.hits", answer.hits)


class LookupStreams:
    """The calls of one server: bounded in number, drained together. max_deadline_s: of a lookup that names none.

    process: who answers, told in the initial metadata: several processes may listen at one address.
    """

    def __init__(
        self,
        source: LookupSource,
        observer: CallObserver,
        *,
        max_streams: int,
        max_deadline_s: float,
        on_bug: OnBug,
        process: str = "main",
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self.source = source
        self.tracer = tracer
        self.observer = observer
        self.max_deadline_s = max_deadline_s
        self.on_bug = on_bug
        self._max_streams = max_streams
        self._greeting = ((PROCESS_KEY, process),)
        self._streams: set[_Stream] = set()
        self._draining = False

    async def serve(self, context: Any) -> None:
        """One call, to its end. Raises Overloaded or Unavailable when there is no room for it."""
        if self._draining:
            raise Unavailable("this coordinator is going down: ask another one, or come back")
        if len(self._streams) >= self._max_streams:
            raise Overloaded(f"{self._max_streams} LookupStream calls are open already (max_lookup_streams): use Lookup")
        stream = _Stream(self, context)
        self._streams.add(stream)
        try:
            await context.send_initial_metadata(self._greeting)
            await stream.run()
        finally:
            self._streams.discard(stream)

    def drain(self) -> None:
        """Tells every client to go elsewhere; their calls end when they have ended their side."""
        self._draining = True
        for stream in self._streams:
            stream.drain()


class _Stream:
    """One call. `_out` is the message to write next; whoever finds nobody writing writes it."""

    def __init__(self, streams: LookupStreams, context: Any) -> None:
        self._streams = streams
        self._context = context
        self._caller = caller()
        self._out = directory_pb2.LookupStreamResponse()
        self._written = asyncio.Event()
        self._written.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._fault: BaseException | None = None
        self._gone = False

    async def run(self) -> None:
        try:
            while not self._gone and (message := await self._context.read()) is not grpc.aio.EOF:
                await self._answer(message.lookups)
            while self._tasks:
                await asyncio.wait(tuple(self._tasks))
            await self._flush()
        finally:
            for task in tuple(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._fault is not None:
            raise self._fault

    def drain(self) -> None:
        self._out.draining = True
        self._spawn(self._flush())

    async def _answer(self, lookups: Any) -> None:
        arrived_s = time.perf_counter()
        count = positions = 0
        for item in lookups:
            if self._gone:
                return  # and nothing awaited would let anybody else have a turn
            count += 1
            positions += await self._one(item, arrived_s)
            if count >= TURN_LOOKUPS or positions >= TURN_POSITIONS:
                await self._flush()
                count = positions = 0
        await self._flush()

    async def _one(self, item: Any, arrived_s: float) -> int:
        """Returns how many positions were looked up here and now."""
        if len(self._tasks) >= MAX_WAITING:
            await asyncio.wait(tuple(self._tasks), return_when=asyncio.FIRST_COMPLETED)
        tracer = self._streams.tracer
        if not tracer.ratio and not item.HasField("context"):
            return self._look(item, arrived_s, NOTHING)
        with tracer.carried(item.context):
            span = rpc_span(LOOKUP, Kind.SERVER)
            if not span:
                return self._look(item, arrived_s, NOTHING)
            with span.begun():
                return self._look(item, arrived_s, span)

    def _look(self, item: Any, arrived_s: float, span: AnySpan) -> int:
        limit_s = item.deadline_ms / 1000 if item.deadline_ms else self._streams.max_deadline_s
        try:
            if time.perf_counter() - arrived_s >= limit_s:
                raise DeadlineExceeded(f"its turn came after its deadline of {limit_s:.3g} s")
            self._caller.request()
            answer = self._streams.source.lookup(item.lookup)
        except Exception as error:
            self._refuse(item.id, error, arrived_s, span)
            return 0
        if inspect.isawaitable(answer):
            self._spawn(self._later(item.id, answer, arrived_s, limit_s, span))
            return 0
        self._put(item.id, answer, "OK", arrived_s, span)
        return answer.asked

    async def _later(
        self, id: int, answer: Awaitable[directory_pb2.LookupResponse], arrived_s: float, limit_s: float, span: AnySpan
    ) -> None:
        try:
            async with asyncio.timeout(arrived_s + limit_s - time.perf_counter()):
                self._put(id, await answer, "OK", arrived_s, span)
        except TimeoutError:
            self._refuse(id, DeadlineExceeded(f"no answer within {limit_s:.3g} s"), arrived_s, span)
        except Exception as error:
            self._refuse(id, error, arrived_s, span)
        except asyncio.CancelledError:  # the call has ended, so nobody is told
            span.status("CANCELLED")
            span.end()
            raise
        if self._written.is_set():
            await self._flush()

    def _refuse(self, id: int, error: Exception, arrived_s: float, span: AnySpan) -> None:
        if isinstance(error, KvdirError):
            code, text = grpc_code(error).name, words(error)
        else:
            request_id = request_id_here()
            self._streams.on_bug(METHOD, request_id, error)
            code, text = "INTERNAL", f"error: internal error, logged there under request id {request_id}"
        self._put(id, directory_pb2.LookupResponse(protocol_version=PROTOCOL_VERSION, error=text), code, arrived_s, span)

    def _put(self, id: int, answer: directory_pb2.LookupResponse, code: str, arrived_s: float, span: AnySpan) -> None:
        self._out.answers.append(directory_pb2.StreamedAnswer(id=id, lookup=answer))
        self._streams.observer.began(METHOD)
        self._streams.observer.ended(METHOD, code, time.perf_counter() - arrived_s)
        if span:
            describe(span, answer)
            span.status(code)
            span.end()

    async def _flush(self) -> None:
        """Until everything put so far was taken by gRPC. One writes at a time; the others wait for it."""
        while not self._written.is_set():
            await self._written.wait()
        if self._gone or not (self._out.answers or self._out.draining):
            return
        self._written.clear()
        try:
            while self._out.answers or self._out.draining:
                out, self._out = self._out, directory_pb2.LookupStreamResponse()
                await self._context.write(out)
        except grpc.aio.InternalError:  # gRPC's word for a client that is gone
            self._gone = True
        finally:
            self._written.set()

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """What failed was a write, so the call is over; the reader notices by itself."""
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._fault = task.exception()

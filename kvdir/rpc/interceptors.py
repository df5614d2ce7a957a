"""What happens around every call on a server: deadline, errors as statuses, counting. The handlers know none of it.

Rules: a unary call never runs longer than its client's deadline or ours, whichever is earlier; streams end by their own rules.
KvdirError becomes a status (status.py); anything else is a bug: logged with the request id, told as INTERNAL without details.
What names the request (kvdir/obs/trace.py) is current until the handler has ended; a unary call that is sampled is a span.
The wrapped handler of a method is made once and kept, because an interceptor that builds one per call costs 20 us.
Who calls, and whether they may, is the gate's to say (gate.py), before the handler runs; a stream that loses its right ends.
"""

from __future__ import annotations

import asyncio
import inspect
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, Protocol

import grpc
import grpc.aio

from kvdir.errors import DeadlineExceeded, Forbidden, InvalidInput, KvdirError
from kvdir.obs import trace
from kvdir.obs.spans import NO_TRACER, Kind, Tracer, rpc_span
from kvdir.rpc.caller import UNCHECKED, Caller, set_caller
from kvdir.rpc.gate import Gate
from kvdir.rpc.status import grpc_code, trailing

Handler = Any  # grpc.RpcMethodHandler is generic for type checkers only
Context = Any  # grpc.aio.ServicerContext is generic over types that nobody here needs


class CallObserver(Protocol):
    """Counts calls. `code` is a gRPC code name such as "OK"."""

    def began(self, method: str) -> None: ...
    def ended(self, method: str, code: str, seconds: float) -> None: ...


class EdgeInterceptor(grpc.aio.ServerInterceptor):
    """See the module docstring. on_bug: told of exceptions that are not ours. gate: none lets everybody in."""

    def __init__(
        self,
        observer: CallObserver,
        *,
        max_deadline_s: float,
        on_bug: Callable[[str, str, Exception], None],
        gate: Gate | None = None,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self._observer = observer
        self._max_deadline_s = max_deadline_s
        self._on_bug = on_bug
        self._gate = gate or Gate()
        self._tracer = tracer
        self._wrapped: dict[str, Handler | None] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        method = handler_call_details.method
        self._tracer.enter(handler_call_details.invocation_metadata or ())  # gRPC handles each call in a task of its own
        if method not in self._wrapped:
            handler = await continuation(handler_call_details)
            if handler is None:
                return None  # unknown method: not kept, the name is the caller's choice
            self._wrapped[method] = self._wrap(handler, method)
        return self._wrapped[method]

    def _wrap(self, handler: Any, method: str) -> Handler:
        read = _reader(handler.request_deserializer, method)
        serializers = {"request_deserializer": read, "response_serializer": handler.response_serializer}
        once = serializers | {"request_deserializer": _Late(read)}
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(self._unary(handler.unary_unary, method), **once)
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(self._stream(handler.unary_stream, method), **once)
        if handler.stream_stream:
            # Handlers of streams come in two kinds: generators of responses, and coroutines that write them themselves.
            wrap = self._stream if inspect.isasyncgenfunction(handler.stream_stream) else self._coroutine
            return grpc.stream_stream_rpc_method_handler(wrap(handler.stream_stream, method), **serializers)
        return grpc.stream_unary_rpc_method_handler(self._unary(handler.stream_unary, method), **serializers)

    def _unary(self, behaviour: Any, path: str) -> Any:
        name, method, gate = path.removeprefix("/"), path.rpartition("/")[2], self._gate

        async def call(request: Any, context: Context) -> Any:
            watch = _Watch(self._observer, method)
            who = UNCHECKED
            remaining = context.time_remaining()
            limit_s = self._max_deadline_s if remaining is None else min(remaining, self._max_deadline_s)
            self._tracer.begin()
            with rpc_span(name, Kind.SERVER) as span:
                try:
                    who = gate.admit(path, context)
                    set_caller(who)
                    if type(request) is InvalidInput:
                        raise request
                    async with asyncio.timeout(limit_s):
                        return await behaviour(request, context)
                except TimeoutError as error:
                    await self._fail(watch, context, DeadlineExceeded(f"{method}: no answer within {limit_s:.3g} s"), error)
                except Exception as error:
                    await self._fail(watch, context, error, error)
                except asyncio.CancelledError:
                    watch.code = "CANCELLED"
                    raise
                finally:
                    span.status(watch.code)
                    watch.end()
                    gate.audit(path, request, who, watch.code)

        return call

    def _stream(self, behaviour: Any, path: str) -> Any:
        method, gate = path.rpartition("/")[2], self._gate

        async def call(request: Any, context: Context) -> AsyncIterator[Any]:
            watch = _Watch(self._observer, method)
            who, turn = UNCHECKED, _Turn()
            try:
                who = self._admit_stream(path, context, turn)
                if type(request) is InvalidInput:
                    raise request
                async for response in behaviour(request, context):
                    turn.works = False
                    if not who.ended:
                        yield response
                    if who.ended:
                        raise Forbidden(who.ended)
                    turn.works = True
            except Exception as error:
                await self._fail(watch, context, error, error)
            except asyncio.CancelledError:
                await self._cancelled(watch, context, who)
            except GeneratorExit:
                watch.code = "CANCELLED"
                raise
            finally:
                watch.end()
                gate.leave(who)
                gate.audit(path, request, who, watch.code)

        return call

    def _coroutine(self, behaviour: Any, path: str) -> Any:
        method, gate = path.rpartition("/")[2], self._gate

        async def call(request: Any, context: Context) -> None:
            watch = _Watch(self._observer, method)
            who = UNCHECKED
            try:
                who = self._admit_stream(path, context, _Turn())
                await behaviour(request, context)
                if who.ended:
                    raise Forbidden(who.ended)
            except Exception as error:
                await self._fail(watch, context, error, error)
            except asyncio.CancelledError:
                await self._cancelled(watch, context, who)
            finally:
                watch.end()
                gate.leave(who)

        return call

    def _admit_stream(self, path: str, context: Context, turn: _Turn) -> Caller:
        trace.leave()
        who = self._gate.admit(path, context, stream=True)
        if who is not UNCHECKED:
            who.break_off = turn.end
        set_caller(who)
        return who

    async def _cancelled(self, watch: _Watch, context: Context, who: Caller) -> None:
        """By the client, or because its right is gone: then that is what it hears."""
        if not who.ended:
            watch.code = "CANCELLED"
            raise asyncio.CancelledError
        task = asyncio.current_task()
        if task is not None:
            task.uncancel()
        error = Forbidden(who.ended)
        await self._fail(watch, context, error, error)

    async def _fail(self, watch: _Watch, context: Context, error: Exception, cause: Exception) -> NoReturn:
        if isinstance(error, grpc.aio.AbortError):
            watch.code = getattr(context.code(), "name", "UNKNOWN")
            raise error
        if isinstance(error, KvdirError):
            code = grpc_code(error)
            watch.code = code.name
            await context.abort(code, str(error), trailing(error))
        watch.code = "INTERNAL"
        request_id = request_id_here()
        self._on_bug(watch.method, request_id, error)
        await context.abort(grpc.StatusCode.INTERNAL, f"internal error, logged there under request id {request_id}")
        raise cause  # abort() always raises; this line is for readers and type checkers


def _reader(read: Callable[[bytes], Any] | None, path: str) -> Callable[[bytes], Any] | None:
    """As `read`, for a stream: bytes that are no such message are the caller's fault, which gRPC would call UNKNOWN and log."""
    if read is None:
        return None

    def reads(data: bytes) -> Any:
        try:
            return read(data)
        except Exception as error:  # protobuf's DecodeError differs between its implementations
            method = path.rpartition("/")[2]
            raise InvalidInput(
                f"{method}: {len(data)} bytes that are no such request: damaged, or of another protocol"
            ) from error

    return reads


class _Late:
    """Of a single request gRPC reads before any handler of ours runs; so the fault is handed on as the request."""

    def __init__(self, read: Callable[[bytes], Any] | None) -> None:
        self._read = read

    def __call__(self, data: bytes) -> Any:
        try:
            return data if self._read is None else self._read(data)
        except InvalidInput as error:
            return error


class _Turn:
    """Whose turn it is in a stream: its handler's (works), or gRPC's, which writes what a generator has yielded. A task that is
    cancelled in gRPC's own turn ends without a status, and its client waits for ever; so then the handler's next turn ends it.
    """

    __slots__ = ("_task", "works")

    def __init__(self) -> None:
        self._task = asyncio.current_task()
        self.works = True

    def end(self) -> None:
        if self._task is not None and self.works and self._task is not asyncio.current_task():
            self._task.cancel()


class _Watch:
    """Times one call and reports its end exactly once."""

    __slots__ = ("_observer", "_started_s", "code", "method")

    def __init__(self, observer: CallObserver, method: str) -> None:
        self._observer = observer
        self._started_s = time.perf_counter()
        self.method = method
        self.code = "OK"
        observer.began(method)

    def end(self) -> None:
        self._observer.ended(self.method, self.code, time.perf_counter() - self._started_s)


def request_id_here() -> str:
    """What the caller named its request, or a new name for something that is to be logged and told to the caller."""
    return trace.request_id() or secrets.token_hex(8)

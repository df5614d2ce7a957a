"""Spans: what one process did for a sampled request, and for how long.

    with span("peer_agent.v1.Peer/Lock", Kind.CLIENT) as mine:
        if mine:
            mine.set("kvdir.peer", node)

Rules: nothing is made unless the current trace is sampled and this process exports (then `span` gives NOTHING, which is false);
a span inside is its child, and calls from inside carry it. Names and attributes by OpenTelemetry's conventions for RPC (release
candidate: rpc.system.name, rpc.method, rpc.response.status_code, error.type); ours begin with kvdir. Values are names, counts
and times: never a fingerprint, a token, a salt, or the text of an error. See docs/adr/0026.

Does not: choose where spans go (otlp.py).
"""

from __future__ import annotations

import contextlib
import contextvars
import enum
import random
import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from kvdir.obs import trace
from kvdir.obs.trace import Recorder, TraceContext

Value = str | int | float | bool


class Kind(enum.IntEnum):
    """As in opentelemetry.proto.trace.v1.Span."""

    INTERNAL = 1
    SERVER = 2
    CLIENT = 3


_SERVER_ERRORS = frozenset(("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"))
"""Codes that are a server's own fault, by the same conventions."""


class Span:
    """One that runs, or has ended; also the context manager around it. Times in ns since 1970, by one reading of that clock."""

    __slots__ = ("_began_ns", "_token", "attributes", "context", "end_ns", "error", "kind", "name", "parent_id", "start_ns")

    def __init__(self, name: str, kind: Kind, parent: TraceContext) -> None:
        self.name = name
        self.kind = kind
        self.parent_id = parent.span_id
        self.context = TraceContext(parent.trace_id, secrets.token_hex(8), True, parent.state, parent.recorder, self)
        self.attributes: dict[str, Value] = {}
        self.error = False
        self.end_ns = 0
        self.start_ns = time.time_ns()
        self._began_ns = time.perf_counter_ns()
        self._token: contextvars.Token[TraceContext | None] | None = None

    def __bool__(self) -> bool:
        return True

    def set(self, name: str, value: Value) -> None:
        self.attributes[name] = value

    def server(self, address: str) -> None:
        """Who is called: "host:port", or something else that gRPC dials."""
        host, _, port = address.rpartition(":")
        if port.isdigit():
            self.attributes["server.address"], self.attributes["server.port"] = host.strip("[]"), int(port)
        else:
            self.attributes["server.address"] = address

    def status(self, code: str) -> None:
        """Of an RPC: a gRPC code's name."""
        self.attributes["rpc.response.status_code"] = code
        if code != "OK" and (self.kind is not Kind.SERVER or code in _SERVER_ERRORS):
            self.fail(code)

    def fail(self, kind: str) -> None:
        """kind: what went wrong, of few values."""
        self.error = True
        self.attributes["error.type"] = kind

    def end(self) -> None:
        """Once; later calls change nothing."""
        if not self.end_ns:
            self.end_ns = self.start_ns + time.perf_counter_ns() - self._began_ns
            if self.context.recorder is not None:
                self.context.recorder.ended(self)

    @contextlib.contextmanager
    def begun(self) -> Iterator[Self]:
        """Current inside the block, which it may outlive: whoever has it calls `end`."""
        with trace.within(self.context):
            yield self

    def __enter__(self) -> Self:
        self._token = trace._trace.set(self.context)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._token is not None:
            trace._trace.reset(self._token)
        if kind is not None and "rpc.response.status_code" not in self.attributes:
            self.fail(getattr(kind, "code", None) or kind.__name__)
        self.end()


class _Nothing:
    """Instead of a span where none is wanted."""

    __slots__ = ()

    def __bool__(self) -> bool:
        return False

    def set(self, name: str, value: Value) -> None:
        pass

    def server(self, address: str) -> None:
        pass

    def status(self, code: str) -> None:
        pass

    def fail(self, kind: str) -> None:
        pass

    def end(self) -> None:
        pass

    def begun(self) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        pass


NOTHING = _Nothing()

AnySpan = Span | _Nothing


def span(name: str, kind: Kind = Kind.INTERNAL) -> AnySpan:
    """A child of what is current, begun now, current inside `with`; NOTHING unless the trace is sampled and exported."""
    parent = trace._trace.get()
    if parent is None or not parent.sampled or parent.recorder is None:
        return NOTHING
    return Span(name, kind, parent)


def active() -> AnySpan:
    """The span that runs here, for whoever knows more about it than who began it."""
    context = trace._trace.get()
    return NOTHING if context is None or context.span is None else context.span


def rpc_span(method: str, kind: Kind) -> AnySpan:
    """Of one call. method: "package.Service/Method"."""
    made = span(method, kind)
    if made:
        made.set("rpc.system.name", "grpc")
        made.set("rpc.method", method)
    return made


@dataclass(frozen=True, slots=True)
class Tracer:
    """How one daemon traces. ratio: of requests that come without a context, the share that begins a trace here."""

    recorder: Recorder | None = None
    ratio: float = 0.0

    def enter(self, metadata: Iterable[Any]) -> None:
        """At the beginning of a call, in its own task: its caller's trace, if it has one, is current from now on."""
        parent, state, name = trace.arrived(metadata)
        if parent or name:
            trace.enter(trace.parse(parent, state, recorder=self.recorder), request_id=name)

    def begin(self) -> None:
        """In the task of a call that is one request: where its caller has no trace, a new one may begin."""
        if self.ratio and trace.current() is None:
            trace.enter(self._root())

    def carried(self, carrier: Any) -> AbstractContextManager[None]:
        """As both, for one message of a stream. carrier: kvdir.v1.RequestContext."""
        found = trace.parse(carrier.traceparent, carrier.tracestate, recorder=self.recorder)
        if found is None and self.ratio:
            found = self._root()
        return trace.within(found, request_id=carrier.request_id)

    def _root(self) -> TraceContext | None:
        if random.random() >= self.ratio:
            return None
        return TraceContext(secrets.token_hex(16), "", True, recorder=self.recorder)


NO_TRACER = Tracer()

"""Which request this is: its W3C trace context and its request id, carried from the engine to every process that serves it.

    engine ──metadata──▶ agent ──metadata, or a field of the stream's message──▶ coordinator
                           └────metadata────▶ owner

Rules: what came in goes out, also when it is not sampled; what cannot be read counts as absent; a call without either sets
nothing and allocates nothing. Context variables follow tasks: a task that outlives the request is started `detached`. In an
engine's process the current context of OpenTelemetry is taken where there is none of ours, if the engine has loaded its
API; it is never imported here. Format: https://www.w3.org/TR/trace-context/ (level 2).

Does not: record anything (spans.py) or send it anywhere (otlp.py).
"""

from __future__ import annotations

import contextvars
import re
import sys
from collections.abc import Iterable
from types import TracebackType
from typing import Any, NamedTuple, Protocol

TRACEPARENT_KEY = "traceparent"
TRACESTATE_KEY = "tracestate"
REQUEST_ID_KEY = "kvdir-request-id"
"""Metadata keys."""

MAX_STATE = 512
MAX_REQUEST_ID = 64
"""Characters; longer ones are dropped, or cut."""

Metadata = tuple[tuple[str, str], ...]

_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_NO_TRACE, _NO_SPAN = "0" * 32, "0" * 16
_SAMPLED = "13579bdf"
"""Last digits of flags whose lowest bit is set."""


class Recorder(Protocol):
    """Takes spans that have ended. Called from any thread; never waits."""

    def ended(self, span: Any) -> None: ...


class TraceContext(NamedTuple):  # a frozen dataclass takes four times as long; one is made for every message that names a trace
    """Where in which trace we are. trace_id: 32 hex digits; span_id: 16, or "" before the first span of a trace.

    state: other vendors' tracestate, passed on as it came. recorder: of this process, None when it exports nothing. span: of
    spans.py, while this names one of this process.
    """

    trace_id: str
    span_id: str
    sampled: bool
    state: str = ""
    recorder: Recorder | None = None
    span: Any = None

    @property
    def traceparent(self) -> str:
        """As it goes out."""
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.sampled else '00'}"


_trace: contextvars.ContextVar[TraceContext | None] = contextvars.ContextVar("kvdir_trace", default=None)
_request_id: contextvars.ContextVar[str] = contextvars.ContextVar("kvdir_request_id", default="")


def current() -> TraceContext | None:
    """The trace that this task or thread works for."""
    return _trace.get()


def request_id() -> str:
    """What the caller named its request; "" where it gave no name."""
    return _request_id.get()


def trace_id() -> str:
    """Of the current trace; "" when there is none."""
    context = _trace.get()
    return context.trace_id if context is not None else ""


def current_exemplar() -> dict[str, str] | None:
    """Labels of an exemplar for what is observed now; None outside of sampled traces, which costs one look."""
    context = _trace.get()
    if context is None or not context.sampled:
        return None
    return {"trace_id": context.trace_id, "span_id": context.span_id} if context.span_id else {"trace_id": context.trace_id}


def parse(traceparent: str, state: str = "", *, recorder: Recorder | None = None) -> TraceContext | None:
    """The context that a traceparent header names; None when it is not one."""
    match = _PARENT.fullmatch(traceparent)
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if version == "ff" or (version == "00" and more) or trace_id == _NO_TRACE or span_id == _NO_SPAN:
        return None
    return TraceContext(trace_id, span_id, flags[1] in _SAMPLED, _state(state) if state else "", recorder)


def clean_request_id(text: str) -> str:
    """At most MAX_REQUEST_ID characters that metadata and one line of a log can hold."""
    cut = text[:MAX_REQUEST_ID]
    return cut if cut.isascii() and cut.isprintable() else "".join(c if " " < c < "\x7f" else "?" for c in cut)


def outgoing() -> TraceContext | None:
    """The context that a call from here carries."""
    context = _trace.get()
    if context is not None:
        return context if context.span_id else None
    return _of_opentelemetry() if "opentelemetry.trace" in sys.modules else None


def metadata() -> Metadata | None:
    """Of a call from here; None when there is nothing to carry."""
    context, name = outgoing(), _request_id.get()
    if context is None and not name:
        return None
    out = []
    if context is not None:
        out.append((TRACEPARENT_KEY, context.traceparent))
        if context.state:
            out.append((TRACESTATE_KEY, context.state))
    if name:
        out.append((REQUEST_ID_KEY, name))
    return tuple(out)


def arrived(metadata: Iterable[Any]) -> tuple[str, str, str]:
    """(traceparent, tracestate, request id) of a call's metadata; "" for what is not there."""
    parent = state = name = ""
    for key, value in metadata:
        if key == TRACEPARENT_KEY:
            parent = value
        elif key == TRACESTATE_KEY:
            state = f"{state},{value}" if state else value
        elif key == REQUEST_ID_KEY:
            name = value
    return parent, state, name


class within:  # a `with` statement reads so; a generator would take twice the time, once per lookup
    """Calls and log lines inside belong to this trace and request; None, "": to those that are current already."""

    __slots__ = ("_context", "_name", "_named", "_request_id")

    def __init__(self, context: TraceContext | None, *, request_id: str = "") -> None:
        self._context = context
        self._name = request_id
        self._named: contextvars.Token[TraceContext | None] | None = None
        self._request_id: contextvars.Token[str] | None = None

    def __enter__(self) -> None:
        if self._context is not None:
            self._named = _trace.set(self._context)
        if self._name:
            self._request_id = _request_id.set(clean_request_id(self._name))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._request_id is not None:
            _request_id.reset(self._request_id)
        if self._named is not None:
            _trace.reset(self._named)


def enter(context: TraceContext | None, *, request_id: str = "") -> None:
    """As `within`, to the end of this task: for a server's call, which has a task of its own."""
    if context is not None:
        _trace.set(context)
    if request_id:
        _request_id.set(clean_request_id(request_id))


def leave() -> None:
    """The trace, not the request id: for a call that serves many requests, which name theirs in its messages."""
    if _trace.get() is not None:
        _trace.set(None)


def detached() -> contextvars.Context:
    """The context for a task that serves many requests: without any."""
    context = contextvars.copy_context()
    context.run(_trace.set, None)
    context.run(_request_id.set, "")
    return context


def _state(text: str) -> str:
    return text if len(text) <= MAX_STATE and text.isascii() and text.isprintable() else ""


def _of_opentelemetry() -> TraceContext | None:
    """The current span of the engine's own OpenTelemetry."""
    found = sys.modules["opentelemetry.trace"].get_current_span().get_span_context()
    if not found.is_valid:
        return None
    state = found.trace_state.to_header() if found.trace_state else ""
    return TraceContext(f"{found.trace_id:032x}", f"{found.span_id:016x}", bool(found.trace_flags.sampled), _state(state))

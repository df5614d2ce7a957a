"""Loads as part of the engine's traces: what the caller passes, or the span that is current in its own OpenTelemetry.

    engine.load(fingerprints, into=tensors, trace="00-4bf9...-01", request_id="cmpl-7")

Rules: a trace that is given is passed on as it is; else, where the engine records a span with OpenTelemetry, the load is a
child of it, made by the engine's own tracer, so that the copy into its memory is in the trace too. OpenTelemetry is never
imported here. Neither given nor recording: nothing is made. What cannot be read is no trace, never an error.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar, cast

from kvdir.fingerprint import Fingerprints
from kvdir.obs import trace
from peer_agent.client.results import LoadResult

_API = "opentelemetry.trace"

LoadT = TypeVar("LoadT", bound=Callable[..., LoadResult])
AsyncLoadT = TypeVar("AsyncLoadT", bound=Callable[..., Awaitable[LoadResult]])


def traced(load: LoadT) -> LoadT:
    """For a `load(self, fingerprints)` with the keywords `trace` (a traceparent) and `request_id`, which are for this only."""

    @functools.wraps(load)
    def call(engine: Any, fingerprints: Fingerprints, **kwargs: Any) -> LoadResult:
        if not _wanted(kwargs):
            return load(engine, fingerprints, **kwargs)
        with _request(kwargs, len(fingerprints)) as tell:
            return tell(load(engine, fingerprints, **kwargs))

    return cast(LoadT, call)


def traced_aio(load: AsyncLoadT) -> AsyncLoadT:
    """As `traced`, for asyncio."""

    @functools.wraps(load)
    async def call(engine: Any, fingerprints: Fingerprints, **kwargs: Any) -> LoadResult:
        if not _wanted(kwargs):
            return await load(engine, fingerprints, **kwargs)
        with _request(kwargs, len(fingerprints)) as tell:
            return tell(await load(engine, fingerprints, **kwargs))

    return cast(AsyncLoadT, call)


def named(traceparent: str, request_id: str) -> contextlib.AbstractContextManager[None]:
    """Calls of engine and directory inside belong to this trace and request."""
    return trace.within(trace.parse(traceparent) if traceparent else None, request_id=request_id)


def _wanted(kwargs: dict[str, Any]) -> bool:
    return bool(kwargs.get("trace") or kwargs.get("request_id")) or _API in sys.modules


@contextlib.contextmanager
def _request(kwargs: dict[str, Any], blocks: int) -> Iterator[Callable[[LoadResult], LoadResult]]:
    """What the load's result is shown to."""
    with named(kwargs.get("trace", ""), kwargs.get("request_id", "")):
        api = sys.modules.get(_API)
        if api is None or trace.current() is not None or not api.get_current_span().is_recording():
            yield lambda result: result
            return
        with api.get_tracer("kvdir").start_as_current_span("kvdir load", kind=api.SpanKind.CLIENT) as span:

            def tell(result: LoadResult) -> LoadResult:
                span.set_attributes(
                    {
                        "kvdir.blocks": blocks,
                        "kvdir.hits": result.hits,
                        "kvdir.bytes": result.peer_bytes,
                        "kvdir.copy_us": result.timings.copy_us,
                    }
                )
                return result

            yield tell

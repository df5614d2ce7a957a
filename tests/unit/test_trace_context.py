"""The W3C trace context as values, on its way through metadata, tasks and threads; and spans that are made or not."""

from __future__ import annotations

import asyncio
import contextvars
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdir.obs import trace
from kvdir.obs.spans import NO_TRACER, NOTHING, Kind, Span, Tracer, active, rpc_span, span
from kvdir.obs.trace import TraceContext, parse

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = f"00-{TRACE}-{CALLER}-01"


class Kept:
    """A recorder that keeps."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def ended(self, span: Span) -> None:
        self.spans.append(span)


def test_context_is_read_when_the_header_is_right() -> None:
    assert parse(SAMPLED, "vendor=1") == TraceContext(TRACE, CALLER, True, "vendor=1")
    assert parse(f"00-{TRACE}-{CALLER}-02") == TraceContext(TRACE, CALLER, False)
    assert parse(f"cc-{TRACE}-{CALLER}-01-what-comes-later") == TraceContext(TRACE, CALLER, True)  # of a newer version


@pytest.mark.parametrize(
    "header",
    [
        "", "00", SAMPLED + "-more", SAMPLED.upper(), SAMPLED[:-1], f"ff-{TRACE}-{CALLER}-01", f"00-{'0' * 32}-{CALLER}-01",
        f"00-{TRACE}-{'0' * 16}-01", f" {SAMPLED}", f"{SAMPLED}\n", f"00-{TRACE[:-1]}\u0664-{CALLER}-01",
    ],
)  # fmt: skip
def test_context_is_absent_when_the_header_is_wrong(header: str) -> None:
    assert parse(header) is None


@given(st.text(max_size=80))
def test_nothing_is_raised_when_the_header_is_anything(header: str) -> None:
    found = parse(header, header)
    assert found is None or found.traceparent[3:-2] == header[3:53]


@given(st.text(max_size=200))
def test_request_id_fits_into_metadata_and_a_log_line_whatever_it_was(text: str) -> None:
    clean = trace.clean_request_id(text)
    assert len(clean) <= trace.MAX_REQUEST_ID
    assert not clean or (clean.isascii() and clean.isprintable())


def test_call_carries_what_came_in_when_nothing_is_recorded() -> None:
    with trace.within(parse(SAMPLED, "vendor=1"), request_id="cmpl-7"):
        carried = trace.metadata()
    assert carried == (("traceparent", SAMPLED), ("tracestate", "vendor=1"), ("kvdir-request-id", "cmpl-7"))
    assert trace.arrived(carried) == (SAMPLED, "vendor=1", "cmpl-7")
    assert trace.metadata() is None


def test_state_is_dropped_when_metadata_cannot_hold_it() -> None:
    for state in ("x" * 513, "a=\u00e9", "a=b\n"):
        found = parse(SAMPLED, state)
        assert found is not None
        assert found.state == ""


def test_exemplar_is_the_trace_when_it_is_sampled() -> None:
    assert trace.current_exemplar() is None
    with trace.within(parse(f"00-{TRACE}-{CALLER}-00")):
        assert trace.current_exemplar() is None
    with trace.within(parse(SAMPLED)):
        assert trace.current_exemplar() == {"trace_id": TRACE, "span_id": CALLER}


async def test_tasks_know_the_request_when_they_are_started_for_it_and_not_when_they_outlive_it() -> None:
    async def who() -> tuple[str, str]:
        return trace.trace_id(), trace.request_id()

    with trace.within(parse(SAMPLED), request_id="r"):
        mine = asyncio.create_task(who())
        everybodys = asyncio.create_task(who(), context=trace.detached())
    assert await mine == (TRACE, "r")
    assert await everybodys == ("", "")


def test_no_span_is_made_when_it_is_not_sampled_or_goes_nowhere() -> None:
    kept = Kept()
    for context in (None, parse(SAMPLED), parse(f"00-{TRACE}-{CALLER}-00", recorder=kept)):
        with trace.within(context), span("work") as mine:
            assert mine is NOTHING
            assert active() is NOTHING
            mine.set("a", 1)
            mine.status("OK")
    assert kept.spans == []


def test_spans_nest_when_they_are_sampled() -> None:
    kept = Kept()
    with trace.within(parse(SAMPLED, "v=1", recorder=kept)):
        with rpc_span("a.B/C", Kind.SERVER) as outer:
            assert active() is outer
            with span("inner") as inner:
                carried = dict(trace.metadata() or ())
                assert inner
            assert carried == {"traceparent": f"00-{TRACE}-{inner.context.span_id}-01", "tracestate": "v=1"}
        assert trace.current() == parse(SAMPLED, "v=1", recorder=kept)
    first, second = kept.spans
    assert (first.name, first.parent_id, second.parent_id) == ("inner", second.context.span_id, CALLER)
    assert second.start_ns <= first.start_ns <= first.end_ns


@pytest.mark.parametrize(
    ("kind", "code", "error"),
    [
        (Kind.SERVER, "NOT_FOUND", False),
        (Kind.SERVER, "INTERNAL", True),
        (Kind.CLIENT, "NOT_FOUND", True),
        (Kind.CLIENT, "OK", False),
    ],
)
def test_span_says_error_when_the_conventions_do(kind: Kind, code: str, error: bool) -> None:
    with trace.within(parse(SAMPLED, recorder=Kept())), rpc_span("a.B/C", kind) as mine:
        mine.status(code)
    assert isinstance(mine, Span)
    assert (mine.error, mine.attributes.get("error.type")) == (error, code if error else None)


def test_span_says_only_the_kind_of_error_when_something_is_raised() -> None:
    kept = Kept()
    with pytest.raises(ValueError, match="secret"), trace.within(parse(SAMPLED, recorder=kept)), span("work"):
        raise ValueError("secret")
    (mine,) = kept.spans
    assert mine.error
    assert mine.attributes == {"error.type": "ValueError"}


def test_trace_begins_here_when_the_ratio_says_so_and_the_caller_has_none() -> None:
    tracer = Tracer(Kept(), ratio=1.0)

    def call(*metadata: tuple[str, str]) -> TraceContext | None:
        tracer.enter(metadata)
        before = trace.current()
        tracer.begin()
        assert before is None or trace.current() is before, "the caller's word stands"
        return trace.current()

    new = contextvars.copy_context().run(call)
    assert new is not None
    assert (new.sampled, new.span_id, len(new.trace_id)) == (True, "", 32)
    given = contextvars.copy_context().run(call, ("traceparent", f"00-{TRACE}-{CALLER}-00"))
    assert given is not None
    assert not given.sampled


def test_nothing_is_set_when_a_call_names_nothing() -> None:
    def call() -> list[Any]:
        before = len(contextvars.copy_context())
        NO_TRACER.enter((("user-agent", "grpc"), ("te", "trailers")))
        NO_TRACER.begin()
        return [len(contextvars.copy_context()) - before, trace.current(), trace.request_id()]

    assert contextvars.copy_context().run(call) == [0, None, ""]

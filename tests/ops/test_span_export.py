"""Spans on their way to a collector that is well, away, overloaded, unwilling or silent."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import pytest

from kvdir.obs import otlp, trace
from kvdir.obs.otlp import Collector, Exporter, collector
from kvdir.obs.spans import NO_TRACER, span
from kvdir.obs.trace import TraceContext
from kvdir.obs.tracing import open_tracing
from kvdir.testing.span_collector import SpanCollector, decode
from kvdir.testing.wait import wait_until
from kvdir.v1 import otlp_pb2 as pb

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@contextlib.contextmanager
def exporting(url: str, **headers: str) -> Iterator[Exporter]:
    exporter = Exporter(Collector(f"{url}/v1/traces", headers), {"service.name": "test", "service.instance.id": "one"})
    yield exporter
    exporter.close(grace_s=5.0)


def make(exporter: Exporter, count: int = 1) -> None:
    with trace.within(TraceContext(TRACE, "", True, recorder=exporter)):
        for number in range(count):
            with span("work") as mine:
                mine.set("kvdir.blocks", number)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "GATHER_S", 0.05)
    monkeypatch.setattr(otlp, "PAUSE_S", 0.05)


def test_spans_arrive_in_batches_when_there_are_many() -> None:
    with SpanCollector() as received, exporting(received.url, Authorization="Bearer t0ken") as exporter:
        make(exporter, 2 * otlp.BATCH + 1)
        wait_until(lambda: exporter.figures.exported == 2 * otlp.BATCH + 1, "all are there")
        assert [item.attributes["kvdir.blocks"] for item in received.spans] == list(range(2 * otlp.BATCH + 1))
        assert set(received.paths) == {"/v1/traces"}
        assert received.headers[0]["Authorization"] == "Bearer t0ken"
        assert max(len(decode(body)) for body in received.bodies) <= otlp.BATCH


def test_nothing_is_lost_when_the_collector_is_overloaded_for_a_while() -> None:
    with SpanCollector() as received, exporting(received.url) as exporter:
        received.status = 503
        make(exporter, 3)
        wait_until(lambda: len(received.paths) >= 2, "it was tried again")
        received.status = 200
        wait_until(lambda: len(received.spans) == 3, "all three arrive")
        wait_until(lambda: exporter.figures.exported == 3, "and are counted")
        assert exporter.figures.dropped == exporter.figures.refused == 0


def test_batch_is_given_up_and_counted_when_the_collector_refuses_it() -> None:
    with SpanCollector() as received, exporting(received.url) as exporter:
        received.status = 401
        make(exporter, 2)
        wait_until(lambda: exporter.figures.refused == 2, "they are counted")
        received.status = 200
        make(exporter)
        wait_until(lambda: exporter.figures.exported == 1, "the next one arrives")


def test_rejected_spans_are_counted_when_a_batch_is_taken_in_part() -> None:
    with SpanCollector() as received, exporting(received.url) as exporter:
        received.answer = pb.OtlpExportResponse(partial_success=pb.OtlpPartialSuccess(rejected_spans=2)).SerializeToString()
        make(exporter, 5)
        wait_until(lambda: exporter.figures.exported + exporter.figures.refused == 5, "all are accounted for")
        assert exporter.figures.refused in (2, 4)  # of each batch two


def test_nothing_is_said_when_the_collector_closes_what_is_idle(caplog: pytest.LogCaptureFixture) -> None:
    with SpanCollector() as received, exporting(received.url) as exporter:
        for number in (1, 2, 3):
            make(exporter)
            wait_until(lambda number=number: exporter.figures.exported == number, "it is there")  # type: ignore[misc]
            connection = exporter._connection
            assert connection is not None
            if connection.sock is not None:
                connection.sock.shutdown(socket.SHUT_RDWR)
    assert not caplog.records


def test_the_next_spans_arrive_when_some_cannot_be_written(caplog: pytest.LogCaptureFixture) -> None:
    with SpanCollector() as received, exporting(received.url) as exporter:
        with trace.within(TraceContext(TRACE, "", True, recorder=exporter)), span("work") as mine:
            mine.set("kvdir.blocks", 2**64)
        wait_until(lambda: exporter.figures.refused == 1, "it is given up")
        make(exporter)
        wait_until(lambda: exporter.figures.exported == 1, "the other one is there")
    assert [record.message for record in caplog.records] == ["spans cannot be sent"]


@pytest.mark.parametrize("said", ["authorization=Bearer%20s3cret%0A", "api key=s3cret", "=s3cret", "x=s3cret\u00e9"])
def test_headers_that_cannot_be_sent_are_refused_without_their_values(said: str, caplog: pytest.LogCaptureFixture) -> None:
    environ = {"OTEL_EXPORTER_OTLP_HEADERS": said}
    tracing = open_tracing("http://127.0.0.1:9", 0.0, service="s", instance="i", version="1", environ=environ)
    assert tracing.exporter is None
    (record,) = caplog.records
    assert "OTEL_EXPORTER_OTLP_HEADERS" in record.message
    assert "s3cret" not in str(vars(record))


def test_new_spans_are_dropped_and_counted_when_too_many_wait() -> None:
    with SpanCollector() as received, exporting(received.url) as exporter:
        received.status = 503
        make(exporter, otlp.MAX_QUEUED + 7)
        assert exporter.figures.dropped == 7
        received.status = 200
        wait_until(lambda: exporter.figures.exported == otlp.MAX_QUEUED, "the others arrive")


def test_close_ends_within_its_grace_when_the_collector_says_nothing() -> None:
    with SpanCollector() as received:
        received.silent.set()
        with exporting(received.url) as exporter:
            make(exporter, 3)
            began_s = time.monotonic()
            exporter.close(grace_s=1.0)
            assert time.monotonic() - began_s < 20
            assert exporter.figures.dropped == 3


def test_last_spans_are_delivered_when_a_daemon_stops() -> None:
    with SpanCollector() as received:
        with exporting(received.url) as exporter:
            make(exporter, 3)
        assert len(received.spans) == 3


def test_nobody_waits_when_no_collector_listens() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with exporting(f"http://127.0.0.1:{unused.getsockname()[1]}") as exporter:
            make(exporter, 3)
            exporter.close(grace_s=10.0)
            assert exporter.figures.dropped == 3


@pytest.mark.parametrize(
    ("setting", "environ", "url"),
    [
        ("http://c:4318", {}, "http://c:4318/v1/traces"),
        ("http://c:4318/", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://other:4318"}, "http://c:4318/v1/traces"),
        ("http://c:4318/v1/traces", {}, "http://c:4318/v1/traces"),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "https://e/base"}, "https://e/base/v1/traces"),
        ("", {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://e:1/x", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://f"}, "http://e:1/x"),
    ],
)
def test_collector_is_where_setting_or_environment_says(setting: str, environ: dict[str, str], url: str) -> None:
    found = collector(setting, environ | {"OTEL_EXPORTER_OTLP_HEADERS": "api-key=s%3Dcret, x=y"})
    assert found is not None
    assert (found.url, found.headers) == (url, {"api-key": "s=cret", "x": "y"})
    assert "s=cret" not in repr(found)


def test_spans_go_nowhere_when_nothing_says_where() -> None:
    assert collector("", {}) is None
    with trace.within(trace.parse(f"00-{TRACE}-00f067aa0ba902b7-01", recorder=NO_TRACER.recorder)):
        assert not span("work")

"""Sends spans to a collector: OTLP over HTTP, protobuf encoding, from a thread of its own.

    span ends (any thread) ──▶ bounded queue ──▶ thread: batch, encode, POST ──▶ collector

Rules: whoever ends a span never waits; what finds the queue full is dropped and counted. A batch that cannot be delivered stays
at the head of the queue and is tried again, with pauses, and at `close` once more within the grace. No redirect is followed.
Headers (OTEL_EXPORTER_OTLP_HEADERS) may hold a token: they are in no message.
Source: https://opentelemetry.io/docs/specs/otlp/ (1.x), .../specs/otel/protocol/exporter/ for the variables. Why not the SDK:
docs/adr/0026.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import re
import ssl
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

from kvdir.obs.logs import say, say_bug
from kvdir.obs.spans import Span, Value
from kvdir.v1 import otlp_pb2 as pb

log = logging.getLogger("kvdir.otlp")

MAX_QUEUED = 4096
BATCH = 512
GATHER_S = 1.0
"""How long the first span of a batch waits for others."""
POST_S = 5.0
PAUSE_S = 1.0
MAX_PAUSE_S = 30.0
RETRIED = frozenset((429, 502, 503, 504))
"""HTTP statuses after which the same batch may be sent again; any other refusal is final."""
MAX_ANSWER_BYTES = 65_536
PATH = "/v1/traces"


@dataclass(frozen=True, slots=True)
class Collector:
    """Where spans go. headers: with every request; secret."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def shown(self) -> str:
        """For logs: host and port."""
        parts = urlsplit(self.url)
        return parts.hostname or "" if parts.port is None else f"{parts.hostname}:{parts.port}"


def url_fault(url: str) -> str:
    """Why this is no base URL of a collector; "" if it is one. Never with the URL in it: that may hold a password."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return "is not a URL: write http://HOST:4318"
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return "must be http:// or https:// and a host, such as http://127.0.0.1:4318 (not the port for gRPC, 4317)"
    if parts.username or parts.password:
        return "must not hold a user or password: put a header into OTEL_EXPORTER_OTLP_HEADERS"
    return ""


def header_fault(headers: Mapping[str, str]) -> str:
    """Why these cannot be sent, without their values."""
    for name, value in headers.items():
        if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name):
            return "the name of a header is none"
        if not (value.isascii() and value.isprintable()):
            return f"the value of {name} has signs in it that no header may have: a line end?"
    return ""


def collector(endpoint: str, environ: Mapping[str, str]) -> Collector | None:
    """By the setting, else by OpenTelemetry's variables; None: spans go nowhere."""
    exact = "" if endpoint else environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "")
    base = endpoint or environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
    if not exact and not base:
        return None
    url = exact or (base if urlsplit(base).path.endswith(PATH) else base.rstrip("/") + PATH)
    text = environ.get("OTEL_EXPORTER_OTLP_TRACES_HEADERS") or environ.get("OTEL_EXPORTER_OTLP_HEADERS", "")
    pairs = (item.partition("=") for item in text.split(",") if "=" in item)
    return Collector(url, {key.strip(): unquote(value.strip()) for key, _, value in pairs})


@dataclass(slots=True)
class SpanFigures:
    """Spans since start: delivered, dropped because too many waited, refused by the collector."""

    exported: int = 0
    dropped: int = 0
    refused: int = 0


class Exporter:
    """kvdir.obs.trace.Recorder. resource: who we are, by OpenTelemetry's names (service.name, ...)."""

    def __init__(self, collector: Collector, resource: Mapping[str, Value]) -> None:
        self.figures = SpanFigures()
        self._collector = collector
        self._resource = [_attribute(key, value) for key, value in resource.items()]
        self._version = str(resource.get("service.version", ""))
        self._spans: deque[Span] = deque()
        self._woken = threading.Event()
        self._closing = threading.Event()
        self._until_s = float("inf")
        self._connection: http.client.HTTPConnection | None = None
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def ended(self, span: Span) -> None:
        if len(self._spans) >= MAX_QUEUED or self._closing.is_set():
            self.figures.dropped += 1
            return
        self._spans.append(span)
        if not self._woken.is_set():
            self._woken.set()

    def close(self, *, grace_s: float) -> None:
        """Sends what waits, within grace_s; the rest is dropped. Idempotent."""
        if self._closing.is_set():
            return
        self._until_s = time.monotonic() + grace_s
        self._closing.set()
        self._woken.set()
        self._thread.join(grace_s)
        self.figures.dropped += len(self._spans)

    def _run(self) -> None:
        pause_s = 0.0
        try:
            while True:
                self._woken.wait()
                if not self._closing.is_set():
                    self._closing.wait(pause_s or GATHER_S)
                self._woken.clear()
                pause_s = self._drain(pause_s)
                if self._spans:
                    self._woken.set()
                if self._closing.is_set() and (pause_s or not self._spans):
                    return
        finally:
            self._hang_up()

    def _drain(self, pause_s: float) -> float:
        """Delivers batches until there is none; returns how long to wait before the next try, 0 when all went well."""
        while self._spans:
            batch = [self._spans[at] for at in range(min(BATCH, len(self._spans)))]  # they stay in line until delivered
            used_before = self._connection is not None
            try:
                again = self._post(batch)
            except (OSError, http.client.HTTPException) as error:
                self._hang_up()
                if used_before and isinstance(error, ConnectionError):
                    continue  # the collector had closed it while we had nothing to say
                say(log, logging.WARNING, "spans not delivered", collector=self._collector.shown, error=type(error).__name__)
                again = True
            except Exception as error:  # a bug of ours costs these spans and no others
                say_bug(log, "spans cannot be sent", error)
                self.figures.refused += len(batch)
                again = False
            if again:
                return min(2 * pause_s or PAUSE_S, MAX_PAUSE_S)
            for _ in batch:
                self._spans.popleft()
        return 0.0

    def _post(self, batch: Sequence[Span]) -> bool:
        """Whether it is worth trying again."""
        left_s = min(POST_S, self._until_s - time.monotonic())
        if left_s <= 0:
            return True
        connection = self._connected(left_s)
        body = self._encode(batch).SerializeToString()
        parts = urlsplit(self._collector.url)
        target = f"{parts.path}?{parts.query}" if parts.query else parts.path
        connection.request("POST", target, body, {"Content-Type": "application/x-protobuf", **self._collector.headers})
        answer = connection.getresponse()
        told = answer.read(MAX_ANSWER_BYTES)
        if answer.status in RETRIED:
            say(log, logging.WARNING, "spans not delivered", collector=self._collector.shown, status=answer.status)
            return True
        if answer.status >= 300:
            self.figures.refused += len(batch)
            say(log, logging.WARNING, "spans refused", collector=self._collector.shown, status=answer.status)
            return False
        rejected = min(_rejected(told), len(batch))
        self.figures.refused += rejected
        self.figures.exported += len(batch) - rejected
        return False

    def _connected(self, timeout_s: float) -> http.client.HTTPConnection:
        if self._connection is None:
            parts = urlsplit(self._collector.url)
            host = parts.hostname or ""
            if parts.scheme == "https":
                context = ssl.create_default_context()
                self._connection = http.client.HTTPSConnection(host, parts.port, timeout=timeout_s, context=context)
            else:
                self._connection = http.client.HTTPConnection(host, parts.port, timeout=timeout_s)
        if self._connection.sock is not None:
            self._connection.sock.settimeout(timeout_s)
        return self._connection

    def _hang_up(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.close()
            self._connection = None

    def _encode(self, batch: Sequence[Span]) -> pb.OtlpExportRequest:
        scope = pb.OtlpScope(name="kvdir", version=self._version)
        spans = pb.OtlpScopeSpans(scope=scope, spans=[_encode(span) for span in batch])
        resource = pb.OtlpResource(attributes=self._resource)
        return pb.OtlpExportRequest(resource_spans=[pb.OtlpResourceSpans(resource=resource, scope_spans=[spans])])


def _encode(span: Span) -> pb.OtlpSpan:
    return pb.OtlpSpan(
        trace_id=bytes.fromhex(span.context.trace_id),
        span_id=bytes.fromhex(span.context.span_id),
        parent_span_id=bytes.fromhex(span.parent_id),
        trace_state=span.context.state,
        name=span.name,
        kind=int(span.kind),
        start_time_unix_nano=span.start_ns,
        end_time_unix_nano=span.end_ns,
        attributes=[_attribute(key, value) for key, value in span.attributes.items()],
        status=pb.OtlpStatus(code=2) if span.error else None,
    )


def _attribute(key: str, value: Value) -> pb.OtlpAttribute:
    made: dict[str, Any]
    match value:
        case bool():
            made = {"bool_value": value}
        case int():
            made = {"int_value": value}
        case float():
            made = {"double_value": value}
        case _:
            made = {"string_value": str(value)}
    return pb.OtlpAttribute(key=key, value=pb.OtlpValue(**made))


def _rejected(answer: bytes) -> int:
    """Spans of a delivered batch that the collector did not take, as it says."""
    try:
        return max(0, pb.OtlpExportResponse.FromString(answer).partial_success.rejected_spans)
    except ValueError:  # google.protobuf's DecodeError: an answer of another kind says nothing about spans
        return 0

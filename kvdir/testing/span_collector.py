"""A collector of spans in this process: takes OTLP over HTTP as the real ones do, and shows what came.

Faults on request: another HTTP status, a partial success, silence. Used by tests and by bench/trace_picture.py.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from kvdir.v1 import otlp_pb2 as pb


@dataclass(frozen=True, slots=True)
class Received:
    """One span. Ids in hex; parent "" for the first of a trace; times in ns since 1970. resource: who made it."""

    name: str
    kind: int
    trace_id: str
    span_id: str
    parent: str
    start_ns: int
    end_ns: int
    error: bool
    attributes: dict[str, Any]
    resource: dict[str, Any]

    @property
    def service(self) -> str:
        """ "kvdir-peer-agent/node1" """
        return f"{self.resource['service.name']}/{self.resource['service.instance.id']}"


class SpanCollector:
    """status: of every answer from now on. silent: nothing is answered until it is cleared. bodies, headers: as they came."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.status = 200
        self.answer = b""
        self.silent = threading.Event()
        self._released = threading.Event()
        ours = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 30.0

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if ours.silent.is_set():
                    ours._released.wait(30.0)
                ours.paths.append(self.path)
                ours.headers.append(dict(self.headers.items()))
                if ours.status == 200:
                    ours.bodies.append(body)
                self.send_response(ours.status)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(ours.answer)))
                self.end_headers()
                self.wfile.write(ours.answer)

            def log_message(self, format: str, *args: object) -> None:
                """Silent: the spans are what counts."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="spans-in", daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def spans(self) -> list[Received]:
        """All so far, in the order in which they came."""
        return [span for body in list(self.bodies) for span in decode(body)]

    def trace(self, trace_id: str) -> list[Received]:
        """Of one trace, by start."""
        return sorted((span for span in self.spans if span.trace_id == trace_id), key=lambda span: span.start_ns)


def decode(body: bytes) -> list[Received]:
    """Of one request."""
    out = []
    for group in pb.OtlpExportRequest.FromString(body).resource_spans:
        resource = _attributes(group.resource.attributes)
        out += [_received(span, resource) for scope in group.scope_spans for span in scope.spans]
    return out


def children(spans: Sequence[Received]) -> dict[str, list[Received]]:
    """By the parent's id, each list by start."""
    out: dict[str, list[Received]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: span.start_ns):
        out[span.parent].append(span)
    return out


def _received(span: pb.OtlpSpan, resource: dict[str, Any]) -> Received:
    return Received(
        name=span.name,
        kind=span.kind,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        error=span.status.code == 2,
        attributes=_attributes(span.attributes),
        resource=resource,
    )


def _attributes(attributes: Any) -> dict[str, Any]:
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in attributes}

"""/metrics, /healthz and /readyz, on a thread of their own, so that a scrape never holds up a lookup.

healthz: the process lives and its event loop turned lately. readyz: it may be asked; 503 with the reason while warming
or draining.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from kvdir.errors import ConfigError

Probe = Callable[[], str]
"""Returns why not, or an empty string."""

Further = Callable[[BaseHTTPRequestHandler], None]
"""Answers a request for any other path, on the thread of its connection. It may take the connection over
(`request.connection.detach()`), and so give the thread back while it goes on writing."""


class HttpSide:
    """Serves from construction until `close`. Raises ConfigError if the port cannot be had.

    alive, ready: probes. remark: added when it is ready. refresh: brings the collector up to date before a scrape.
    further: answers what is asked for beside that. All are called on the HTTP thread, so they may only read plain values, or
    hand work to the event loop and wait for it a bounded time. setting: that the address comes from, for errors.
    """

    def __init__(
        self,
        address: tuple[str, int],
        collector: Collector,
        *,
        alive: Probe,
        ready: Probe,
        remark: Probe = lambda: "",
        refresh: Callable[[], None] = lambda: None,
        further: Further | None = None,
        setting: str = "http_listen",
    ) -> None:
        registry = CollectorRegistry()
        registry.register(collector)

        def metrics() -> tuple[int, str, bytes]:
            refresh()
            return 200, CONTENT_TYPE_LATEST, generate_latest(registry)

        class Handler(_Handler):
            pages = {  # noqa: RUF012  # one table per server, made before it serves
                "/metrics": metrics,
                "/healthz": lambda: _probe(alive),
                "/readyz": lambda: _probe(ready, remark),
            }
            beside = staticmethod(further or _nothing_else)

        flag = setting.replace("_", "-")
        try:
            self._server = _Server(address, Handler)
        except OSError as error:
            raise ConfigError(
                [
                    f"{setting}: {address[0]}:{address[1]} cannot be used ({error.strerror}): "
                    f"stop the process that has it, or give another port with --{flag} (0 takes a free one)"
                ]
            ) from error
        self.address: tuple[str, int] = (address[0], self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="http", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=2.0)


class LoopPulse:
    """Says whether an event loop turned within limit_s. `beat` is called from the loop."""

    def __init__(self, *, limit_s: float) -> None:
        self._limit_s = limit_s
        self._beat_s = time.monotonic()

    def beat(self) -> None:
        self._beat_s = time.monotonic()

    def fault(self) -> str:
        silent_s = time.monotonic() - self._beat_s
        return f"the event loop has not turned for {silent_s:.1f} s" if silent_s > self._limit_s else ""


def _probe(probe: Probe, remark: Probe = lambda: "") -> tuple[int, str, bytes]:
    fault = probe()
    words = fault or " ".join(filter(None, ("ok", remark())))
    return (503 if fault else 200), "text/plain; charset=utf-8", words.encode() + b"\n"


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 16


class _Handler(BaseHTTPRequestHandler):
    pages: dict[str, Callable[[], tuple[int, str, bytes]]]
    beside: Further
    timeout = 5.0  # of the socket: a client that sends nothing does not keep a thread

    def do_GET(self) -> None:
        page = self.pages.get(self.path.partition("?")[0])
        if page is None:
            self.beside(self)
        else:
            send(self, *page())

    def do_HEAD(self) -> None:
        self.beside(self)

    def do_POST(self) -> None:
        self.beside(self)

    def log_message(self, format: str, *args: object) -> None:
        """Silent: probes come every few seconds."""


def send(request: BaseHTTPRequestHandler, status: int, kind: str, body: bytes) -> None:
    """A whole answer. kind: Content-Type."""
    request.send_response(status)
    request.send_header("Content-Type", kind)
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(body)


def _nothing_else(request: BaseHTTPRequestHandler) -> None:
    send(request, 404, "text/plain", b"try /metrics, /healthz, /readyz\n")

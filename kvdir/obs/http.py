"""/metrics, /healthz and /readyz, on threads of their own, so that a scrape never holds up a lookup.

healthz: the process lives and its event loop turned lately. readyz: it may be asked; 503 with the reason while warming
or draining. /metrics: text, or OpenMetrics with exemplars for who accepts that; gzip likewise. Scrapers that ask at the same
time get the same answer, so that many cost no more than one. How connections are accepted and bounded: door.py.
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from types import TracebackType
from typing import Any, Protocol, Self

from kvdir.errors import ConfigError
from kvdir.obs.definition import Family
from kvdir.obs.door import Door
from kvdir.obs.exposition import accepts, chosen, process_families, render
from kvdir.obs.logs import say, say_bug
from kvdir.obs.tally import Tally

log = logging.getLogger("kvdir.http")

ANSWER_S = 5.0
"""For an answer to be taken, and for what follows the head of a request."""
SCRAPE_S = 5.0
"""A scraper waits so long for another one's answer to be made."""
FRESH_S = 0.1
"""An answer made so lately is given again."""
GZIP_BYTES = 4096

Probe = Callable[[], str]
"""Returns why not, or an empty string."""

Further = Callable[[BaseHTTPRequestHandler], None]
"""Answers a request for any other path, on the thread of its connection. It may take the connection over
(`request.connection.detach()`), and so give the thread back while it goes on writing."""


class Metrics(Protocol):
    """What is exposed. `collect` runs on a thread that serves HTTP."""

    @property
    def tally(self) -> Tally: ...

    def collect(self) -> Iterator[Family]: ...


@dataclass(frozen=True, slots=True)
class _Page:
    status: int
    kind: str
    body: bytes
    began_s: float = 0.0

    def packed(self, accept_encoding: str) -> tuple[bytes, str]:
        """(body, content encoding)."""
        if len(self.body) < GZIP_BYTES or not accepts(accept_encoding, "gzip"):
            return self.body, ""
        return gzip.compress(self.body, 1, mtime=0), "gzip"


class HttpSide:
    """Serves from construction until `close`. Raises ConfigError if the port cannot be had.

    alive, ready: probes. remark: added when it is ready. refresh: brings the metrics up to date before a scrape.
    further: answers what is asked for beside that. All are called on threads of the HTTP side, so they may only read plain
    values, or hand work to the event loop and wait for it a bounded time. setting: that the address comes from, for errors.
    """

    def __init__(
        self,
        address: tuple[str, int],
        metrics: Metrics,
        *,
        alive: Probe,
        ready: Probe,
        remark: Probe = lambda: "",
        refresh: Callable[[], None] = lambda: None,
        further: Further | None = None,
        setting: str = "http_listen",
    ) -> None:
        self._metrics = metrics
        self._refresh = refresh
        self._making = threading.Lock()
        self._made: dict[str, _Page] = {}
        probes = {"/healthz": lambda: _probe(alive), "/readyz": lambda: _probe(ready, remark)}
        probe_paths = [[path.encode()] for path in probes]

        class Handler(_Handler):
            pages = {"/metrics": self._scraped, **{path: _accepting(probe) for path, probe in probes.items()}}  # noqa: RUF012
            beside = staticmethod(further or _nothing_else)

        flag = f"--{setting.replace('_', '-')}"
        try:
            self._door = Door(
                address,
                lambda connection: _answer(Handler, connection),
                is_probe=lambda line: line.split(b" ")[1:2] in probe_paths,
            )
        except OSError as error:
            raise ConfigError(
                [
                    f"{setting}: {address[0]}:{address[1]} cannot be used ({error.strerror}): "
                    f"stop the process that has it, or give another port with {flag} (0 takes a free one)"
                ]
            ) from error
        self.address: tuple[str, int] = (address[0], self._door.port)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._door.close()

    def _scraped(self, accept: str) -> _Page:
        """The newest answer that is new enough, or one that is made now, by one thread at a time."""
        arrived_s, kind = time.monotonic(), chosen(accept)
        if not self._making.acquire(timeout=SCRAPE_S):
            return _Page(503, _WORDS, b"other scrapes are being answered: come back later\n")
        try:
            page = self._made.get(kind)
            if page is None or page.began_s < arrived_s - FRESH_S:
                began_s = time.monotonic()
                self._refresh()
                families = itertools.chain(self._metrics.collect(), process_families())
                page = self._made[kind] = _Page(200, kind, render(families, kind), began_s)
                self._metrics.tally.observe("scrape_duration_seconds", time.monotonic() - began_s)
            return page
        finally:
            self._making.release()


class LoopPulse:
    """Says whether an event loop turned within limit_s. `beat` is called from the loop."""

    def __init__(self, *, limit_s: float) -> None:
        self._limit_s = limit_s
        self._beat_s = time.monotonic()
        self.late_s = 0.0

    def beat(self, late_s: float = 0.0) -> None:
        """late_s: how late whoever beats was."""
        self._beat_s, self.late_s = time.monotonic(), late_s

    def fault(self) -> str:
        silent_s = time.monotonic() - self._beat_s
        return f"the event loop has not turned for {silent_s:.1f} s" if silent_s > self._limit_s else ""


_WORDS = "text/plain; charset=utf-8"


def _probe(probe: Probe, remark: Probe = lambda: "") -> _Page:
    fault = probe()
    words = fault or " ".join(filter(None, ("ok", remark())))
    return _Page(503 if fault else 200, _WORDS, words.encode() + b"\n")


def _accepting(make: Callable[[], _Page]) -> Callable[[str], _Page]:
    """For a page that is the same whatever the client accepts."""
    return lambda _: make()


def _answer(handler: Any, connection: socket.socket) -> None:
    """One request. A client that is gone or slow is no event; anything else is a bug, and costs one answer."""
    try:
        with contextlib.suppress(OSError):
            handler(connection, connection.getpeername(), None)
    except Exception as error:
        say(log, logging.ERROR, "http request failed", error=repr(error))


class _Handler(BaseHTTPRequestHandler):
    pages: dict[str, Callable[[str], _Page]]
    beside: Further
    timeout = ANSWER_S
    server_version, sys_version = "kvdir", ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        make = self.pages.get(path)
        if make is None:
            self.beside(self)
            return
        try:
            page = make(self.headers.get("Accept", ""))
        except Exception as error:
            say_bug(log, "http request failed", error, path=path)
            page = _Page(500, _WORDS, b"an error of ours, in the log as `http request failed`\n")
        body, encoding = page.packed(self.headers.get("Accept-Encoding", ""))
        send(self, page.status, page.kind, body, encoding=encoding)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self.beside(self)

    def log_message(self, format: str, *args: object) -> None:
        """Silent: probes come every few seconds."""


def send(request: BaseHTTPRequestHandler, status: int, kind: str, body: bytes, *, encoding: str = "") -> None:
    """A whole answer. kind: Content-Type."""
    request.send_response(status)
    request.send_header("Content-Type", kind)
    if encoding:
        request.send_header("Content-Encoding", encoding)
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(body)


def _nothing_else(request: BaseHTTPRequestHandler) -> None:
    send(request, 404, "text/plain", b"try /metrics, /healthz, /readyz\n")

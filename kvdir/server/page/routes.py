"""The page's paths on the HTTP side: /, its assets, the stream of pictures, and the questions it asks.

Rules: it shows every tenant, so it is for whoever may read this machine's loopback (or is let through to it, as kubectl
port-forward does), and for nobody else: requests that come under another name, or from another site's page, are refused (but
for a link to / that somebody follows, which shows that site nothing); the browser is told to load nothing from elsewhere and
to run no script but the page's own. Reads only: nothing here changes anything.
"""

from __future__ import annotations

import mimetypes
import time
import urllib.parse
from collections.abc import Callable
from email.message import Message
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from importlib import resources
from socket import socket
from typing import Any

import msgspec

from kvdir.errors import DeadlineExceeded, KvdirError, Unavailable
from kvdir.server.host_header import host_fault
from kvdir.server.page.answers import Answers
from kvdir.server.page.feed import Feed

MAX_BODY_BYTES = 512 * 2**10
BODY_S = 5.0
_JSON = "application/json"
_TEXT = "text/plain; charset=utf-8"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


class PageRoutes:
    """A `Further` of kvdir/obs/http.py."""

    def __init__(self, feed: Feed, answers: Answers) -> None:
        self._feed = feed
        self._answers = answers
        self._assets = _assets()

    def __call__(self, request: BaseHTTPRequestHandler) -> None:
        path, _, query = request.path.partition("?")
        fault = host_fault(request.headers.get("Host")) or ("" if _is_link(request, path) else _site_fault(request.headers))
        if fault:
            self._send(request, HTTPStatus.FORBIDDEN, _TEXT, f"{fault}\n".encode())
        elif request.command == "POST":
            self._post(request, path)
        elif path == "/page/events":
            self._watch(request)
        elif path == "/page/node":
            name = urllib.parse.unquote_plus(query.removeprefix("name="))
            self._answer(request, lambda: self._answers.node(name))
        elif path in self._assets:
            self._send(request, HTTPStatus.OK, *self._assets[path])
        else:
            self._send(request, HTTPStatus.NOT_FOUND, _TEXT, b"try /, /metrics, /healthz, /readyz\n")

    def _post(self, request: BaseHTTPRequestHandler, path: str) -> None:
        length = request.headers.get("Content-Length", "")
        if path != "/page/explain":
            self._send(request, HTTPStatus.NOT_FOUND, _TEXT, b"nothing is changed here: the page only reads\n")
        elif request.headers.get_content_type() != _JSON or not length.isdecimal() or len(length) > 9:
            self._send(request, HTTPStatus.BAD_REQUEST, _TEXT, b"send application/json with Content-Length\n")
        elif int(length) > MAX_BODY_BYTES:
            self._send(request, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, _TEXT, f"at most {MAX_BODY_BYTES} bytes\n".encode())
        else:
            body = _body(request, int(length))
            self._answer(request, lambda: self._answers.explain(body))

    def _answer(self, request: BaseHTTPRequestHandler, answer: Callable[[], dict[str, Any]]) -> None:
        content: dict[str, Any]
        try:
            content, status = answer(), HTTPStatus.OK
        except KvdirError as error:
            # That there is nothing to say is an answer like others; a browser would log another status as a fault of the page.
            late = isinstance(error, Unavailable | DeadlineExceeded)
            content, status = {"error": str(error)}, HTTPStatus.SERVICE_UNAVAILABLE if late else HTTPStatus.OK
        self._send(request, status, _JSON, msgspec.json.encode(content))

    def _watch(self, request: BaseHTTPRequestHandler) -> None:
        full = self._feed.full()
        if full:
            self._send(request, HTTPStatus.SERVICE_UNAVAILABLE, _TEXT, f"{full}\n".encode())
            return
        self._head(request, HTTPStatus.OK, "text/event-stream")
        request.end_headers()
        if request.command == "HEAD":
            return
        taken = socket(fileno=request.connection.detach())
        if not self._feed.join(taken):
            taken.close()

    def _send(self, request: BaseHTTPRequestHandler, status: HTTPStatus, kind: str, body: bytes) -> None:
        self._head(request, status, kind)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(body)

    def _head(self, request: BaseHTTPRequestHandler, status: HTTPStatus, kind: str) -> None:
        request.send_response(status)
        request.send_header("Content-Type", kind)
        request.send_header("Connection", "close")
        for name, value in HEADERS.items():
            request.send_header(name, value)


def _body(request: BaseHTTPRequestHandler, length: int) -> bytes:
    """Whole within BODY_S, however it comes. Raises TimeoutError, ConnectionError: the connection closes without an answer."""
    body, until_s = bytearray(), time.monotonic() + BODY_S
    while len(body) < length:
        request.connection.settimeout(max(0.001, until_s - time.monotonic()))
        part = request.rfile.read1(length - len(body))
        if not part:
            raise ConnectionResetError
        body += part
    request.connection.settimeout(BODY_S)
    return bytes(body)


def _is_link(request: BaseHTTPRequestHandler, path: str) -> bool:
    """Whether somebody comes here by a link, say in a chat or a dashboard: to a window of its own, of which no other site sees
    anything. Source: W3C Fetch Metadata; our Cross-Origin-Opener-Policy.
    """
    kind = (request.headers.get("Sec-Fetch-Mode"), request.headers.get("Sec-Fetch-Dest"))
    return request.command == "GET" and path == "/" and kind == ("navigate", "document")


def _site_fault(headers: Message) -> str:
    """Why this is not a request of the page's own, in words; programs that are no browsers say nothing of it."""
    site, origin = headers.get("Sec-Fetch-Site", "none"), headers.get("Origin", "")
    if site not in ("none", "same-origin"):
        return f"a page of another site may not read this one ({site})"
    if origin and origin.partition("://")[2] != headers.get("Host"):
        return "a page of another site may not read this one"
    return ""


def _assets() -> dict[str, tuple[str, bytes]]:
    """By path: (Content-Type, content)."""
    out = {}
    for file in resources.files("kvdir.server.page").joinpath("static").iterdir():
        kind = "text/javascript" if file.name.endswith(".js") else mimetypes.guess_type(file.name)[0] or "text/plain"
        path = "/" if file.name == "index.html" else f"/page/{file.name}"
        out[path] = (f"{kind}; charset=utf-8" if kind.startswith("text/") else kind, file.read_bytes())
    return out

"""/metrics, /healthz, /readyz over plain HTTP/1.1, GET only: for Prometheus and the kubelet, nothing else.

Rules: readiness says whether engines and peers are served, and never depends on a coordinator; metrics are rendered off the
event loop; a request has a size and a time limit, and each connection answers one request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from peer_agent.server.metrics import CONTENT_TYPE

REQUEST_TIMEOUT_S = 5.0
PLAIN = "text/plain; charset=utf-8"
REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}


class HttpServer:
    """ready: "" when ready, else why not."""

    def __init__(self, *, render: Callable[[], bytes], ready: Callable[[], str]) -> None:
        self._render = render
        self._ready = ready
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Returns the port. Raises OSError when it cannot listen."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=8192)
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                status, content_type, body = await self._answer(head.split(b"\r\n", 1)[0].decode("latin-1"))
                writer.write(_head(status, content_type, len(body)) + body)
                await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            writer.transport.abort()
        finally:
            writer.close()

    async def _answer(self, request_line: str) -> tuple[int, str, bytes]:
        method, _, rest = request_line.partition(" ")
        if method != "GET":
            return 405, PLAIN, b"only GET\n"
        match rest.partition(" ")[0].partition("?")[0]:
            case "/metrics":
                return 200, CONTENT_TYPE, await asyncio.to_thread(self._render)
            case "/healthz":
                return 200, PLAIN, b"ok\n"
            case "/readyz":
                why_not = self._ready()
                return (503, PLAIN, why_not.encode() + b"\n") if why_not else (200, PLAIN, b"ready\n")
        return 404, PLAIN, b"there are /metrics, /healthz and /readyz\n"


def _head(status: int, content_type: str, length: int) -> bytes:
    lines = (
        f"HTTP/1.1 {status} {REASONS[status]}",
        f"Content-Type: {content_type}",
        f"Content-Length: {length}",
        "Connection: close",
        "\r\n",
    )
    return "\r\n".join(lines).encode("latin-1")

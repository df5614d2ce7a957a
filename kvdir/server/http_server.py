"""A small HTTP/1.1 server on the event loop, for APIs whose clients keep connections open: the indexer's.

Owns: reading requests and writing answers within bounds. Rules:
- every wait has a deadline: a request that began must be whole within `request_s`, answered within `answer_s`, its answer taken
  within `write_s`; a connection that says nothing is closed after `idle_s`;
- bounded: connections (beyond them the one that has said nothing for longest closes, if for `yield_s` or more; else 503 and
  the new one closes), head and body of a request, and how many large bodies are in
  memory at once (others wait, within their `request_s`); a connection costs no thread;
- strict, because what two readers understand differently is how requests are smuggled: one Content-Length or none, no
  Transfer-Encoding, lines end with CRLF or LF, names are tokens, no other control character anywhere. Everything else is 4xx
  with words, and the connection closes: behind what the client was still sending, for LINGER_S, so that it reads the words.
Does not: TLS, HTTP/2, chunked bodies (411 says so), or know any path. Source: RFC 9112. Why by hand: docs/adr/0021.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus

from kvdir.errors import ConfigError
from kvdir.obs.logs import say_bug

log = logging.getLogger("kvdir.http")

MAX_HEAD_BYTES = 16 * 2**10
SMALL_BODY_BYTES = 64 * 2**10
LARGE_BODIES = 8
"""So many requests with more than SMALL_BODY_BYTES are read and answered at a time."""
LINGER_S = 1.0
_REQUEST = re.compile(rb"([A-Z]{1,16}) (/[!-~]*) HTTP/1\.([01])")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([\t\x20-\x7e\x80-\xff]*)")
_TEXT = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Request:
    """target: path and query as sent. headers: names in lower case."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Response:
    """kind: Content-Type."""

    status: int
    body: bytes
    kind: str = "application/json"


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """See the module docstring."""

    connections: int = 1_024
    body_bytes: int = 16 * 2**20
    idle_s: float = 75.0
    yield_s: float = 1.0
    request_s: float = 10.0
    answer_s: float = 30.0
    write_s: float = 10.0


Answer = Callable[[Request], Awaitable[Response]]


class _Refused(Exception):
    """A request that is not read further; the connection closes with this answer."""

    def __init__(self, status: HTTPStatus, words: str) -> None:
        super().__init__(words)
        self.response = Response(status, f"{words}\n".encode(), _TEXT)


class HttpServer:
    """Serves from `start` to `close`. answer: of one request; what it raises is a bug: 500, and logged."""

    def __init__(self, answer: Answer, limits: HttpLimits) -> None:
        self._answer = answer
        self._limits = limits
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._silent: dict[asyncio.Task[None], float] = {}  # since when no request has begun, oldest first
        self._large = asyncio.Semaphore(LARGE_BODIES)

    @property
    def connections(self) -> int:
        """Open now."""
        return len(self._connections)

    async def start(self, host: str, port: int, *, setting: str) -> int:
        """The port it listens at. Raises ConfigError that names the setting."""
        try:
            self._server = await asyncio.start_server(self._connected, host, port, limit=MAX_HEAD_BYTES)
        except OSError as error:
            raise ConfigError(
                [
                    f"{setting}: {host}:{port} cannot be used ({error.strerror}): stop the process that has it, or give "
                    "another port (0 takes a free one)"
                ]
            ) from error
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def close(self) -> None:
        """Takes no more connections and ends those that are open; an answer under way is cut off."""
        if self._server is not None:
            self._server.close()
        for task in tuple(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        full = len(self._connections) >= self._limits.connections and not self._make_room()
        task = asyncio.create_task(self._serve(reader, writer, full=full))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    def _make_room(self) -> bool:
        """The one that has been silent for longest goes, if it has been for long enough: a crowd of them keeps nobody out."""
        task = next(iter(self._silent), None)
        if task is None or asyncio.get_running_loop().time() - self._silent[task] < self._limits.yield_s:
            return False
        del self._silent[task]
        task.cancel()
        return True

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, full: bool) -> None:
        try:
            if full:
                words = f"{self._limits.connections} connections are open already: close some, or keep fewer in the pool\n"
                await self._write(writer, Response(HTTPStatus.SERVICE_UNAVAILABLE, words.encode(), _TEXT), close=True)
                return
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, TimeoutError):
            pass  # the client is gone, or as good as
        finally:
            await _close(writer)

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request. Returns whether the connection stays open."""
        first = await self._begun(reader)
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(self._limits.request_s):
                    request, keep = await self._read(first, reader, writer, stack)
            except _Refused as refused:
                await self._last_words(reader, writer, refused.response)
                return False
            except TimeoutError:
                words = f"the request was not whole within {self._limits.request_s:g} s\n".encode()
                await self._last_words(reader, writer, Response(HTTPStatus.REQUEST_TIMEOUT, words, _TEXT))
                return False
            try:
                async with asyncio.timeout(self._limits.answer_s):
                    response = await self._answer(request)
            except TimeoutError:
                late = f"no answer within {self._limits.answer_s:g} s: this coordinator or what it asks is overloaded\n"
                response = Response(HTTPStatus.GATEWAY_TIMEOUT, late.encode(), _TEXT)
            except Exception as error:
                say_bug(log, "call failed", error, method=request.method)
                response = Response(HTTPStatus.INTERNAL_SERVER_ERROR, b"internal error, logged there\n", _TEXT)
        await self._write(writer, response, close=not keep, head_only=request.method == "HEAD")
        await asyncio.sleep(0)  # the next request may be here already: others have their turn first
        return keep

    async def _begun(self, reader: asyncio.StreamReader) -> bytes:
        """The first byte of a request; until it is here the connection may have to give way."""
        task = asyncio.current_task()
        assert task is not None
        self._silent[task] = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(self._limits.idle_s):
                return await reader.readexactly(1)
        finally:
            self._silent.pop(task, None)

    async def _read(
        self, first: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, stack: contextlib.AsyncExitStack
    ) -> tuple[Request, bool]:
        """stack: gives back the right to a large body, once it is answered."""
        lines = await _head(first, reader)
        line = _REQUEST.fullmatch(lines[0]) if lines else None
        if line is None:
            raise _Refused(HTTPStatus.BAD_REQUEST, "this is no HTTP/1.1 request: METHOD /path HTTP/1.1")
        headers = _headers(lines[1:])
        length = _length(headers, self._limits.body_bytes)
        if length > SMALL_BODY_BYTES:
            await stack.enter_async_context(self._large)
        if length and headers.get("expect", "").lower() == "100-continue" and not writer.is_closing():
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await reader.readexactly(length) if length else b""
        wishes = {token.strip() for token in headers.get("connection", "").lower().split(",")}
        keep = "close" not in wishes and (line[3] == b"1" or "keep-alive" in wishes)
        return Request(line[1].decode(), line[2].decode(), headers, body), keep

    async def _last_words(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, response: Response) -> None:
        """A socket that is closed over unread bytes is reset, and the answer with it (RFC 9112, 9.6): so they are read away."""
        await self._write(writer, response, close=True)
        if not writer.is_closing():
            writer.write_eof()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while await reader.read(MAX_HEAD_BYTES):
                    pass

    async def _write(self, writer: asyncio.StreamWriter, response: Response, *, close: bool, head_only: bool = False) -> None:
        head = (
            f"HTTP/1.1 {int(response.status)} {HTTPStatus(response.status).phrase}\r\nContent-Type: {response.kind}\r\n"
            f"Content-Length: {len(response.body)}\r\n{'Connection: close' if close else 'Connection: keep-alive'}\r\n\r\n"
        )
        if writer.is_closing():  # uvloop's transports cannot be written to any more
            raise ConnectionResetError
        writer.write(head.encode() + (b"" if head_only else response.body))
        async with asyncio.timeout(self._limits.write_s):
            await writer.drain()


async def _close(writer: asyncio.StreamWriter) -> None:
    """A client that does not read would keep socket and answer for as long as it likes: what it has not taken soon is lost."""
    writer.close()
    try:
        async with asyncio.timeout(LINGER_S):
            await writer.wait_closed()
    except (ConnectionError, TimeoutError):
        pass
    finally:
        writer.transport.abort()


async def _head(first: bytes, reader: asyncio.StreamReader) -> list[bytes]:
    """Lines up to the empty one. Raises _Refused when they are too long."""
    lines: list[bytes] = []
    begun, left = first, MAX_HEAD_BYTES
    while True:
        try:
            line = begun + (b"" if begun == b"\n" else await reader.readuntil(b"\n"))
        except asyncio.LimitOverrunError:
            left, line = 0, b""
        begun, left = b"", left - len(line)
        if left <= 0:
            raise _Refused(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"the head is longer than {MAX_HEAD_BYTES} bytes")
        line = line.removesuffix(b"\n").removesuffix(b"\r")
        if line:
            lines.append(line)
        elif lines:  # empty lines before a request are passed over (RFC 9112, 2.2)
            return lines


def _headers(lines: list[bytes]) -> dict[str, str]:
    out: dict[str, str] = {}
    for line in lines:
        field = _FIELD.fullmatch(line)
        if field is None:
            raise _Refused(HTTPStatus.BAD_REQUEST, "a header is not NAME: VALUE")
        name = field[1].decode().lower()
        if name in out and name in ("content-length", "content-type", "host"):
            raise _Refused(HTTPStatus.BAD_REQUEST, f"the header {name} is given twice")
        out[name] = field[2].strip(b" \t").decode("latin-1")
    return out


def _length(headers: Mapping[str, str], most: int) -> int:
    if "transfer-encoding" in headers:
        raise _Refused(HTTPStatus.LENGTH_REQUIRED, "chunked bodies are not read here: send the body with Content-Length")
    text = headers.get("content-length", "0")
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise _Refused(HTTPStatus.BAD_REQUEST, "Content-Length is not a number of bytes")
    if int(text) > most:
        raise _Refused(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"the body has {int(text)} bytes, at most {most} are read (--max-message-bytes): send hashes instead of tokens",
        )
    return int(text)

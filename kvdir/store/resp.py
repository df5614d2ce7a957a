"""One connection to a Redis or Valkey server: commands out, replies in, in order.

Owns the wire format (RESP2, https://redis.io/docs/latest/develop/reference/protocol-spec/) and the queue of replies that are
due. It is our own because a lookup is some dozens of small commands in one write, and redis-py takes 4 times as long for those.

Rules
- Commands may be sent while earlier ones are under way; replies come in the order of commands. Whoever stops waiting leaves its
  reply to be thrown away when it comes.
- A reply that is an error is a value (`ReplyError`) inside a batch: one command's error says nothing about the others.
- A connection that broke stays broken: what is due and whatever is sent later ends with ConnectionLost.
Does not: connect again, retry, or know which server to ask.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

Argument = bytes | int | str


class ConnectionLost(Exception):
    """The connection broke; commands that were under way may have been carried out or not."""


class ReplyError(Exception):
    """An error that the server answered with. kind: its first word, e.g. MOVED."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.kind, _, self.rest = text.partition(" ")


@dataclass(frozen=True, slots=True)
class Credentials:
    """For AUTH; no user: the default one. The password is shown nowhere."""

    user: str = ""
    password: str = field(default="", repr=False)

    def command(self) -> tuple[Argument, ...]:
        return ("AUTH", self.user, self.password) if self.user else ("AUTH", self.password)


def encode(*command: Argument) -> bytes:
    """One command as an array of bulk strings."""
    parts = [b"*%d\r\n" % len(command)]
    for argument in command:
        value = argument if isinstance(argument, bytes) else str(argument).encode()
        parts.append(b"$%d\r\n%b\r\n" % (len(value), value))
    return b"".join(parts)


class Decoder:
    """Turns bytes, cut anywhere, into replies; each byte is looked at once, however large a reply is.

    A bulk string is bytes, a simple one str, an integer int, an array a list, nil None, an error a ReplyError (not raised).
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._open: list[tuple[list[object], int]] = []  # arrays that are not complete: items so far, how many there will be

    def feed(self, data: bytes) -> list[object]:
        """The replies that are complete now. Raises ValueError for nonsense; the decoder is of no use then."""
        self._buffer += data
        replies: list[object] = []
        at = 0
        while (end := self._buffer.find(b"\r\n", at)) >= 0:
            kind, line, end = self._buffer[at], self._buffer[at + 1 : end], end + 2
            if kind == 0x24 and (size := int(line)) >= 0:  # $
                if len(self._buffer) < end + size + 2:
                    break
                value: object = bytes(self._buffer[end : end + size])
                end += size + 2
            elif kind == 0x2A and (count := int(line)) > 0:  # *
                self._open.append(([], count))
                at = end
                continue
            else:
                value = _short(kind, line)
            at = end
            self._close(value, replies)
        del self._buffer[:at]
        return replies

    def _close(self, value: object, replies: list[object]) -> None:
        """Puts a value where it belongs, and what that completes."""
        while self._open:
            items, count = self._open[-1]
            items.append(value)
            if len(items) < count:
                return
            self._open.pop()
            value = items
        replies.append(value)


def _short(kind: int, line: bytearray) -> object:
    """A reply that is one line."""
    match kind:
        case 0x24:  # $-1
            return None
        case 0x2A:  # *0, *-1
            return [] if line == b"0" else None
        case 0x3A:  # :
            return int(line)
        case 0x2B:  # +
            return line.decode(errors="replace")
        case 0x2D:  # -
            return ReplyError(line.decode(errors="replace"))
    raise ValueError(f"a reply cannot begin with byte {kind:#x}: is this a Redis server?")


@dataclass(slots=True)
class _Due:
    """A batch that waits for `count` replies. since: when it was sent, by the loop's clock."""

    count: int
    since: float
    done: asyncio.Future[list[object]]
    replies: list[object] = field(default_factory=list)


class Connection(asyncio.Protocol):
    """See the module docstring. Made by `connect`."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.address = address
        self._transport: asyncio.Transport | None = None
        self._decoder = Decoder()
        self._due: deque[_Due] = deque()
        self._lost: str = ""
        self._closed = asyncio.get_running_loop().create_future()

    @classmethod
    async def connect(
        cls, address: tuple[str, int], *, credentials: Credentials, db: int = 0, tls: ssl.SSLContext | None = None
    ) -> Connection:
        """Connects, says who we are and picks the database. Raises OSError, ReplyError or ConnectionLost; has no deadline."""
        host, port = address
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: cls(address), host, port, ssl=tls, server_hostname=host if tls else None
        )
        try:
            greeting: list[tuple[Argument, ...]] = [credentials.command()] if credentials.password else []
            if db:
                greeting.append(("SELECT", db))
            for reply in await connection.send(greeting) if greeting else []:
                if isinstance(reply, ReplyError):
                    raise reply
        except BaseException:
            connection.abort("greeting failed")
            raise
        return connection

    @property
    def usable(self) -> bool:
        return not self._lost

    def silent_s(self) -> float:
        """How long the oldest reply has been due."""
        return asyncio.get_running_loop().time() - self._due[0].since if self._due else 0.0

    async def send(self, commands: Sequence[tuple[Argument, ...]]) -> list[object]:
        """Replies to the commands, in order, as `Decoder` gives them. Raises ConnectionLost."""
        if self._lost or self._transport is None:
            raise ConnectionLost(self._lost or "not connected")
        loop = asyncio.get_running_loop()
        due = _Due(len(commands), loop.time(), loop.create_future())
        self._due.append(due)
        self._transport.write(b"".join([encode(*command) for command in commands]))
        return await due.done

    def abort(self, reason: str) -> None:
        """Ends the connection now; what is due ends with ConnectionLost. Idempotent."""
        if not self._lost:
            self._lost = reason
        if self._transport is not None:
            self._transport.abort()
        while self._due:
            due = self._due.popleft()
            if not due.done.done():
                due.done.set_exception(ConnectionLost(self._lost))

    async def wait_closed(self) -> None:
        """Until the transport has let go of the socket."""
        await self._closed

    # -- asyncio.Protocol --------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has another base

    def data_received(self, data: bytes) -> None:
        try:
            for reply in self._decoder.feed(data):
                self._take(reply)
        except (ValueError, IndexError) as error:  # IndexError: a reply that nobody waits for
            self.abort(f"nonsense from the server: {error}")

    def _take(self, reply: object) -> None:
        due = self._due[0]
        due.replies.append(reply)
        if len(due.replies) == due.count:
            self._due.popleft()
            if not due.done.done():
                due.done.set_result(due.replies)

    def connection_lost(self, error: Exception | None) -> None:
        self.abort(f"the server closed the connection{f': {error}' if error else ''}")
        if not self._closed.done():
            self._closed.set_result(None)

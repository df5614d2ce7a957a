"""One connection to a Redis or Valkey server: commands out, replies in, in order.

Owns the queue of replies that are due. The wire format, AUTH, SELECT and the socket are redis-py's connection (extra `redis`);
its clients above that are not used: their pipelines take 3 times as long for a lookup's dozens of small commands, and their
retries know no deadline of ours (ADR 13).

Rules
- Commands may be sent while earlier ones are under way; replies come in the order of commands. Whoever stops waiting leaves its
  reply to be thrown away when it comes; what was not yet written then never is.
- A reply that is an error is a value (`ReplyError`) inside a batch: one command's error says nothing about the others.
- A connection that broke stays broken: what is due and whatever is sent later ends with ConnectionLost.
- redis-py gives a connection up when a call of it is cancelled. So one task of ours makes those calls, never a caller.
Does not: connect again, retry, or know which server to ask.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import redis.asyncio
from redis._parsers import _AsyncHiredisParser, _AsyncRESP2Parser
from redis.exceptions import InvalidResponse, RedisError, ResponseError
from redis.utils import HIREDIS_AVAILABLE

from kvdir.store.reply import Argument, ConnectionLost, ReplyError
from kvdir.store.url import Credentials

_Parser: Any = _AsyncHiredisParser if HIREDIS_AVAILABLE else _AsyncRESP2Parser


class _WholeErrors(_Parser):  # type: ignore[misc]
    """Gives errors as the server said them; redis-py takes the first word off those that it knows."""

    EXCEPTION_CLASSES: ClassVar[dict[str, type[Exception]]] = {}


class _Link(redis.asyncio.Connection):
    """redis-py's connection, with a TLS context made once instead of one per connection, and an end that waits for nobody."""

    def __init__(self, tls: ssl.SSLContext | None, **options: Any) -> None:
        self._tls = tls
        super().__init__(**options)

    def _connection_arguments(self) -> Mapping[str, Any]:
        return {**super()._connection_arguments(), "ssl": self._tls}

    def abort(self) -> None:
        """Drops the socket with what is not yet written; `disconnect` would wait for a server that does not read."""
        if self._writer is not None:
            self._writer.transport.abort()


@dataclass(slots=True)
class _Due:
    """A batch that waits for `count` replies. since: when it was sent, by the loop's clock."""

    count: int
    since: float
    done: asyncio.Future[list[object]]
    replies: list[object] = field(default_factory=list)


class Connection:
    """See the module docstring. Made by `connect`."""

    def __init__(self, address: tuple[str, int], link: _Link) -> None:
        self.address = address
        self._link = link
        self._outbox: asyncio.Queue[tuple[_Due, list[bytes]]] = asyncio.Queue()  # no bound but that of calls under way
        self._due: deque[_Due] = deque()
        self._lost = ""
        self._task = asyncio.get_running_loop().create_task(self._run())

    @classmethod
    async def connect(
        cls, address: tuple[str, int], *, credentials: Credentials, db: int = 0, tls: ssl.SSLContext | None = None
    ) -> Connection:
        """Connects, says who we are and picks the database. Raises OSError, ReplyError or ConnectionLost; has no deadline."""
        host, port = address
        link = _Link(
            tls,
            host=host,
            port=port,
            db=db,
            username=credentials.user or None,
            password=credentials.password or None,
            protocol=2,
            parser_class=_WholeErrors,
            socket_timeout=None,
            socket_connect_timeout=None,
        )
        try:
            await link.connect()  # type: ignore[no-untyped-call]
        except ResponseError as error:
            raise ReplyError(str(error)) from error
        except RedisError as error:
            raise error.__context__ if isinstance(error.__context__, OSError) else ConnectionLost(str(error)) from error
        return cls(address, link)

    @property
    def usable(self) -> bool:
        return not self._lost

    def silent_s(self) -> float:
        """How long the oldest reply has been due."""
        return asyncio.get_running_loop().time() - self._due[0].since if self._due else 0.0

    async def send(self, commands: Sequence[tuple[Argument, ...]]) -> list[object]:
        """Replies to the commands, in order: bytes, int, list, None or ReplyError. Raises ConnectionLost."""
        if self._lost:
            raise ConnectionLost(self._lost)
        loop = asyncio.get_running_loop()
        due = _Due(len(commands), loop.time(), loop.create_future())
        self._outbox.put_nowait((due, self._link.pack_commands(commands)))
        return await due.done

    def abort(self, reason: str) -> None:
        """Ends the connection now; what is due ends with ConnectionLost. Idempotent."""
        self._give_up(reason)
        self._link.abort()
        self._task.cancel()

    async def wait_closed(self) -> None:
        """After `abort`: until the socket is let go of."""
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.result()

    def _give_up(self, reason: str) -> None:
        self._lost = self._lost or reason
        while not self._outbox.empty():
            self._due.append(self._outbox.get_nowait()[0])
        while self._due:
            due = self._due.popleft()
            if not due.done.done():
                due.done.set_exception(ConnectionLost(self._lost))

    # -- the task that makes redis-py's calls --------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Writes and reads until the connection is lost or aborted, then closes it."""
        reason = "it was ended"
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._write())
                both.create_task(self._read())
        except* (RedisError, OSError, ValueError) as errors:  # ValueError: redis-py's own parser, for nonsense
            reason = str(errors.exceptions[0])
        finally:
            self._give_up(reason)
            self._link.abort()
            await self._link.disconnect()

    async def _write(self) -> None:
        while True:
            due, packed = await self._outbox.get()
            if not due.done.done():
                self._due.append(due)
                await self._link.send_packed_command(packed, check_health=False)

    async def _read(self) -> None:
        while True:
            reply: object
            try:
                reply = await self._link.read_response(disable_decoding=True, disconnect_on_error=False)
            except ResponseError as error:
                reply = ReplyError(str(error))
            self._take(reply)

    def _take(self, reply: object) -> None:
        if not self._due:
            raise InvalidResponse("a reply that nobody waits for")
        due = self._due[0]
        due.replies.append(reply)
        if len(due.replies) == due.count:
            self._due.popleft()
            if not due.done.done():
                due.done.set_result(due.replies)

"""Sends commands to whoever has their slots, until each has its answer or the deadline has come.

Owns the connections (two to a server, so that lookups do not queue behind writes), the library of functions on each master, and
retries: what servers say about moved slots, fail-over, loading or a missing library is followed, with pauses, inside the
caller's deadline. A command may be carried out twice, or after its caller gave up; the functions are made for that.

Connecting and learning who has what are tasks of their own, shared by all who wait for them: a caller with a short deadline
starts what the next one finds done. `close` ends them. Does not: know what the commands mean.
"""

from __future__ import annotations

import asyncio
import enum
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from kvdir.errors import ConfigError, KvdirError
from kvdir.store.base import Figures, StoreRefused, StoreUnavailable
from kvdir.store.connection import Connection
from kvdir.store.library import Library
from kvdir.store.reply import Argument, ConnectionLost, ReplyError
from kvdir.store.topology import Address, topology_of
from kvdir.store.url import Kind, StoreUrl, TlsFiles
from kvdir.store.verdict import Again, judge

_PAUSES_S = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2)
"""Before the second, third, ... attempt; the last one from then on."""
_SILENT_S = 1.0
"""A server that owes an answer for so long is asked again over a new connection."""
_MOST_CALLS = 256

ResultT = TypeVar("ResultT")


class Lane(enum.Enum):
    """Which of the connections to a server."""

    READ = "read"
    WRITE = "write"
    LEARN = "learn"


@dataclass(frozen=True, slots=True)
class Request:
    """One command for whoever has the slot."""

    slot: int
    command: tuple[Argument, ...]


class _Again(Exception):
    """This attempt came to nothing, the next one may not. reason: as that of Again."""

    def __init__(self, reason: str, words: str = "") -> None:
        super().__init__(words or reason)
        self.reason = reason


class Servers:
    """See the module docstring. Deadlines are times of the loop's clock."""

    def __init__(self, url: StoreUrl, library: Library, figures: Figures) -> None:
        self._url = url
        self._library = library
        self._figures = figures
        self._topology = topology_of(url)
        self._connections: dict[tuple[Address, Lane], Connection] = {}
        self._shared: dict[object, asyncio.Task[object]] = {}
        self._calls = asyncio.Semaphore(_MOST_CALLS)
        self._tls = _tls_context(url.tls)
        self._closed = True

    @property
    def masters(self) -> tuple[Address, ...]:
        return self._topology.masters()

    @property
    def gaps(self) -> str:
        """Slots that nobody has, in words; empty when there are none."""
        return self._topology.gaps()

    async def start(self, *, deadline: float) -> None:
        """Learns who has what."""
        self._closed = False
        await self._until(deadline, self._learn)

    async def close(self) -> None:
        """Ends every connection and task; calls under way raise StoreUnavailable."""
        self._closed = True
        tasks = list(self._shared.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._shared.clear()  # a task that was cancelled before it began could not take itself out
        connections = list(self._connections.values())
        self._connections.clear()
        for connection in connections:
            connection.abort("the store was closed")
        await asyncio.gather(*(connection.wait_closed() for connection in connections))

    async def run(self, requests: Sequence[Request], *, deadline: float, lane: Lane) -> list[Any]:
        """Replies in the order of the requests. Which of them is carried out first is not said."""
        replies: list[Any] = [None] * len(requests)
        waiting = dict(enumerate(requests))

        async def attempt() -> None:
            reasons = await self._attempt(waiting, replies, lane)
            if waiting:
                raise _Again("waiting", "; ".join(sorted(reasons)))

        await self._until(deadline, attempt)
        return replies

    async def everywhere(self, command: tuple[Argument, ...], *, deadline: float) -> dict[Address, Any]:
        """The reply of each master to a command that needs no slot."""
        replies: dict[Address, Any] = {}

        async def attempt() -> None:
            for address in self.masters:
                if address not in replies:
                    replies[address] = await self._one(address, command)

        await self._until(deadline, attempt)
        return {address: reply for address, reply in replies.items() if address in self.masters}

    # -- attempts ----------------------------------------------------------------------------------------------------------

    async def _until(self, deadline: float, attempt: Callable[[], Awaitable[None]]) -> None:
        """Attempts until one succeeds. Raises StoreUnavailable at the deadline, with the last reason."""
        reason, failures, loop = "the server has not answered", 0, asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(deadline), self._calls:
                while True:
                    if self._closed:
                        raise StoreUnavailable(f"{self._url}: the store is not open")
                    try:
                        return await attempt()
                    except _Again as again:
                        reason = str(again)
                    pause_s = _PAUSES_S[min(failures, len(_PAUSES_S) - 1)]
                    if loop.time() + pause_s >= deadline:
                        break
                    failures += 1
                    await asyncio.sleep(pause_s)
        except TimeoutError:
            pass
        raise StoreUnavailable(f"{self._url}: not in time: {reason}")

    async def _attempt(self, waiting: dict[int, Request], replies: list[Any], lane: Lane) -> set[str]:
        """Sends what is waiting; what is answered leaves it. Returns why the rest was not."""
        groups: dict[Address, list[int]] = {}
        try:
            for index, request in waiting.items():
                groups.setdefault(self._topology.address(request.slot), []).append(index)
        except StoreUnavailable as error:
            await self._learn()
            return {str(error)}
        answers = await asyncio.gather(
            *(self._send(address, [waiting[index].command for index in indices], lane) for address, indices in groups.items())
        )
        verdicts: set[tuple[Address, Again]] = set()
        for (address, indices), answer in zip(groups.items(), answers, strict=True):
            for index, reply in zip(indices, answer, strict=True):
                match reply:
                    case Again():
                        verdicts.add((address, reply))
                    case KvdirError():
                        raise reply
                    case _:
                        replies[index] = reply
                        del waiting[index]
        for _, verdict in verdicts:
            self._figures.retried(verdict.reason)
        await self._follow(verdicts)
        return {f"{_words(address)}: {verdict.words or verdict.reason}" for address, verdict in verdicts}

    async def _follow(self, verdicts: set[tuple[Address, Again]]) -> None:
        """Does what the servers' answers ask for before the next attempt."""
        for address, verdict in verdicts:
            if verdict.load:
                await self._load(address)
        if any(verdict.elsewhere for _, verdict in verdicts):
            await self._learn()

    async def _send(self, address: Address, commands: Sequence[tuple[Argument, ...]], lane: Lane) -> list[object]:
        """Per command the reply, Again, or the error that it means. Raises nothing: others are sent to at the same time."""
        try:
            replies = await self._exchange(address, commands, lane)
        except _Again as again:
            return [Again(again.reason, elsewhere=True, words=str(again))] * len(commands)
        except KvdirError as error:
            return [error] * len(commands)
        return [judge(reply, _words(address)) if isinstance(reply, ReplyError) else reply for reply in replies]

    async def _exchange(self, address: Address, commands: Sequence[tuple[Argument, ...]], lane: Lane) -> list[object]:
        """Raw replies, errors among them. Raises _Again when the connection cannot be had or breaks."""
        try:
            connection = await self._connection(address, lane)
        except ReplyError as error:
            verdict = judge(error, _words(address))
            raise (_Again(verdict.reason, str(error)) if isinstance(verdict, Again) else verdict) from error
        try:
            async with asyncio.timeout(_SILENT_S):
                return await connection.send(commands)
        except TimeoutError:
            connection.abort("it was silent for too long")
            raise _Again("silent") from None
        except ConnectionLost as error:
            raise _Again("lost", f"connection lost: {error}") from error

    async def _one(self, address: Address, command: tuple[Argument, ...]) -> object:
        (reply,) = await self._exchange(address, [command], Lane.READ)
        if not isinstance(reply, ReplyError):
            return reply
        verdict = judge(reply, _words(address))
        raise (_Again(verdict.reason, f"{_words(address)}: {reply}") if isinstance(verdict, Again) else verdict)

    # -- what attempts need ------------------------------------------------------------------------------------------------

    async def _load(self, address: Address) -> None:
        """Puts the library on a master; its replicas get it from there."""
        (reply,) = await self._exchange(address, [("FUNCTION", "LOAD", self._library.code)], Lane.WRITE)
        if not isinstance(reply, ReplyError) or "already exists" in reply.rest:
            return
        verdict = judge(reply, _words(address))
        if isinstance(verdict, KvdirError):
            raise verdict

    async def _learn(self) -> None:
        """Asks anew who has what. Raises _Again if nobody says so."""

        async def learn() -> None:
            await self._topology.learn(self._ask)

        try:
            await self._share("learn", learn)
        except StoreUnavailable as error:
            raise _Again("learn", str(error)) from error

    async def _ask(self, address: Address, command: tuple[Argument, ...]) -> object:
        """See topology.Ask."""
        try:
            (reply,) = await self._exchange(address, [command], Lane.LEARN)
        except _Again as error:
            raise StoreUnavailable(f"{_words(address)}: {error}") from error
        if isinstance(reply, ReplyError):
            raise reply
        return reply

    async def _connection(self, address: Address, lane: Lane) -> Connection:
        """Raises ReplyError when the server does not let us in, _Again when it is not there."""
        key = (address, lane)
        connection = self._connections.get(key)
        if connection is not None and connection.usable:
            if connection.silent_s() < _SILENT_S:
                return connection
            connection.abort("it was silent for too long")
            raise _Again("silent")

        async def dial() -> Connection:
            if connection is not None:
                await connection.wait_closed()
            self._connections[key] = made = await self._dial(address, lane)
            return made

        try:
            return await self._share(key, dial)
        except TimeoutError:
            raise _Again("connect", "connecting takes too long") from None
        except ssl.SSLCertVerificationError as error:
            raise StoreRefused(
                f"{_words(address)}: its certificate is not trusted: {error.verify_message}: check ca"
            ) from error
        except (OSError, ConnectionLost) as error:
            raise _Again("connect", f"cannot connect: {error}") from error

    async def _dial(self, address: Address, lane: Lane) -> Connection:
        sentinel = lane is Lane.LEARN and self._url.kind is Kind.SENTINEL
        async with asyncio.timeout(self._url.connect_timeout_s):
            return await Connection.connect(
                address,
                credentials=self._url.sentinel_credentials if sentinel else self._url.credentials,
                db=0 if sentinel else self._url.db,
                tls=self._tls,
            )

    async def _share(self, key: object, work: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """The result of `work`, which runs once for all who ask for it at the same time, to its end."""
        task = self._shared.get(key)
        if task is None and self._closed:
            raise StoreUnavailable(f"{self._url}: the store was closed")
        if task is None:

            async def run() -> object:
                try:
                    return await work()
                except Exception as error:  # the caller's to raise; a task that nobody waits for any more says nothing
                    return _Failed(error)
                finally:
                    self._shared.pop(key, None)

            task = self._shared[key] = asyncio.get_running_loop().create_task(run())
        try:
            result = await asyncio.shield(task)
        except asyncio.CancelledError:
            if self._closed and task.cancelled():
                raise StoreUnavailable(f"{self._url}: the store was closed") from None
            raise
        if isinstance(result, _Failed):
            raise result.error
        return cast(ResultT, result)


@dataclass(frozen=True, slots=True)
class _Failed:
    error: Exception


def _words(address: Address) -> str:
    return f"{address[0]}:{address[1]}"


def _tls_context(files: TlsFiles | None) -> ssl.SSLContext | None:
    if files is None:
        return None
    try:
        context = ssl.create_default_context(cafile=files.ca or None)
        if files.cert:
            context.load_cert_chain(files.cert, files.key or None)
    except OSError as error:  # also ssl.SSLError
        raise ConfigError([f"store: TLS files cannot be used: {error}: check ca, cert and key"]) from error
    return context

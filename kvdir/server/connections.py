"""The open publish calls, and what is to be said on each.

Rules: what is said is bounded: an acknowledgement replaces the one before it, and repair requests are few by the core's own
rule. A stream has one connection; a newer one ends the older. Saying something never waits.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from typing import Any, Generic, Protocol, TypeVar

from kvdir.core.stream import StreamCursor
from kvdir.location import StreamState
from kvdir.v1 import events_pb2

_SAYINGS = 64


class Spoken(Protocol):
    """A stream, as far as a connection has to know it. cursor: counts in only what may be acknowledged."""

    @property
    def node(self) -> str: ...
    @property
    def epoch(self) -> int: ...
    @property
    def cursor(self) -> StreamCursor: ...
    @property
    def state(self) -> StreamState: ...


StreamT = TypeVar("StreamT", bound=Spoken)


class Connection(Generic[StreamT]):
    """One publish call. Its writer task sends what is put here, in order, then ends the call if `ending`."""

    def __init__(self, stream: StreamT, number: int, *, ack_every: int) -> None:
        self.stream = stream
        self.number = number
        self.wake = asyncio.Event()
        self.ending = False
        self._ack_every = ack_every
        self._acked_seq = 0
        self._heard = False
        self._sayings: deque[events_pb2.PublishResponse] = deque(maxlen=_SAYINGS)

    def say(self, response: events_pb2.PublishResponse) -> None:
        """Sends it soon."""
        self._sayings.append(response)
        self.wake.set()

    def end(self, response: events_pb2.PublishResponse | None = None) -> None:
        """Sends what is left, `response` last, and ends the call."""
        if response is not None:
            self._sayings.append(response)
        self.ending = True
        self.wake.set()

    def heard(self, *, now: bool = False) -> None:
        """Something arrived: it is acknowledged when enough has come together, with the next tick, or now."""
        self._heard = True
        if now or self.stream.cursor.top_seq - self._acked_seq >= self._ack_every:
            self.wake.set()

    def flush(self) -> None:
        """The tick: whatever is unacknowledged goes out."""
        if self._heard:
            self.wake.set()

    def take(self) -> events_pb2.PublishResponse | None:
        """What to send next; None when there is nothing."""
        if self._sayings:
            return self._sayings.popleft()
        if not self._heard:
            return None
        self._heard = False
        cursor = self.stream.cursor
        self._acked_seq = cursor.top_seq
        return events_pb2.PublishResponse(
            ack=events_pb2.Ack(seq=cursor.top_seq, state=int(self.stream.state))  # type: ignore[arg-type]
        )


class Connections:
    """By stream. Several calls of one stream exist only while an older one is being ended."""

    def __init__(self) -> None:
        self._by_stream: dict[tuple[str, int], Connection[Any]] = {}
        self._removed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._by_stream)

    def __iter__(self) -> Iterator[Connection[Any]]:
        return iter(tuple(self._by_stream.values()))

    def add(self, connection: Connection[Any]) -> None:
        """Takes the place of an older connection of the stream, which is ended."""
        key = (connection.stream.node, connection.stream.epoch)
        older = self._by_stream.get(key)
        if older is not None:
            older.end()
        self._by_stream[key] = connection

    def remove(self, connection: Connection[Any]) -> None:
        key = (connection.stream.node, connection.stream.epoch)
        if self._by_stream.get(key) is connection:
            del self._by_stream[key]
            self._removed.set()

    async def wait_removed(self) -> None:
        """Until some connection ends from now on."""
        self._removed.clear()
        await self._removed.wait()

    def get(self, node: str, epoch: int) -> Connection[Any] | None:
        return self._by_stream.get((node, epoch))

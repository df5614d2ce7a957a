"""Raw watch calls against a coordinator, and a replica with its reader: for tests of either end of the feed."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc.aio

from kvdir.client.publisher import Backoff
from kvdir.client.replica import METHOD, Replica
from kvdir.client.replica_reader import ReplicaReader
from kvdir.core.feed_items import Item, Response, Start
from kvdir.core.watcher import MIN_CREDIT_BYTES
from kvdir.rpc.watch_codec import decode_response, encode_credit, encode_start
from kvdir.v1 import directory_pb2


class RawWatch:
    """One call, read by hand. responses: all that came."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.responses: list[Response] = []
        self.received_bytes = 0
        self._unseen: deque[Any] = deque()

    async def read(self, *, within_s: float = 10.0) -> Response | None:
        """The next message; None at the end of the call."""
        async with asyncio.timeout(within_s):
            data = await self.call.read()
        if data is grpc.aio.EOF:
            return None
        self.received_bytes += len(data)
        response = decode_response(data)
        self.responses.append(response)
        self._unseen += [
            thing for thing in (response.welcome, *response.items, response.beat, response.end) if thing is not None
        ]
        return response

    async def until(self, kind: type[Any], *, within_s: float = 10.0) -> Any:
        """The next Welcome, item, Beat or End of this type; what comes before it is passed over."""
        async with asyncio.timeout(within_s):
            while True:
                while self._unseen:
                    thing = self._unseen.popleft()
                    if isinstance(thing, kind):
                        return thing
                assert await self.read() is not None, f"the call ended before {kind}"

    async def grant(self, more_bytes: int = MIN_CREDIT_BYTES) -> int:
        """Grants so much beyond what has come."""
        total_bytes = self.received_bytes + more_bytes
        await self.call.write(encode_credit(total_bytes))
        return total_bytes

    @property
    def items(self) -> list[Item]:
        return [item for response in self.responses for item in response.items]

    @property
    def position(self) -> int:
        return max((response.position for response in self.responses), default=0)


@contextlib.asynccontextmanager
async def watching(address: str, **start: Any) -> AsyncIterator[RawWatch]:
    """A call behind its start, of which fields may be given."""
    fields: dict[str, Any] = {"watcher": "raw", "credit_bytes": 4 * MIN_CREDIT_BYTES} | start
    async with grpc.aio.insecure_channel(address) as channel:
        call: Any = channel.stream_stream(
            METHOD, request_serializer=directory_pb2.WatchRequest.SerializeToString, response_deserializer=None
        )()
        await call.write(encode_start(Start(**fields)))
        yield RawWatch(call)
        call.cancel()


@contextlib.asynccontextmanager
async def replicating(
    addresses: str | Sequence[str], path: Path, **settings: Any
) -> AsyncIterator[tuple[Replica, ReplicaReader]]:
    """A replica that runs inside the block, and a reader of its region."""
    given: dict[str, Any] = {"backoff": Backoff(base_s=0.02, limit_s=0.1), "name": "test"} | settings
    replica = Replica(addresses, path=path, **given)
    replica.open()
    running = asyncio.create_task(replica.run())
    try:
        yield replica, ReplicaReader(str(path))
    finally:
        running.cancel()
        (outcome,) = await asyncio.gather(running, return_exceptions=True)
        if isinstance(outcome, Exception):
            raise outcome

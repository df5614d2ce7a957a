"""Raw watch calls against a coordinator, and a replica with its reader: for tests of either end of the feed."""

from __future__ import annotations

import asyncio
import contextlib
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

    async def read(self, *, within_s: float = 10.0) -> Response | None:
        """The next message; None at the end of the call."""
        async with asyncio.timeout(within_s):
            data = await self.call.read()
        if data is grpc.aio.EOF:
            return None
        self.received_bytes += len(data)
        self.responses.append(decode_response(data))
        return self.responses[-1]

    async def until(self, kind: type[Item] | str, *, within_s: float = 10.0) -> Any:
        """The next item of this type, or the next "welcome", "beat" or "end"."""
        async with asyncio.timeout(within_s):
            while True:
                response = await self.read()
                assert response is not None, f"the call ended before {kind}"
                if isinstance(kind, str):
                    if getattr(response, kind) is not None:
                        return getattr(response, kind)
                    continue
                for item in response.items:
                    if isinstance(item, kind):
                        return item

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

"""Calls that a lookup worker does not answer itself, carried to the main process as they are: bytes, deadline, metadata, end.

Rules: a message is read only when the one before it was taken at the other side, in both directions; whichever side ends or
breaks off the call, the other side hears it with its reason. Nothing is looked into, so no worker needs to know what main
learns to say; whose certificate the worker saw goes along, because main sees only the worker. Calls take turns over several
connections, since each carries MAX_STREAMS at most, which one client may open by itself; one of a request and an answer
ends in time, whatever its client does not send: main would never end one whose request does not come (grpc.aio).
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import grpc
import grpc.aio

from kvdir.rpc.caller import CERTIFICATE_KEY, caller, carried_claims

_OWN = frozenset(("user-agent", "te", "content-type", CERTIFICATE_KEY))
_OWN_PREFIXES = ("grpc-", ":")
"""Metadata that each connection makes for itself."""


def pass_through(
    channels: Sequence[grpc.aio.Channel], service: str, methods: Mapping[str, bool], *, max_deadline_s: float
) -> dict[str, Any]:
    """Handlers by method name. service: full name, such as "kvdir.v1.Admin". methods: whether anybody sends a stream there;
    a call where nobody does ends after max_deadline_s.
    """
    return {
        name: grpc.stream_stream_rpc_method_handler(
            _handler(channels, f"/{service}/{name}", math.inf if streams else max_deadline_s)
        )
        for name, streams in methods.items()
    }


def _handler(channels: Sequence[grpc.aio.Channel], method: str, limit_s: float) -> Any:
    turns: Iterator[Any] = itertools.cycle([channel.stream_stream(method) for channel in channels])

    async def handle(request_iterator: Any, context: Any) -> None:
        remaining_s = context.time_remaining()
        timeout_s = min(limit_s, math.inf if remaining_s is None else remaining_s)
        metadata = [item for item in context.invocation_metadata() or () if not _own(item[0])]
        metadata += carried_claims(caller())  # and never what the caller itself says there
        call = next(turns)(timeout=timeout_s if timeout_s < math.inf else None, metadata=grpc.aio.Metadata(*metadata))
        up = asyncio.create_task(_carry_up(context, call))
        try:
            async for message in call:
                await context.write(message)
            context.set_trailing_metadata(tuple(await call.trailing_metadata() or ()))
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details() or "", tuple(error.trailing_metadata() or ()))
        finally:
            call.cancel()
            up.cancel()
            await asyncio.gather(up, return_exceptions=True)

    return handle


def _own(key: str) -> bool:
    return key in _OWN or key.startswith(_OWN_PREFIXES)


async def _carry_up(context: Any, call: Any) -> None:
    try:
        while (message := await context.read()) is not grpc.aio.EOF:
            await call.write(message)
        await call.done_writing()
    except (grpc.RpcError, asyncio.InvalidStateError):
        return  # the call has ended; whoever reads its answers hears why

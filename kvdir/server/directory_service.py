"""kvdir.v1.Directory: lookups, one, several, or many over one call, and scores. Thin: sources answer."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

from kvdir.errors import KvdirError, TooLarge, Unsupported
from kvdir.location import PROTOCOL_VERSION
from kvdir.obs.spans import active
from kvdir.rpc.caller import caller
from kvdir.rpc.lookup_codec import decode_min_trust
from kvdir.rpc.score_codec import decode_parts, decode_weights, encode_scores
from kvdir.rpc.status import words
from kvdir.server.lookup_source import LookupSource
from kvdir.server.lookup_stream import LookupStreams, describe
from kvdir.server.score_source import ScoreSource, scored
from kvdir.v1 import directory_pb2, directory_pb2_grpc


class DirectoryService(directory_pb2_grpc.DirectoryServicer):
    """See the module docstring. max_fingerprints: in all lists of one LookupBatch together, where an empty list counts as
    one, because it costs as much; and in one Score. scores: none in a lookup worker, which passes that call on.
    """

    def __init__(
        self, source: LookupSource, streams: LookupStreams, *, max_fingerprints: int, scores: ScoreSource | None = None
    ) -> None:
        self._source = source
        self._streams = streams
        self._scores = scores
        self._max_fingerprints = max_fingerprints

    async def Lookup(self, request: directory_pb2.LookupRequest, context: Any) -> directory_pb2.LookupResponse:
        found = self._source.lookup(request)
        answer = await found if inspect.isawaitable(found) else found
        describe(active(), answer)
        return answer

    async def LookupBatch(self, request: directory_pb2.LookupBatchRequest, context: Any) -> directory_pb2.LookupBatchResponse:
        asked = sum(max(1, len(item.fingerprints.packed) // (item.fingerprints.width or 32)) for item in request.requests)
        if asked > self._max_fingerprints:
            raise TooLarge(f"{asked} fingerprints in one call, max_fingerprints is {self._max_fingerprints}: split the batch")
        responses = await asyncio.gather(*(self._lookup_or_error(item) for item in request.requests))
        return directory_pb2.LookupBatchResponse(protocol_version=PROTOCOL_VERSION, responses=responses)

    async def LookupStream(self, request_iterator: Any, context: Any) -> None:
        await self._streams.serve(context)

    async def Score(self, request: directory_pb2.ScoreRequest, context: Any) -> directory_pb2.ScoreResponse:
        if self._scores is None:
            raise Unsupported("this process answers lookups only: ask the coordinator's main process")
        return encode_scores(
            await scored(
                self._scores,
                decode_parts(request),
                weights=decode_weights(request),
                min_trust=decode_min_trust(request.min_trust),
                max_instances=request.max_instances,
                max_fingerprints=self._max_fingerprints,
                tenants=caller().tenants,
            )
        )

    async def _lookup_or_error(self, request: directory_pb2.LookupRequest) -> directory_pb2.LookupResponse:
        try:
            answer = self._source.lookup(request)
            return await answer if inspect.isawaitable(answer) else answer
        except KvdirError as error:
            return directory_pb2.LookupResponse(protocol_version=PROTOCOL_VERSION, error=words(error))

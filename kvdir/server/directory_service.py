"""kvdir.v1.Directory: lookups. Answers from memory, never waits."""

from __future__ import annotations

from typing import Any

from kvdir.core.answer import LookupMode
from kvdir.errors import KvdirError, TooLarge
from kvdir.location import PROTOCOL_VERSION
from kvdir.rpc.lookup_codec import decode_fingerprints, decode_min_trust, encode_lookup
from kvdir.server.coordinator import Coordinator
from kvdir.v1 import directory_pb2, directory_pb2_grpc

_PREFIX = int(LookupMode.PREFIX)


class DirectoryService(directory_pb2_grpc.DirectoryServicer):
    """See the module docstring."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    async def Lookup(self, request: directory_pb2.LookupRequest, context: Any) -> directory_pb2.LookupResponse:
        return self._lookup(request)

    async def LookupBatch(self, request: directory_pb2.LookupBatchRequest, context: Any) -> directory_pb2.LookupBatchResponse:
        limit = self._coordinator.config.max_fingerprints
        asked = sum(len(item.fingerprints.packed) // (item.fingerprints.width or 32) for item in request.requests)
        if asked > limit:
            raise TooLarge(f"{asked} fingerprints in one call, max_fingerprints is {limit}: split the batch")
        return directory_pb2.LookupBatchResponse(
            protocol_version=PROTOCOL_VERSION, responses=[self._lookup_or_error(item) for item in request.requests]
        )

    def _lookup(self, request: directory_pb2.LookupRequest) -> directory_pb2.LookupResponse:
        coordinator = self._coordinator
        answer = coordinator.directory.lookup(
            request.namespace_digest,
            decode_fingerprints(request.fingerprints),
            prefix=request.mode == _PREFIX,
            touch=request.touch,
            min_trust=decode_min_trust(request.min_trust),
            now_s=coordinator.now_s(),
        )
        return encode_lookup(answer)

    def _lookup_or_error(self, request: directory_pb2.LookupRequest) -> directory_pb2.LookupResponse:
        try:
            return self._lookup(request)
        except KvdirError as error:
            return directory_pb2.LookupResponse(protocol_version=PROTOCOL_VERSION, error=f"{error.code}: {error}")

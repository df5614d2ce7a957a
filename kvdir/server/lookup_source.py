"""Where a server's answers to lookups come from. A port: the directory of this process here; a region or a store elsewhere.

Rules: a lookup that can be answered from memory is answered at once, without a task; one that has to wait for somebody comes
back as an awaitable. A refusal is a KvdirError, raised here or by the awaitable. Namespaces that the caller may not see
(kvdir/rpc/caller.py) are unknown.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol

from kvdir.core.answer import Lookup, LookupMode
from kvdir.core.recent_lookups import RecentLookups
from kvdir.obs import trace
from kvdir.rpc.caller import caller
from kvdir.rpc.lookup_codec import decode_fingerprints, decode_min_trust, encode_lookup
from kvdir.server.coordinator import Coordinator
from kvdir.v1 import directory_pb2

PREFIX = int(LookupMode.PREFIX)


class LookupSource(Protocol):
    """See the module docstring."""

    def lookup(
        self, request: directory_pb2.LookupRequest
    ) -> directory_pb2.LookupResponse | Awaitable[directory_pb2.LookupResponse]:
        """The answer, or a wait for it. Raises KvdirError."""
        ...


class DirectorySource:
    """LookupSource over the coordinator's own directory: never waits."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def lookup(self, request: directory_pb2.LookupRequest) -> directory_pb2.LookupResponse:
        coordinator = self._coordinator
        answer = coordinator.directory.lookup(
            request.namespace_digest,
            decode_fingerprints(request.fingerprints),
            prefix=request.mode == PREFIX,
            touch=request.touch,
            min_trust=decode_min_trust(request.min_trust),
            tenants=caller().tenants,
            now_s=coordinator.now_s(),
        )
        remember(coordinator.recent, request.namespace_digest, answer, now_s=coordinator.now_s())
        return encode_lookup(answer)


def remember(recent: RecentLookups, namespace_digest: bytes, answer: Lookup, *, now_s: float) -> None:
    """Among the newest lookups, under the name of the request that is current."""
    context = trace.current()
    trace_id = context.trace_id if context is not None else ""
    recent.add(now_s, namespace_digest, answer, request_id=trace.request_id(), trace_id=trace_id)

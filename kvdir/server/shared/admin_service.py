"""kvdir.v1.Admin over a shared store: what any coordinator can say about all nodes, and in words what none of them can."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from kvdir.errors import InvalidInput, Unsupported
from kvdir.location import PROTOCOL_VERSION
from kvdir.rpc.admin_codec import encode_node, encode_status, encode_sums
from kvdir.rpc.lookup_codec import encode_trust
from kvdir.server.admin_sight import of_all_tenants, visible_sums, who_am_i
from kvdir.server.shared.coordinator import SharedCoordinator
from kvdir.v1 import admin_pb2, admin_pb2_grpc

_ANSWER_S = 0.1
"""Left of a deadline for the answer to travel in."""


class SharedAdminService(admin_pb2_grpc.AdminServicer):
    """See the module docstring."""

    def __init__(self, coordinator: SharedCoordinator) -> None:
        self._coordinator = coordinator

    async def WhoAmI(self, request: admin_pb2.WhoAmIRequest, context: Any) -> admin_pb2.WhoAmIResponse:
        return who_am_i(self._coordinator.security, self._coordinator.name)

    async def Nodes(self, request: admin_pb2.NodesRequest, context: Any) -> admin_pb2.NodesResponse:
        of_all_tenants()
        now_s = self._coordinator.now_s()
        views = self._coordinator.link.fleet.views(now_s)
        return admin_pb2.NodesResponse(
            protocol_version=PROTOCOL_VERSION, nodes=[encode_node(view, now_s=now_s) for view in views]
        )

    async def Views(self, request: admin_pb2.ViewsRequest, context: Any) -> admin_pb2.ViewsResponse:
        now_s, link = self._coordinator.now_s(), self._coordinator.link
        return encode_sums(visible_sums(link.fleet.sums(link.namespaces, now_s=now_s), link.namespaces), now_s=now_s)

    async def Status(self, request: admin_pb2.StatusRequest, context: Any) -> admin_pb2.StatusResponse:
        of_all_tenants()
        return encode_status(self._coordinator.status())

    async def Reconcile(self, request: admin_pb2.ReconcileRequest, context: Any) -> admin_pb2.ReconcileResponse:
        of_all_tenants()
        coordinator = self._coordinator
        session = coordinator.sessions.get(request.node)
        if session is None:
            saved = coordinator.link.fleet.saved(request.node)
            if saved is None or saved.left:
                raise InvalidInput(f"no live node {request.node!r}; `kvdir nodes` lists them")
            raise InvalidInput(
                f"node {request.node!r} published last to coordinator {saved.coordinator} of this store: ask that one"
            )
        limit_s, remaining_s = coordinator.config.max_deadline_s, context.time_remaining()
        timeout_s = max(0.0, min(limit_s, limit_s if remaining_s is None else remaining_s) - _ANSWER_S)
        done = await session.restate(timeout_s=timeout_s)
        return admin_pb2.ReconcileResponse(
            protocol_version=PROTOCOL_VERSION,
            done=done,
            trust=encode_trust(session.stream.trust(coordinator.now_s())),
            blocks=sum(held.blocks for held in session.stream.holders.values()),
        )

    async def Story(self, request: admin_pb2.StoryRequest, context: Any) -> admin_pb2.StoryResponse:
        raise Unsupported("not with --store redis: coordinators that share a store keep no story; their logs tell of streams")

    async def Quotas(self, request: admin_pb2.QuotasRequest, context: Any) -> admin_pb2.QuotasResponse:
        raise Unsupported("not with --store redis: quotas are kept by coordinators with a directory of their own")

    async def Digests(self, request: admin_pb2.DigestsRequest, context: Any) -> admin_pb2.DigestsResponse:
        raise Unsupported("not with --store redis: coordinators that share a store share one directory, so nothing can differ")

    async def Dump(self, request: admin_pb2.DumpRequest, context: Any) -> AsyncIterator[admin_pb2.DumpChunk]:
        raise Unsupported("not with --store redis: the directory lies in Redis, dump that (redis-cli --rdb)")
        yield admin_pb2.DumpChunk()

"""kvdir.v1.Admin: what operators ask. Nothing here is on a hot path."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from kvdir.core.digests import DigestsView, stream_digests
from kvdir.core.inspect import dump_part, node_views
from kvdir.core.quota_views import quotas_view
from kvdir.core.totals import sums_view
from kvdir.errors import InvalidInput
from kvdir.location import PROTOCOL_VERSION
from kvdir.rpc.admin_codec import encode_node, encode_part, encode_status, encode_sums
from kvdir.rpc.caller import caller
from kvdir.rpc.digest_codec import encode_digests
from kvdir.rpc.lookup_codec import encode_trust
from kvdir.rpc.story_codec import encode_quotas, encode_story
from kvdir.server.admin_sight import of_all_tenants, visible_sums, who_am_i
from kvdir.server.coordinator import Coordinator
from kvdir.v1 import admin_pb2, admin_pb2_grpc

_CHUNK_BLOCKS = 16_384
_MAX_CHUNK_BLOCKS = 262_144
_STORY_ENTRIES = 200
_MAX_STORY_ENTRIES = 4_096
_ANSWER_S = 0.1
"""Left of a deadline for the answer to travel in."""


class AdminService(admin_pb2_grpc.AdminServicer):
    """See the module docstring."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    async def WhoAmI(self, request: admin_pb2.WhoAmIRequest, context: Any) -> admin_pb2.WhoAmIResponse:
        return who_am_i(self._coordinator.security, self._coordinator.name)

    async def Nodes(self, request: admin_pb2.NodesRequest, context: Any) -> admin_pb2.NodesResponse:
        of_all_tenants()
        now_s = self._coordinator.now_s()
        views = node_views(self._coordinator.directory, now_s=now_s)
        return admin_pb2.NodesResponse(
            protocol_version=PROTOCOL_VERSION, nodes=[encode_node(view, now_s=now_s) for view in views]
        )

    async def Views(self, request: admin_pb2.ViewsRequest, context: Any) -> admin_pb2.ViewsResponse:
        now_s, directory = self._coordinator.now_s(), self._coordinator.directory
        return encode_sums(visible_sums(sums_view(directory, now_s=now_s), directory.namespaces), now_s=now_s)

    async def Status(self, request: admin_pb2.StatusRequest, context: Any) -> admin_pb2.StatusResponse:
        of_all_tenants()
        return encode_status(self._coordinator.status())

    async def Story(self, request: admin_pb2.StoryRequest, context: Any) -> admin_pb2.StoryResponse:
        of_all_tenants()
        if bool(request.node) == bool(request.fingerprint):
            raise InvalidInput("a story is of a node or of a fingerprint: give one of them")
        if request.fingerprint and len(request.fingerprint) < 8:
            raise InvalidInput(f"{len(request.fingerprint)} bytes of a fingerprint: at least its first 8 are needed")
        now_s, story = self._coordinator.now_s(), self._coordinator.directory.story
        limit = min(request.max_entries or _STORY_ENTRIES, _MAX_STORY_ENTRIES)
        pages = story.pages()
        if request.node:
            entries = await asyncio.to_thread(pages.of_node, request.node, max_entries=limit)
        else:
            entries = await asyncio.to_thread(pages.of_block, request.fingerprint, max_entries=limit)
        return encode_story(entries, reaches_back_s=story.reaches_back_s(now_s), now_s=now_s)

    async def Quotas(self, request: admin_pb2.QuotasRequest, context: Any) -> admin_pb2.QuotasResponse:
        of_all_tenants()
        coordinator, now_s = self._coordinator, self._coordinator.now_s()
        return encode_quotas(quotas_view(coordinator.quotas, coordinator.directory.orphans), now_s=now_s)

    async def Digests(self, request: admin_pb2.DigestsRequest, context: Any) -> admin_pb2.DigestsResponse:
        of_all_tenants()
        if request.sketches and not request.node:
            raise InvalidInput("sketches are given for one node at a time: name the node")
        coordinator = self._coordinator
        streams = stream_digests(coordinator.directory, node=request.node, sketches=request.sketches, now_s=coordinator.now_s())
        return encode_digests(DigestsView(coordinator.name, streams))

    async def Dump(self, request: admin_pb2.DumpRequest, context: Any) -> AsyncIterator[admin_pb2.DumpChunk]:
        cursor = 0
        max_blocks = min(request.chunk_blocks or _CHUNK_BLOCKS, _MAX_CHUNK_BLOCKS)
        while True:
            cursor, part = dump_part(
                self._coordinator.directory,
                cursor,
                max_blocks=max_blocks,
                namespace_digest=request.namespace_digest,
                node=request.node,
                tenants=caller().tenants,
            )
            if part.keys:
                yield encode_part(part)
            if cursor == 0:
                return
            await asyncio.sleep(0)  # events and lookups go first

    async def Reconcile(self, request: admin_pb2.ReconcileRequest, context: Any) -> admin_pb2.ReconcileResponse:
        of_all_tenants()
        coordinator = self._coordinator
        stream = coordinator.directory.want_snapshot(request.node)
        limit_s, remaining_s = coordinator.config.max_deadline_s, context.time_remaining()
        timeout_s = max(0.0, min(limit_s, limit_s if remaining_s is None else remaining_s) - _ANSWER_S)
        done = await coordinator.wait_snapshot(request.node, timeout_s=timeout_s)
        return admin_pb2.ReconcileResponse(
            protocol_version=PROTOCOL_VERSION,
            done=done,
            trust=encode_trust(stream.trust(coordinator.now_s())),
            blocks=sum(holder.claimed for holder in stream.holders.values()),
        )

"""The calls of the coordinator's API: how each request is made and its answer read. Shared by the aio and the sync client.

A call is a value: which method, the request, and how to read the response. So both clients differ only in how they wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kvdir.core.answer import Lookup, LookupMode
from kvdir.core.digests import DigestsView
from kvdir.core.feedback import Feedback, StaleReport
from kvdir.core.quota_views import QuotasView
from kvdir.core.score import ScorePart, Scores
from kvdir.core.views import NodeView, StatusView, SumsView
from kvdir.fingerprint import Fingerprints
from kvdir.location import MinTrust, NodeTrust, Tier
from kvdir.rpc.admin_codec import decode_node, decode_status, decode_sums
from kvdir.rpc.digest_codec import decode_digests
from kvdir.rpc.event_codec import encode_stale_report
from kvdir.rpc.lookup_codec import check_version, decode_lookup, decode_trust, encode_lookup_request
from kvdir.rpc.score_codec import decode_scores, encode_score_request
from kvdir.rpc.story_codec import StoryAnswer, decode_quotas, decode_story
from kvdir.v1 import admin_pb2, directory_pb2, events_pb2

AnswerT = TypeVar("AnswerT")

LOOKUP_METHOD = "/kvdir.v1.Directory/Lookup"


@dataclass(frozen=True, slots=True)
class Call(Generic[AnswerT]):
    """method: "/package.Service/Method". Every call may be sent again to another coordinator: none of them counts twice.

    hedged: short, and changes nothing, so that a second coordinator may be asked beside a slow one.
    """

    method: str
    request: Any
    response: type[Any]
    read: Callable[[Any], AnswerT]
    hedged: bool = False


@dataclass(frozen=True, slots=True)
class Reconciled:
    """done: whether the snapshot was applied before the deadline. blocks: what the node holds, as far as is known."""

    done: bool
    trust: NodeTrust
    blocks: int


@dataclass(frozen=True, slots=True)
class WhoAmI:
    """What a coordinator takes the caller for. tenants, stores: names of the policy; `*`: all. remark: why it may be more than
    it seems.
    """

    coordinator: str
    identity: str
    certificate: str
    roles: tuple[str, ...]
    tenants: tuple[str, ...]
    stores: tuple[str, ...]
    nodes: tuple[str, ...]
    remark: str


def lookup(
    namespace_digest: bytes, fingerprints: Fingerprints, *, mode: LookupMode, touch: bool, min_trust: MinTrust = MinTrust.ANY
) -> Call[Lookup]:
    request = encode_lookup_request(namespace_digest, fingerprints, mode=mode, touch=touch, min_trust=min_trust)
    return Call(LOOKUP_METHOD, request, directory_pb2.LookupResponse, decode_lookup, hedged=True)


def score(
    parts: Sequence[ScorePart], *, weights: Mapping[Tier, float], min_trust: MinTrust, max_instances: int
) -> Call[Scores]:
    request = encode_score_request(parts, weights=weights, min_trust=min_trust, max_instances=max_instances)
    return Call("/kvdir.v1.Directory/Score", request, directory_pb2.ScoreResponse, decode_scores, hedged=True)


def report_stale(report: StaleReport) -> Call[Feedback]:
    def read(response: events_pb2.ReportStaleResponse) -> Feedback:
        check_version(response.protocol_version)
        return Feedback(response.removed, response.ignored_reason)

    return Call("/kvdir.v1.Events/ReportStale", encode_stale_report(report), events_pb2.ReportStaleResponse, read)


def nodes() -> Call[tuple[NodeView, ...]]:
    def read(response: admin_pb2.NodesResponse) -> tuple[NodeView, ...]:
        check_version(response.protocol_version)
        now_s = time.monotonic()
        return tuple(decode_node(info, now_s=now_s) for info in response.nodes)

    return Call("/kvdir.v1.Admin/Nodes", admin_pb2.NodesRequest(), admin_pb2.NodesResponse, read)


def status() -> Call[StatusView]:
    def read(response: admin_pb2.StatusResponse) -> StatusView:
        check_version(response.protocol_version)
        return decode_status(response)

    return Call("/kvdir.v1.Admin/Status", admin_pb2.StatusRequest(), admin_pb2.StatusResponse, read)


def views() -> Call[SumsView]:
    def read(response: admin_pb2.ViewsResponse) -> SumsView:
        check_version(response.protocol_version)
        return decode_sums(response, now_s=time.monotonic())

    return Call("/kvdir.v1.Admin/Views", admin_pb2.ViewsRequest(), admin_pb2.ViewsResponse, read)


def who_am_i() -> Call[WhoAmI]:
    def read(response: admin_pb2.WhoAmIResponse) -> WhoAmI:
        check_version(response.protocol_version)
        return WhoAmI(
            response.coordinator,
            response.identity,
            response.certificate,
            tuple(response.roles),
            tuple(response.tenants),
            tuple(response.stores),
            tuple(response.nodes),
            response.remark,
        )

    return Call("/kvdir.v1.Admin/WhoAmI", admin_pb2.WhoAmIRequest(), admin_pb2.WhoAmIResponse, read)


def reconcile(node: str) -> Call[Reconciled]:
    def read(response: admin_pb2.ReconcileResponse) -> Reconciled:
        check_version(response.protocol_version)
        return Reconciled(response.done, decode_trust(response.trust), response.blocks)

    request = admin_pb2.ReconcileRequest(node=node)
    return Call("/kvdir.v1.Admin/Reconcile", request, admin_pb2.ReconcileResponse, read)


def story(*, node: str, fingerprint: bytes, max_entries: int) -> Call[StoryAnswer]:
    def read(response: admin_pb2.StoryResponse) -> StoryAnswer:
        check_version(response.protocol_version)
        return decode_story(response, now_s=time.monotonic())

    request = admin_pb2.StoryRequest(node=node, fingerprint=fingerprint, max_entries=max_entries)
    return Call("/kvdir.v1.Admin/Story", request, admin_pb2.StoryResponse, read)


def quotas() -> Call[QuotasView]:
    def read(response: admin_pb2.QuotasResponse) -> QuotasView:
        check_version(response.protocol_version)
        return decode_quotas(response, now_s=time.monotonic())

    return Call("/kvdir.v1.Admin/Quotas", admin_pb2.QuotasRequest(), admin_pb2.QuotasResponse, read)


def digests(*, node: str, sketches: bool) -> Call[DigestsView]:
    def read(response: admin_pb2.DigestsResponse) -> DigestsView:
        check_version(response.protocol_version)
        return decode_digests(response)

    request = admin_pb2.DigestsRequest(node=node, sketches=sketches)
    return Call("/kvdir.v1.Admin/Digests", request, admin_pb2.DigestsResponse, read)


DUMP_METHOD = "/kvdir.v1.Admin/Dump"


def dump_request(*, namespace_digest: bytes, node: str, chunk_blocks: int) -> admin_pb2.DumpRequest:
    return admin_pb2.DumpRequest(namespace_digest=namespace_digest, node=node, chunk_blocks=chunk_blocks)

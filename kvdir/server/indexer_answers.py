"""Answers of the indexer API, in the shapes that routers read. Pure.

Counts are tokens, and cumulative as both known implementations have them: GPU what is restorable from GPU memory alone, CPU
with host memory behind it, DISK with disk and remote stores, so that longest_matched is the last of them. DP is GPU by
data-parallel rank. What is ours stands under one key, `kvdir`, which readers of the RFC pass over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvdir.core.score import InstanceScore, RankScore, Scores
from kvdir.engines.events import lora_name_of
from kvdir.location import NodeTrust
from kvdir.server.indexer_requests import Api, Registration

NOTHING = (0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Hit:
    """One instance as a router calls it. ranks: at least one when it is answered."""

    instance_id: str
    score: float = 0.0
    ranks: tuple[RankScore, ...] = ()
    trusts: tuple[NodeTrust, ...] = ()

    @classmethod
    def of(cls, instance_id: str, item: InstanceScore, scores: Scores) -> Hit:
        return cls(instance_id, item.score, item.ranks, tuple(scores.nodes[number] for number in item.nodes))

    def with_rank(self, rank: int) -> Hit:
        """Itself, with a rank that is known; it has nothing unless something was found."""
        if any(known.dp_rank == rank for known in self.ranks):
            return self
        return replace(self, ranks=(*self.ranks, RankScore(rank, 0, NOTHING)))

    @property
    def through(self) -> tuple[int, int, int]:
        """The best rank's, with nothing slower than gpu, cpu, and anything."""
        gpu, cpu, _, last = (max(rank.through[level] for rank in self.ranks) for level in range(4))
        return gpu, cpu, last


def query_answer(
    hits: Iterable[Hit], scores: Scores, *, skipped: Mapping[str, str], api: Api, tenant: str, block_tokens: int
) -> dict[str, Any]:
    """Of /query and /query_by_hash. skipped: namespaces that were not asked, with the reason. block_tokens: what `frequencies`
    of Dynamo count in; 0: nobody knows.
    """
    hits = list(hits)
    about: dict[str, Any] = {"warming": scores.warming, "incomplete": scores.incomplete}
    if skipped:
        about["skipped_namespaces"] = dict(skipped)
    instances = {hit.instance_id: _lower(hit, about) for hit in hits}
    if api is Api.DYNAMO:
        device = {
            hit.instance_id: {str(rank.dp_rank): rank.through[0] for rank in hit.ranks if rank.through[0]} for hit in hits
        }
        return {
            "scores": {name: ranks for name, ranks in device.items() if ranks},
            "frequencies": _frequencies([rank.through[0] for hit in hits for rank in hit.ranks], block_tokens),
            "instances": instances,
        }
    return {tenant: {hit.instance_id: _upper(hit, about) for hit in hits}, "instances": instances}


def _device(hit: Hit) -> dict[str, int]:
    return {str(rank.dp_rank): rank.through[0] for rank in hit.ranks if rank.through[0]}


def _upper(hit: Hit, about: Mapping[str, Any]) -> dict[str, Any]:
    """As the text of RFC Mooncake #1403 has it."""
    gpu, cpu, disk = hit.through
    dp = {str(rank.dp_rank): rank.through[0] for rank in hit.ranks}
    return {"longest_matched": disk, "GPU": gpu, "DP": dp, "CPU": cpu, "DISK": disk, "kvdir": _ours(hit, about)}


def _lower(hit: Hit, about: Mapping[str, Any]) -> dict[str, Any]:
    """As Mooncake's conductor and Dynamo's indexer answer."""
    gpu, cpu, disk = hit.through
    return {
        "longest_matched": disk,
        "gpu": gpu,
        "dp": {str(rank.dp_rank): rank.through[0] for rank in hit.ranks},
        "cpu": cpu,
        "disk": disk,
        "rank_matches": {
            str(rank.dp_rank): {"gpu": rank.through[0], "cpu": rank.through[1], "disk": rank.through[3]} for rank in hit.ranks
        },
        "kvdir": _ours(hit, about),
    }


def _ours(hit: Hit, about: Mapping[str, Any]) -> dict[str, Any]:
    """about: the answer as a whole, in each instance because the RFC has no other place for it."""
    return {"score": hit.score, "streams": [stream_document(trust) for trust in hit.trusts], **about}


def _frequencies(device_tokens: Iterable[int], block_tokens: int) -> list[int]:
    """Per block from the start, at how many ranks it is."""
    blocks = [tokens // block_tokens for tokens in device_tokens] if block_tokens else []
    return [sum(count > at for count in blocks) for at in range(max(blocks, default=0))]


def stream_document(trust: NodeTrust) -> dict[str, Any]:
    """How far a stream can be believed."""
    return {
        "stream": trust.node,
        "state": trust.state.name.lower(),
        "reason": trust.reason,
        "age_s": round(trust.age_s, 3),
        "missing_events": trust.missing_events,
        "confirmed": round(trust.confirmed, 4),
    }


@dataclass(frozen=True, slots=True)
class Listener:
    """A stream that is followed. words: why it is not as it should be; "" when it is."""

    stream: str
    connected: bool
    words: str = ""


def worker_document(
    registrations: Iterable[tuple[Registration, str]], listeners: Mapping[str, Listener], trusts: Mapping[str, NodeTrust]
) -> dict[str, Any]:
    """One instance of /workers, as Dynamo's indexer lists it. registrations: of all its ranks, with their streams' names."""
    ranks = list(registrations)
    first = ranks[0][0]
    shown = {str(item.dp_rank or 0): _listener(item, stream, listeners, trusts) for item, stream in ranks}
    statuses = {entry["status"] for entry in shown.values()}
    return {
        "instance_id": first.given,
        "source": "zmq",
        "status": next(status for status in ("failed", "pending", "active") if status in statuses),
        "model_name": first.model,
        "routing_group": first.tenant,
        "tenant_id": first.tenant,
        "lora_name": lora_name_of(first.adapter) or "",
        "type": first.dialect,
        "block_size": first.block_tokens,
        "endpoints": {str(item.dp_rank or 0): item.endpoint for item, _ in ranks},
        "listeners": shown,
    }


def _listener(
    item: Registration, stream: str, listeners: Mapping[str, Listener], trusts: Mapping[str, NodeTrust]
) -> dict[str, Any]:
    listener, trust = listeners.get(stream, Listener(stream, False)), trusts.get(stream)
    status = "active" if listener.connected else "failed" if listener.words else "pending"
    document: dict[str, Any] = {"endpoint": item.endpoint, "replay_endpoint": item.replay, "status": status}
    if listener.words:
        document["last_error"] = listener.words
    return document | ({"kvdir": stream_document(trust)} if trust is not None else {})


def agent_document(instance: str, model: str, streams: Iterable[tuple[int, NodeTrust]]) -> dict[str, Any]:
    """An instance that an agent follows: nobody registered it, routers may send it requests all the same."""
    listeners = {str(rank): {"status": "active", "kvdir": stream_document(trust)} for rank, trust in streams}
    return {"instance_id": instance, "source": "agent", "status": "active", "model_name": model, "listeners": listeners}

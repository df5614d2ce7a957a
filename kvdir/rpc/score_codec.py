"""kvdir.v1 score messages <-> values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from kvdir.core.score import InstanceScore, RankScore, ScoreGroup, ScoreName, ScorePart, Scores
from kvdir.errors import InvalidInput, RemoteProtocolError
from kvdir.location import PROTOCOL_VERSION, MinTrust, Tier
from kvdir.rpc.lookup_codec import check_version, decode_fingerprints, decode_trust, encode_fingerprints, encode_trust
from kvdir.v1 import directory_pb2


def encode_score_request(
    parts: Sequence[ScorePart], *, weights: Mapping[Tier, float], min_trust: MinTrust, max_instances: int
) -> directory_pb2.ScoreRequest:
    return directory_pb2.ScoreRequest(
        parts=[_encode_part(part) for part in parts],
        weights=[
            directory_pb2.TierWeight(tier=int(tier), weight=weight)  # type: ignore[arg-type]
            for tier, weight in weights.items()
        ],
        min_trust=int(min_trust),  # type: ignore[arg-type]
        max_instances=max_instances,
    )


def decode_parts(request: directory_pb2.ScoreRequest) -> tuple[ScorePart, ...]:
    """Raises InvalidInput for nothing to score, a group without a name, and bad packing."""
    parts = tuple(
        ScorePart(
            tuple(
                ScoreGroup(
                    tuple(ScoreName(name.namespace_digest, decode_fingerprints(name.fingerprints)) for name in group.names)
                )
                for group in part.groups
            )
        )
        for part in request.parts
    )
    if not parts or not all(part.groups and all(group.names for group in part.groups) for part in parts):
        raise InvalidInput("a score needs at least one part, each part a group, and each group a name of the prompt's blocks")
    return parts


def decode_weights(request: directory_pb2.ScoreRequest) -> dict[Tier, float]:
    """Empty when none are given. A tier that this release does not know is left out. Raises InvalidInput."""
    if any(not math.isfinite(item.weight) or item.weight < 0 for item in request.weights):
        raise InvalidInput("a tier's weight must be a finite number, at least 0")
    return {Tier(item.tier): item.weight for item in request.weights if item.tier in _TIERS}


def encode_scores(scores: Scores) -> directory_pb2.ScoreResponse:
    return directory_pb2.ScoreResponse(
        protocol_version=PROTOCOL_VERSION,
        instances=[_encode_instance(item) for item in scores.instances],
        nodes=[encode_trust(trust) for trust in scores.nodes],
        warming=scores.warming,
        incomplete=scores.incomplete,
        unknown_namespaces=scores.unknown_namespaces,
        nodes_below_trust=scores.below_trust,
    )


def decode_scores(response: directory_pb2.ScoreResponse) -> Scores:
    """Raises RemoteProtocolError if an instance rests on a node that is not listed."""
    check_version(response.protocol_version)
    nodes = tuple(decode_trust(trust) for trust in response.nodes)
    if any(number >= len(nodes) for item in response.instances for number in item.nodes):
        raise RemoteProtocolError(
            "the coordinator's answer does not fit together: an instance rests on a node that is not listed"
        )
    return Scores(
        tuple(_decode_instance(item) for item in response.instances),
        nodes,
        response.warming,
        response.incomplete,
        tuple(response.unknown_namespaces),
        response.nodes_below_trust,
    )


def _encode_part(part: ScorePart) -> directory_pb2.ScorePart:
    return directory_pb2.ScorePart(
        groups=[
            directory_pb2.ScoreGroup(
                names=[
                    directory_pb2.ScoreName(
                        namespace_digest=name.namespace_digest, fingerprints=encode_fingerprints(name.fingerprints)
                    )
                    for name in group.names
                ]
            )
            for group in part.groups
        ]
    )


def _encode_instance(item: InstanceScore) -> directory_pb2.InstanceScore:
    return directory_pb2.InstanceScore(
        instance=item.instance,
        score=item.score,
        matched_tokens=item.matched_tokens,
        tiers=[
            directory_pb2.TierMatch(tier=int(tier), tokens=tokens)  # type: ignore[arg-type]
            for tier, tokens in item.tiers
        ],
        ranks=[directory_pb2.RankMatch(dp_rank=rank.dp_rank, tokens=rank.tokens, through=rank.through) for rank in item.ranks],
        nodes=item.nodes,
    )


def _decode_instance(item: directory_pb2.InstanceScore) -> InstanceScore:
    return InstanceScore(
        item.instance,
        item.score,
        item.matched_tokens,
        tuple((Tier(match.tier), match.tokens) for match in item.tiers if match.tier in _TIERS),
        tuple(RankScore(rank.dp_rank, rank.tokens, tuple(rank.through)) for rank in item.ranks),
        tuple(item.nodes),
    )


_TIERS = frozenset(int(tier) for tier in Tier)

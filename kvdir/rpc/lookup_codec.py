"""kvdir.v1 lookup messages <-> values."""

from __future__ import annotations

import math

from kvdir.core.answer import Lookup, LookupMode
from kvdir.errors import InvalidInput, RemoteProtocolError
from kvdir.fingerprint import Fingerprints
from kvdir.location import PROTOCOL_VERSION, MinTrust, NodeTrust, StreamState
from kvdir.v1 import common_pb2, directory_pb2


def decode_fingerprints(fingerprints: common_pb2.Fingerprints) -> Fingerprints:
    """Raises InvalidInput for a wrong width or packing."""
    return Fingerprints(fingerprints.packed, fingerprints.width)


def encode_fingerprints(fingerprints: Fingerprints) -> common_pb2.Fingerprints:
    return common_pb2.Fingerprints(packed=fingerprints.packed, width=fingerprints.width)


def encode_lookup_request(
    namespace_digest: bytes,
    fingerprints: Fingerprints,
    *,
    mode: LookupMode,
    touch: bool,
    min_trust: MinTrust = MinTrust.ANY,
) -> directory_pb2.LookupRequest:
    return directory_pb2.LookupRequest(
        namespace_digest=namespace_digest,
        fingerprints=encode_fingerprints(fingerprints),
        mode=int(mode),  # type: ignore[arg-type]
        touch=touch,
        min_trust=int(min_trust),  # type: ignore[arg-type]
    )


def decode_min_trust(min_trust: int) -> MinTrust:
    """Raises InvalidInput for a number this release does not know: answering with less trust than asked for would be a lie."""
    if min_trust == common_pb2.MIN_TRUST_UNSPECIFIED:
        return MinTrust.ANY
    if min_trust not in _MIN_TRUSTS:
        raise InvalidInput(f"min_trust {min_trust} is not known here: use one of {', '.join(item.name for item in MinTrust)}")
    return MinTrust(min_trust)


def encode_trust(trust: NodeTrust) -> common_pb2.NodeTrust:
    return common_pb2.NodeTrust(
        node=trust.node,
        epoch=trust.epoch,
        state=int(trust.state),  # type: ignore[arg-type]
        reason=trust.reason,
        age_ms=int(trust.age_s * 1000),
        missing_events=trust.missing_events,
        peer_address=trust.peer_address,
        confirmed=trust.confirmed,
    )


def decode_trust(trust: common_pb2.NodeTrust) -> NodeTrust:
    """A state this release does not know is taken for a gap: usable as a hint, not trusted."""
    state = StreamState(trust.state) if trust.state in _STATES else StreamState.GAP
    return NodeTrust(
        trust.node,
        trust.epoch,
        state,
        trust.reason,
        trust.age_ms / 1000,
        trust.missing_events,
        trust.peer_address,
        trust.confirmed,
    )


class NodesEncoder:
    """Encodes the nodes of answers, once for as long as answers name them by the same tuple; a third of what encoding costs."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[tuple[NodeTrust, ...], list[common_pb2.NodeTrust]]] = {}

    def encode(self, nodes: tuple[NodeTrust, ...]) -> list[common_pb2.NodeTrust]:
        known = self._known.get(id(nodes))
        if known is None:
            if len(self._known) >= _KEPT_NODES:
                self._known.clear()
            known = self._known[id(nodes)] = nodes, [encode_trust(trust) for trust in nodes]  # kept, so its id stays its own
        return known[1]


def encode_lookup(answer: Lookup, nodes: NodesEncoder | None = None) -> directory_pb2.LookupResponse:
    return directory_pb2.LookupResponse(
        protocol_version=PROTOCOL_VERSION,
        runs=answer.runs,
        sets=[directory_pb2.HolderSet(holders=packed) for packed in answer.sets],
        nodes=nodes.encode(answer.nodes) if nodes is not None else [encode_trust(trust) for trust in answer.nodes],
        hits=answer.hits,
        asked=answer.asked,
        warming=answer.warming,
        nodes_below_trust=answer.below_trust,
        lag_ms=math.ceil(answer.lag_s * 1e3),
        incomplete=answer.incomplete,
    )


def decode_lookup(response: directory_pb2.LookupResponse) -> Lookup:
    """Raises RemoteProtocolError if runs or sets do not fit together: an index out of range must not surface later."""
    check_version(response.protocol_version)
    answer = Lookup(
        runs=response.runs,
        sets=tuple(item.holders for item in response.sets),
        nodes=tuple(decode_trust(trust) for trust in response.nodes),
        hits=response.hits,
        asked=response.asked,
        warming=response.warming,
        below_trust=response.nodes_below_trust,
        lag_s=response.lag_ms / 1e3,
        incomplete=response.incomplete,
    )
    fault = answer.fault()
    if fault:
        raise RemoteProtocolError(f"the coordinator's answer does not fit together: {fault}")
    return answer


def check_version(version: int) -> None:
    """Raises RemoteProtocolError unless the other side speaks our version."""
    if version != PROTOCOL_VERSION:
        raise RemoteProtocolError(
            f"the other side speaks protocol version {version}, this one {PROTOCOL_VERSION}: run the same release on both"
        )


_KEPT_NODES = 256
_STATES = frozenset(int(state) for state in StreamState)
_MIN_TRUSTS = frozenset(int(item) for item in MinTrust)

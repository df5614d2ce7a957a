"""kvdir.v1.Digests <-> values."""

from __future__ import annotations

from kvdir.core.digests import DigestsView, StreamDigest
from kvdir.location import PROTOCOL_VERSION
from kvdir.rpc.event_codec import decode_part, encode_part
from kvdir.rpc.lookup_codec import decode_trust, encode_trust
from kvdir.v1 import admin_pb2


def encode_digests(view: DigestsView) -> admin_pb2.DigestsResponse:
    return admin_pb2.DigestsResponse(
        protocol_version=PROTOCOL_VERSION,
        coordinator=view.coordinator,
        streams=[
            admin_pb2.StreamDigest(
                trust=encode_trust(item.trust),
                applied_seq=item.applied_seq,
                announced_seq=item.announced_seq,
                parts=map(encode_part, item.parts),
                exact=item.exact,
            )
            for item in view.streams
        ],
    )


def decode_digests(response: admin_pb2.DigestsResponse) -> DigestsView:
    return DigestsView(
        response.coordinator,
        tuple(
            StreamDigest(
                decode_trust(item.trust),
                item.applied_seq,
                item.announced_seq,
                tuple(map(decode_part, item.parts)),
                item.exact,
            )
            for item in response.streams
        ),
    )

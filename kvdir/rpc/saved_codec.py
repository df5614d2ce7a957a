"""A node as coordinators of one store save it for each other <-> bytes: the operator's view of it, and what that leaves out.

Times travel as ages, because clocks of two machines have nothing in common; read back, they are relative to the moment of
saving.
"""

from __future__ import annotations

import msgspec
from google.protobuf.message import DecodeError

from kvdir.core.fleet import SavedNode
from kvdir.rpc.admin_codec import decode_node, encode_node
from kvdir.v1 import admin_pb2

_VERSION = 1


class _Record(msgspec.Struct, array_like=True, frozen=True):
    version: int
    view: bytes
    beat: int
    coordinator: str
    exact: bool
    resumable: bool
    namespaces: list[bytes]


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Record)


def encode_saved(saved: SavedNode, *, now_s: float) -> bytes:
    """now_s: on the clock that the view's times are of."""
    return _ENCODER.encode(
        _Record(
            _VERSION,
            encode_node(saved.view, now_s=now_s).SerializeToString(),
            saved.beat,
            saved.coordinator,
            saved.exact,
            saved.resumable,
            list(saved.namespaces),
        )
    )


def decode_saved(record: bytes) -> SavedNode | None:
    """None: another version, or not whole. The times in the view are relative to 0, the moment of saving."""
    try:
        fields = _DECODER.decode(record)
        info = admin_pb2.NodeInfo.FromString(fields.view)
    except (msgspec.DecodeError, DecodeError):
        return None
    if fields.version != _VERSION or not info.trust.node:
        return None
    return SavedNode(
        view=decode_node(info, now_s=0.0),
        beat=fields.beat,
        coordinator=fields.coordinator,
        exact=fields.exact,
        resumable=fields.resumable,
        namespaces=tuple(fields.namespaces),
    )

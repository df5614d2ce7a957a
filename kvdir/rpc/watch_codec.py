"""kvdir.v1 Watch messages <-> values (core/feed_items.py).

Responses are encoded piece by piece and concatenated: that is a message, too, with all items in order (protobuf encoding,
"last one wins, repeated fields append").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvdir.core.feed_items import (
    Beat,
    Dropped,
    End,
    Heard,
    HolderItem,
    Item,
    NamespaceGone,
    NamespaceItem,
    NodeGone,
    NodeItem,
    Page,
    Removed,
    Response,
    SnapshotEnd,
    Start,
    Stored,
    Welcome,
)
from kvdir.core.namespaces import Announced
from kvdir.errors import InvalidInput, RemoteProtocolError
from kvdir.location import PROTOCOL_VERSION
from kvdir.rpc.lookup_codec import check_version, decode_trust, encode_trust
from kvdir.v1 import common_pb2, directory_pb2

Pb = directory_pb2.WatchItem


def encode_start(start: Start) -> directory_pb2.WatchRequest:
    return directory_pb2.WatchRequest(
        start=directory_pb2.WatchStart(
            protocol_version=PROTOCOL_VERSION,
            watcher=start.watcher,
            log_id=start.log_id,
            position=start.position,
            namespace_digests=sorted(start.digests),
            credit_bytes=start.credit_bytes,
        )
    )


def decode_start(request: directory_pb2.WatchRequest) -> Start:
    """Raises RemoteProtocolError for anything but a start of our version, InvalidInput for digests that are none."""
    if request.WhichOneof("message") != "start":
        raise RemoteProtocolError("a watch call begins with start")
    start = request.start
    check_version(start.protocol_version)
    if any(len(digest) != 32 for digest in start.namespace_digests):
        raise InvalidInput("namespace digests have 32 bytes each; none at all watches every namespace")
    digests = frozenset(start.namespace_digests)
    return Start(start.watcher[:128], start.log_id, start.position, digests, start.credit_bytes)


def encode_credit(total_bytes: int) -> directory_pb2.WatchRequest:
    return directory_pb2.WatchRequest(credit=directory_pb2.WatchCredit(total_bytes=total_bytes))


def encode_item(item: Item) -> bytes:
    """A serialised WatchResponse with this item alone."""
    return directory_pb2.WatchResponse(items=[_TO_PB[type(item)](item)]).SerializeToString()


def encode_response(response: Response) -> bytes:
    """A serialised WatchResponse without items: those are encoded each on its own, once for all watchers."""
    pb = directory_pb2.WatchResponse(position=response.position)
    if response.welcome is not None:
        pb.welcome.CopyFrom(_welcome_to_pb(response.welcome))
    if response.beat is not None:
        beat = response.beat
        pb.beat.CopyFrom(
            directory_pb2.WatchBeat(
                head=beat.head,
                behind_us=int(beat.behind_s * 1e6),
                warming=beat.warming,
                incomplete=beat.incomplete,
                credit_bytes=beat.credit_bytes,
            )
        )
    if response.end is not None:
        pb.end.CopyFrom(directory_pb2.WatchEnd(reason=response.end.reason, begin_anew=response.end.begin_anew))
    return pb.SerializeToString()


def decode_response(data: bytes) -> Response:
    """Raises RemoteProtocolError for another version, or what is no message at all. Items of kinds unknown here do so, too:
    a copy that passed over a change would be wrong without knowing it.
    """
    try:
        pb = directory_pb2.WatchResponse.FromString(data)
    except Exception as error:  # protobuf's DecodeError differs between its implementations
        raise RemoteProtocolError(f"the coordinator sent what is no WatchResponse: {error}") from error
    return Response(
        welcome=_welcome_from_pb(pb.welcome) if pb.HasField("welcome") else None,
        items=tuple([_item_from_pb(item) for item in pb.items]),
        position=pb.position,
        beat=_beat_from_pb(pb.beat) if pb.HasField("beat") else None,
        end=End(pb.end.reason, pb.end.begin_anew) if pb.HasField("end") else None,
    )


def _welcome_to_pb(welcome: Welcome) -> directory_pb2.WatchWelcome:
    return directory_pb2.WatchWelcome(
        protocol_version=PROTOCOL_VERSION,
        coordinator=welcome.coordinator,
        log_id=welcome.log_id,
        snapshot=welcome.snapshot,
        seed=welcome.seed,
        blocks=welcome.blocks,
        beat_interval_ms=round(welcome.beat_interval_s * 1000),
        stale_after_ms=round(welcome.stale_after_s * 1000),
        expire_after_ms=round(welcome.expire_after_s * 1000),
    )


def _welcome_from_pb(pb: directory_pb2.WatchWelcome) -> Welcome:
    check_version(pb.protocol_version)
    return Welcome(
        coordinator=pb.coordinator,
        log_id=pb.log_id,
        snapshot=pb.snapshot,
        seed=pb.seed,
        blocks=pb.blocks,
        beat_interval_s=pb.beat_interval_ms / 1000,
        stale_after_s=pb.stale_after_ms / 1000,
        expire_after_s=pb.expire_after_ms / 1000,
    )


def _beat_from_pb(pb: directory_pb2.WatchBeat) -> Beat:
    return Beat(pb.head, pb.behind_us / 1e6, pb.warming, pb.incomplete, pb.credit_bytes)


def _item_from_pb(pb: directory_pb2.WatchItem) -> Item:
    kind = pb.WhichOneof("item")
    read = _FROM_PB.get(kind or "")
    if read is None:
        raise RemoteProtocolError(f"the coordinator sent an item of a kind unknown here ({kind}): run the same release on both")
    return read(pb)


def _node_from_pb(pb: directory_pb2.WatchItem) -> Item:
    node = pb.node
    return NodeGone(node.slot) if node.gone else NodeItem(node.slot, decode_trust(node.trust), node.hidden)


def _holder_from_pb(pb: directory_pb2.WatchItem) -> Item:
    holder = pb.holder
    return HolderItem(holder.number, holder.node_slot, holder.namespace_digest, int(holder.tier), holder.visible)


def _namespace_from_pb(pb: directory_pb2.WatchItem) -> Item:
    namespace = pb.namespace
    return NamespaceItem(Announced(namespace.digest, namespace.canonical_json, namespace.block_bytes))


def _page_from_pb(pb: directory_pb2.WatchItem) -> Item:
    page = pb.page
    return Page(page.keys, page.ages, page.sets, tuple(page.holder_sets), page.done_blocks)


_FROM_PB: dict[str, Callable[[directory_pb2.WatchItem], Item]] = {
    "stored": lambda pb: Stored(pb.stored.holder, pb.stored.packed),
    "removed": lambda pb: Removed(pb.removed.holder, pb.removed.packed),
    "dropped": lambda pb: Dropped(pb.dropped.holder),
    "node": _node_from_pb,
    "holder": _holder_from_pb,
    "heard": lambda pb: Heard(pb.heard.packed),
    "page": _page_from_pb,
    "snapshot_end": lambda pb: SnapshotEnd(pb.snapshot_end.blocks),
    "namespace": _namespace_from_pb,
    "namespace_gone": lambda pb: NamespaceGone(pb.namespace_gone),
}


def _blocks(item: Stored | Removed) -> directory_pb2.WatchBlocks:
    return directory_pb2.WatchBlocks(holder=item.holder, packed=item.packed)


def _node_to_pb(item: NodeItem) -> directory_pb2.WatchItem:
    return Pb(node=directory_pb2.WatchNode(slot=item.slot, trust=encode_trust(item.trust), hidden=item.hidden))


def _holder_to_pb(item: HolderItem) -> directory_pb2.WatchItem:
    return Pb(
        holder=directory_pb2.WatchHolder(
            number=item.number,
            node_slot=item.slot,
            namespace_digest=item.digest,
            tier=item.tier,  # type: ignore[arg-type]
            visible=item.visible,
        )
    )


def _page_to_pb(item: Page) -> directory_pb2.WatchItem:
    return Pb(
        page=directory_pb2.WatchPage(
            keys=item.keys, ages=item.ages, sets=item.sets, holder_sets=item.holder_sets, done_blocks=item.done
        )
    )


def _namespace_to_pb(item: NamespaceItem) -> directory_pb2.WatchItem:
    announced = item.announced
    return Pb(
        namespace=common_pb2.Namespace(
            digest=announced.digest, canonical_json=announced.canonical, block_bytes=announced.block_bytes
        )
    )


_TO_PB: dict[type[Any], Callable[[Any], directory_pb2.WatchItem]] = {
    Stored: lambda item: Pb(stored=_blocks(item)),
    Removed: lambda item: Pb(removed=_blocks(item)),
    Dropped: lambda item: Pb(dropped=directory_pb2.WatchDropped(holder=item.holder)),
    NodeItem: _node_to_pb,
    NodeGone: lambda item: Pb(node=directory_pb2.WatchNode(slot=item.slot, gone=True)),
    HolderItem: _holder_to_pb,
    Heard: lambda item: Pb(heard=directory_pb2.WatchHeard(packed=item.packed)),
    Page: _page_to_pb,
    SnapshotEnd: lambda item: Pb(snapshot_end=directory_pb2.WatchSnapshotEnd(blocks=item.blocks)),
    NamespaceItem: _namespace_to_pb,
    NamespaceGone: lambda item: Pb(namespace_gone=item.digest),
}

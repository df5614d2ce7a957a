"""After the last request: waits until the directory has caught up, and holds its counts against the agents' own.

With several coordinators, the counts are of the first, and the others are held against it by digest (kvdir/core/diff.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence

import grpc
import grpc.aio

from kvdir.client.aio import DirectoryClient
from kvdir.core.diff import Verdict, compare, worst
from kvdir.core.views import NodeView
from kvdir.errors import KvdirError, Unsupported
from kvdir.location import StreamState
from kvdir.rpc.certificates import TlsFiles
from kvdir.rpc.channel import client_options
from kvdir.rpc.status import from_rpc_error
from kvdir.rpc.tls import PLAINTEXT
from peer_agent.demo.cluster import DemoCluster
from peer_agent.demo.report import NodeFigures, Settled
from peer_agent.v1 import engine_pb2, engine_pb2_grpc

POLL_S = 0.05
CALL_S = 2.0


async def settle(cluster: DemoCluster, *, within_s: float, ended: Sequence[NodeView] = ()) -> Settled:
    """Returns as soon as every stream is synced, every figure trusted and every count right, or after `within_s`.

    ended: streams that are over, as they were last seen; their repairs and untrusted times are counted in.
    """
    began_s = time.monotonic()
    async with DirectoryClient(cluster.coordinator_address, tls=cluster.tls) as client:
        while True:
            try:
                state = await _state(cluster, client, ended, began_s)
            except KvdirError:
                if time.monotonic() - began_s > within_s:
                    raise
            else:
                if state.agrees or time.monotonic() - began_s > within_s:
                    return state
            await asyncio.sleep(POLL_S)


async def node_view(cluster: DemoCluster, node: int) -> NodeView | None:
    """What the directory knows about one node."""
    async with DirectoryClient(cluster.coordinator_address, tls=cluster.tls) as client:
        views = await client.nodes(deadline_s=CALL_S)
    return next((view for view in views if view.trust.node == f"node-{node}"), None)


async def _state(cluster: DemoCluster, client: DirectoryClient, ended: Sequence[NodeView], began_s: float) -> Settled:
    held = [await owner_counts(cluster.engine_address(node)) for node in range(cluster.plan.nodes)]
    views = {view.trust.node: view for view in await client.nodes(deadline_s=CALL_S)}
    live = [view for view in views.values() if view.trust.state is not StreamState.FENCED]
    trusted = [holding.blocks.trusted and holding.bytes.trusted for view in live for holding in view.holdings]
    names = [f"node-{number}" for number in range(cluster.plan.nodes)]
    return Settled(
        streams_synced=sum(view.trust.state is StreamState.SYNCED for view in live),
        streams_total=len(live),
        views_trusted=sum(trusted),
        views_total=len(trusted),
        nodes=tuple(_side_by_side(name, views.get(name), counts) for name, counts in zip(names, held, strict=True)),
        untrusted_s=sum(view.untrusted_s for view in (*ended, *live)),
        repairs=_repairs((*ended, *live)),
        waited_s=time.monotonic() - began_s,
        agreement=await _agreement(cluster.coordinator_addresses, cluster.tls),
    )


async def _agreement(addresses: Sequence[str], tls: TlsFiles | None) -> Verdict:
    """Those that share a store have one directory, and no digests."""
    async with contextlib.AsyncExitStack() as stack:
        clients = {address: await stack.enter_async_context(DirectoryClient(address, tls=tls)) for address in addresses}
        try:
            views = await asyncio.gather(*(client.digests(deadline_s=CALL_S) for client in clients.values()))
        except Unsupported:
            return Verdict.EQUAL
        return worst(compare(dict(zip(clients, views, strict=True))))


def _side_by_side(name: str, view: NodeView | None, counts: tuple[int, int]) -> NodeFigures:
    holdings = view.holdings if view else ()
    return NodeFigures(
        node=name,
        state=view.trust.state.name.lower() if view else "unknown",
        trusted=view is not None and all(holding.blocks.trusted and holding.bytes.trusted for holding in holdings),
        blocks=sum(holding.blocks.value for holding in holdings),
        bytes=sum(holding.bytes.value for holding in holdings),
        owner_blocks=counts[0],
        owner_bytes=counts[1],
    )


def _repairs(views: Sequence[NodeView]) -> dict[str, int]:
    return {
        "replay": sum(view.replays for view in views),
        "sketch": sum(view.sketches for view in views),
        "snapshot": sum(view.snapshots for view in views),
    }


async def owner_counts(address: str) -> tuple[int, int]:
    """Committed blocks and their bytes, from the agent itself."""
    async with PLAINTEXT.aio(address, options=client_options()) as channel:
        try:
            answer = await engine_pb2_grpc.EngineStub(channel).Inventory(engine_pb2.InventoryRequest(), timeout=CALL_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, target=address) from error
    blocks = sum(item.committed for item in answer.namespaces)
    return blocks, sum(item.committed * item.block_bytes for item in answer.namespaces)

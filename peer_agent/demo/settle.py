"""After the last request: waits until the directory has caught up, and holds its counts against the agents' own."""

from __future__ import annotations

import asyncio
import time

import grpc
import grpc.aio

from kvdir.client.aio import DirectoryClient
from kvdir.core.views import NodeView
from kvdir.errors import KvdirError
from kvdir.location import StreamState
from kvdir.rpc.channel import client_options
from kvdir.rpc.status import from_rpc_error
from peer_agent.demo.cluster import DemoCluster
from peer_agent.demo.report import Settled
from peer_agent.v1 import engine_pb2, engine_pb2_grpc

POLL_S = 0.05
CALL_S = 2.0


async def settle(cluster: DemoCluster, *, within_s: float) -> Settled:
    """Returns as soon as every stream is synced, every figure trusted and every count right, or after `within_s`."""
    began_s = time.monotonic()
    async with DirectoryClient(cluster.coordinator_address) as client:
        while True:
            try:
                state = await _state(cluster, client, began_s)
            except KvdirError:
                if time.monotonic() - began_s > within_s:
                    raise
            else:
                if state.agrees or time.monotonic() - began_s > within_s:
                    return state
            await asyncio.sleep(POLL_S)


async def _state(cluster: DemoCluster, client: DirectoryClient, began_s: float) -> Settled:
    held = [await owner_blocks(cluster.engine_address(node)) for node in range(cluster.plan.nodes)]
    views = {view.trust.node: view for view in await client.nodes(deadline_s=CALL_S)}
    nodes = [views.get(f"node-{number}") for number in range(cluster.plan.nodes)]
    live = [view for view in nodes if view is not None and view.trust.state is not StreamState.FENCED]
    synced = sum(view.trust.state is StreamState.SYNCED for view in live)
    figures = [holding.blocks for view in live for holding in view.holdings]
    trusted = sum(figure.trusted for figure in figures)
    same = all(_blocks(view) == blocks for view, blocks in zip(nodes, held, strict=True))
    return Settled(
        streams_synced=synced,
        streams_total=len(live),
        views_trusted=trusted,
        views_total=len(figures),
        directory_blocks=sum(figure.value for figure in figures),
        owner_blocks=sum(held),
        agrees=same and synced == cluster.plan.nodes and trusted == len(figures),
        waited_s=time.monotonic() - began_s,
    )


def _blocks(view: NodeView | None) -> int:
    return sum(holding.blocks.value for holding in view.holdings) if view else -1


async def owner_blocks(address: str) -> int:
    """Committed blocks, from the agent itself."""
    async with grpc.aio.insecure_channel(address, options=client_options()) as channel:
        try:
            answer = await engine_pb2_grpc.EngineStub(channel).Inventory(engine_pb2.InventoryRequest(), timeout=CALL_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, target=address) from error
    return sum(item.committed for item in answer.namespaces)

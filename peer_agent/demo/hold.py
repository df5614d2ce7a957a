"""The demo that stays: the same cluster and trace, again and again at a modest rate, until somebody stops it.

For looking at it: the coordinator's page, metrics, dashboards. What the options break (an agent, a coordinator) is broken once
in every pass over the trace. Every byte is checked as in a demo that ends; only the report is short. Bounded: a pass's
figures go with it, sums stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvdir.testing.routing import Policy, Router
from kvdir.testing.trace import Request
from peer_agent.client import aio
from peer_agent.demo.baseline import WithoutPeers
from peer_agent.demo.cluster import DemoCluster, demo_cluster
from peer_agent.demo.content import Content
from peer_agent.demo.outage import CoordinatorOutage, Outage, merged
from peer_agent.demo.processes import Child
from peer_agent.demo.run import REQUESTS_PER_NODE, DemoOptions, attached, plan_of, until_terminated
from peer_agent.demo.store import demo_store
from peer_agent.demo.workload import Tally, Workload


@dataclass(slots=True)
class Held:
    """Sums over all passes, the one under way included. wrong: blocks handed out with other bytes; must be 0."""

    requests: int = 0
    blocks: int = 0
    hits: int = 0
    wrong: int = 0

    def add(self, tally: Tally) -> None:
        self.requests += tally.requests
        self.blocks += tally.blocks
        self.hits += tally.hit_local + tally.hit_peer
        self.wrong += tally.wrong


def run_held(
    options: DemoOptions, requests: Sequence[Request], *, per_s: float, ready: Callable[[dict[str, Any]], None]
) -> Held:
    """Until SIGTERM or SIGINT, with everything cleaned up then. per_s: requests a second. ready: gets `addresses`."""
    held = Held()
    with contextlib.suppress(asyncio.CancelledError, KeyboardInterrupt):
        until_terminated(lambda: hold(options, requests, held, per_s=per_s, ready=ready))
    return held


async def hold(
    options: DemoOptions,
    requests: Sequence[Request],
    held: Held,
    *,
    per_s: float,
    ready: Callable[[dict[str, Any]], None],
) -> None:
    """Until it is cancelled. held: is added to."""
    with demo_store(options.store) as store:
        async with demo_cluster(plan_of(options, store, priced=True)) as cluster, attached(cluster) as engines:
            ready(addresses(cluster))
            while True:
                await _pass(cluster, engines, requests, options, held, per_s)


async def _pass(
    cluster: DemoCluster,
    engines: list[aio.Engine],
    requests: Sequence[Request],
    options: DemoOptions,
    held: Held,
    per_s: float,
) -> None:
    """The trace once."""
    without_peers = WithoutPeers(nodes=cluster.plan.nodes, blocks_per_node=cluster.blocks_per_node(0))
    outages = (
        Outage(cluster, engines, without_peers, options.kill_at),
        CoordinatorOutage(cluster, options.kill_coordinator_at),
    )
    async with asyncio.TaskGroup() as group:
        workload = Workload(
            engines,
            router=Router(Policy.P2C, nodes=cluster.plan.nodes, rng=random.Random(options.seed)),
            content=Content(options.block_bytes),
            without_peers=without_peers,
            deadline_s=options.deadline_s,
            in_flight=REQUESTS_PER_NODE * cluster.plan.nodes,
            compute_s=options.compute_ms / 1000,
            pause_s=1 / per_s,
            actions=merged(*(outage.actions(group) for outage in outages)),
        )
        try:
            await workload.run(requests)
        finally:
            held.add(workload.tally)


def addresses(cluster: DemoCluster) -> dict[str, Any]:
    """What `--hold` says when it is ready; an interface. page, metrics: URLs. tls: files for
    commands. pid: to break one by hand.
    """
    tls = cluster.tls
    return {
        "event": "ready",
        "tls": {} if tls is None else {"cert": tls.certificate, "key": tls.key, "ca": tls.ca},
        "page": f"http://{cluster.coordinators[0].ready['page']}/",
        "metrics": [f"http://{child.ready['http']}/metrics" for child in (*cluster.coordinators, *cluster.agents)],
        "coordinators": [{"grpc": child.ready["grpc"], **_process(child)} for child in cluster.coordinators],
        "agents": [
            {"node": child.ready["node"], "engine": child.ready["engine"], "peer": child.ready["peer"], **_process(child)}
            for child in cluster.agents
        ],
    }


def _process(child: Child) -> dict[str, Any]:
    return {"http": child.ready["http"], "pid": child.pid}

"""One run of the demo from start to figures; command.py is the command line in front of it."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import uvloop

from kvdir.cli.output import CommandFailed
from kvdir.core.views import NodeView
from kvdir.testing.routing import Policy, Router
from kvdir.testing.simulate import trace_namespace
from kvdir.testing.trace import Request
from peer_agent.client import aio
from peer_agent.demo import report
from peer_agent.demo.baseline import WithoutPeers
from peer_agent.demo.cluster import READY_S, ClusterPlan, DemoCluster, demo_cluster
from peer_agent.demo.content import Content
from peer_agent.demo.leaks import Watch
from peer_agent.demo.settle import node_view, settle
from peer_agent.demo.workload import Action, Tally, Workload

REQUESTS_PER_NODE = 2
SETTLE_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What the command line says. kill_at: number of the request before which an agent is killed; None: none is."""

    nodes: int
    block_bytes: int
    blocks_per_node: int
    loss: float
    kill_at: int | None
    deadline_s: float
    compute_ms: float
    seed: int
    transports: tuple[str, ...] = ("shm", "tcp")


class Outage:
    """One agent is killed before request `kill_at` and started again; request `back_at` and later ones wait until it is back.

    Without that wait, a fast machine would be through with all requests before the agent has started.
    """

    def __init__(
        self, cluster: DemoCluster, engines: list[aio.Engine], without_peers: WithoutPeers, kill_at: int | None
    ) -> None:
        self._cluster = cluster
        self._victim = cluster.plan.nodes - 1
        self._engine = engines[self._victim]
        self._without_peers = without_peers
        self._kill_at = kill_at
        self._restart: asyncio.Task[None] | None = None
        self.down_s: float | None = None
        self.ended: list[NodeView] = []
        """The stream of the killed agent, as it was just before: a new one follows, and counts from 0."""

    def actions(self, group: asyncio.TaskGroup) -> dict[int, Action]:
        """For the workload; the restart runs in `group`."""
        if self._kill_at is None:
            return {}
        back_at = self._kill_at + max(1, self._kill_at // 2)
        return {self._kill_at: partial(self._kill, group), back_at: self._wait}

    async def _kill(self, group: asyncio.TaskGroup) -> None:
        view = await node_view(self._cluster, self._victim)
        self.ended += [view] if view else []
        await self._cluster.kill(self._victim)
        self._without_peers.lose(self._victim)
        self._restart = group.create_task(self._start_again(time.monotonic()))

    async def _start_again(self, killed_s: float) -> None:
        await self._cluster.restart(self._victim)
        await self._engine.attach(timeout_s=READY_S)
        self.down_s = round(time.monotonic() - killed_s, 2)

    async def _wait(self) -> None:
        assert self._restart is not None
        await asyncio.shield(self._restart)  # `group` owns it; only the wait ends with the workload


def run_demo(
    options: DemoOptions,
    requests: Iterable[Request],
    *,
    progress: Callable[[], None] = lambda: None,
    ready: Callable[[DemoCluster], None] = lambda cluster: None,
) -> dict[str, Any]:
    """Runs it on an event loop of its own; SIGTERM ends it as Ctrl-C does, with everything cleaned up."""

    async def main() -> dict[str, Any]:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await demo(options, requests, progress=progress, ready=ready)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            return runner.run(main())
        except asyncio.CancelledError:
            raise CommandFailed("stopped by SIGTERM; processes and arenas are gone") from None


async def demo(
    options: DemoOptions,
    requests: Iterable[Request],
    *,
    progress: Callable[[], None] = lambda: None,
    ready: Callable[[DemoCluster], None] = lambda cluster: None,
) -> dict[str, Any]:
    """The figures (report.document). `ready` is called once the cluster runs and before the first request."""
    namespace = trace_namespace(block_bytes=options.block_bytes)
    plan = ClusterPlan(
        namespace=namespace,
        nodes=options.nodes,
        blocks_per_node=options.blocks_per_node,
        loss=options.loss,
        transports=options.transports,
    )
    async with demo_cluster(plan) as cluster:
        watch = Watch(cluster)
        async with contextlib.AsyncExitStack() as stack:
            engines = []
            for node in range(plan.nodes):
                engine = await aio.connect(cluster.engine_address(node), namespace=namespace, engine=f"demo-{node}")
                stack.push_async_callback(engine.close)
                engines.append(engine)
            ready(cluster)
            without_peers = WithoutPeers(nodes=plan.nodes, blocks_per_node=cluster.blocks_per_node(0))
            began_s = time.monotonic()
            outage = Outage(cluster, engines, without_peers, options.kill_at)
            tally = await _serve(cluster, engines, requests, options, outage, without_peers, watch, progress)
            seconds = time.monotonic() - began_s
            settled = await settle(cluster, within_s=SETTLE_S, ended=outage.ended)
        lives = await watch.finish(within_s=SETTLE_S)
    run = report.Run(
        nodes=plan.nodes,
        block_bytes=options.block_bytes,
        blocks_per_node=cluster.blocks_per_node(0),
        loss=options.loss,
        killed=options.kill_at is not None,
        agent_down_s=outage.down_s,
        seconds=seconds,
        hit_ratio_without_peers=without_peers.hit_ratio,
    )
    return report.document(run, tally, settled, lives)


async def _serve(
    cluster: DemoCluster,
    engines: list[aio.Engine],
    requests: Iterable[Request],
    options: DemoOptions,
    outage: Outage,
    without_peers: WithoutPeers,
    watch: Watch,
    progress: Callable[[], None],
) -> Tally:
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(watch.run())
        workload = Workload(
            engines,
            router=Router(Policy.P2C, nodes=cluster.plan.nodes, rng=random.Random(options.seed)),
            content=Content(options.block_bytes),
            without_peers=without_peers,
            deadline_s=options.deadline_s,
            in_flight=REQUESTS_PER_NODE * cluster.plan.nodes,
            compute_s=options.compute_ms / 1000,
            actions=outage.actions(group),
            progress=progress,
        )
        tally = await workload.run(requests)
        watching.cancel()
        return tally

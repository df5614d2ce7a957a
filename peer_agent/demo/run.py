"""One run of the demo from start to figures; command.py is the command line in front of it."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import uvloop

from kvdir.cli.output import CommandFailed
from kvdir.store.url import StoreUrl
from kvdir.testing.routing import Policy, Router
from kvdir.testing.simulate import trace_namespace
from kvdir.testing.trace import Request
from peer_agent.client import aio
from peer_agent.demo import report
from peer_agent.demo.baseline import WithoutPeers
from peer_agent.demo.cluster import ClusterPlan, DemoCluster, demo_cluster
from peer_agent.demo.content import Content
from peer_agent.demo.leaks import Watch
from peer_agent.demo.outage import CoordinatorOutage, Outage, merged
from peer_agent.demo.settle import settle
from peer_agent.demo.store import MEMORY, demo_store
from peer_agent.demo.workload import Tally, Workload

T = TypeVar("T")

REQUESTS_PER_NODE = 2
SETTLE_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What the command line says. kill_at: number of the request before which an agent is killed; None: none is.

    kill_coordinator_at: the same of a coordinator. store: memory, auto or a URL (store.py).
    """

    nodes: int
    block_bytes: int
    blocks_per_node: int
    loss: float
    kill_at: int | None
    deadline_s: float
    compute_ms: float
    seed: int
    transports: tuple[str, ...] = ("shm", "tcp")
    coordinators: int = 1
    kill_coordinator_at: int | None = None
    replica: bool = False
    store: str = MEMORY
    tls: bool = False


def run_demo(
    options: DemoOptions,
    requests: Iterable[Request],
    *,
    progress: Callable[[], None] = lambda: None,
    ready: Callable[[DemoCluster], None] = lambda cluster: None,
) -> dict[str, Any]:
    """Runs it on an event loop of its own. CommandFailed when SIGTERM ended it."""
    try:
        return until_terminated(lambda: demo(options, requests, progress=progress, ready=ready))
    except asyncio.CancelledError:
        raise CommandFailed("stopped by SIGTERM; processes and arenas are gone") from None


def until_terminated(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Runs it; SIGTERM, or the end of its terminal, cancels it as Ctrl-C does, with everything cleaned up, and then
    CancelledError is raised. Told again, it goes on cleaning up, which takes a bounded time.
    """

    async def main() -> T:
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup(1) has it
                loop.add_signal_handler(number, lambda: task.cancelling() or task.cancel())
        return await work()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


async def demo(
    options: DemoOptions,
    requests: Iterable[Request],
    *,
    progress: Callable[[], None] = lambda: None,
    ready: Callable[[DemoCluster], None] = lambda cluster: None,
) -> dict[str, Any]:
    """The figures (report.document). `ready` is called once the cluster runs and before the first request."""
    with demo_store(options.store) as store:
        return await _demo(options, requests, store, progress, ready)


async def _demo(
    options: DemoOptions,
    requests: Iterable[Request],
    store: str,
    progress: Callable[[], None],
    ready: Callable[[DemoCluster], None],
) -> dict[str, Any]:
    plan = plan_of(options, store)
    async with demo_cluster(plan) as cluster:
        watch = Watch(cluster)
        async with attached(cluster) as engines:
            ready(cluster)
            without_peers = WithoutPeers(nodes=plan.nodes, blocks_per_node=cluster.blocks_per_node(0))
            began_s = time.monotonic()
            outage = Outage(cluster, engines, without_peers, options.kill_at)
            other = CoordinatorOutage(cluster, options.kill_coordinator_at)
            tally = await _serve(cluster, engines, requests, options, (outage, other), without_peers, watch, progress)
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
        coordinators=plan.coordinators,
        store="" if plan.store == MEMORY else StoreUrl.parse(plan.store).text,
        coordinator_killed=options.kill_coordinator_at is not None,
        coordinator_down_s=other.down_s,
        seconds=seconds,
        hit_ratio_without_peers=without_peers.hit_ratio,
    )
    return report.document(run, tally, settled, lives)


def plan_of(options: DemoOptions, store: str, *, priced: bool = False) -> ClusterPlan:
    """store: URL of the one there is, or memory. priced: agents know what recomputing takes, and skip what does not pay."""
    namespace = trace_namespace(block_bytes=options.block_bytes)
    block_s = options.compute_ms / 1000
    return ClusterPlan(
        namespace=namespace,
        prefill_tokens_per_s=namespace.block_tokens / block_s if priced and block_s else 0.0,
        nodes=options.nodes,
        blocks_per_node=options.blocks_per_node,
        loss=options.loss,
        transports=options.transports,
        coordinators=options.coordinators,
        replica=options.replica,
        store=store,
        tls=options.tls,
    )


@contextlib.asynccontextmanager
async def attached(cluster: DemoCluster) -> AsyncIterator[list[aio.Engine]]:
    """One engine client a node."""
    async with contextlib.AsyncExitStack() as stack:
        engines = []
        for node in range(cluster.plan.nodes):
            address = cluster.engine_address(node)
            engine = await aio.connect(address, namespace=cluster.plan.namespace, engine=f"demo-{node}")
            stack.push_async_callback(engine.close)
            engines.append(engine)
        yield engines


async def _serve(
    cluster: DemoCluster,
    engines: list[aio.Engine],
    requests: Iterable[Request],
    options: DemoOptions,
    outages: tuple[Outage, CoordinatorOutage],
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
            actions=merged(*(outage.actions(group) for outage in outages)),
            progress=progress,
        )
        tally = await workload.run(requests)
        watching.cancel()
        return tally

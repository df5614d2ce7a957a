"""What the demo breaks on purpose: an agent, or a coordinator, is killed in the middle and started again.

Each says before which requests something is to happen (workload.py holds every worker meanwhile). Some later request waits
until what was killed is back: without that, a fast machine would be through with all requests before.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from functools import partial

from kvdir.core.views import NodeView
from peer_agent.client import aio
from peer_agent.demo.baseline import WithoutPeers
from peer_agent.demo.cluster import READY_S, DemoCluster
from peer_agent.demo.settle import node_view
from peer_agent.demo.workload import Action


class Outage:
    """The last agent is killed before request `kill_at`. down_s: until engines could use it again."""

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
        return {self._kill_at: partial(self._kill, group), _back_at(self._kill_at): self._wait}

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
        await _back(self._restart)


class CoordinatorOutage:
    """The last coordinator is killed before request `kill_at`. down_s: until it was ready again, knowing nothing."""

    def __init__(self, cluster: DemoCluster, kill_at: int | None) -> None:
        self._cluster = cluster
        self._victim = cluster.plan.coordinators - 1
        self._kill_at = kill_at
        self._restart: asyncio.Task[None] | None = None
        self.down_s: float | None = None

    def actions(self, group: asyncio.TaskGroup) -> dict[int, Action]:
        """For the workload; the restart runs in `group`."""
        if self._kill_at is None:
            return {}
        return {self._kill_at: partial(self._kill, group), _back_at(self._kill_at): self._wait}

    async def _kill(self, group: asyncio.TaskGroup) -> None:
        await self._cluster.kill_coordinator(self._victim)
        self._restart = group.create_task(self._start_again(time.monotonic()))

    async def _start_again(self, killed_s: float) -> None:
        await self._cluster.restart_coordinator(self._victim)
        self.down_s = round(time.monotonic() - killed_s, 2)

    async def _wait(self) -> None:
        await _back(self._restart)


def merged(*actions: Mapping[int, Action]) -> dict[int, Action]:
    """Those before the same request one after the other."""
    return {
        number: partial(_in_turn, [item[number] for item in actions if number in item])
        for number in sorted({number for item in actions for number in item})
    }


async def _in_turn(actions: Sequence[Action]) -> None:
    for action in actions:
        await action()


def _back_at(kill_at: int) -> int:
    return kill_at + max(1, kill_at // 2)


async def _back(restart: asyncio.Task[None] | None) -> None:
    assert restart is not None
    await asyncio.shield(restart)  # the group owns it; only the wait ends with the workload

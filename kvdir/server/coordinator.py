"""The directory with its connections: executes effects, wakes waiters. The shell that services and ticker share.

Everything here runs on one event loop, so nothing is locked; the directory is never touched from another thread.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from kvdir.core.directory import Directory
from kvdir.core.effects import (
    AskEvict,
    Effect,
    Fence,
    RequestReplay,
    RequestSketch,
    RequestSnapshot,
    SketchApplied,
    SnapshotApplied,
    StateChanged,
)
from kvdir.core.event import EvictResult
from kvdir.core.inspect import status_view
from kvdir.core.node import Stream
from kvdir.core.quota_keeper import QuotaKeeper
from kvdir.core.recent_lookups import RecentLookups
from kvdir.core.views import StatusView
from kvdir.location import StreamState
from kvdir.obs.logs import say
from kvdir.obs.metrics import CoordinatorMetrics
from kvdir.rpc.event_codec import encode_evict_request, encode_sketch_request
from kvdir.rpc.gate import Gate
from kvdir.rpc.tls import ServerTls
from kvdir.server.checkpoint import Checkpointer, CheckpointFigures
from kvdir.server.config import CoordinatorConfig
from kvdir.server.connections import Connections
from kvdir.server.rights import coordinator_security
from kvdir.server.watching import Watching
from kvdir.v1 import events_pb2

if TYPE_CHECKING:
    from kvdir.server.worker_place import WorkerPlace

log = logging.getLogger("kvdir.coordinator")


class Coordinator:
    """What the services are about. `draining`: no new streams. on_drain, on_tick: who else is told. place: of workers.

    seed: of the directory's index, for replicas. store_id: of this process's memory, so that agents notice that two addresses
    lead to it.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        directory: Directory,
        metrics: CoordinatorMetrics,
        *,
        name: str,
        version: str,
        seed: int = 0,
    ) -> None:
        self.config = config
        self.directory = directory
        self.metrics = metrics
        self.connections = Connections()
        self.recent = RecentLookups()
        self.security = coordinator_security(config)
        self.security.watched_by(metrics.tally)
        self.name = name
        self.version = version
        self.store_id = secrets.token_hex(8)
        self.draining = False
        self.on_drain: list[Callable[[], None]] = []
        self.on_tick: list[Callable[[float], None]] = []
        self.place: WorkerPlace | None = None
        self.tls: ServerTls | None = None
        self.checkpoints = CheckpointFigures()
        self.checkpointer: Checkpointer | None = None
        self.quotas = QuotaKeeper(config.quotas())
        self.watching = Watching(directory, config, seed=seed, name=name)
        metrics.tally.watch("limited_total", lambda: self.watching.figures.refused, "watchers")
        self.on_drain.append(self.watching.drain)
        self._waiters: defaultdict[str, list[asyncio.Future[None]]] = defaultdict(list)

    @property
    def gate(self) -> Gate:
        return self.security.gate

    def now_s(self) -> float:
        return time.monotonic()

    def status(self) -> StatusView:
        """Lookups include those that workers answered."""
        view = status_view(self.directory, version=self.version, coordinator=self.name, now_s=self.now_s())
        counted = self.metrics.counted(self.directory, self.metrics.beside())
        lookups, blocks, hits = (counted[name] for name in ("lookups", "lookup_blocks", "lookup_hits"))
        return replace(view, lookups=lookups, lookup_blocks=blocks, lookup_hits=hits)

    def gather_metrics(self) -> Iterator[None]:
        """Puts aside what the next scrape shows, in steps: what runs may do something else between them."""
        yield from self.metrics.gather(self.directory, now_s=self.now_s())
        self.watching.refresh(self.metrics.watch)
        self.metrics.guards.refresh(self.directory, self.quotas, self.checkpoints)

    def tick(self) -> None:
        """Time has passed: repair, staleness, acknowledgements."""
        now_s = self.now_s()
        self.execute(self.directory.tick(now_s=now_s))
        self.execute(self.quotas.tick(self.directory, now_s=now_s))
        for connection in self.connections:
            connection.flush()
        self.watching.tick()
        for told in self.on_tick:
            told(now_s)

    def execute(self, effects: Iterable[Effect]) -> None:
        """Does what the core wants done. What cannot be delivered is dropped: the core's deadlines cover it."""
        for effect in effects:
            self.directory.story.effect(self.now_s(), effect)
            match effect:
                case AskEvict(node, epoch, request):
                    digest = request.namespace_digest.hex()[:16]
                    say(log, logging.WARNING, "eviction", node=node, namespace=digest, max_blocks=request.max_blocks)
                    connection = self.connections.get(node, epoch)
                    if connection is not None:
                        connection.say(encode_evict_request(epoch, request))
                case StateChanged():
                    level = logging.INFO if effect.after is StreamState.SYNCED else logging.WARNING
                    say(
                        log, level, "stream", node=effect.node, epoch=f"{effect.epoch:016x}",
                        before=effect.before.name if effect.before else "new", after=effect.after.name, reason=effect.reason,
                    )  # fmt: skip
                case SnapshotApplied():
                    say(log, logging.INFO, "snapshot applied", node=effect.node, blocks=effect.blocks)
                    for waiter in self._waiters.pop(effect.node, ()):
                        if not waiter.done():
                            waiter.set_result(None)
                case SketchApplied():
                    say(log, logging.INFO, "sketch applied", node=effect.node, differed=effect.blocks)
                case Fence():
                    say(log, logging.WARNING, "fenced", node=effect.node, epoch=f"{effect.epoch:016x}", reason=effect.reason)
                    connection = self.connections.get(effect.node, effect.epoch)
                    if connection is not None:
                        connection.end(fenced_response(effect.epoch, effect.newer_epoch, effect.reason))
                case RequestReplay() | RequestSketch() | RequestSnapshot():
                    connection = self.connections.get(effect.node, effect.epoch)
                    if connection is not None:
                        connection.say(repair_request(effect))

    def evicted(self, stream: Stream, result: EvictResult) -> None:
        """An owner did what a quota asked."""
        self.quotas.answered(stream, result)
        self.directory.story.evicted(self.now_s(), stream.node, stream.epoch, result)

    async def wait_snapshot(self, node: str, *, timeout_s: float) -> bool:
        """Until the next snapshot of the node was applied; False at the deadline."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[node].append(waiter)
        try:
            async with asyncio.timeout(timeout_s):
                await waiter
        except TimeoutError:
            return False
        finally:
            if waiter in self._waiters.get(node, ()):
                self._waiters[node].remove(waiter)
        return True

    def drain(self) -> None:
        """Ends every stream after its last acknowledgement; agents go elsewhere or come back. New ones are refused."""
        if self.draining:
            return
        self.draining = True
        for told in self.on_drain:
            told()
        for connection in self.connections:
            connection.end()

    def not_ready(self) -> str:
        """Why nobody should be sent here, in words; empty when all is well."""
        if self.draining:
            return "draining"
        return "warming: some node has not restated what it holds since the start" if self.directory.warming else ""

    def remark(self) -> str:
        partial = "(partial: some live node has not restated what it holds)" if self.directory.partial else ""
        return " ".join(filter(None, (partial, self.security.remark())))


def fenced_response(epoch: int, newer_epoch: int, reason: str) -> events_pb2.PublishResponse:
    return events_pb2.PublishResponse(fenced=events_pb2.Fenced(epoch=epoch, newer_epoch=newer_epoch, reason=reason))


def repair_request(effect: RequestReplay | RequestSketch | RequestSnapshot) -> events_pb2.PublishResponse:
    """As it is said to the owner."""
    if isinstance(effect, RequestReplay):
        return events_pb2.PublishResponse(
            replay_request=events_pb2.ReplayRequest(first_seq=effect.first_seq, last_seq=effect.last_seq)
        )
    if isinstance(effect, RequestSketch):
        return encode_sketch_request(effect)
    return events_pb2.PublishResponse(
        snapshot_request=events_pb2.SnapshotRequest(snapshot_id=effect.snapshot_id, reason=effect.reason)
    )

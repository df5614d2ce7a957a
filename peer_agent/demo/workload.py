"""The demo's load: trace requests go to nodes, load what exists, recompute and store the rest, and check every byte.

Rules: the choice of node is the router's, by outstanding blocks; requests begin in trace order, at most `in_flight` at once; a
request never fails because something was missing, stale, slow or broken: that is recomputed. Whatever a load calls a hit
is compared byte for byte with what its fingerprint says it must be. Does not: start processes, print.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from kvdir.errors import KvdirError
from kvdir.fingerprint import Fingerprints
from kvdir.testing.routing import Router
from kvdir.testing.trace import Request
from peer_agent.client.results import LoadResult, StoreResult
from peer_agent.core.effects import LoadStatus
from peer_agent.demo.baseline import WithoutPeers
from peer_agent.demo.content import Bytes, Content

Action = Callable[[], Awaitable[None]]


class NodeEngine(Protocol):
    """What the demo needs of peer_agent.client's aio engine."""

    async def load(self, fingerprints: Fingerprints, *, into: Any, deadline_s: float) -> LoadResult: ...
    async def store(self, fingerprints: Fingerprints, blocks: Any, *, deadline_s: float) -> StoreResult: ...


@dataclass(slots=True)
class Tally:
    """Counts of blocks, unless the name says otherwise. recomputed = blocks - hit_local - hit_peer.

    stale, late, corrupt: of the recomputed ones, why. wrong: handed out as hits with other bytes than they must have.
    """

    requests: int = 0
    failed_requests: int = 0
    blocks: int = 0
    hit_local: int = 0
    hit_peer: int = 0
    recomputed: int = 0
    stale: int = 0
    late: int = 0
    corrupt: int = 0
    wrong: int = 0
    stored: int = 0
    not_stored: int = 0
    peer_bytes: int = 0
    lookup_us: list[int] = field(default_factory=list)
    load_us: list[int] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


class Workload:
    """Runs requests against one engine client a node. `actions`: awaited before the request of that number and all that follow.

    compute_s: how long recomputing one block takes. Without it a node whose agent is dead would be the fastest of all, and
    draw every request. pause_s: least time between two requests.
    """

    def __init__(
        self,
        engines: Sequence[NodeEngine],
        *,
        router: Router,
        content: Content,
        without_peers: WithoutPeers,
        deadline_s: float,
        in_flight: int,
        compute_s: float = 0.0,
        pause_s: float = 0.0,
        actions: Mapping[int, Action] | None = None,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        self._engines = engines
        self._router = router
        self._content = content
        self._without_peers = without_peers
        self._deadline_s = deadline_s
        self._in_flight = in_flight
        self._compute_s = compute_s
        self._pause_s = pause_s
        self._actions = dict(actions or {})
        self._progress = progress
        self._turn = asyncio.Lock()
        self._outstanding_blocks = [0.0] * len(engines)
        self.tally = Tally()

    async def run(self, requests: Iterable[Request]) -> Tally:
        """Serves every request. An error that is no kvdir error is a bug and ends the run."""
        source = iter(requests)
        async with asyncio.TaskGroup() as group:
            for _ in range(self._in_flight):
                group.create_task(self._worker(source))
        return self.tally

    async def _worker(self, source: Iterator[Request]) -> None:
        buffer = np.empty((0, self._content.block_bytes), dtype=np.uint8)
        while (request := await self._next(source)) is not None:
            if len(buffer) < len(request.blocks):
                buffer = np.empty((len(request.blocks), self._content.block_bytes), dtype=np.uint8)
            await self._serve(request, buffer[: len(request.blocks)])
            self._progress()

    async def _next(self, source: Iterator[Request]) -> Request | None:
        """The next request in order; None at the end. An action holds every worker, because each passes here."""
        async with self._turn:
            if self._pause_s:
                await asyncio.sleep(self._pause_s)
            request = next(source, None)
            if request is not None and (action := self._actions.pop(request.number, None)) is not None:
                await action()
            return request

    async def _serve(self, request: Request, buffer: Bytes) -> None:
        node = self._router.choose(self._outstanding_blocks, request.blocks)
        self._outstanding_blocks[node] += len(request.blocks)
        self._without_peers.begin(node, request.blocks)
        self.tally.requests += 1
        self.tally.blocks += len(request.blocks)
        try:
            await self._load_and_store(self._engines[node], request.fingerprints, buffer)
        except KvdirError as error:
            self.tally.failed_requests += 1
            self.tally.failures.append(f"request {request.number} on node {node}: {error}")
        finally:
            self._outstanding_blocks[node] -= len(request.blocks)
            self._without_peers.end(node, request.blocks)

    async def _load_and_store(self, engine: NodeEngine, fingerprints: Fingerprints, buffer: Bytes) -> None:
        started = time.perf_counter_ns()
        result = await engine.load(fingerprints, into=buffer, deadline_s=self._deadline_s)
        self.tally.load_us.append((time.perf_counter_ns() - started) // 1000)
        missing = self._check(fingerprints, buffer, result)
        await asyncio.sleep(len(missing) * self._compute_s)
        for position in missing:
            self._content.fill(fingerprints[position], buffer[position])
        if missing:
            stored = await engine.store(
                fingerprints.select(missing), [buffer[position] for position in missing], deadline_s=self._deadline_s
            )
            self.tally.stored += stored.stored
            self.tally.not_stored += len(missing) - stored.stored - stored.present

    def _check(self, fingerprints: Fingerprints, buffer: Bytes, result: LoadResult) -> list[int]:
        """Counts the answer, verifies the hits, and returns the positions to recompute."""
        tally, missing = self.tally, []
        tally.peer_bytes += result.peer_bytes
        if result.directory_reached:
            tally.lookup_us.append(result.timings.lookup_us)
        for position, status in enumerate(map(LoadStatus, result.statuses)):
            tally.stale += status is LoadStatus.STALE
            tally.late += status is LoadStatus.LATE
            tally.corrupt += status is LoadStatus.CORRUPT
            if status.hit and not self._content.matches(fingerprints[position], buffer[position]):
                tally.wrong += 1
            elif status.hit:
                tally.hit_local += status is LoadStatus.HIT_LOCAL
                tally.hit_peer += status is LoadStatus.HIT_PEER
                continue
            missing.append(position)
        tally.recomputed += len(missing)
        return missing

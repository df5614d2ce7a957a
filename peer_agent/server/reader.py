"""The read path: local -> nominate -> the owner answers the whole remaining list -> verified read -> commit -> next nominee.

Rules:
- Every step stands under the caller's deadline; what has arrived by then is answered, the rest is late, stale or a miss.
- A load runs to its end even when its caller has gone (the blocks are then simply here, and locked for nobody), so a transfer
  is never left without an owner: slots of blocks that did not arrive are freed when it has settled, and quarantined until then.
- Single flight: a block that another load or an engine is writing is not read again; it is waited for, after everything that
  we reserved ourselves is committed or given back. Nobody waits while holding a reservation, so nobody waits in a circle.
- Absent though the directory said so: reported to the directory in the background.

Does not: decide (peer_agent/core/plan.py), move bytes (fetch.py), keep connections (peers.py), or copy to engines
(peer_agent/client).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from kvdir.errors import KvdirError
from kvdir.fingerprint import Fingerprints
from kvdir.obs.logs import say
from peer_agent.core.effects import BLOCK_RECORD_BYTES, LoadStatus
from peer_agent.core.inventory import AGENT
from peer_agent.core.serial_plan import Ask, Claim, ReadPlan
from peer_agent.server.fetch import Fetcher, Source
from peer_agent.server.load import Directory, Load, ReaderCounters
from peer_agent.server.peer import LockAnswer, Peer, PeerFailure
from peer_agent.server.peers import Peers
from peer_agent.server.store import Store
from peer_agent.server.tasks import OwnedTasks

log = logging.getLogger(__name__)

RATE_WEIGHT = 0.2
"""Of the newest read in the smoothed rate."""

LEASE_MARGIN_S = 1.0
"""A peer's lock outlives our deadline by this, so that it never ends before a read that is in time."""


class Reader:
    """Runs loads for one agent."""

    def __init__(
        self,
        store: Store,
        peers: Peers,
        directory: Directory | None,
        *,
        node: str,
        clock: Callable[[], float],
        tasks: OwnedTasks,
        max_chunk_bytes: int,
        max_read_bytes: int,
        directory_timeout_s: float,
    ) -> None:
        self._store = store
        self._peers = peers
        self._directory = directory
        self._node = node
        self._clock = clock
        self._tasks = tasks
        self._directory_timeout_s = directory_timeout_s
        self.counters = ReaderCounters()
        self._fetcher = Fetcher(
            store, peers, self.counters, clock=clock, max_chunk_bytes=max_chunk_bytes, max_read_bytes=max_read_bytes
        )

    async def load(
        self,
        namespace_digest: bytes,
        fingerprints: Fingerprints,
        *,
        session: int,
        timeout_s: float,
        lease_s: float,
        local_only: bool = False,
    ) -> Load:
        """Brings blocks here and locks them for `session` (0: no lock), within timeout_s. See the module docstring."""
        namespace = self._store.namespace(namespace_digest)
        load = Load(
            namespace_digest=namespace_digest,
            block_bytes=namespace.block_bytes,
            fingerprints=fingerprints,
            session=session,
            until_s=self._clock() + timeout_s,
            lease_s=timeout_s + lease_s,
            plan=ReadPlan(len(fingerprints)),
            records=bytearray(BLOCK_RECORD_BYTES * len(fingerprints)),
        )
        self._fetcher.hold(load, range(len(fingerprints)), LoadStatus.HIT_LOCAL)
        if load.plan.remaining and not local_only and self._directory is not None:
            work = self._tasks.start(self._fetch_missing(load), name="load")
            if work is not None:
                await self._until_done(load, work)
            else:
                self.counters.refused += 1
        self._count(load)
        return load

    async def _until_done(self, load: Load, work: asyncio.Task[None]) -> None:
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            session, load.session = load.session, AGENT
            if load.lock and self._store.is_attached(session):
                self._store.unlock((load.lock,), session=session)
            raise

    async def _fetch_missing(self, load: Load) -> None:
        await self._nominate(load)
        while True:
            ask = load.plan.next_ask(now_s=self._clock(), deadline_s=load.until_s)
            if ask is not None:
                await self._ask(load, ask)
            elif not load.writers or self._left_s(load) <= 0:
                break
            else:
                await self._wait_for_writers(load)
        if self._left_s(load) <= 0:
            load.plan.out_of_time()

    # nominate

    async def _nominate(self, load: Load) -> None:
        positions = load.plan.remaining
        wanted = load.fingerprints.select(positions)
        began_s = self._clock()
        assert self._directory is not None
        try:
            found = await self._directory.nominate(
                load.namespace_digest, wanted, timeout_s=min(self._directory_timeout_s, self._left_s(load))
            )
        except KvdirError as error:
            self.counters.directory_failures += 1
            say(log, logging.DEBUG, "no directory", error=error)
            return
        finally:
            load.lookup_s += self._clock() - began_s
        load.directory_reached = True
        load.nodes = found.nodes
        claims = [Claim(claim.node, frozenset(positions[at] for at in claim.positions)) for claim in found.claims]
        load.plan.nominate(claims, me=self._node, figures=self._peers.figures())

    # the owner decides

    async def _ask(self, load: Load, ask: Ask) -> None:
        asked = load.fingerprints.select(ask.positions)
        began_s = self._clock()
        try:
            peer, answer = await self._lock(load, ask, asked)
        except PeerFailure as failure:
            self.counters.peer_failures += 1
            say(log, logging.DEBUG, "peer did not answer", error=failure)
            load.plan.unreachable(ask, late=failure.late)
            return
        finally:
            load.lock_s += self._clock() - began_s
        source = Source.of(ask, peer, answer, count=len(load.fingerprints))
        stale = load.plan.answered(ask, source.held)
        if stale:
            self._report_stale(load, peer, answer, stale)
        if not answer.lock:
            return
        began_s = self._clock()
        try:
            await self._fetcher.fetch(load, source)
        finally:
            load.read_s += self._clock() - began_s
            if peer.unlock_soon(answer.lock):
                self._tasks.start(peer.flush_unlocks(), name="unlock")

    async def _lock(self, load: Load, ask: Ask, asked: Fingerprints) -> tuple[Peer, LockAnswer]:
        """Asks the owner; once more when it turns out to have been restarted."""
        for attempt in range(2):
            left_s = ask.until_s - self._clock()
            peer = await self._peers.reach(ask.node, timeout_s=left_s)
            began_s = self._clock()
            left_s = ask.until_s - began_s
            try:
                answer = await peer.lock(
                    load.namespace_digest,
                    asked,
                    reader=self._node,
                    lease_s=self._left_s(load) + LEASE_MARGIN_S,
                    timeout_s=left_s,
                )
            except PeerFailure as failure:
                if failure.restarted and not attempt:
                    continue
                if failure.late:
                    self._peers.late(peer, waited_s=self._clock() - began_s)
                elif peer.broken:
                    self._peers.failed(peer)
                raise
            self._peers.answered(peer)
            return peer, answer
        raise PeerFailure(f"{ask.node.node} keeps restarting")

    def _report_stale(self, load: Load, peer: Peer, answer: LockAnswer, stale: Sequence[int]) -> None:
        assert self._directory is not None
        gone = load.fingerprints.select(stale)
        report = self._directory.report_stale(
            load.namespace_digest, gone, node=peer.node, epoch=answer.epoch, owner_seq=answer.owner_seq
        )
        if self._tasks.start(self._deliver(report, len(gone)), name="report-stale") is None:
            self.counters.stale_unreported += len(gone)

    async def _deliver(self, report: Coroutine[Any, Any, None], blocks: int) -> None:
        try:
            await report
        except KvdirError as error:
            self.counters.stale_unreported += blocks
            say(log, logging.DEBUG, "stale blocks not reported", blocks=blocks, error=error)
        else:
            self.counters.stale_reported += blocks

    async def _wait_for_writers(self, load: Load) -> None:
        waiting, load.writers = load.writers, {}
        self.counters.waited += len(waiting)
        wanted = load.fingerprints.select(waiting)
        await self._store.wait_for_writers(load.namespace_digest, wanted, timeout_s=self._left_s(load))
        self._fetcher.hold(load, waiting, LoadStatus.HIT_PEER)
        missing = set(load.plan.remaining)
        for position, ask in waiting.items():
            if position in missing and self._left_s(load) <= 0:
                load.plan.read(ask, {position: LoadStatus.LATE})
            elif position in missing:
                load.plan.try_again(ask)

    def _left_s(self, load: Load) -> float:
        return load.until_s - self._clock()

    def _count(self, load: Load) -> None:
        self.counters.loads += 1
        self.counters.peer_bytes += load.peer_bytes
        if load.peer_bytes and load.read_s > 0:
            rate, known = load.peer_bytes / load.read_s, self.counters.read_bytes_per_s
            self.counters.read_bytes_per_s = known + RATE_WEIGHT * (rate - known) if known else rate
        results = load.plan.results
        for status in LoadStatus:
            self.counters.blocks[status] += results.count(status)

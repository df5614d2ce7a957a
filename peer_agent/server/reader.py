"""The read path: local -> nominate -> owners answer the whole remaining list -> verified reads -> commit, side by side.

Rules:
- Every step stands under the caller's deadline; what has arrived by then is answered, the rest is late, stale or a miss.
- A load runs to its end even when its caller has gone (the blocks are then simply here, and locked for nobody), so a transfer
  is never left without an owner: slots of blocks that did not arrive are freed when it has settled, and quarantined until then.
- Single flight: a block that another load or an engine is writing is not read again, but waited for. The one exception is a
  hedge: the same load reads a block that is overdue from a second owner as well.
- Whatever is here already costs no call to anybody.

Does not: decide (peer_agent/core/plan.py), run asks and reads (load_work.py), move bytes (fetch.py), keep connections
(peers.py), or copy to engines (peer_agent/client).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from kvdir.errors import KvdirError
from kvdir.fingerprint import Fingerprints
from kvdir.namespace import Namespace
from kvdir.obs.logs import say
from kvdir.obs.spans import span
from peer_agent.core.cost import UNKNOWN_PRICE, Recompute
from peer_agent.core.effects import BLOCK_RECORD_BYTES, LoadStatus
from peer_agent.core.leases import AGENT
from peer_agent.core.nominees import Claim
from peer_agent.core.orders import BACKGROUND_LIMITS, Limits, Terms
from peer_agent.core.plan import ReadPlan
from peer_agent.core.schedule import Priority
from peer_agent.server.explaining import explanation_json
from peer_agent.server.fetch import Fetcher
from peer_agent.server.load import Directory, Load, ReaderCounters
from peer_agent.server.load_work import LoadWork
from peer_agent.server.owners import Owners
from peer_agent.server.peers import Peers
from peer_agent.server.store import Store
from peer_agent.server.tasks import OwnedTasks
from peer_agent.server.turns import Turns

log = logging.getLogger(__name__)

LAST_MOMENT_S = 0.01
LAST_MOMENT_SHARE = 0.05
"""Of a deadline, at most LAST_MOMENT_S: from the end of the last read to the answer."""

RATE_WEIGHT = 0.2
"""Of the newest read in the smoothed rate."""


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
        turns: Turns,
        limits: Limits,
        directory_timeout_s: float,
    ) -> None:
        self.counters = ReaderCounters()
        self._store = store
        store.told = self.counters.tally.prefetched.follow
        self._peers = peers
        self._directory = directory
        self._node = node
        self._turns = turns
        self._clock = clock
        self._tasks = tasks
        self._limits = limits
        self._background_limits = replace(
            BACKGROUND_LIMITS,
            max_chunk_bytes=min(limits.max_chunk_bytes, BACKGROUND_LIMITS.max_chunk_bytes),
            max_read_bytes=limits.max_read_bytes,
        )
        self._numbers = itertools.count(1)
        self._directory_timeout_s = directory_timeout_s
        self._owners = Owners(peers, directory, self.counters, node=node, clock=clock, tasks=tasks)
        self._fetcher = Fetcher(store, peers, turns, self.counters, clock=clock)

    async def load(
        self,
        namespace_digest: bytes,
        fingerprints: Fingerprints,
        *,
        session: int,
        timeout_s: float,
        lease_s: float,
        local_only: bool = False,
        priority: Priority = Priority.LOAD,
        prefill_tokens_per_s: float = 0.0,
    ) -> Load:
        """Brings blocks here and locks them for `session` (0: no lock), within timeout_s. See the module docstring."""
        namespace = self._store.namespace(namespace_digest)
        terms = self._terms(namespace, timeout_s, priority, prefill_tokens_per_s)
        load = Load(
            namespace_digest=namespace_digest,
            block_bytes=namespace.block_bytes,
            fingerprints=fingerprints,
            session=session,
            until_s=terms.began_s + timeout_s,
            reads_until_s=terms.deadline_s,
            lease_s=timeout_s + lease_s,
            number=next(self._numbers),
            priority=priority,
            recompute=terms.recompute,
            plan=ReadPlan(len(fingerprints), terms),
            records=bytearray(BLOCK_RECORD_BYTES * len(fingerprints)),
        )
        here = self._fetcher.lock_here(load, range(len(fingerprints)))
        load.plan.hold(here, LoadStatus.HIT_LOCAL)
        if priority is Priority.LOAD:
            self.counters.tally.prefetched.use(namespace_digest, fingerprints.select(here))
        if load.plan.remaining and not local_only and self._directory is not None:
            with self._turns.bringing(priority):
                await self._bring(load)
        spent_s = self._clock() - terms.began_s
        load.net_gain_s = load.plan.net_gain_s(spent_s)
        self._count(load, spent_s=spent_s, block_tokens=namespace.block_tokens)
        if log.isEnabledFor(logging.DEBUG):
            say(log, logging.DEBUG, "load", number=load.number, priority=priority.name, explanation=explanation_json(load))
        return load

    def _terms(self, namespace: Namespace, timeout_s: float, priority: Priority, prefill_tokens_per_s: float) -> Terms:
        now_s = self._clock()
        return Terms(
            block_bytes=namespace.block_bytes,
            began_s=now_s,
            deadline_s=now_s + timeout_s - min(LAST_MOMENT_S, LAST_MOMENT_SHARE * timeout_s),
            recompute=Recompute(namespace.block_tokens, prefill_tokens_per_s) if prefill_tokens_per_s else UNKNOWN_PRICE,
            limits=self._limits if priority is Priority.LOAD else self._background_limits,
        )

    async def _bring(self, load: Load) -> None:
        """Returns when the load is answered; what is still under way then has an owner of its own."""
        work = LoadWork(
            load,
            store=self._store,
            owners=self._owners,
            fetcher=self._fetcher,
            counters=self.counters,
            clock=self._clock,
        )
        if self._tasks.start(self._work(load, work), name="load") is None:
            self.counters.refused += 1
            return
        session = load.session  # `work` forgets it once the load is answered
        try:
            async with asyncio.timeout(load.until_s - self._clock() + LAST_MOMENT_S):
                await work.answered.wait()
        except TimeoutError:  # the event loop is behind: the caller does not wait for it
            load.plan.out_of_time()
            work.conclude()
        except asyncio.CancelledError:
            load.session = AGENT
            if load.lock and self._store.is_attached(session):
                self._store.unlock((load.lock,), session=session)
            raise

    async def _work(self, load: Load, work: LoadWork) -> None:
        try:
            if await self._nominate(load):
                await work.run()
        finally:
            work.conclude()

    async def _nominate(self, load: Load) -> bool:
        """Whether the directory has answered."""
        assert self._directory is not None
        positions = load.plan.remaining
        wanted = load.fingerprints.select(positions)
        began_s = self._clock()
        timeout_s = min(self._directory_timeout_s, load.until_s - began_s)
        with span("nominate") as mine:
            try:
                found = await self._directory.nominate(load.namespace_digest, wanted, timeout_s=timeout_s)
            except KvdirError as error:
                self.counters.directory_failures += 1
                mine.fail(error.code)
                say(log, logging.DEBUG, "no directory", error=error)
                return False
            finally:
                load.lookup_s += self._clock() - began_s
            if mine:
                mine.set("kvdir.blocks", len(wanted))
                mine.set("kvdir.nominees", len(found.claims))
        load.directory_reached = True
        load.nodes = found.nodes
        asked = np.array(positions, np.intp)
        claims = [Claim(claim.node, asked[claim.positions]) for claim in found.claims]
        load.plan.nominate(claims, me=self._node, figures=partial(self._peers.figures, besides=load.number))
        return True

    def _count(self, load: Load, *, spent_s: float, block_tokens: int) -> None:
        counters, plan = self.counters, load.plan
        counters.loads += 1
        counters.tally.load(
            plan,
            load.priority,
            asked=bool(load.asked_s),
            spent_s=spent_s,
            block_tokens=block_tokens,
            block_bytes=load.block_bytes,
        )
        counters.hedges += plan.hedges
        counters.hedges_won += plan.hedges_won
        results = plan.results
        for status in LoadStatus:
            counters.blocks[status] += results.count(status)
        if load.peer_bytes and load.read_s > 0:
            rate, known = load.peer_bytes / load.read_s, counters.read_bytes_per_s
            counters.read_bytes_per_s = known + RATE_WEIGHT * (rate - known) if known else rate
        if load.peer_bytes and plan.predicted_s > 0:
            counters.predictions.add((load.read_to_s - load.asked_s) / plan.predicted_s)
        if load.recompute.known and load.asked_s and load.priority is Priority.LOAD:
            counters.saved_s += load.net_gain_s + spent_s
            counters.spent_s += spent_s

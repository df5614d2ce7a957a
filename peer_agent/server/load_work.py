"""One load at work: owners asked side by side, reads from all that have answered, and the end as soon as nothing can follow.

Rules:
- `answered` is set once the caller need not wait any longer: everything is here, nothing is left to try, or the time is up.
  What is still under way then (a silent owner's answer, a read that lost against its hedge) is awaited in the background, by
  its own deadline, and its lock given back.
- Asks and reads end a moment before the deadline, so that the blocks that did arrive are in the answer.
- Blocks that somebody else here is writing are waited for beside everything else, by a task that holds no slots: nobody waits
  in a circle.
- Every task belongs to `run`, which ends after all of them; a bug in one ends the load, and is raised.

Does not: decide (peer_agent/core/plan.py), ask (owners.py) or move bytes (fetch.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvdir.obs.logs import say
from peer_agent.core.effects import LoadStatus
from peer_agent.core.leases import AGENT
from peer_agent.core.orders import Ask
from peer_agent.server.fetch import Fetcher, Reading
from peer_agent.server.load import Load, ReaderCounters
from peer_agent.server.owners import Owners, Source
from peer_agent.server.peer import PeerFailure
from peer_agent.server.store import Store

log = logging.getLogger(__name__)


class LoadWork:
    """See the module docstring. `run` once."""

    def __init__(
        self,
        load: Load,
        *,
        store: Store,
        owners: Owners,
        fetcher: Fetcher,
        counters: ReaderCounters,
        clock: Callable[[], float],
    ) -> None:
        self.answered = asyncio.Event()
        self._load = load
        self._store = store
        self._owners = owners
        self._fetcher = fetcher
        self._counters = counters
        self._clock = clock
        self._woken = asyncio.Event()
        self._sources: dict[int, Source] = {}
        self._readings: dict[int, Reading] = {}
        self._reads: dict[int, asyncio.Task[None]] = {}
        self._waiting: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Until the load is over and nothing is under way any more."""
        try:
            async with asyncio.TaskGroup() as group:
                await self._drive(group)
                self.conclude()
        finally:
            self.conclude()

    async def _drive(self, group: asyncio.TaskGroup) -> None:
        """Begins what the plan wants, after every event, until there is nothing to wait for or the time is up."""
        load, plan = self._load, self._load.plan
        while (now_s := self._clock()) < load.reads_until_s:
            self._woken.clear()
            self._begin(group, now_s)
            if plan.over(now_s):
                return
            await self._sleep(plan.next_wake_s(now_s))
        while self._reads and self._clock() < load.until_s:
            self._woken.clear()
            await self._sleep(load.until_s)
        self._take_over(plan.set_aside)  # some may be here, while the writer of others is still waited for
        plan.out_of_time()

    def _begin(self, group: asyncio.TaskGroup, now_s: float) -> None:
        load, plan = self._load, self._load.plan
        for fetch in plan.overdue(now_s):
            self._fetcher.overdue(self._readings[fetch.number])
        for ask in plan.next_asks(now_s):
            load.asked_s = load.asked_s or now_s
            group.create_task(self._ask(ask), name=f"ask-{ask.node.node}")
        for fetch in plan.next_fetches(now_s):
            load.read_from_s = load.read_from_s or now_s
            reading = self._readings[fetch.number] = Reading(fetch, self._sources[fetch.ask.number])
            self._reads[fetch.number] = group.create_task(self._read(reading), name=f"read-{fetch.ask.node.node}")
        aside = plan.set_aside
        if aside and self._waiting is None:
            self._waiting = group.create_task(self._wait_for_writers(aside), name="wait-for-writers")

    async def _sleep(self, until_s: float) -> None:
        """Until something has happened, or until_s."""
        loop = asyncio.get_running_loop()
        timer = loop.call_later(max(0.0, until_s - self._clock()), self._woken.set)
        try:
            await self._woken.wait()
        finally:
            timer.cancel()

    def conclude(self) -> None:
        """Once: what the answer says is settled; nothing that arrives later is locked for the engine."""
        if self.answered.is_set():
            return
        self.answered.set()
        self._load.session = AGENT
        if self._waiting is not None:
            self._waiting.cancel()
        for number in self._reads:
            self._abort(number)
        busy = {self._readings[number].source.ask.number for number in self._reads}
        for number in [number for number in self._sources if number not in busy]:
            self._owners.unlock(self._sources.pop(number))

    # tasks

    async def _ask(self, ask: Ask) -> None:
        load, plan = self._load, self._load.plan
        try:
            source = await self._owners.ask(load, ask)
        except PeerFailure as failure:
            self._counters.peer_failures += 1
            say(log, logging.DEBUG, "peer did not answer", error=failure)
            plan.unreachable(ask, late=failure.late, now_s=self._clock())
            return
        finally:
            self._woken.set()
        now_s = self._clock()
        load.answered_s = load.answered_s or now_s
        right, wrong = source.held(load.block_bytes)
        stale = plan.answered(ask, right, refused=wrong, now_s=now_s)
        self._counters.tally.answered(ask.node.age_s, held=len(right), stale=len(stale))
        self._owners.report_stale(load, source, stale)
        self._sources[ask.number] = source
        if self.answered.is_set():
            self._release(source)

    async def _read(self, reading: Reading) -> None:
        load, plan, fetch = self._load, self._load.plan, reading.fetch
        try:
            reading.begun = True
            if not reading.needless:
                await self._fetcher.fetch(load, reading, twin_of=lambda: self._reservation(fetch.hedges))
        finally:
            load.read_to_s = now_s = self._clock()
            del self._readings[fetch.number], self._reads[fetch.number]
            for needless in plan.fetched(fetch, reading.outcome.tobytes(), now_s=now_s):
                self._abort(needless.number)
            if self.answered.is_set():
                self._release(reading.source)
            self._woken.set()

    async def _wait_for_writers(self, positions: tuple[int, ...]) -> None:
        load, plan = self._load, self._load.plan
        self._counters.waited += len(positions)
        wanted = load.fingerprints.select(positions)
        await self._store.wait_for_writers(load.namespace_digest, wanted, timeout_s=load.reads_until_s - self._clock())
        if not self.answered.is_set():
            self._take_over(positions)
            plan.released(positions)
        self._waiting = None
        self._woken.set()

    def _take_over(self, positions: tuple[int, ...]) -> None:
        """What somebody else has written."""
        if positions:
            self._load.plan.hold(self._fetcher.lock_here(self._load, positions), LoadStatus.HIT_PEER)

    def _abort(self, number: int) -> None:
        """A read that nobody needs any more. A task that is cancelled before it began would never say that it has ended."""
        self._readings[number].needless = True
        if self._readings[number].begun:
            self._reads[number].cancel()

    def _reservation(self, number: int | None) -> int:
        """Under which the read of this number writes; 0 when it has ended, or there is none."""
        reading = self._readings.get(number) if number is not None else None
        return reading.reservation if reading is not None else 0

    def _release(self, source: Source) -> None:
        """After the end: the last read from an owner gives its lock back."""
        number = source.ask.number
        if number in self._sources and not any(reading.source is source for reading in self._readings.values()):
            self._owners.unlock(self._sources.pop(number))

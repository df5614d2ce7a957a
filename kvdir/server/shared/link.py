"""A coordinator's link to the store: who is in it, whether it answers, and the upkeep that any coordinator may do.

Rules: one task reads the store in turns (`run`), so that lookups, hellos and operators find in memory what other coordinators
saved. A store that is away is said at once and asked again in growing intervals; a store that was emptied is a new one, and
every stream begins anew. Nothing is decided from what could not be read. Does not: write blocks or speak to agents.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from kvdir.core.breaker import Breaker
from kvdir.core.fleet import Fleet, SavedNode
from kvdir.core.namespaces import Announced, NamespaceTable
from kvdir.errors import KvdirError, NamespaceError, Unavailable
from kvdir.namespace import Namespace
from kvdir.obs.call_figures import CallFigures
from kvdir.obs.logs import say
from kvdir.rpc.saved_codec import decode_saved
from kvdir.server.config import CoordinatorConfig
from kvdir.store.base import BlockStore, Health, NodeEntry, StoreLost

log = logging.getLogger("kvdir.store")

AnswerT = TypeVar("AnswerT")

UPKEEP_S = 2.0
SWEEP_BUCKETS = 256
SWEEP_S = 0.2
"""Of every UPKEEP_S: while blocks of dropped holders take memory, there may be no room for others."""
AGAIN_MAX_S = 2.0


class StoreLink:
    """fleet, namespaces: as last read. away: why the store does not answer, in words; empty when it does.

    on_emptied: told when the store has forgotten everything. unreadable: saved nodes of another version, when last read.
    epochs: by node, that of its last writer, also before it has saved anything. calls: what the store's answers took.
    """

    def __init__(self, store: BlockStore, config: CoordinatorConfig, *, on_emptied: Callable[[str], None]) -> None:
        self.store = store
        self.fleet = Fleet(stale_after_s=config.stale_after_s, expire_after_s=config.expire_after_s)
        self.namespaces = NamespaceTable(limit=config.max_namespaces)
        self.breaker = Breaker()
        self.health = Health()
        self.evicted = 0  # keys, as the servers' sum rose: it falls when one restarts or leaves
        self.calls = CallFigures()
        self.away = "not opened yet"
        self.opened_s: float | None = None
        self.lost_buckets = 0
        self.swept = 0
        self.unreadable = 0
        self.epochs: dict[str, int] = {}
        self._config = config
        self._timeout_s = config.store_timeout_s
        self._every_s = min(0.5, config.heartbeat_interval_ms / 2000)
        self._on_emptied = on_emptied
        self._hurry = asyncio.Event()
        self._put: set[bytes] = set()
        """Namespaces that the store has, as last read: a fail-over may lose some, a store that was emptied has none."""
        self._waiting: list[asyncio.Future[None]] = []
        self._upkeep_s = float("-inf")

    @property
    def store_id(self) -> str:
        return f"{self.store.store_id:016x}"

    @property
    def evicting(self) -> bool:
        """Whether blocks were taken away for want of memory, so that what is not found is unknown rather than absent."""
        return self.health.evicts and (self.health.evicted > 0 or self.lost_buckets > 0)

    async def open(self) -> None:
        """Raises StoreRefused when it will never work so; a store that is away is waited for by `run`."""
        try:
            await self.store.open(deadline_s=max(self._timeout_s, 5.0))
        except Unavailable as error:
            self._gone(error)
            return
        self.opened_s = time.monotonic()
        await self._once()

    async def run(self) -> None:
        """Until cancelled: reads in turns, at once when somebody waits."""
        failures = 0
        while True:
            wait_s = min(self._every_s * (1 << min(failures, 8)), max(AGAIN_MAX_S, self._every_s))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._hurry.wait()
            self._hurry.clear()
            failures = 0 if await self._once() else failures + 1

    async def fresh(self) -> None:
        """Until the nodes have been read by a question asked from now on. Raises Unavailable."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        self._hurry.set()
        try:
            async with asyncio.timeout(2 * self._timeout_s + 1.0):
                await waiter
        except TimeoutError:
            raise Unavailable(f"the store did not answer: {self.away or 'it is slow'}") from None

    async def close(self) -> None:
        await self.store.close()

    async def forget(self, node: str, token: int) -> None:
        """The node and its entries go, unless somebody writes it again."""
        if await self.store.forget(node, token, deadline_s=self._timeout_s):
            self.fleet.forgotten(node)
            say(log, logging.WARNING, "node forgotten", node=node)

    async def announce(self, announced: Announced) -> str:
        """Adds a namespace, for all coordinators; returns why not, in words, or an empty string."""
        fault = self.namespaces.announce(announced)
        if not fault:
            await self._put_namespace(announced.digest, announced.canonical)
        return fault

    async def _put_namespace(self, digest: bytes, canonical: bytes) -> None:
        if digest not in self._put:
            await self.store.put_namespace(digest, canonical, deadline_s=self._timeout_s)
            self._put.add(digest)

    async def read_namespaces(self) -> None:
        """What other coordinators announced; what cannot be read here is left out."""
        found = await self.store.namespaces(deadline_s=self._timeout_s)
        self._put = set(found)
        for digest, canonical in found.items():
            if self.namespaces.get(digest) is None:
                with contextlib.suppress(NamespaceError):
                    block_bytes = Namespace.from_canonical(canonical).block_bytes
                    self.namespaces.announce(Announced(digest, canonical, block_bytes))

    async def timed(self, method: str, call: Awaitable[AnswerT]) -> AnswerT:
        """The call's outcome, counted under this name."""
        began_s, code = time.perf_counter(), "OK"
        self.calls.began(method)
        try:
            return await call
        except KvdirError as error:
            code = error.code
            raise
        except asyncio.CancelledError:
            code = "cancelled"
            raise
        finally:
            self.calls.ended(method, code, time.perf_counter() - began_s)

    # -- inside ----------------------------------------------------------------------------------------------------------

    async def _once(self) -> bool:
        waiting, self._waiting = self._waiting, []
        try:
            await self._read()
        except KvdirError as error:
            self._gone(error)
            _settle(waiting, error)
            return False
        _settle(waiting, None)
        return True

    async def _read(self) -> None:
        if self.opened_s is None:
            await self.store.open(deadline_s=self._timeout_s)
            self.opened_s = time.monotonic()
        now_s = time.monotonic()
        try:
            entries = await self.timed("nodes", self.store.nodes(deadline_s=self._timeout_s))
            self.fleet.read(self._decoded(entries), now_s=now_s)
            if now_s - self._upkeep_s >= UPKEEP_S:
                await self._upkeep(now_s)
                self._upkeep_s = now_s
        except StoreLost as error:
            await self._reopen(error)
        if self.away:
            say(log, logging.INFO, "store answers", store=self.store_id, nodes=len(self.fleet))
            self.away = ""

    def _decoded(self, entries: Sequence[NodeEntry]) -> list[tuple[SavedNode, int, float]]:
        """Without those that only registered so far, and those that another release saved."""
        decoded = [(decode_saved(entry.record), entry) for entry in entries if entry.record]
        self.unreadable = sum(saved is None for saved, _ in decoded)
        self.epochs = {entry.node: entry.epoch for entry in entries}
        return [(saved, entry.token, entry.age_s) for saved, entry in decoded if saved is not None]

    async def _upkeep(self, now_s: float) -> None:
        await self.read_namespaces()
        for known in self.namespaces:
            await self._put_namespace(known.digest, known.namespace.canonical().encode())
        before, self.health = self.health, await self.store.health(deadline_s=self._timeout_s)
        self.evicted += max(0, self.health.evicted - before.evicted)
        self.lost_buckets = (await self.store.counts((), deadline_s=self._timeout_s)).lost_buckets
        limit_s, left_only = self._config.forget_after_s, not self._config.forget_enforce
        for node, token in list(self.fleet.orphans(limit_s=limit_s, left_only=left_only, now_s=now_s)):
            await self.forget(node, token)
        end_s = now_s + SWEEP_S
        while freed := await self.store.sweep(SWEEP_BUCKETS, deadline_s=self._timeout_s):
            self.swept += freed
            if time.monotonic() >= end_s:
                break

    async def _reopen(self, error: StoreLost) -> None:
        """It was emptied, or lost what we built on. Whoever has the same id still has our nodes."""
        before = self.store.store_id
        await self.store.open(deadline_s=self._timeout_s)
        say(log, logging.WARNING, "store lost", reason=str(error), before=f"{before:016x}", now=self.store_id)
        if self.store.store_id != before:
            self.fleet.emptied()
            self._put = set()
            self._upkeep_s = float("-inf")
            self.lost_buckets = 0
            self.opened_s = time.monotonic()
            self._on_emptied("the store was emptied: everything is published anew")

    def _gone(self, error: KvdirError) -> None:
        words = str(error)
        if words != self.away:
            say(log, logging.WARNING, "store is away", reason=words)
        self.away = words or "it does not answer"


def _settle(waiting: Iterable[asyncio.Future[None]], error: KvdirError | None) -> None:
    for waiter in waiting:
        if waiter.done():
            continue
        if error is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(Unavailable(f"the store is away: {error}"))

"""Tier gpu: pools that engines registered, what is published from them, and blocks brought from there into the arena on demand.

    Lock or Load wants a block that only a device has
      -> staging begun (core/device_pool.py) -> slots reserved -> the mover copies and checks -> commit: tier cpu
      -> overwritten meanwhile: the slots go back, the block is withdrawn here and in the directory

Rules:
- Whoever waits does so for a share of its deadline; the staging itself ends when the mover says that nothing writes to its
  slots any more, or is dead. Until then nobody else gets them.
- One staging a block: the reservation keeps a second one away, and who comes second waits for the first.
- A staging takes at most STAGE_SHARE of the arena's slots of a namespace, so it cannot push out everything else at once.
- With the session go its pools: withdrawn and published as such at once, closed in the mover when no copy uses them any more.

Does not: open a device, or trust an engine's generation table for more than a comparison.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvdir.core.event import Event
from kvdir.errors import InvalidInput, TooLarge, Unavailable
from kvdir.fingerprint import Fingerprints
from kvdir.obs.logs import say
from peer_agent.core.device_pool import DevicePools, Staging
from peer_agent.core.effects import Reserved
from peer_agent.core.inventory import AGENT
from peer_agent.core.records import BLOCK_RECORD
from peer_agent.memory.arena import Arena, ArenaError
from peer_agent.memory.device import HANDLE_BYTES
from peer_agent.memory.layout import SizeClass
from peer_agent.mover.device_calls import MAX_STAGE_BLOCKS, OpenPool, Stage, Staged
from peer_agent.server.device_movers import CALL_S, DeviceMover, DeviceMovers
from peer_agent.server.store import Store
from peer_agent.server.tasks import OwnedTasks
from peer_agent.transport.base import ReadStatus

log = logging.getLogger(__name__)

STAGE_SHARE = 0.5
"""Of the slots of a namespace that one request may fill from devices."""

RESTART_S = 0.5
"""How long a staging waits for a mover that is being restarted: enough after one crash, and no burden after many."""

MAX_POOLS = 64
MAX_POOL_SLOTS = 1 << 22
MAX_STAGINGS = 64
MAX_STAGING_TASKS = 2 * MAX_STAGINGS
"""A request begins one staging a pool and MAX_STAGE_BLOCKS."""

MAX_TASKS = MAX_STAGING_TASKS + MAX_POOLS
"""Closing a pool is a task, too, for which there is always room: device memory that is not let go is lost to its engine."""

TABLE_BLOCK_BYTES = 1
"""A generation table has headers only; an arena's slots have at least one byte."""


@dataclass(slots=True)
class StagingCounters:
    """Blocks, since start. failed: the mover could not copy them, or ended."""

    staged: int = 0
    overwritten: int = 0
    late: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class _Pool:
    table: Arena
    mover: DeviceMover
    opening: OpenPool


class Stager:
    """See the module docstring. table_path: beginning of the files of generation tables. publish: as Store's."""

    def __init__(
        self,
        store: Store,
        movers: DeviceMovers,
        *,
        table_path: str,
        epoch: int,
        publish: Callable[[Event], object],
        tasks: OwnedTasks,
    ) -> None:
        self.pools = DevicePools()
        self.counters = StagingCounters()
        self._store = store
        self._movers = movers
        self._table_path = table_path
        self._epoch = epoch
        self._publish = publish
        self._tasks = tasks
        self._open: dict[int, _Pool] = {}
        self._waiting: set[asyncio.Event] = set()
        _remove_left_tables(table_path, epoch)

    # engines

    async def register(
        self, namespace_digest: bytes, *, session: int, device: str, handle: bytes, slots: int, block_bytes: int
    ) -> tuple[int, Arena]:
        """The pool's number and generation table. Raises InvalidInput (sizes), Unavailable (the device cannot be opened)."""
        namespace = self._store.namespace(namespace_digest)
        if block_bytes != namespace.block_bytes:
            raise InvalidInput(f"the pool's slots hold {block_bytes} bytes, a block of this namespace {namespace.block_bytes}")
        if not 0 < slots <= MAX_POOL_SLOTS or len(handle) > HANDLE_BYTES:
            raise TooLarge(f"a pool has 1 to {MAX_POOL_SLOTS} slots and a handle of at most {HANDLE_BYTES} bytes")
        mover = await self._movers.of(device)
        if len(self._open) >= MAX_POOLS:
            raise TooLarge(f"{MAX_POOLS} pools are registered here: unregister one, or use larger ones")
        number = secrets.randbits(63) or 1
        table = self._make_table(namespace_digest, slots)
        opening = OpenPool(number, handle, slots, block_bytes, table.path, table.arena_id)
        self._open[number] = _Pool(table, mover, opening)
        try:
            await mover.open(opening, until_s=time.monotonic() + CALL_S)
            if not self._store.is_attached(session):
                raise ConnectionError("the session ended meanwhile")
        except BaseException as error:
            self._let_go((number,))
            if not isinstance(error, OSError | ValueError):
                raise
            raise Unavailable(f"the agent's mover cannot open this pool: {error}") from error
        self.pools.register(number, session=session, namespace_digest=namespace_digest, slots=slots)
        say(log, logging.INFO, "pool registered", device=device, slots=slots, session=f"{session:x}")
        return number, table

    def publish(
        self, pool: int, fingerprints: Fingerprints, slots: Sequence[int], generations: Sequence[int], *, session: int
    ) -> None:
        self._publish_all(self.pools.publish(pool, fingerprints, slots, generations, session=session))

    async def withdraw(self, pool: int, slots: Sequence[int], *, session: int, timeout_s: float) -> int:
        """Takes blocks out of sight now, then waits until nobody copies these slots. Returns how many still are copied."""
        self._publish_all(self.pools.withdraw(pool, slots, session=session))
        until_s = time.monotonic() + timeout_s
        while (reading := self.pools.reading(pool, slots)) and (left_s := until_s - time.monotonic()) > 0:
            await self._staging_ends(left_s)
        return reading

    def unregister(self, pool: int, *, session: int) -> None:
        self._publish_all(self.pools.unregister(pool, session=session))
        self._let_go((pool,))

    def end_session(self, session: int) -> None:
        gone, events = self.pools.end_session(session)
        self._publish_all(events)
        self._let_go(gone)

    # blocks

    def present(self, namespace_digest: bytes, fingerprints: Fingerprints) -> bytes:
        """One byte per fingerprint: 1 if a device of this host has it."""
        return self.pools.present(namespace_digest, fingerprints)

    async def stage(self, namespace_digest: bytes, fingerprints: Fingerprints, *, timeout_s: float) -> float:
        """Brings what only devices have into the arena, as far as it can be done by then. Returns how long it took, seconds;
        says nothing about the outcome.
        """
        if not len(self.pools) or self.pools.stagings >= MAX_STAGINGS or timeout_s <= 0:
            return 0.0
        began_s = time.monotonic()
        here = np.frombuffer(self._store.present(namespace_digest, fingerprints), np.uint8)
        there = np.frombuffer(self.pools.present(namespace_digest, fingerprints), np.uint8)
        missing = np.flatnonzero((here == 0) & (there == 1))[: self._room(namespace_digest)].tolist()
        if not missing:
            return 0.0
        until_s = began_s + timeout_s
        for first in range(0, len(missing), MAX_STAGE_BLOCKS):
            part = fingerprints.select(missing[first : first + MAX_STAGE_BLOCKS])
            for staging in self.pools.begin(namespace_digest, part):
                self._start(namespace_digest, part.select(staging.positions), staging, until_s)
        wanted = fingerprints.select(missing)
        await self._store.wait_for_writers(namespace_digest, wanted, timeout_s=until_s - time.monotonic())
        return time.monotonic() - began_s

    def close(self) -> None:
        """After the sessions; tables go."""
        for pool in self._open.values():
            pool.table.close()
        self._open.clear()

    # internals

    def _make_table(self, namespace_digest: bytes, slots: int) -> Arena:
        """Under the first free name, so that what a killed agent left behind is replaced."""
        taken = {pool.table.path for pool in self._open.values()}
        path = next(path for number in itertools.count(1) if (path := f"{self._table_path}.pool{number}") not in taken)
        try:
            return Arena.create(path, [SizeClass(namespace_digest, TABLE_BLOCK_BYTES, slots)], epoch=self._epoch)
        except ArenaError as error:
            raise Unavailable(f"no generation table for this pool: {error}") from error

    def _room(self, namespace_digest: bytes) -> int:
        slots = next(item.slots for item in self._store.occupancy() if item.namespace_digest == namespace_digest)
        return max(1, int(slots * STAGE_SHARE))

    def _start(self, namespace_digest: bytes, fingerprints: Fingerprints, staging: Staging, until_s: float) -> None:
        """Reserves at once, so that a second request for the same blocks meets the reservation."""
        reserved, _ = self._store.reserve(namespace_digest, fingerprints, session=AGENT, lease_s=0.0)
        work = self._run(namespace_digest, fingerprints, staging, reserved, until_s)
        full = len(self._tasks) >= MAX_STAGING_TASKS
        if not reserved.reservation or full or self._tasks.start(work, name="staging") is None:
            work.close()
            self._store.abort(reserved.reservation, session=AGENT)
            self._ended(staging)

    async def _run(
        self, namespace_digest: bytes, fingerprints: Fingerprints, staging: Staging, reserved: Reserved, until_s: float
    ) -> None:
        """One staging to its very end. fingerprints: of the staging's blocks; reserved: those for which there are slots."""
        gone: list[int] = []
        reservation, positions = reserved.reservation, reserved.positions
        try:
            pool = self._open.get(staging.pool)
            if pool is not None:
                await pool.mover.open(pool.opening, until_s=min(until_s, time.monotonic() + RESTART_S))
                chosen = fingerprints.select(positions)
                wanted = self._question(pool, namespace_digest, chosen, staging, reserved, until_s)
                staged = await pool.mover.stage(wanted, until_s=until_s)
                if ReadStatus.LATE in staged.statuses:
                    self.counters.late += len(positions)
                    await self._outlive(pool.mover, wanted.stage, reservation)
                else:
                    gone = self._commit(reservation, positions, staged)
        except (OSError, ValueError) as error:
            self.counters.failed += len(positions)
            say(log, logging.WARNING, "staging failed", blocks=len(positions), error=error)
        finally:
            self._store.abort(reservation, session=AGENT)
            self._ended(staging, gone)

    async def _outlive(self, mover: DeviceMover, stage: int, reservation: int) -> None:
        """The copy goes on beyond its deadline: who waits gets an answer, and the slots wait for its end."""
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._store.quarantine(reservation, settled)
        try:
            await mover.settle(stage)
        finally:
            settled.set_result(None)

    def _commit(self, reservation: int, positions: tuple[int, ...], staged: Staged) -> list[int]:
        """Commits what is right; returns the positions that are not there any more."""
        statuses = np.frombuffer(staged.statuses, np.uint8)
        good = np.flatnonzero(statuses == ReadStatus.OK)
        checksums = np.frombuffer(staged.checksums, "<u8")[good].tobytes()
        self._store.commit(reservation, session=AGENT, positions=[positions[at] for at in good], checksums=checksums)
        gone = [position for position, status in zip(positions, staged.statuses, strict=True) if status != ReadStatus.OK]
        self.counters.staged += len(good)
        self.counters.overwritten += len(gone)
        return gone

    def _question(
        self,
        pool: _Pool,
        namespace_digest: bytes,
        fingerprints: Fingerprints,
        staging: Staging,
        reserved: Reserved,
        until_s: float,
    ) -> Stage:
        at = list(reserved.positions)
        table = pool.table.classes[0]
        slots = np.array(staging.slots, np.uint64)[at]
        records = np.zeros(len(at), BLOCK_RECORD)
        records["offset"] = table.first + slots * np.uint64(table.stride)
        records["generation"] = np.array(staging.generations, np.uint64)[at]
        records["length"] = TABLE_BLOCK_BYTES
        records["state"] = 1
        return Stage(
            stage=self._movers.next_stage(),
            pool=staging.pool,
            namespace_digest=namespace_digest,
            fingerprints=fingerprints.packed,
            width=fingerprints.width,
            records=records.tobytes(),
            slots=slots.astype("<u4").tobytes(),
            destinations=reserved.offsets,
            deadline_ns=int(until_s * 1e9),
        )

    def _ended(self, staging: Staging, gone: Iterable[int] = ()) -> None:
        self._publish_all(self.pools.end(staging.number, gone))
        for waiting in self._waiting:
            waiting.set()

    async def _staging_ends(self, timeout_s: float) -> None:
        """Until any does, or the time is up."""
        waiting = asyncio.Event()
        self._waiting.add(waiting)
        try:
            async with asyncio.timeout(timeout_s):
                await waiting.wait()
        except TimeoutError:
            return
        finally:
            self._waiting.discard(waiting)

    def _let_go(self, pools: Iterable[int]) -> None:
        for number in pools:
            pool = self._open.pop(number)
            pool.table.close()
            self._tasks.start(self._close_pool(pool.mover, number), name="close-pool")

    async def _close_pool(self, mover: DeviceMover, number: int) -> None:
        try:
            await mover.close_pool(number)
        except ConnectionError as error:
            say(log, logging.DEBUG, "pool not closed in its mover", error=error)

    def _publish_all(self, events: Iterable[Event]) -> None:
        for event in events:
            self._publish(event)


def _remove_left_tables(table_path: str, epoch: int) -> None:
    """Of an agent that was killed; one that lives keeps its own (Arena's lock)."""
    directory, name = os.path.split(table_path)
    for left in os.listdir(directory):
        if left.startswith(f"{name}.pool"):
            with contextlib.suppress(ArenaError):
                Arena.create(os.path.join(directory, left), [SizeClass(bytes(32), TABLE_BLOCK_BYTES, 1)], epoch=epoch).close()

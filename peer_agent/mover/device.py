"""Inside the mover: copies blocks of tier gpu from an engine's device memory into reserved slots of the arena.

The agent never opens a device: a driver's crash ends this process, and its context takes some hundred MiB that only hosts with
registered pools pay. Order of a stage, which makes overwritten blocks absent and never wrong (peer_agent/client/pool_table.py
has the engine's half):

    1 generation table: the header names this block with the generation it was published with   else not OK
    2 copy begun; its event seen done on this host                                               else LATE
    3 generation table again: unchanged since 1                                                  else not OK
    4 checksum of the bytes that are in the arena

Whoever overwrites a slot makes its generation odd before the first kernel that writes is launched. A copy that read one
of its bytes ended after that, so step 3 sees it.

Does not: commit, reserve, or know who wants the blocks (peer_agent/server/staging.py).
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field

import msgspec
import numpy as np

from peer_agent import _native
from peer_agent.memory.arena import Arena, ArenaError
from peer_agent.memory.device import Device, DeviceError, DevicePool, Event, Stream, make_device
from peer_agent.mover.backend import BackendError, Memory, Service, Settings
from peer_agent.mover.device_calls import ClosePool, OpenPool, Settle, Stage, Staged, encode
from peer_agent.transport.base import ReadStatus

LOOK_S = 20e-6
LOOK_MAX_S = 1e-3
"""A copy's event is looked at in pauses that double: a small copy is seen soon, a large one costs nothing."""


@dataclass(slots=True)
class _Pool:
    """stages: whose copies have not been seen ended. closing: goes with the last of them."""

    pool: DevicePool
    table: Arena
    stages: set[int] = field(default_factory=set)
    closing: bool = False


@dataclass(frozen=True, slots=True)
class _Copy:
    pool: int
    event: Event


class DeviceService(Service):
    """settings: device, an identity for `make_device`."""

    def __init__(self, settings: Settings) -> None:
        self._identity = settings.get("device", "")
        self._device: Device
        self._stream: Stream
        self._memory: Memory
        self._pools: dict[int, _Pool] = {}
        self._copying: dict[int, _Copy] = {}

    async def open(self, memory: Memory) -> bytes:
        try:
            self._device = make_device(self._identity)
            self._device.pin(memory.arena)
            self._stream = self._device.stream()
        except DeviceError as error:
            raise BackendError(f"device {self._identity}: {error}") from error
        self._memory = memory
        return b""

    def about(self) -> dict[str, str]:
        return {"device": self._device.name}

    async def close(self) -> None: ...

    async def call(self, method: str, body: bytes) -> bytes:
        match method:
            case "open_pool":
                return self._open_pool(msgspec.msgpack.decode(body, type=OpenPool))
            case "close_pool":
                return await self._close_pool(msgspec.msgpack.decode(body, type=ClosePool))
            case "stage":
                return encode(await self._stage(msgspec.msgpack.decode(body, type=Stage)))
            case "settle":
                return await self._settle(msgspec.msgpack.decode(body, type=Settle))
        raise ValueError(f"the device service has no call {method!r}")

    def _open_pool(self, wanted: OpenPool) -> bytes:
        if wanted.pool in self._pools:
            return b""
        try:
            table = Arena.open(wanted.table_path, writable=False)
        except ArenaError as error:
            raise ConnectionError(str(error)) from error
        try:
            if table.arena_id != wanted.table_id:
                raise ValueError(f"{wanted.table_path} is another table than was meant")
            pool = self._device.open_handle(wanted.handle)
        except (DeviceError, ValueError) as error:
            table.close()
            raise ConnectionError(str(error)) from error
        self._pools[wanted.pool] = _Pool(pool, table)
        if (pool.slots, pool.block_bytes) != (wanted.slots, wanted.block_bytes):
            self._drop(wanted.pool)
            raise ValueError(
                f"the pool has {pool.slots} slots of {pool.block_bytes} bytes, not {wanted.slots} of {wanted.block_bytes}"
            )
        return b""

    async def _close_pool(self, wanted: ClosePool) -> bytes:
        """At once, or with the last copy under way: unmapping device memory under one would end this process."""
        found = self._pools.get(wanted.pool)
        if found is not None:
            found.closing = True
            if not found.stages:
                self._drop(wanted.pool)
        return b""

    def _drop(self, number: int) -> None:
        found = self._pools.pop(number)
        found.table.close()
        self._device.close_pool(found.pool)

    async def _stage(self, wanted: Stage) -> Staged:
        found = self._pools.get(wanted.pool)
        if found is None or found.closing:
            raise ConnectionError(f"pool {wanted.pool} is not open here")
        statuses = np.frombuffer(_verify(found.table, wanted), np.uint8).copy()
        good = np.flatnonzero(statuses == ReadStatus.OK)
        slots = found.pool.checked(np.frombuffer(wanted.slots, "<u4")[good])
        offsets = np.frombuffer(wanted.destinations, "<u8")[good].tobytes()
        host = _native.reserved_payloads(self._memory.arena, offsets, found.pool.block_bytes)
        try:
            event = self._device.copy_to_host(found.pool, slots, np.frombuffer(host, np.uint64), stream=self._stream)
        except DeviceError as error:
            raise ConnectionError(str(error)) from error  # nothing was begun
        found.stages.add(wanted.stage)
        self._copying[wanted.stage] = _Copy(wanted.pool, event)
        if not await self._ended(wanted.stage, until_s=wanted.deadline_ns / 1e9):
            return Staged(bytes([ReadStatus.LATE]) * len(statuses), b"")
        after = np.frombuffer(_verify(found.table, wanted), np.uint8)
        statuses[good] = after[good]
        checksums = np.zeros(len(statuses), "<u8")
        checksums[good] = np.frombuffer(_native.payload_checksums(self._memory.arena, offsets, found.pool.block_bytes), "<u8")
        return Staged(statuses.tobytes(), checksums.tobytes())

    async def _settle(self, wanted: Settle) -> bytes:
        if wanted.stage in self._copying:
            await self._ended(wanted.stage, until_s=math.inf)
        return b""

    async def _ended(self, stage: int, *, until_s: float) -> bool:
        """Whether the stage's copy was seen complete by then.

        DeviceError ends this process (main.py): a context in which a copy failed is of no more use, and only its end is sure to
        end what was begun in it.
        """
        copy, pause_s = self._copying[stage], LOOK_S
        while not copy.event.done():
            if time.monotonic() >= until_s:
                return False
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LOOK_MAX_S)
        self._forget(stage)
        return True

    def _forget(self, stage: int) -> None:
        copy = self._copying.pop(stage)
        found = self._pools[copy.pool]
        found.stages.discard(stage)
        if found.closing and not found.stages:
            self._drop(copy.pool)


def _verify(table: Arena, wanted: Stage) -> bytes:
    """One ReadStatus a block: does the table say now what it said when the block was published?"""
    return _native.verify_blocks(
        table.region, wanted.records, wanted.namespace_digest, wanted.fingerprints, wanted.width, False
    )

"""A device's memory as the source of stores and the destination of loads: order, deadlines, and copies that miss them.

    pool = device.allocate(slots=4096, segment_bytes=[...])      # or device.adopt(tensors)
    engine = peer_agent.connect(address, namespace=namespace, device=device)
    engine.store(fingerprints, DeviceBlocks(pool, slots, ready=event))
    engine.load(fingerprints, into=DeviceBlocks(pool, slots, ready=event))

Rules:
- Nothing is begun before `ready` was seen done on this host: for a store the slots are then written, for a load nobody uses
  them any more. No stream is ever assumed to be the right one.
- A store is committed only after its copy's event was seen done; checksums are of the bytes that are then in the arena.
- A load verifies blocks in the arena, copies, and verifies again that they stayed the same. It returns once the copies were
  seen done, so consumers that start afterwards see the blocks, on whatever stream.
- A copy that misses the deadline is not forgotten: arena, page lock, presence and the load's lock stay until it has ended, the
  caller sees it as `DeviceBlocks.busy`, and nothing else is begun meanwhile. Until then the caller leaves the slots alone.

Does not: know how a device works (peer_agent/memory/device.py).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvdir.errors import DeadlineExceeded, InvalidInput, KvdirError
from kvdir.obs.logs import say
from peer_agent import _native
from peer_agent.client.buffers import CallerMemory, Keep, Wanted, memory_of
from peer_agent.core.records import BLOCK_RECORD
from peer_agent.memory.device import Array, Device, DeviceError, DevicePool, Event
from peer_agent.memory.layout import HEADER_BYTES
from peer_agent.transport.base import ReadStatus

log = logging.getLogger(__name__)

CHUNK_BYTES = 16 << 20
"""Copies of a load are marked in steps of this size: what a deadline cuts off is at most one step more than had to be."""

LOOK_S = 0.05
"""How often copies that missed their deadline are looked at."""


class DeviceBlocks:
    """Blocks in slots of a pool, in the order of the fingerprints; one slot a block.

    ready: an event that is done once the slots may be touched: for a store after the kernels that fill them, for a load after
    the last use of what they held. `stream.record()` behind that work makes one. InvalidInput for slots that the pool lacks.
    """

    def __init__(self, pool: DevicePool, slots: Sequence[int] | Array, *, ready: Event) -> None:
        self.pool = pool
        self.slots = pool.checked(slots)
        self.ready = ready
        self._late: list[Event] = []

    def __len__(self) -> int:
        return len(self.slots)

    def await_ready(self, until_s: float) -> None:
        """Raises DeadlineExceeded when `ready` is not done by time.monotonic() until_s, or only just."""
        if not self.ready.wait(until_s - time.monotonic()) or time.monotonic() >= until_s:
            raise DeadlineExceeded("the deadline passed before the `ready` event of these device blocks was done")

    @property
    def busy(self) -> bool:
        """Whether a copy that missed its deadline may still read or write the slots."""
        return not all(map(_ended, self._late))

    def wait_idle(self, timeout_s: float) -> bool:
        """Waits until no copy uses the slots any more; False after timeout_s."""
        until_s = time.monotonic() + timeout_s
        return all(_ended(event, until_s - time.monotonic()) for event in list(self._late))


class DeviceCopier:
    """The copies of one engine. Thread-safe."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._changed = threading.Condition()
        self._late: list[_Late] = []
        self._out = device.stream()
        self._in = device.stream()

    def memory(self, blocks: DeviceBlocks, *, count: int, block_bytes: int) -> DeviceMemory:
        """What store and load use. InvalidInput: wrong number or size of blocks, another device."""
        if blocks.pool.device is not self.device:
            raise InvalidInput(f"these blocks are on another device object than the engine's, {self.device.name}: use that one")
        if len(blocks) != count:
            raise InvalidInput(f"{len(blocks)} device slots for {count} fingerprints: pass one slot a block")
        if blocks.pool.block_bytes != block_bytes:
            raise InvalidInput(
                f"the pool's slots hold {blocks.pool.block_bytes} bytes, a block of this namespace has {block_bytes}: "
                "make the pool from segments that add up to it"
            )
        if blocks.busy:
            raise InvalidInput("an earlier copy still uses these slots: wait_idle, or use others")
        blocks._late.clear()
        return DeviceMemory(self, blocks)

    def to_host(self, pool: DevicePool, slots: Array, host: Array) -> Event:
        return self.device.copy_to_host(pool, slots, host, stream=self._out)

    def from_host(self, pool: DevicePool, slots: Array, host: Array) -> Event:
        return self.device.copy_from_host(pool, slots, host, stream=self._in)

    def await_quiet(self, until_s: float) -> None:
        """Until no earlier copy is late any more. DeadlineExceeded by until_s: then the device stands still, or nearly."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._late, max(0.0, until_s - time.monotonic())):
                count = len(self._late)
                raise DeadlineExceeded(
                    f"{self.device.name} has not finished {count} earlier copies: is it overloaded or stuck?"
                )

    def outlive(self, event: Event, blocks: DeviceBlocks, let_go: Callable[[], None]) -> None:
        """A copy has missed its deadline: calls let_go once it has ended. One thread looks after all of them."""
        blocks._late.append(event)
        with self._changed:
            self._late.append(_Late(event, blocks, let_go))
            if len(self._late) == 1:
                threading.Thread(target=self._look_after, name="kvdir-late-copies", daemon=True).start()
        say(log, logging.WARNING, "a device copy missed its deadline", device=self.device.name, blocks=len(blocks))

    def _look_after(self) -> None:
        """Ends with the last late copy; a daemon, because a device that stands still for ever must not keep the process."""
        while True:
            first = self._late[0]  # only this thread takes any out
            if not _ended(first.event, LOOK_S):
                continue
            try:
                first.let_go()
            except Exception:
                log.exception("what a late copy held could not be given back")
            with self._changed:
                self._late.pop(0)
                self._changed.notify_all()
                if not self._late:
                    return


@dataclass(frozen=True, slots=True)
class _Late:
    """blocks: keeps the pool's memory, too."""

    event: Event
    blocks: DeviceBlocks
    let_go: Callable[[], None]


class DeviceMemory:
    """The device blocks of one call; see peer_agent.client.buffers.CallerMemory."""

    waits = True

    def __init__(self, copier: DeviceCopier, blocks: DeviceBlocks) -> None:
        self._copier = copier
        self._blocks = blocks
        self.late = False

    def copy_in(
        self, region: memoryview, offsets: bytes, positions: Array, *, block_bytes: int, until_s: float, keep: Keep
    ) -> bytes:
        self._await_turn(until_s)
        host = np.frombuffer(_native.reserved_payloads(region, offsets, block_bytes), np.uint64)
        event = self._copier.to_host(self._blocks.pool, self._blocks.slots[positions], host)
        try:
            if not event.wait(until_s - time.monotonic()):
                self._outlive(event, keep)
                raise DeadlineExceeded(f"{self._copier.device.name} did not finish the copy by the deadline")
        except DeviceError:
            self.late = True  # how a broken device ends what it has begun is not known: the slots rest for their lease
            raise
        except KeyboardInterrupt:  # in the caller's thread: the copy goes on
            self._outlive(event, keep)
            raise
        return _native.payload_checksums(region, offsets, block_bytes)

    def copy_out(self, region: memoryview, wanted: Wanted, *, until_s: float, keep: Keep) -> bytes:
        statuses = np.frombuffer(_verify(region, wanted, check=wanted.check), np.uint8).copy()
        good = np.flatnonzero(statuses == ReadStatus.OK)
        if not good.size:
            return statuses.tobytes()
        try:
            self._await_turn(until_s)
        except DeadlineExceeded as error:
            say(log, logging.DEBUG, "load came too late to begin its copies", error=error)
            statuses[good] = ReadStatus.LATE
            return statuses.tobytes()
        arrived = self._copy_chunks(region, wanted, good, until_s=until_s, keep=keep)
        after = np.frombuffer(_verify(region, wanted, check=False), np.uint8)
        statuses[good] = after[good]
        statuses[good[arrived:]] = ReadStatus.LATE
        return statuses.tobytes()

    def _copy_chunks(self, region: memoryview, wanted: Wanted, chosen: Array, *, until_s: float, keep: Keep) -> int:
        """How many of the chosen blocks were seen complete by until_s, first ones first."""
        pool = self._blocks.pool
        slots = self._blocks.slots[wanted.positions[chosen]]
        base = np.frombuffer(region, np.uint8).ctypes.data
        host = np.frombuffer(wanted.records, BLOCK_RECORD)["offset"][chosen].astype(np.uint64) + np.uint64(base + HEADER_BYTES)
        step = max(1, CHUNK_BYTES // pool.block_bytes)
        marks: list[Event] = []
        try:
            for at in range(0, len(slots), step):
                mark = self._copier.from_host(pool, slots[at : at + step], host[at : at + step])
                marks.append(mark)  # one by one: those begun before a refusal must be known
            for done, mark in enumerate(marks):
                if not mark.wait(until_s - time.monotonic()):
                    self._outlive(marks[-1], keep)
                    return done * step
        except (DeviceError, KeyboardInterrupt):  # those behind a chunk that failed may go on
            if marks:
                self._outlive(marks[-1], keep)
            raise
        return len(slots)

    def _await_turn(self, until_s: float) -> None:
        self._copier.await_quiet(until_s)
        self._blocks.await_ready(until_s)

    def _outlive(self, event: Event, keep: Keep) -> None:
        self.late = True
        self._copier.outlive(event, self._blocks, keep())


def caller_memory(blocks: Any, copier: DeviceCopier | None, *, count: int, block_bytes: int, writable: bool) -> CallerMemory:
    """`blocks` as store and load take them, on the host or on the device. InvalidInput says what is wrong with them."""
    if not isinstance(blocks, DeviceBlocks):
        return memory_of(blocks, count=count, block_bytes=block_bytes, writable=writable)
    if copier is None:
        raise InvalidInput("device blocks, but an engine without a device: use connect(..., device=...)")
    return copier.memory(blocks, count=count, block_bytes=block_bytes)


def _verify(region: memoryview, wanted: Wanted, *, check: bool) -> bytes:
    return _native.verify_blocks(region, wanted.records, wanted.namespace_digest, wanted.fingerprints, wanted.width, check)


def _ended(event: Event, timeout_s: float = 0.0) -> bool:
    """Whether the device is through with it; a copy that failed is, too: nothing moves on a broken stream."""
    try:
        return event.wait(timeout_s)
    except KvdirError:
        return True

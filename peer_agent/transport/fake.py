"""An in-process plane for tests: real arenas, real verification, no sockets, and faults on demand.

    network = FakeNetwork()
    owner, reader = FakeTransport(network, owner_arena), FakeTransport(network, reader_arena)
    network.faults[await owner.export()] = Fault.TORN

It passes the same contract suite as the real planes (transport/check.py). What it adds is what they never do on their own:
`Fault.LATE_WRITE` answers LATE with `settled` pending, and the bytes land when the test calls `land_late_writes`, as a
one-sided RDMA transfer may do after the reader gave up.
"""

from __future__ import annotations

import asyncio
import enum
import hmac
import itertools
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from peer_agent import _native
from peer_agent.memory.arena import Arena
from peer_agent.memory.layout import HEADER_BYTES
from peer_agent.transport.base import BLOCK_RECORD_BYTES, Capabilities, ReadList, ReadOutcome, ReadStatus
from peer_agent.transport.outcomes import check_shape, settled_outcome, uniform_outcome

RECORD = struct.Struct("<QQQII")


class Fault(enum.Enum):
    """How a peer may misbehave. Planes have the ones that are possible for them."""

    SLOW = "takes requests and never answers"
    CLOSING = "goes away in the middle of an answer"
    WRONG_BYTES = "sends other payload bytes than the checksum says"
    WRONG_HEADER = "sends another block's header"
    TORN = "rewrites the slots while they are copied"
    GARBAGE = "answers with frames that are none"
    LATE_WRITE = "writes after the reader has given up"


@dataclass(slots=True)
class FakeNetwork:
    """What the fakes of one test share. Keys are descriptors."""

    owners: dict[bytes, FakeTransport] = field(default_factory=dict)
    faults: dict[bytes, Fault] = field(default_factory=dict)
    numbers: itertools.count[int] = field(default_factory=itertools.count)
    late_writes: list[Callable[[], None]] = field(default_factory=list)

    def land_late_writes(self) -> None:
        """Lets every pending late transfer write its bytes and settle."""
        pending, self.late_writes[:] = list(self.late_writes), []
        for write in pending:
            write()


class FakeTransport:
    """Owner's and reader's side of one arena."""

    name = "fake"

    def __init__(self, network: FakeNetwork, arena: Arena) -> None:
        self.network = network
        self.arena = arena
        self._descriptor = b"\x01fake %d" % next(network.numbers)
        self._grants: dict[int, tuple[dict[int, bytes], float, bytes]] = {}
        self._connections: list[FakeConnection] = []

    def capabilities(self) -> Capabilities:
        return Capabilities(same_host_only=True, gpu=False, verifies="checksum", owner_checks_lock=True)

    async def export(self) -> bytes:
        self.network.owners[self._descriptor] = self
        return self._descriptor

    def grant(self, lock: int, records: bytes, *, expires_s: float, capability: bytes) -> None:
        present = {record[0]: RECORD.pack(*record) for record in RECORD.iter_unpack(records) if record[4] == 1}
        self._grants[lock] = (present, expires_s, capability)

    def revoke(self, lock: int) -> None:
        self._grants.pop(lock, None)

    async def connect(self, descriptor: bytes, *, deadline_s: float) -> FakeConnection:
        if not descriptor.startswith(b"\x01fake "):
            raise ValueError("not a fake descriptor of version 1")
        if descriptor not in self.network.owners:
            raise ConnectionError("nobody exports under this fake descriptor")
        connection = FakeConnection(self.network, descriptor, self.arena)
        self._connections.append(connection)
        return connection

    async def close(self) -> None:
        self.network.owners.pop(self._descriptor, None)
        for connection in self._connections:
            await connection.close()

    def admit(self, blocks: ReadList) -> bytes:
        """Records of `blocks`, with those that the lock does not cover marked absent."""
        granted, expires_s, capability = self._grants.get(blocks.lock, ({}, 0.0, b""))
        live = time.monotonic() < expires_s and hmac.compare_digest(capability, blocks.capability)
        admitted = bytearray(blocks.records)
        for index, record in enumerate(RECORD.iter_unpack(blocks.records)):
            covered = live and record[0] in granted
            if not covered:
                RECORD.pack_into(admitted, index * BLOCK_RECORD_BYTES, *record[:4], 0)
        return bytes(admitted)


class FakeConnection:
    """To one owner of the network."""

    def __init__(self, network: FakeNetwork, descriptor: bytes, arena: Arena) -> None:
        self._network = network
        self._descriptor = descriptor
        self._arena = arena
        self._closed = asyncio.Event()

    async def read(self, blocks: ReadList, *, deadline_s: float) -> ReadOutcome:
        check_shape(blocks)
        deadline_ns = time.monotonic_ns() + int(deadline_s * 1e9)
        await asyncio.sleep(0)  # every plane gives the loop a turn
        owner = self._network.owners.get(self._descriptor)
        if owner is None or self._closed.is_set():
            return uniform_outcome(blocks, ReadStatus.PEER_LOST)
        if blocks.epoch != owner.arena.epoch:
            return uniform_outcome(blocks, ReadStatus.STALE)
        if deadline_s <= 0:
            return uniform_outcome(blocks, ReadStatus.LATE)
        match self._network.faults.get(self._descriptor):
            case None:
                return settled_outcome(blocks, self._copy(owner, owner.arena.region, blocks, deadline_ns))
            case Fault.SLOW:
                return await self._wait_in_vain(blocks, deadline_s)
            case Fault.CLOSING:
                return settled_outcome(blocks, self._copy_half(owner, blocks, deadline_ns))
            case Fault.GARBAGE:
                return uniform_outcome(blocks, ReadStatus.PEER_LOST)
            case Fault.LATE_WRITE:
                return self._give_up_early(blocks)
            case fault:
                doctored = _doctor(owner.arena, fault)
                statuses = self._copy(owner, memoryview(doctored), blocks, deadline_ns)
                if fault is Fault.TORN:
                    statuses = statuses.replace(bytes([ReadStatus.OK]), bytes([ReadStatus.TORN]))
                return settled_outcome(blocks, statuses)

    async def close(self) -> None:
        self._closed.set()

    def _copy(self, owner: FakeTransport, source: memoryview, blocks: ReadList, deadline_ns: int) -> bytes:
        found = _native.read_slots(
            source,
            owner.admit(blocks),
            blocks.namespace_digest,
            blocks.fingerprints,
            blocks.width,
            self._arena.region,
            blocks.destinations,
            True,
            deadline_ns,
            sys.maxsize,
        )
        assert found is not None
        return found[0]

    def _copy_half(self, owner: FakeTransport, blocks: ReadList, deadline_ns: int) -> bytes:
        statuses = self._copy(owner, owner.arena.region, blocks, deadline_ns)
        half = len(statuses) // 2
        return statuses[:half] + bytes([ReadStatus.PEER_LOST]) * (len(statuses) - half)

    async def _wait_in_vain(self, blocks: ReadList, deadline_s: float) -> ReadOutcome:
        try:
            async with asyncio.timeout(deadline_s):
                await self._closed.wait()
        except TimeoutError:
            return uniform_outcome(blocks, ReadStatus.LATE)
        return uniform_outcome(blocks, ReadStatus.PEER_LOST)

    def _give_up_early(self, blocks: ReadList) -> ReadOutcome:
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def write() -> None:
            for (destination,), record in zip(
                struct.iter_unpack("<Q", blocks.destinations), RECORD.iter_unpack(blocks.records), strict=True
            ):
                start = destination + HEADER_BYTES
                self._arena.region[start : start + record[3]] = b"\xee" * record[3]
            settled.set_result(None)

        self._network.late_writes.append(write)
        statuses = bytes([ReadStatus.LATE]) * len(blocks)
        return ReadOutcome(statuses, settled, 0)


def _doctor(arena: Arena, fault: Fault) -> bytearray:
    """A copy of an owner's memory with every visible slot spoilt."""
    doctored = bytearray(arena.region)
    for size_class in arena.classes:
        for index in range(size_class.slots):
            header = size_class.offset(index)
            at = header + (HEADER_BYTES if fault is Fault.WRONG_BYTES else 32)  # first payload or fingerprint byte
            if fault in (Fault.WRONG_BYTES, Fault.WRONG_HEADER):
                doctored[at] ^= 0xFF
    return doctored

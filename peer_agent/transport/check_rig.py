"""What the transport contract suite works with: two arenas, two ends of a plane, and blocks with known bytes.

Separate from check.py so that other tests (faults with real processes, torn writers) can use the same handles.
"""

from __future__ import annotations

import ctypes
import random
import struct
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from peer_agent import _native
from peer_agent.core.capability import KEY_BYTES, CapabilityMint
from peer_agent.memory.arena import Arena
from peer_agent.memory.layout import HEADER_BYTES
from peer_agent.transport.base import BLOCK_RECORD_BYTES, Connection, ReadList, ReadOutcome, ReadStatus, Transport
from peer_agent.transport.fake import RECORD, Fault

WIDTH = 16
LOCK = 7
KEY = bytes(range(KEY_BYTES))
LEASE_S = 60.0
DEADLINE_S = 10.0


async def _no_fault(_: Fault) -> bytes | None:
    return None


@dataclass(slots=True)
class Rig:
    """One owner and one reader over one plane. Both arenas: one size class, the same block size, at least 16 slots.

    faulty: the descriptor of a peer that misbehaves so and serves owner_arena, or None where the plane cannot.
    """

    owner: Transport
    owner_arena: Arena
    reader: Transport
    reader_arena: Arena
    faulty: Callable[[Fault], Awaitable[bytes | None]] = _no_fault
    seed: random.Random = field(default_factory=lambda: random.Random(0))
    capabilities: dict[int, bytes] = field(default_factory=dict)  # by lock

    @property
    def digest(self) -> bytes:
        return self.owner_arena.classes[0].namespace_digest

    @property
    def block_bytes(self) -> int:
        return self.owner_arena.classes[0].block_bytes

    async def connect(self) -> Connection:
        return await self.reader.connect(await self.owner.export(), deadline_s=DEADLINE_S)

    def store(self, slots: Sequence[int], *, lock: int | None = LOCK) -> Stored:
        """Commits random blocks into these slots of the owner; grants them under `lock`."""
        offsets = self.owner_offsets(slots)
        payloads = [self.seed.randbytes(self.block_bytes) for _ in slots]
        fingerprints = self.seed.randbytes(len(slots) * WIDTH)
        _native.begin_write(self.owner_arena.region, offsets)
        records = write(self.owner_arena, offsets, self.digest, fingerprints, payloads)
        if lock is not None:
            self.grant(lock, records)
        return Stored(tuple(slots), records, fingerprints, tuple(payloads))

    def grant(self, lock: int, records: bytes, *, lease_s: float = LEASE_S) -> bytes:
        """As a store does for Peer.Lock; returns the capability."""
        expires_s = time.monotonic() + lease_s
        mint = CapabilityMint(KEY, epoch=self.owner_arena.epoch)
        capability = mint.capability(lock, records, reader="rig", expires_s=expires_s)
        self.owner.grant(lock, records, expires_s=expires_s, capability=capability)
        self.capabilities[lock] = capability
        return capability

    def owner_offsets(self, slots: Sequence[int]) -> bytes:
        return pack([self.owner_arena.classes[0].offset(slot) for slot in slots])

    def reserve(self, count: int, *, first: int = 0) -> bytes:
        """Makes reader slots ready to be written; returns their offsets."""
        offsets = pack([self.reader_arena.classes[0].offset(slot) for slot in range(first, first + count)])
        _native.begin_write(self.reader_arena.region, offsets)
        return offsets

    def request(self, stored: Stored, *, first: int = 0, lock: int = LOCK) -> ReadList:
        """Asks for all of `stored` into reader slots from `first` on, which it reserves."""
        return ReadList(
            lock=lock,
            epoch=self.owner_arena.epoch,
            namespace_digest=self.digest,
            fingerprints=stored.fingerprints,
            width=WIDTH,
            records=stored.records,
            destinations=self.reserve(len(stored.payloads), first=first),
            capability=self.capabilities.get(lock, b""),
        )

    def landed(self, blocks: ReadList, index: int) -> bytes:
        """What lies in the destination of one block now."""
        (offset,) = struct.unpack_from("<Q", blocks.destinations, index * 8)
        return bytes(self.reader_arena.region[offset + HEADER_BYTES : offset + HEADER_BYTES + self.block_bytes])

    def expect(self, outcome: ReadOutcome, blocks: ReadList, stored: Stored) -> list[ReadStatus]:
        """The suite's first rule: whatever is OK has exactly the owner's bytes. Returns the statuses."""
        statuses = [ReadStatus(status) for status in outcome.statuses]
        assert len(statuses) == len(blocks)
        for index, status in enumerate(statuses):
            if status is ReadStatus.OK:
                assert self.landed(blocks, index) == stored.payloads[index], f"block {index} is OK with wrong bytes"
        assert outcome.bytes_read == self.block_bytes * statuses.count(ReadStatus.OK)
        return statuses


@dataclass(frozen=True, slots=True)
class Stored:
    """Committed blocks of the owner, in request order."""

    slots: tuple[int, ...]
    records: bytes
    fingerprints: bytes
    payloads: tuple[bytes, ...]


def pack(offsets: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(offsets)}Q", *offsets)


def write(arena: Arena, offsets: bytes, digest: bytes, fingerprints: bytes, payloads: Sequence[bytes]) -> bytes:
    """Writes payloads into reserved slots and commits them; returns their records."""
    buffers = [ctypes.create_string_buffer(payload, len(payload)) for payload in payloads]
    sources = pack([ctypes.addressof(buffer) for buffer in buffers])
    length = len(payloads[0]) if payloads else 0
    checksums = _native.write_blocks(arena.region, offsets, sources, length)
    return _native.commit(arena.region, offsets, digest, fingerprints, WIDTH, length, checksums)


def with_record(blocks: ReadList, index: int, **changes: int) -> ReadList:
    """The same request with fields of one record changed: offset, generation, checksum, length, state."""
    fields = ("offset", "generation", "checksum", "length", "state")
    record = dict(zip(fields, RECORD.unpack_from(blocks.records, index * BLOCK_RECORD_BYTES), strict=True)) | changes
    records = bytearray(blocks.records)
    RECORD.pack_into(records, index * BLOCK_RECORD_BYTES, *(record[name] for name in fields))
    return replace(blocks, records=bytes(records))

"""The same-host plane: the peer's arena mapped read-only, blocks copied natively, generations checked before and after.

Descriptor (what `export` returns and Peer.Hello carries), little endian:

    u8 layout version (1) | 16 B boot id | u64 device | u64 inode | 16 B arena id | u64 epoch | UTF-8 path

Rules:
- Device and inode say whether the path means the same file here: another host, another container's /dev/shm and a restarted
  peer all differ, and `connect` says which it is, so that the caller takes tcp instead.
- The owner does no work and cannot refuse: a lock protects the blocks, it is not looked at here. What protects the reader is
  the generation: a slot that was reused, torn or retired is not OK, lock or no lock. A SIGSTOPped owner is still readable.
- Once the owner closed its arena or was replaced, its superblock says epoch 0 and reads are PEER_LOST.
- Peers on one host run as one user (arena files have mode 0600) and could read each other's memory anyway; the plane
  protects against accidents and restarts, not against a hostile process of the same user, which could also shorten the file
  under a reader.
"""

from __future__ import annotations

import asyncio
import os
import struct
import time
import weakref
from dataclasses import dataclass

from peer_agent import _native
from peer_agent.memory.arena import Arena, ArenaError
from peer_agent.transport.base import Capabilities, ReadList, ReadOutcome, ReadStatus
from peer_agent.transport.movers import Movers
from peer_agent.transport.outcomes import settled_now, uniform_outcome

DESCRIPTOR_VERSION = 1
_DESCRIPTOR = struct.Struct("<B16sQQ16sQ")
_BOOT_ID = "/proc/sys/kernel/random/boot_id"

INLINE_BYTES = 2 << 20
"""What may be copied in the event loop per turn of it, bytes (some 200 us). Handing a read to a thread and back costs 30 us on
idle cores and 100 us on busy ones, so a single small read is faster without; a burst of them goes to the threads."""


class ShmTransport:
    """Owner's and reader's side for one arena.

    check: compare payload checksums as well; costs a third of the speed and finds memory that rotted, which generations
    cannot. inline_bytes: see INLINE_BYTES.
    """

    name = "shm"

    def __init__(
        self, arena: Arena, *, movers: Movers | None = None, check: bool = False, inline_bytes: int = INLINE_BYTES
    ) -> None:
        self._arena = arena
        self._check = check
        self._inline = InlineBudget(inline_bytes)
        self._movers = (movers or Movers()).attach()
        self._connections: weakref.WeakSet[ShmConnection] = weakref.WeakSet()

    def capabilities(self) -> Capabilities:
        verifies = "checksum" if self._check else "generation"
        return Capabilities(same_host_only=True, gpu=False, verifies=verifies, owner_checks_lock=False)

    async def export(self) -> bytes:
        device, inode = self._arena.file_identity
        fixed = _DESCRIPTOR.pack(DESCRIPTOR_VERSION, _boot_id(), device, inode, self._arena.arena_id, self._arena.epoch)
        return fixed + self._arena.path.encode()

    def grant(self, lock: int, records: bytes, *, expires_s: float, capability: bytes) -> None:
        """Nothing to do: the arena itself is what readers see."""

    def revoke(self, lock: int) -> None:
        """Nothing to do: the generation changes before a slot is reused."""

    async def connect(self, descriptor: bytes, *, deadline_s: float) -> ShmConnection:
        wanted = _Descriptor.parse(descriptor)
        opening = asyncio.get_running_loop().run_in_executor(None, _open_peer, wanted)
        try:
            async with asyncio.timeout(deadline_s):
                peer = await asyncio.shield(opening)
        except TimeoutError:
            opening.add_done_callback(_close_late)
            raise ConnectionError(f"could not map {wanted.path} in time; is this node overloaded?") from None
        except asyncio.CancelledError:
            opening.add_done_callback(_close_late)
            raise
        connection = ShmConnection(self._arena, peer, self._movers, inline=self._inline, check=self._check)
        self._connections.add(connection)
        return connection

    async def close(self) -> None:
        for connection in tuple(self._connections):
            await connection.close()
        await self._movers.close()


class ShmConnection:
    """One peer's mapped arena."""

    def __init__(self, arena: Arena, peer: Arena, movers: Movers, *, inline: InlineBudget, check: bool) -> None:
        self._inline = inline
        self._arena = arena
        self._peer = peer
        self._movers = movers
        self._check = check
        self._tickets: set[int] = set()
        self._closed = False

    async def read(self, blocks: ReadList, *, deadline_s: float) -> ReadOutcome:
        until_s = time.monotonic() + deadline_s
        if self._closed or self._peer.epoch_now() != self._peer.epoch:
            return uniform_outcome(blocks, ReadStatus.PEER_LOST)
        if blocks.epoch != self._peer.epoch:
            return uniform_outcome(blocks, ReadStatus.STALE)
        here = _native.read_slots(*self._arguments(blocks, until_s), self._inline.left)
        if here is not None:
            self._inline.spend(here[2])
            return ReadOutcome(here[0], settled_now(), here[1])
        try:
            statuses, moved = await self._movers.read(
                lambda movers: movers.read_slots(*self._arguments(blocks, until_s)), tickets=self._tickets
            )
        except ConnectionError:
            return uniform_outcome(blocks, ReadStatus.PEER_LOST)
        return ReadOutcome(statuses, settled_now(), moved)

    async def close(self) -> None:
        """Reads in progress end with their current block; the mapping goes when they have."""
        if self._closed:
            return
        self._closed = True
        self._movers.abort(self._tickets)
        self._peer.close()

    def _arguments(
        self, blocks: ReadList, until_s: float
    ) -> tuple[memoryview, bytes, bytes, bytes, int, memoryview, bytes, bool, int]:
        return (
            self._peer.region,
            blocks.records,
            blocks.namespace_digest,
            blocks.fingerprints,
            blocks.width,
            self._arena.region,
            blocks.destinations,
            self._check,
            int(until_s * 1e9),
        )


class InlineBudget:
    """How many bytes may still be copied in this turn of the event loop."""

    def __init__(self, bytes_per_turn: int) -> None:
        self._full = bytes_per_turn
        self.left = bytes_per_turn

    def spend(self, size: int) -> None:
        if self.left == self._full:
            asyncio.get_running_loop().call_soon(self._refill)
        self.left -= size

    def _refill(self) -> None:
        self.left = self._full


@dataclass(frozen=True, slots=True)
class _Descriptor:
    boot_id: bytes
    device: int
    inode: int
    arena_id: bytes
    epoch: int
    path: str

    @classmethod
    def parse(cls, descriptor: bytes) -> _Descriptor:
        """ValueError for garbage."""
        if len(descriptor) <= _DESCRIPTOR.size or descriptor[0] != DESCRIPTOR_VERSION:
            raise ValueError(f"not an shm descriptor of version {DESCRIPTOR_VERSION}: {len(descriptor)} bytes")
        _, boot_id, device, inode, arena_id, epoch = _DESCRIPTOR.unpack_from(descriptor)
        path = descriptor[_DESCRIPTOR.size :].decode()  # UnicodeDecodeError is a ValueError
        if not os.path.isabs(path) or "\0" in path:
            raise ValueError("shm descriptor without an absolute path")
        return cls(boot_id, device, inode, arena_id, epoch, path)


def _close_late(opening: asyncio.Future[Arena]) -> None:
    """What was mapped after nobody waited any more."""
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


def _open_peer(wanted: _Descriptor) -> Arena:
    if wanted.boot_id != _boot_id():
        raise ConnectionError("the peer runs on another host (boot id differs); use tcp")
    try:
        peer = Arena.open(wanted.path, writable=False)
    except ArenaError as error:
        raise ConnectionError(f"{error} If it runs in another container, share its /dev/shm or use tcp.") from error
    if peer.file_identity != (wanted.device, wanted.inode):
        reason = f"{wanted.path} is another file here: the peer has a /dev/shm of its own (use tcp) or restarted (ask again)"
    elif (peer.arena_id, peer.epoch) != (wanted.arena_id, wanted.epoch):
        reason = f"the arena at {wanted.path} is of another epoch: the peer has restarted; ask it again"
    else:
        return peer
    peer.close()
    raise ConnectionError(reason)


def _boot_id() -> bytes:
    with open(_BOOT_ID, encoding="ascii") as file:
        return bytes.fromhex(file.read().strip().replace("-", ""))

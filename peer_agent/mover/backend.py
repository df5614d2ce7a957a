"""The port of what runs inside a mover: libraries that move bytes one-sidedly, kept behind few verbs.

Rules of a backend:
- It runs in the mover's event loop (plain asyncio, one thread) and never blocks it longer than a transfer's posting takes. Idle
  it costs nothing: it waits on a descriptor, or polls with pauses that grow.
- A `Link` moves bytes from the peer's arena into our arena or scratch, to exactly the addresses it is given. Ranges were
  checked before, on both sides (reads.py); verification comes afterwards and is not its business either.
- **When `gets` has returned or raised, nothing of that batch writes any more.** This is what quarantine ends on. A library that
  cannot promise it must not return: whoever waits too long calls `close`, and if that does not return either, or raises
  Unsettled, the mover ends.
- `gets` is never cancelled by its caller. `close` makes gets under way raise ConnectionError.
- A crash is allowed: it costs this mover's transfers (peer lost), nothing else.

A `Service` is the same without transfers: calls of the agent that must not run in the agent (peer_agent/mover/device.py).

Does not: know locks, deadlines, statuses, or other peers.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


class BackendError(Exception):
    """The backend cannot work on this machine or in this configuration. `faults`: what is missing and what to do, one each."""

    def __init__(self, *faults: str) -> None:
        super().__init__("; ".join(faults))
        self.faults = faults


class Unsettled(Exception):
    """Something may still write, and nothing but the end of this process stops it for certain: the mover ends on it."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What a mover maps. arena: the agent's whole arena, writable; its offsets are what records speak of. arena_fd: the same as
    an open file.

    scratch: memory of our own for peers' slot headers. incarnation: 16 random bytes, new in every life of the mover; a peer
    that holds a descriptor of an earlier life must be refused.
    """

    arena: memoryview
    arena_fd: int
    scratch: memoryview
    incarnation: bytes

    @property
    def arena_address(self) -> int:
        return address_of(self.arena)

    @property
    def scratch_address(self) -> int:
        return address_of(self.scratch)


@dataclass(frozen=True, slots=True)
class Gets:
    """n transfers, packed u64 little endian each, in the same order.

    remote: offsets in the peer's arena. local: addresses in this process, inside Memory.arena or Memory.scratch; all of one
    batch in the same of the two. lengths: bytes, payloads or HEADER_BYTES each.
    """

    remote: bytes
    local: bytes
    lengths: bytes

    def __len__(self) -> int:
        return len(self.remote) // 8

    @property
    def size(self) -> int:
        """Bytes of all of them."""
        return sum(array("Q", self.lengths))


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """What a peer's descriptor says. incarnation, arena_bytes: of the peer; descriptor: the backend's own part, unchecked."""

    incarnation: bytes
    arena_bytes: int
    descriptor: bytes


class Link(Protocol):
    """A connection to one peer's memory. Several batches may be under way at once."""

    @property
    def lanes(self) -> tuple[str, ...]:
        """Paths that the library really uses, such as "rc_mlx5/mlx5_0:1"; for people and metrics. No commas in them."""

    @property
    def broken(self) -> bool:
        """True once every further `gets` would raise; the next read connects anew."""

    async def gets(self, gets: Gets) -> None:
        """Returns when every byte has arrived. ConnectionError: the peer, path or link is gone. See the rules above."""

    async def close(self) -> None:
        """Ends the link; idempotent. Gets under way raise. Returns only when nothing can write through it any more."""


@runtime_checkable
class Backend(Protocol):
    """One library. Made with its settings; `open` comes first and once."""

    async def open(self, memory: Memory) -> bytes:
        """Registers the memory and starts serving it; returns the backend's part of our descriptor (at most 16 KiB).

        Raises BackendError.
        """

    async def connect(self, peer: PeerMemory) -> Link:
        """A link that has proven that the peer of this incarnation answers.

        ConnectionError: it does not, or a path is not allowed; ValueError: garbage descriptor. Cancelling leaves nothing
        behind.
        """

    def about(self) -> dict[str, str]:
        """What is in use, for people: library, version, devices."""

    async def close(self) -> None: ...


@runtime_checkable
class Service(Protocol):
    """Calls that must not run in the agent. Bodies are the two sides' own business; at most MAX_BODY_BYTES."""

    async def open(self, memory: Memory) -> bytes: ...

    async def call(self, method: str, body: bytes) -> bytes:
        """ValueError, ConnectionError and OSError reach the caller as such; anything else ends the mover."""

    def about(self) -> dict[str, str]: ...

    async def close(self) -> None: ...


Settings = Mapping[str, str]
"""Of a backend: what its constructor takes."""


def address_of(view: memoryview) -> int:
    """Address of a writable buffer's first byte; valid as long as the buffer is."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))

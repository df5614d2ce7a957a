"""A backend without a library: gets are copies from the peer's mapped arena. For tests of everything around a backend.

Faults on demand (settings of the reader's mover): `fault` =
    stall       gets never end until the link is closed; the first `after` batches do
    late        gets are lost: they end only after `close`, and write 0xEE over their destinations just before
    hang        close never returns
    crash       the process kills itself on the first get
    bug         a callback raises on the first get

Descriptor: pid, incarnation, and the owner mover's arena by its descriptor in /proc, which ends with that process.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import signal
import struct
from collections.abc import Iterator

from peer_agent.mover.backend import Backend, Gets, Link, Memory, PeerMemory, Settings, address_of

_SLICE = 64


class FakeBackend(Backend):
    def __init__(self, settings: Settings) -> None:
        self._fault = settings.get("fault", "")
        self._after = int(settings.get("after", "0"))

    async def open(self, memory: Memory) -> bytes:
        return b"%d " % os.getpid() + memory.incarnation + b"/proc/%d/fd/%d" % (os.getpid(), memory.arena_fd)

    async def connect(self, peer: PeerMemory) -> Link:
        pid, _, rest = peer.descriptor.partition(b" ")
        if not pid.isdigit() or len(rest) <= 16:
            raise ValueError("not a fake descriptor")
        if rest[:16] != peer.incarnation:
            raise ConnectionError("the peer's mover has another incarnation")
        try:
            watch = os.pidfd_open(int(pid))
        except OSError as error:
            raise ConnectionError(f"the peer's mover is gone: {error}") from error
        try:
            fd = os.open(rest[16:].decode(), os.O_RDONLY)
            try:
                mapping = mmap.mmap(fd, peer.arena_bytes, prot=mmap.PROT_READ | mmap.PROT_WRITE, flags=mmap.MAP_PRIVATE)
            finally:
                os.close(fd)
        except (OSError, ValueError) as error:
            os.close(watch)
            raise ConnectionError(f"the peer's arena is gone: {error}") from error
        return FakeLink(mapping, watch, self._fault, self._after)

    def about(self) -> dict[str, str]:
        return {"library": "none"}

    async def close(self) -> None: ...


class FakeLink(Link):
    """Maps the peer's arena (private, never written)."""

    def __init__(self, mapping: mmap.mmap, watch: int, fault: str, after: int) -> None:
        self._source = memoryview(mapping)
        self._watch = watch
        self._fault = fault
        self._whole = after
        self._closing = asyncio.Event()
        self._under_way: set[asyncio.Future[None]] = set()
        asyncio.get_running_loop().add_reader(watch, self._owner_died)

    @property
    def lanes(self) -> tuple[str, ...]:
        return ("fake",)

    @property
    def broken(self) -> bool:
        return self._closing.is_set()

    async def gets(self, gets: Gets) -> None:
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._under_way.add(ended)
        try:
            await self._gets(gets)
        finally:
            self._under_way.discard(ended)
            ended.set_result(None)

    async def close(self) -> None:
        if self._fault == "hang":
            await asyncio.get_running_loop().create_future()
        self._end()
        if self._under_way:
            await asyncio.wait(self._under_way)

    async def _gets(self, gets: Gets) -> None:
        if self._fault == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._fault == "bug":
            asyncio.get_running_loop().call_soon(int, "no number")
        self._whole -= 1
        if self._fault in ("stall", "hang", "late", "bug") and self._whole < 0:
            await self._closing.wait()
            if self._fault == "late":
                for _, local, length in _each(gets):
                    ctypes.memset(local, 0xEE, length)
        base = address_of(self._source)
        for index, (remote, local, length) in enumerate(_each(gets)):
            if self._closing.is_set():
                raise ConnectionError("closed, or the peer's mover is gone")
            ctypes.memmove(local, base + remote, length)
            if index % _SLICE == 0:
                await asyncio.sleep(0)

    def _owner_died(self) -> None:
        self._end()

    def _end(self) -> None:
        if not self._closing.is_set():
            self._closing.set()
            asyncio.get_running_loop().remove_reader(self._watch)
            os.close(self._watch)


def _each(gets: Gets) -> Iterator[tuple[int, int, int]]:
    count = len(gets)
    columns = (struct.unpack(f"<{count}Q", packed) for packed in (gets.remote, gets.local, gets.lengths))
    return zip(*columns, strict=True)

"""The planes that run in a mover process keep the contract of peer_agent/transport/base.py."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from peer_agent.memory.arena import Arena
from peer_agent.memory.layout import HEADER_BYTES, SizeClass
from peer_agent.transport.check import CHECKS, Check
from peer_agent.transport.check_rig import Rig
from peer_agent.transport.fake import Fault
from peer_agent.transport.mover import MoverConnection, MoverTransport

DIGEST = b"contract namespace".ljust(32, b".")
SLOTS = 16
BLOCK_BYTES = 100_000
BACKENDS: dict[str, Mapping[str, str]] = {
    "fake": {},
    "ucx": {"emulated": "tcp"},
}


class StoppingTransport(MoverTransport):
    """Stops an owner's mover (pid by descriptor) once it is connected: a stopped one would not let itself be connected."""

    def __init__(self, arena: Arena, *, backend: str, settings: Mapping[str, str]) -> None:
        super().__init__(arena, backend=backend, settings=settings)
        self.stops: dict[bytes, int] = {}

    async def connect(self, descriptor: bytes, *, deadline_s: float) -> MoverConnection:
        connection = await super().connect(descriptor, deadline_s=deadline_s)
        if descriptor in self.stops:
            os.kill(self.stops[descriptor], signal.SIGSTOP)
        return connection


@asynccontextmanager
async def mover_rig(directory: Path, backend: str) -> AsyncIterator[Rig]:
    classes = [SizeClass(DIGEST, BLOCK_BYTES, SLOTS)]
    async with AsyncExitStack() as stack:
        owner_arena = stack.enter_context(Arena.create(directory / "owner", classes, epoch=0xA1))
        reader_arena = stack.enter_context(Arena.create(directory / "reader", classes, epoch=0xB2))

        def plane(arena: Arena) -> StoppingTransport:
            made = StoppingTransport(arena, backend=backend, settings=BACKENDS[backend])
            stack.push_async_callback(made.close)
            return made

        owner, reader = plane(owner_arena), plane(reader_arena)
        rig = Rig(owner, owner_arena, reader, reader_arena)
        await asyncio.gather(owner.export(), reader.export())

        async def faulty(fault: Fault) -> bytes | None:
            """Another owner with the same epoch, whose memory or mover is in a bad way."""
            arena = stack.enter_context(Arena.create(directory / f"faulty-{fault.name}", classes, epoch=0xA1))
            arena.region[4096:] = rig.owner_arena.region[4096:]
            match fault:
                case Fault.WRONG_BYTES:
                    spoil(arena, HEADER_BYTES)
                case Fault.WRONG_HEADER:
                    spoil(arena, 32)
                case Fault.SLOW | Fault.LATE_WRITE:
                    if backend == "fake":  # reads a stopped owner's memory, as shm does
                        return None
                case _:
                    return None
            other = plane(arena)
            descriptor = await other.export()
            if fault in (Fault.SLOW, Fault.LATE_WRITE):
                reader.stops[descriptor] = other.pid
            return descriptor

        rig.faulty = faulty
        yield rig


def spoil(arena: Arena, at: int) -> None:
    """Flips one byte of every slot, `at` bytes from its header on."""
    for index in range(SLOTS):
        arena.region[arena.classes[0].offset(index) + at] ^= 0xFF


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("backend", BACKENDS)
async def test_mover_plane_keeps_the_contract(backend: str, check: Check, tmp_path: Path) -> None:
    async with mover_rig(tmp_path, backend) as rig:
        await check(rig)

"""The rig of planes that run in mover processes: for their contract suite and their fault tests, whatever the backend.

Separate from check_rig.py because it starts processes and stops them (SIGSTOP).
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from peer_agent.memory.arena import Arena
from peer_agent.memory.layout import HEADER_BYTES, SUPERBLOCK_BYTES, SizeClass
from peer_agent.transport.check_rig import DEADLINE_S, Rig
from peer_agent.transport.fake import Fault
from peer_agent.transport.mover import MoverConnection, MoverTransport

DIGEST = b"contract namespace".ljust(32, b".")
OWNER_EPOCH, READER_EPOCH = 0xA1, 0xB2


class StoppingTransport(MoverTransport):
    """Stops an owner's mover (pid by descriptor) once it is connected: a stopped one would not let itself be connected."""

    def __init__(self, arena: Arena, *, backend: str, settings: Mapping[str, str] | None = None) -> None:
        super().__init__(arena, backend=backend, settings=settings)
        self.stops: dict[bytes, int] = {}

    async def connect(self, descriptor: bytes, *, deadline_s: float) -> MoverConnection:
        connection = await super().connect(descriptor, deadline_s=deadline_s)
        if descriptor in self.stops:
            await stop(self.stops[descriptor])
        return connection


@dataclass(slots=True, kw_only=True)
class MoverRig(Rig):
    """owner, reader: MoverTransports of the same backend. another: a third one, over an arena that is a copy of the owner's."""

    owner: StoppingTransport
    reader: StoppingTransport
    another: Callable[[str], tuple[StoppingTransport, Arena]]


@asynccontextmanager
async def mover_rig(
    directory: Path,
    backend: str,
    settings: Mapping[str, str],
    *,
    block_bytes: int = 100_000,
    slots: int = 16,
    reader_settings: Mapping[str, str] | None = None,
    stopped_is_readable: bool = False,
) -> AsyncIterator[MoverRig]:
    """Owner and reader, each with its mover up.

    reader_settings: the reader's, where they differ. stopped_is_readable: the plane reads a stopped owner's memory and has no
    slow peers.
    """
    classes = [SizeClass(DIGEST, block_bytes, slots)]
    async with AsyncExitStack() as stack:

        def plane(name: str, epoch: int, settings: Mapping[str, str]) -> tuple[StoppingTransport, Arena]:
            arena = stack.enter_context(Arena.create(directory / name, classes, epoch=epoch))
            transport = StoppingTransport(arena, backend=backend, settings=settings)
            stack.push_async_callback(transport.close)
            return transport, arena

        def another(name: str) -> tuple[StoppingTransport, Arena]:
            transport, arena = plane(name, OWNER_EPOCH, settings)
            arena.region[SUPERBLOCK_BYTES:] = owner_arena.region[SUPERBLOCK_BYTES:]
            return transport, arena

        async def faulty(fault: Fault) -> bytes | None:
            if fault not in FAULTS or (stopped_is_readable and FAULTS[fault] is None):
                return None
            transport, arena = another(f"faulty-{fault.name}")
            descriptor = await transport.export()
            if (spoilt := FAULTS[fault]) is not None:
                for index in range(slots):
                    arena.region[arena.classes[0].offset(index) + spoilt] ^= 0xFF
            else:
                reader.stops[descriptor] = transport.pid
            return descriptor

        owner, owner_arena = plane("owner", OWNER_EPOCH, settings)
        reader, reader_arena = plane("reader", READER_EPOCH, settings if reader_settings is None else reader_settings)
        await asyncio.gather(owner.export(), reader.export())
        yield MoverRig(
            owner=owner,
            owner_arena=owner_arena,
            reader=reader,
            reader_arena=reader_arena,
            faulty=faulty,
            another=another,
        )


FAULTS: Mapping[Fault, int | None] = {
    Fault.WRONG_BYTES: HEADER_BYTES,
    Fault.WRONG_HEADER: 32,
    Fault.SLOW: None,
    Fault.LATE_WRITE: None,
}
"""What can be wrong with an owner: one byte of every slot at this distance from its header, or (None) its mover is stopped."""


async def stop(pid: int) -> None:
    """SIGSTOP. Returns when every thread has stopped: one that has no core at the moment goes on for a while."""
    os.kill(pid, signal.SIGSTOP)
    await eventually(lambda: all(_state(task) == "T" for task in Path(f"/proc/{pid}/task").iterdir()))


def _state(task: Path) -> str:
    return task.joinpath("stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]


async def eventually(condition: Callable[[], bool], *, within_s: float = DEADLINE_S) -> None:
    """Waits for a condition that nothing announces. TimeoutError says that it never came true."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 (a process ends, a file changes: nobody sets an event)
            await asyncio.sleep(0.005)

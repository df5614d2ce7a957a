"""Each failure of a plane a thousand times over: no descriptor, thread, task, mapping or page is left behind.

What is read while it fails is checked as well: a block that is OK has the owner's bytes (`Rig.expect`).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from peer_agent import _native
from peer_agent.memory.arena import Arena
from peer_agent.memory.layout import SizeClass
from peer_agent.testing.leaks import expect_no_leak
from peer_agent.testing.link import Link, link_to
from peer_agent.transport.base import Connection, ReadList, ReadStatus
from peer_agent.transport.check_rig import DEADLINE_S, LOCK, Rig, Stored, with_record
from peer_agent.transport.fake import Fault
from peer_agent.transport.faulty_owner import faulty_owner
from peer_agent.transport.shm import ShmTransport
from peer_agent.transport.tcp import DESCRIPTOR, TcpTransport

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

DIGEST = b"leaks".ljust(32, b".")
BLOCK, SLOTS, READ_BLOCKS = 4096, 16, 4
REPEATS, WARM_UP = 1000, 100
OK, ABSENT, STALE = ReadStatus.OK, ReadStatus.ABSENT, ReadStatus.STALE
TORN, CORRUPT, LATE, PEER_LOST = ReadStatus.TORN, ReadStatus.CORRUPT, ReadStatus.LATE, ReadStatus.PEER_LOST


@dataclass(frozen=True, slots=True)
class Bed:
    """rig: owner and reader over one plane; `faulty` of it knows the faulty tcp owners. link: in front of the tcp owner."""

    rig: Rig
    link: Link
    stored: Stored
    here: bytes
    by_link: bytes
    path: Path

    def request(self) -> ReadList:
        return self.rig.request(self.stored)

    async def read(self, connection: Connection, blocks: ReadList, *, deadline_s: float = DEADLINE_S) -> set[ReadStatus]:
        outcome = await connection.read(blocks, deadline_s=deadline_s)
        await asyncio.wait_for(outcome.settled, DEADLINE_S)
        return set(self.rig.expect(outcome, blocks, self.stored))

    @asynccontextmanager
    async def connected(self, descriptor: bytes | None = None) -> AsyncIterator[Connection]:
        connection = await self.rig.reader.connect(descriptor or self.here, deadline_s=DEADLINE_S)
        try:
            yield connection
        finally:
            await connection.close()


@asynccontextmanager
async def bed_of(plane: str, directory: Path) -> AsyncIterator[Bed]:
    classes = [SizeClass(DIGEST, BLOCK, SLOTS)]
    async with contextlib.AsyncExitStack() as stack:
        ours = stack.enter_context(Arena.create(directory / "owner.arena", classes, epoch=5))
        theirs = stack.enter_context(Arena.create(directory / "reader.arena", classes, epoch=6))
        make = TcpTransport if plane == "tcp" else ShmTransport
        owner, reader = make(ours), make(theirs)
        stack.push_async_callback(owner.close)
        stack.push_async_callback(reader.close)
        descriptors = {}
        for fault in Fault if plane == "tcp" else ():
            descriptors[fault] = await stack.enter_async_context(faulty_owner(ours, fault))

        async def faulty(fault: Fault) -> bytes | None:
            return descriptors.get(fault)

        rig = Rig(owner, ours, reader, theirs, faulty)
        here = await owner.export()
        port = owner.port if isinstance(owner, TcpTransport) else 9
        link = await stack.enter_async_context(link_to("127.0.0.1", port))
        by_link = DESCRIPTOR.pack(1, 0, link.port, ours.epoch) + b"127.0.0.1"
        yield Bed(rig, link, rig.store(range(READ_BLOCKS)), here, by_link, directory)


# ---- failures of any plane ----


async def connect_and_leave(bed: Bed, _: int) -> None:
    async with bed.connected() as connection:
        assert await bed.read(connection, bed.request()) == {OK}


async def read_after_close(bed: Bed, _: int) -> None:
    async with bed.connected() as connection:
        await connection.close()
        assert await bed.read(connection, bed.request()) == {PEER_LOST}


async def wrong_generation(bed: Bed, number: int) -> None:
    async with bed.connected() as connection:
        statuses = await bed.read(connection, with_record(bed.request(), number % READ_BLOCKS, generation=2 * number + 100))
        assert statuses == {OK, STALE}


async def outside_the_region(bed: Bed, number: int) -> None:
    offset = bed.rig.owner_arena.arena_bytes + 128 * number
    async with bed.connected() as connection:
        statuses = await bed.read(connection, with_record(bed.request(), number % READ_BLOCKS, offset=offset))
        assert statuses - {OK} <= {ABSENT, STALE, CORRUPT}
        assert statuses != {OK}


async def reused_under_the_reader(bed: Bed, number: int) -> None:
    offsets = bed.rig.owner_offsets([READ_BLOCKS + number % 4])
    stored = bed.rig.store([READ_BLOCKS + number % 4], lock=LOCK + 1)
    async with bed.connected() as connection:
        _native.retire(bed.rig.owner_arena.region, offsets)
        blocks = bed.rig.request(stored, lock=LOCK + 1)
        outcome = await connection.read(blocks, deadline_s=DEADLINE_S)
        assert set(outcome.statuses) == {STALE}
    bed.rig.owner.revoke(LOCK + 1)


async def cancelled_in_the_middle(bed: Bed, number: int) -> None:
    async with bed.connected() as connection:
        reading = asyncio.ensure_future(connection.read(bed.request(), deadline_s=DEADLINE_S))
        for _ in range(number % 4):
            await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait({reading})


async def no_time_left(bed: Bed, _: int) -> None:
    async with bed.connected() as connection:
        assert await bed.read(connection, bed.request(), deadline_s=0.0) <= {LATE, OK}


async def garbage_descriptor(bed: Bed, number: int) -> None:
    with pytest.raises((ValueError, ConnectionError)):
        await bed.rig.reader.connect(bed.here[: number % DESCRIPTOR.size], deadline_s=DEADLINE_S)


# ---- failures of tcp ----


async def wrong_capability(bed: Bed, number: int) -> None:
    async with bed.connected() as connection:
        forged = bytearray(bed.request().capability)
        forged[32 + number % 32] ^= 1
        assert await bed.read(connection, replace(bed.request(), capability=bytes(forged))) == {ABSENT}


async def closed_port(bed: Bed, _: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with pytest.raises(ConnectionError):
        await bed.rig.reader.connect(DESCRIPTOR.pack(1, 0, port, 5) + b"127.0.0.1", deadline_s=DEADLINE_S)


async def silence(bed: Bed, _: int) -> None:
    async with bed.connected(bed.by_link) as connection:
        bed.link.down.cut()
        assert await bed.read(connection, bed.request(), deadline_s=0.003) == {LATE}
        bed.link.down.restore()


async def reset_in_the_middle(bed: Bed, number: int) -> None:
    async with bed.connected(bed.by_link) as connection:
        bed.link.down.cut(after_bytes=1 + number % (BLOCK * READ_BLOCKS))
        reading = asyncio.ensure_future(bed.read(connection, bed.request()))
        await asyncio.sleep(0.001)
        bed.link.reset()
        bed.link.down.restore()
        assert await reading <= {OK, PEER_LOST}


def faulty(fault: Fault, *possible: ReadStatus) -> Callable[[Bed, int], Awaitable[None]]:
    async def act(bed: Bed, _: int) -> None:
        async with bed.connected(await bed.rig.faulty(fault)) as connection:
            assert await bed.read(connection, bed.request()) <= set(possible)

    act.__name__ = fault.name.lower()
    return act


# ---- failures of shm ----


async def owner_restarts(bed: Bed, number: int) -> None:
    path = bed.path / "other.arena"
    with Arena.create(path, [SizeClass(DIGEST, BLOCK, SLOTS)], epoch=number + 10) as other:
        owner = ShmTransport(other)
        descriptor = await owner.export()
        connection = await bed.rig.reader.connect(descriptor, deadline_s=DEADLINE_S)
        await owner.close()
    outcome = await connection.read(bed.request(), deadline_s=DEADLINE_S)
    assert set(outcome.statuses) == {PEER_LOST}
    await connection.close()
    with pytest.raises(ConnectionError):
        await bed.rig.reader.connect(descriptor, deadline_s=DEADLINE_S)


EVERY_PLANE = (
    connect_and_leave, read_after_close, wrong_generation, outside_the_region, reused_under_the_reader,
    cancelled_in_the_middle, no_time_left, garbage_descriptor,
)  # fmt: skip
OF_TCP = (
    wrong_capability, closed_port, silence, reset_in_the_middle,
    faulty(Fault.CLOSING, OK, PEER_LOST), faulty(Fault.WRONG_BYTES, CORRUPT), faulty(Fault.WRONG_HEADER, STALE, CORRUPT),
    faulty(Fault.TORN, TORN), faulty(Fault.GARBAGE, PEER_LOST),
)  # fmt: skip
CASES = [(plane, act) for plane in ("shm", "tcp") for act in EVERY_PLANE]
CASES += [("tcp", act) for act in OF_TCP] + [("shm", owner_restarts)]


@pytest.mark.parametrize(("plane", "act"), CASES, ids=[f"{plane}-{act.__name__}" for plane, act in CASES])
async def test_nothing_is_left_after_a_thousand(plane: str, act: Callable[[Bed, int], Awaitable[None]], tmp_path: Path) -> None:
    async with bed_of(plane, tmp_path) as bed:
        await expect_no_leak(lambda number: act(bed, number), times=REPEATS, warm_up=WARM_UP)
        async with bed.connected() as connection:
            assert await bed.read(connection, bed.request()) == {OK}, "and the plane works"

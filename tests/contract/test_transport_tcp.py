"""The tcp plane's connections and threads: silent peers hold neither, and connections come and go by need."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from peer_agent.memory.arena import Arena
from peer_agent.memory.layout import SizeClass
from peer_agent.transport import tcp_peer
from peer_agent.transport.base import ReadStatus
from peer_agent.transport.check_rig import DEADLINE_S, Rig
from peer_agent.transport.fake import Fault
from peer_agent.transport.faulty_owner import faulty_owner
from peer_agent.transport.movers import Movers
from peer_agent.transport.tcp import DESCRIPTOR, PLAIN_VERSION, TcpTransport

DIGEST = b"tcp plane".ljust(32, b".")
BLOCK = 4096
SLOTS = 256
THREADS = 1
SILENT = 24


@asynccontextmanager
async def tcp_rig(directory: Path, *, connections_per_peer: int = 4) -> AsyncIterator[Rig]:
    """One mover thread, so that whatever holds it shows at once."""
    classes = [SizeClass(DIGEST, BLOCK, SLOTS)]
    with (
        Arena.create(directory / "owner", classes, epoch=1) as owner_arena,
        Arena.create(directory / "reader", classes, epoch=2) as reader_arena,
    ):
        owner = TcpTransport(owner_arena)
        reader = TcpTransport(reader_arena, movers=Movers(threads=THREADS), connections_per_peer=connections_per_peer)
        rig = Rig(owner, owner_arena, reader, reader_arena)
        await owner.export()
        try:
            yield rig
        finally:
            await reader.close()
            await owner.close()


async def until(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < ends, "condition not reached in time"
        await asyncio.sleep(0.001)


def open_at(rig: Rig) -> int:
    assert isinstance(rig.owner, TcpTransport)
    return rig.owner.stats()["connections"]


async def test_reads_are_served_when_more_peers_are_silent_than_there_are_threads(tmp_path: Path) -> None:
    async with tcp_rig(tmp_path) as rig, AsyncExitStack() as stack:
        silent = [await stack.enter_async_context(faulty_owner(rig.owner_arena, Fault.SLOW)) for _ in range(SILENT)]
        stored = [rig.store([slot], lock=slot + 1) for slot in range(SILENT + 1)]
        waiting = []
        for slot, descriptor in enumerate(silent):
            peer = await rig.reader.connect(descriptor, deadline_s=DEADLINE_S)
            blocks = rig.request(stored[slot], first=slot, lock=slot + 1)
            waiting.append(asyncio.create_task(peer.read(blocks, deadline_s=60)))
        good = await rig.connect()
        blocks = rig.request(stored[SILENT], first=SILENT, lock=SILENT + 1)
        outcome = await good.read(blocks, deadline_s=DEADLINE_S)
        assert rig.expect(outcome, blocks, stored[SILENT]) == [ReadStatus.OK]
        assert not any(task.done() for task in waiting)
        for task in waiting:
            task.cancel()
        ended = time.monotonic()
        await asyncio.wait(waiting)
        assert time.monotonic() - ended < DEADLINE_S
        assert all(task.cancelled() for task in waiting)


async def test_each_silent_peer_is_late_at_its_own_deadline_when_many_are_read(tmp_path: Path) -> None:
    async with tcp_rig(tmp_path) as rig, AsyncExitStack() as stack:
        silent = [await stack.enter_async_context(faulty_owner(rig.owner_arena, Fault.SLOW)) for _ in range(SILENT)]
        reads = []
        begun = time.monotonic()
        for slot, descriptor in enumerate(silent):
            peer = await rig.reader.connect(descriptor, deadline_s=DEADLINE_S)
            blocks = rig.request(rig.store([slot], lock=slot + 1), first=slot, lock=slot + 1)
            reads.append(peer.read(blocks, deadline_s=0.1))
        outcomes = await asyncio.gather(*reads)
        assert [outcome.statuses for outcome in outcomes] == [bytes([ReadStatus.LATE])] * SILENT
        assert all(outcome.settled.done() for outcome in outcomes)
        assert time.monotonic() - begun < DEADLINE_S, "they wait at the same time, not in turn"


async def test_connects_are_made_when_many_peers_take_connections_and_say_nothing(tmp_path: Path) -> None:
    async with tcp_rig(tmp_path) as rig:
        with socket.create_server(("127.0.0.1", 0), backlog=SILENT) as mute:
            descriptor = DESCRIPTOR.pack(PLAIN_VERSION, 0, mute.getsockname()[1], 1) + b"127.0.0.1"
            connects = [asyncio.create_task(rig.reader.connect(descriptor, deadline_s=60)) for _ in range(SILENT)]
            await asyncio.sleep(0)
            connection = await rig.connect()
            assert not any(task.done() for task in connects)
            stored = rig.store([0])
            blocks = rig.request(stored)
            outcome = await connection.read(blocks, deadline_s=DEADLINE_S)
            assert rig.expect(outcome, blocks, stored) == [ReadStatus.OK]
            results = await asyncio.gather(*connects, return_exceptions=True)
        assert {str(result).partition(" took ")[2] for result in results} == {"the connection but said no hello in time"}


async def test_connection_is_opened_only_when_all_are_busy_and_never_beyond_the_limit(tmp_path: Path) -> None:
    async with tcp_rig(tmp_path, connections_per_peer=3) as rig:
        connection = await rig.connect()
        stored = rig.store(range(32))
        blocks = rig.request(stored)
        for _ in range(10):
            assert set(rig.expect(await connection.read(blocks, deadline_s=DEADLINE_S), blocks, stored)) == {ReadStatus.OK}
        assert open_at(rig) == 1
        requests = [rig.request(stored, first=32 * i) for i in range(8)]
        outcomes = await asyncio.gather(*(connection.read(one, deadline_s=DEADLINE_S) for one in requests))
        for outcome, one in zip(outcomes, requests, strict=True):
            assert set(rig.expect(outcome, one, stored)) == {ReadStatus.OK}
        assert open_at(rig) == 3


async def test_connections_beyond_the_first_are_closed_when_no_read_needs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_peer, "IDLE_S", 0.02)
    async with tcp_rig(tmp_path) as rig:
        connection = await rig.connect()
        stored = rig.store(range(8))
        requests = [rig.request(stored, first=8 * i) for i in range(4)]
        await asyncio.gather(*(connection.read(one, deadline_s=DEADLINE_S) for one in requests))
        await until(lambda: open_at(rig) == 1)
        outcome = await connection.read(requests[0], deadline_s=DEADLINE_S)
        assert set(rig.expect(outcome, requests[0], stored)) == {ReadStatus.OK}
        assert open_at(rig) == 1


async def test_cancelled_read_is_settled_at_once_and_touches_no_other_when_the_peer_is_silent(tmp_path: Path) -> None:
    async with tcp_rig(tmp_path) as rig, faulty_owner(rig.owner_arena, Fault.SLOW) as descriptor:
        connection = await rig.reader.connect(descriptor, deadline_s=DEADLINE_S)
        stored = rig.store(range(4))
        first, second = rig.request(stored), rig.request(stored, first=4)
        cancelled = asyncio.create_task(connection.read(first, deadline_s=60))
        other = asyncio.create_task(connection.read(second, deadline_s=60))
        await asyncio.sleep(0.01)
        begun = time.monotonic()
        cancelled.cancel()
        await asyncio.wait([cancelled], timeout=DEADLINE_S)
        assert cancelled.cancelled()
        assert time.monotonic() - begun < 1.0
        assert not other.done()
        await connection.close()
        outcome = await asyncio.wait_for(other, DEADLINE_S)
        assert rig.expect(outcome, second, stored) == [ReadStatus.PEER_LOST] * 4


_ROUNDS = """
import asyncio, os, sys
from pathlib import Path
from peer_agent.memory.arena import Arena
from peer_agent.memory.layout import SizeClass
from peer_agent.transport.movers import Movers
from peer_agent.transport.registry import PlaneOptions, open_transports

def held():
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

async def rounds(path):
    with Arena.create(path, [SizeClass(bytes(32), 4096, 8)], epoch=1) as arena:
        before = held()
        for _ in range(20):
            planes = open_transports(["shm", "tcp"], arena, options=PlaneOptions(movers=Movers(threads=2)))
            connection = await planes["tcp"].connect(await planes["tcp"].export(), deadline_s=10)
            assert held()[1] == before[1] + 3, "two movers that both planes share, and the owner's thread"
            await connection.close()
            for plane in planes.values():
                await plane.close()
            assert held() == before, (held(), before)

asyncio.run(rounds(Path(sys.argv[1])))
"""


def test_no_descriptor_or_thread_is_left_when_planes_are_closed(tmp_path: Path) -> None:
    """In a process of its own, where nothing that other tests left comes and goes."""
    ended = subprocess.run([sys.executable, "-c", _ROUNDS, str(tmp_path / "arena")], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr

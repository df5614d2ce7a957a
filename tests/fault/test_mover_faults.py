"""Movers that die, hang, lie or are lied to: what the caller gets, within what time, and that the agent never suffers.

UCX and NIXL run over UCX's tcp lane (their wheels); `fake` is the backend without a library, for what none can be asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import struct
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from peer_agent.memory.arena import Arena
from peer_agent.memory.layout import HEADER_BYTES, SizeClass
from peer_agent.mover import child, process, reads
from peer_agent.mover.backend import BackendError
from peer_agent.mover.messages import Ping
from peer_agent.transport.base import ReadList, ReadOutcome, ReadStatus
from peer_agent.transport.check_movers import DIGEST, MoverRig, eventually, mover_rig, stop
from peer_agent.transport.check_rig import DEADLINE_S, Stored
from peer_agent.transport.mover import MoverConnection

OK, LATE, PEER_LOST = ReadStatus.OK, ReadStatus.LATE, ReadStatus.PEER_LOST
LIBRARIES = ("ucx", "nixl")
EMULATED = {"emulated": "tcp"}
PROMPT_S = 0.2
SHORT_S = 0.3
SLACK_S = 0.05
"""How much later than its deadline a read may return."""


@contextlib.asynccontextmanager
async def stopped(pid: int) -> AsyncIterator[None]:
    await stop(pid)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


async def read(rig: MoverRig, connection: MoverConnection, stored: Stored, *, first: int = 0) -> list[ReadStatus]:
    """Reads everything; the rig compares what is OK."""
    blocks = rig.request(stored, first=first)
    return rig.expect(await connection.read(blocks, deadline_s=DEADLINE_S), blocks, stored)


async def under_way(rig: MoverRig, connection: MoverConnection, blocks: ReadList) -> asyncio.Task[ReadOutcome]:
    """A read whose gets our mover has posted: it takes messages in order, and answered two that came later."""
    task = asyncio.create_task(connection.read(blocks, deadline_s=60))
    await asyncio.sleep(0)
    for _ in range(2):
        await rig.reader.process.ask(Ping).answer
    assert not task.done()
    return task


def fill(rig: MoverRig, blocks: ReadList, pattern: bytes) -> None:
    for (offset,) in struct.iter_unpack("<Q", blocks.destinations):
        rig.reader_arena.region[offset + HEADER_BYTES : offset + HEADER_BYTES + rig.block_bytes] = pattern * rig.block_bytes


def holds(rig: MoverRig, blocks: ReadList, pattern: bytes) -> bool:
    return all(rig.landed(blocks, index) == pattern * rig.block_bytes for index in range(len(blocks)))


@pytest.mark.parametrize("backend", LIBRARIES)
async def test_peer_is_lost_promptly_when_its_mover_is_killed_in_a_read(backend: str, tmp_path: Path) -> None:
    async with mover_rig(tmp_path, backend, EMULATED) as rig:
        connection, stored = await rig.reader.connect(await rig.owner.export(), deadline_s=DEADLINE_S), rig.store(range(8))
        assert await read(rig, connection, stored) == [OK] * 8
        blocks = rig.request(stored)
        await stop(victim := rig.owner.pid)  # so that the read is under way for certain
        task = await under_way(rig, connection, blocks)
        os.kill(victim, signal.SIGKILL)
        killed = time.monotonic()
        outcome = await task
        assert time.monotonic() - killed < PROMPT_S
        assert rig.expect(outcome, blocks, stored) == [PEER_LOST] * 8
        assert outcome.settled.done()


@pytest.mark.parametrize("backend", LIBRARIES)
async def test_next_read_works_when_the_peers_mover_was_restarted(backend: str, tmp_path: Path) -> None:
    async with mover_rig(tmp_path, backend, EMULATED) as rig:
        old, stored = await rig.owner.export(), rig.store(range(4))
        connection = await rig.reader.connect(old, deadline_s=DEADLINE_S)
        os.kill(rig.owner.pid, signal.SIGKILL)
        await eventually(lambda: rig.owner.pid == 0)
        await eventually(lambda: rig.owner.pid != 0)
        assert await read(rig, connection, stored) == [PEER_LOST] * 4
        fresh = await rig.owner.export()
        assert fresh != old
        assert await read(rig, await rig.reader.connect(fresh, deadline_s=DEADLINE_S), stored) == [OK] * 4


async def test_next_read_works_when_our_own_mover_was_killed(tmp_path: Path) -> None:
    async with mover_rig(tmp_path, "fake", {}) as rig:
        connection, stored = await rig.reader.connect(await rig.owner.export(), deadline_s=DEADLINE_S), rig.store(range(4))
        os.kill(rig.reader.pid, signal.SIGKILL)
        await eventually(lambda: rig.reader.stats()["mover_starts"] == 2)
        assert await read(rig, connection, stored) == [OK] * 4


@pytest.mark.parametrize("backend", LIBRARIES)
async def test_reads_are_lost_promptly_when_our_own_mover_is_killed_in_a_read(backend: str, tmp_path: Path) -> None:
    async with mover_rig(tmp_path, backend, EMULATED) as rig:
        connection, stored = await rig.reader.connect(await rig.owner.export(), deadline_s=DEADLINE_S), rig.store(range(4))
        async with stopped(rig.owner.pid):
            blocks = rig.request(stored)
            task = await under_way(rig, connection, blocks)
            os.kill(rig.reader.pid, signal.SIGKILL)
            begun = time.monotonic()
            outcome = await task
            assert time.monotonic() - begun < PROMPT_S
        assert rig.expect(outcome, blocks, stored) == [PEER_LOST] * 4
        assert outcome.settled.done()
        assert await reads_again(rig, stored)


async def reads_again(rig: MoverRig, stored: Stored) -> bool:
    """As the agent does: after a loss it says hello again, which brings the descriptor of this moment.

    More than once because UCX ends an *owner's* process when a reader dies while its emulated get is being answered
    (ucp_request.inl "unexpected error", UCX 1.22): that mover is replaced as well.
    """
    until = time.monotonic() + DEADLINE_S
    while time.monotonic() < until:
        with contextlib.suppress(ConnectionError):
            connection = await rig.reader.connect(await rig.owner.export(), deadline_s=1)
            statuses = await read(rig, connection, stored, first=8)
            await connection.close()
            if set(statuses) == {OK}:
                return True
        await asyncio.sleep(0.05)
    return False


async def test_late_read_settles_and_nothing_is_written_afterwards_when_the_peers_mover_is_stopped(tmp_path: Path) -> None:
    async with mover_rig(tmp_path, "ucx", EMULATED) as rig:
        descriptor, stored = await rig.owner.export(), rig.store(range(8))
        connection = await rig.reader.connect(descriptor, deadline_s=DEADLINE_S)
        blocks = rig.request(stored)
        async with stopped(rig.owner.pid):
            begun = time.monotonic()
            outcome = await connection.read(blocks, deadline_s=SHORT_S)
            assert SHORT_S <= time.monotonic() - begun < SHORT_S + SLACK_S
            assert rig.expect(outcome, blocks, stored) == [LATE] * 8
            assert not outcome.settled.done()
            await asyncio.wait_for(outcome.settled, reads.LINGER_S + reads.CLOSE_S)
            fill(rig, blocks, b"\x5a")
        # The owner goes on and answers what it had been asked; another read proves that it has come that far.
        assert await read(rig, connection, stored, first=8) == [OK] * 8
        assert holds(rig, blocks, b"\x5a")


async def test_connect_fails_by_its_deadline_when_the_peers_mover_is_stopped(tmp_path: Path) -> None:
    async with mover_rig(tmp_path, "ucx", EMULATED) as rig:
        descriptor, stored = await rig.owner.export(), rig.store(range(2))
        async with stopped(rig.owner.pid):
            begun = time.monotonic()
            with pytest.raises(ConnectionError, match="no answer"):
                await rig.reader.connect(descriptor, deadline_s=SHORT_S)
            assert time.monotonic() - begun < SHORT_S + SLACK_S
        connection = await rig.reader.connect(descriptor, deadline_s=DEADLINE_S)
        assert await read(rig, connection, stored) == [OK] * 2


async def test_slots_are_written_only_until_settled_when_a_transfer_comes_late(tmp_path: Path) -> None:
    """The quarantine is needed: this backend does write after the deadline. And it is enough."""
    async with mover_rig(tmp_path, "fake", {}, reader_settings={"fault": "late"}) as rig:
        connection, stored = await rig.reader.connect(await rig.owner.export(), deadline_s=DEADLINE_S), rig.store(range(2))
        blocks = rig.request(stored)
        fill(rig, blocks, b"\0")
        outcome = await connection.read(blocks, deadline_s=0.05)
        assert rig.expect(outcome, blocks, stored) == [LATE] * 2
        assert not outcome.settled.done()
        assert holds(rig, blocks, b"\0")
        await asyncio.wait_for(outcome.settled, DEADLINE_S)
        assert holds(rig, blocks, b"\xee"), "the late write has come before settled"


async def test_cancelled_read_waits_for_late_writes_when_the_peer_is_stopped(tmp_path: Path) -> None:
    async with mover_rig(tmp_path, "fake", {}, reader_settings={"fault": "late"}) as rig:
        connection, stored = await rig.reader.connect(await rig.owner.export(), deadline_s=DEADLINE_S), rig.store(range(2))
        blocks = rig.request(stored)
        fill(rig, blocks, b"\0")
        task = await under_way(rig, connection, blocks)
        task.cancel()
        await asyncio.wait({task}, timeout=DEADLINE_S)
        assert task.cancelled()
        assert holds(rig, blocks, b"\xee")


async def test_mover_is_ended_and_its_reads_settle_when_a_link_does_not_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with mover_rig(tmp_path, "fake", {}, reader_settings={"fault": "hang"}) as rig:
        connection, stored = await rig.reader.connect(await rig.owner.export(), deadline_s=DEADLINE_S), rig.store(range(2))
        blocks = rig.request(stored)
        victim = rig.reader.pid
        outcome = await connection.read(blocks, deadline_s=0.05)
        assert rig.expect(outcome, blocks, stored) == [LATE] * 2
        assert not outcome.settled.done()
        await asyncio.wait_for(outcome.settled, DEADLINE_S)
        assert not psutil.pid_exists(victim)


async def test_read_is_late_and_the_mover_replaced_when_our_own_mover_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "PING_S", 0.1)
    monkeypatch.setattr(process, "HANG_S", 0.5)
    async with mover_rig(tmp_path, "fake", {}) as rig:
        connection, stored = await rig.reader.connect(await rig.owner.export(), deadline_s=DEADLINE_S), rig.store(range(2))
        blocks = rig.request(stored)
        os.kill(victim := rig.reader.pid, signal.SIGSTOP)
        begun = time.monotonic()
        outcome = await connection.read(blocks, deadline_s=0.1)
        assert time.monotonic() - begun < 0.1 + SLACK_S
        assert rig.expect(outcome, blocks, stored) == [LATE] * 2
        assert not outcome.settled.done()
        await asyncio.wait_for(outcome.settled, DEADLINE_S)
        assert not psutil.pid_exists(victim)
        assert rig.reader.stats()["mover_kills"] == 1
        assert await read(rig, connection, stored, first=4) == [OK] * 2


async def test_blocks_that_came_in_time_are_kept_when_the_rest_is_late(tmp_path: Path) -> None:
    """Groups are decided one by one; what has been is written no more, although the read is not settled."""
    slow = {"fault": "stall", "after": "6"}  # batches: three groups' payloads and their headers
    async with mover_rig(tmp_path, "fake", {}, block_bytes=1 << 20, slots=16, reader_settings=slow) as rig:
        connection, stored = await rig.reader.connect(await rig.owner.export(), deadline_s=DEADLINE_S), rig.store(range(16))
        blocks = rig.request(stored)
        outcome = await connection.read(blocks, deadline_s=1)
        statuses = rig.expect(outcome, blocks, stored)
        assert set(statuses) == {OK, LATE}
        assert statuses[:4] == [OK] * 4
        await asyncio.wait_for(outcome.settled, DEADLINE_S)
        assert rig.expect(outcome, blocks, stored) == statuses


@pytest.mark.parametrize("fault", ["crash", "bug"])
async def test_agent_goes_on_when_its_mover_ends_at_every_read(fault: str, tmp_path: Path) -> None:
    async with mover_rig(tmp_path, "fake", {}, reader_settings={"fault": fault}) as rig:
        connection, stored = await rig.reader.connect(await rig.owner.export(), deadline_s=DEADLINE_S), rig.store(range(2))
        for crash in range(1, 4):
            assert await read(rig, connection, stored) == [PEER_LOST] * 2
            await eventually(lambda: rig.reader.stats()["mover_starts"] == crash + 1)  # noqa: B023


async def test_peer_is_lost_and_the_mover_replaced_when_it_gets_no_memory(tmp_path: Path) -> None:
    async with mover_rig(tmp_path, "ucx", EMULATED) as rig:
        connection, stored = await rig.reader.connect(await rig.owner.export(), deadline_s=DEADLINE_S), rig.store(range(8))
        victim = rig.reader.pid
        used = psutil.Process(victim).memory_info().vms
        resource.prlimit(victim, resource.RLIMIT_AS, (used // 2, used // 2))
        outcomes = []
        for _ in range(50):  # until it needs memory that it does not have
            blocks = rig.request(stored)
            outcomes += rig.expect(await connection.read(blocks, deadline_s=DEADLINE_S), blocks, stored)
            if rig.reader.pid != victim:
                break
        assert set(outcomes) <= {OK, PEER_LOST}
        os.kill(victim, signal.SIGKILL) if rig.reader.pid == victim else None
        await eventually(lambda: rig.reader.pid not in (0, victim))
        assert await read(rig, connection, stored, first=8) == [OK] * 8


async def test_start_is_refused_with_the_reason_when_the_mover_cannot_get_memory(tmp_path: Path) -> None:
    def little_memory() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (24 << 20, 24 << 20))

    with Arena.create(tmp_path / "arena", [SizeClass(DIGEST, 4096, 4)], epoch=1) as arena:
        mover = process.MoverProcess(child.MoverSpec("fake", arena.fd, arena.arena_bytes, preexec=little_memory))
        try:
            with pytest.raises(BackendError, match=r"ended while it started"):
                await mover.start()
        finally:
            await mover.close()

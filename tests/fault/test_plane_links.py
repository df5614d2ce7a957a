"""The tcp plane over a bad network (peer_agent/testing/link.py), and what refuses it: who waits, how long, what is written."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvdir.testing.wait import eventually
from peer_agent.memory.arena import Arena
from peer_agent.memory.layout import SizeClass
from peer_agent.testing.link import Link, link_to
from peer_agent.testing.timing import DEADLINE_SLACK_S, PROMPT_S, expect_within, took
from peer_agent.transport.base import Connection, ReadStatus
from peer_agent.transport.check_rig import DEADLINE_S, Rig, Stored
from peer_agent.transport.tcp import DESCRIPTOR, TcpTransport

DIGEST = b"links".ljust(32, b".")
BLOCK = 64 << 10
SLOTS = 64
SHORT_S = 0.1
OK, LATE, PEER_LOST = ReadStatus.OK, ReadStatus.LATE, ReadStatus.PEER_LOST


class Bed:
    """An owner with SLOTS blocks behind a link, and a reader that reaches it by the link only."""

    def __init__(self, rig: Rig, link: Link, stored: Stored) -> None:
        self.rig = rig
        self.link = link
        self.stored = stored

    async def connect(self, *, deadline_s: float = DEADLINE_S) -> Connection:
        return await self.rig.reader.connect(descriptor_of(self.link.port, self.rig), deadline_s=deadline_s)

    async def read(self, connection: Connection, *, deadline_s: float = DEADLINE_S) -> list[ReadStatus]:
        blocks = self.rig.request(self.stored)
        outcome = await connection.read(blocks, deadline_s=deadline_s)
        assert outcome.settled.done(), "tcp never writes after its answer"
        return self.rig.expect(outcome, blocks, self.stored)


def descriptor_of(port: int, rig: Rig) -> bytes:
    return DESCRIPTOR.pack(1, 0, port, rig.owner_arena.epoch) + b"127.0.0.1"


@pytest.fixture
async def bed(tmp_path: Path) -> AsyncIterator[Bed]:
    classes = [SizeClass(DIGEST, BLOCK, SLOTS)]
    with (
        Arena.create(tmp_path / "owner", classes, epoch=5) as ours,
        Arena.create(tmp_path / "reader", classes, epoch=6) as theirs,
    ):
        owner, reader = TcpTransport(ours), TcpTransport(theirs)
        rig = Rig(owner, ours, reader, theirs)
        await owner.export()
        async with link_to("127.0.0.1", owner.port) as link:
            yield Bed(rig, link, rig.store(range(SLOTS)))
            await reader.close()
            await owner.close()


@pytest.mark.parametrize("way", ["up", "down"])
async def test_read_is_late_by_its_deadline_when_one_way_is_cut(bed: Bed, way: str) -> None:
    connection = await bed.connect()
    assert set(await bed.read(connection)) == {OK}

    async def read_over_the_cut() -> list[ReadStatus]:
        getattr(bed.link, way).cut()
        try:
            return await bed.read(connection, deadline_s=SHORT_S)
        finally:
            bed.link.reset()
            bed.link.up.restore()
            bed.link.down.restore()

    for statuses in await expect_within(SHORT_S + DEADLINE_SLACK_S, read_over_the_cut, what="a read over a cut"):
        assert set(statuses) == {LATE}
    assert set(await bed.read(connection)) == {OK}, "a new connection, once the network is whole"


async def test_blocks_that_came_through_count_when_the_answer_is_cut_in_the_middle(bed: Bed) -> None:
    connection = await bed.connect()
    bed.link.down.cut(after_bytes=SLOTS * BLOCK // 2)
    statuses, seconds = await took(bed.read(connection, deadline_s=SHORT_S * 3))
    assert set(statuses) == {OK, LATE}
    assert seconds <= SHORT_S * 3 + DEADLINE_SLACK_S


async def test_nothing_is_written_when_a_late_answer_comes_through_after_all(bed: Bed) -> None:
    connection = await bed.connect()
    blocks = bed.rig.request(bed.stored)
    bed.link.down.cut()
    outcome = await connection.read(blocks, deadline_s=SHORT_S)
    assert set(outcome.statuses) == {LATE}
    before = bytes(bed.rig.reader_arena.region)
    passed = bed.link.down.passed_bytes
    bed.link.down.restore()
    probe = await bed.connect()  # through the same link: what was held back has moved by the time this is answered
    assert bed.link.down.passed_bytes > passed
    assert bytes(bed.rig.reader_arena.region) == before
    await probe.close()


async def test_read_is_lost_at_once_when_the_connection_is_reset_in_the_middle(bed: Bed) -> None:
    connection = await bed.connect()

    async def read_until_reset() -> list[ReadStatus]:
        bed.link.down.cut(after_bytes=SLOTS * BLOCK // 2)
        half = bed.link.down.passed_bytes + SLOTS * BLOCK // 2
        reading = asyncio.ensure_future(bed.read(connection, deadline_s=30))
        await eventually(lambda: bed.link.down.passed_bytes == half, what="half of the answer is through")
        bed.link.reset()
        bed.link.down.restore()
        return await reading

    for statuses in await expect_within(PROMPT_S, read_until_reset, what="half a read and noticing the reset"):
        assert set(statuses) == {OK, PEER_LOST}


async def test_blocks_are_whole_or_late_when_packets_are_lost(bed: Bed) -> None:
    connection = await bed.connect()
    for way in (bed.link.up, bed.link.down):
        way.lose(0.1, retransmit_s=0.02)
    seen: list[ReadStatus] = []
    for _ in range(10):
        statuses, seconds = await took(bed.read(connection, deadline_s=0.3))
        assert seconds <= 0.3 + DEADLINE_SLACK_S
        seen += statuses
    assert seen.count(OK) > len(seen) // 2
    assert set(seen) <= {OK, LATE}


async def test_connect_is_refused_at_once_when_the_port_is_closed(bed: Bed) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]

    async def knock() -> str:
        with pytest.raises(ConnectionError) as refused:
            await bed.rig.reader.connect(descriptor_of(port, bed.rig), deadline_s=10)
        return str(refused.value)

    for reason in await expect_within(PROMPT_S, knock, what="a refusal"):
        assert "refused" in reason.lower()


async def test_connect_ends_by_its_deadline_when_nobody_answers(bed: Bed) -> None:
    bed.link.down.cut()  # the handshake is the kernel's; the hello does not come

    async def knock() -> str:
        with pytest.raises(ConnectionError) as silent:
            await bed.connect(deadline_s=SHORT_S)
        return str(silent.value)

    assert all(await expect_within(SHORT_S + DEADLINE_SLACK_S, knock, what="a connect to a silent peer"))


async def test_connect_ends_by_its_deadline_when_the_peer_accepts_nobody(bed: Bed) -> None:
    """A listener whose queue is full: SYNs are dropped, as by a firewall."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.socket() as first, socket.socket() as second:
        for sock in (first, second):
            sock.setblocking(False)
            sock.connect_ex(full.getsockname())

        async def knock() -> str:
            with pytest.raises(ConnectionError) as silent:
                await bed.rig.reader.connect(descriptor_of(full.getsockname()[1], bed.rig), deadline_s=SHORT_S)
            return str(silent.value)

        assert all(await expect_within(SHORT_S + DEADLINE_SLACK_S, knock, what="a connect into a full queue"))

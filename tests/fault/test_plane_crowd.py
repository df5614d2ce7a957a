"""64 peers of one reader at once: the good ones are read in time, whatever the dead, the silent and the garbling ones do."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from peer_agent.memory.arena import Arena
from peer_agent.memory.layout import SizeClass
from peer_agent.testing.timing import DEADLINE_SLACK_S, PROMPT_S, took
from peer_agent.transport.base import Connection, ReadOutcome, ReadStatus, Transport
from peer_agent.transport.check_rig import DEADLINE_S, Rig
from peer_agent.transport.fake import Fault
from peer_agent.transport.faulty_owner import faulty_owner
from peer_agent.transport.shm import ShmTransport
from peer_agent.transport.tcp import TcpTransport

DIGEST = b"crowd".ljust(32, b".")
BLOCK, EACH, PEERS = 16 << 10, 4, 64
SHORT_S = 0.5
MADE_FAULTS = (Fault.SLOW, Fault.GARBAGE, Fault.CLOSING)


@pytest.mark.parametrize("plane", [ShmTransport, TcpTransport])
async def test_good_peers_are_read_in_time_when_others_among_64_are_dead_silent_or_garbling(
    tmp_path: Path, plane: type[ShmTransport] | type[TcpTransport]
) -> None:
    async with AsyncExitStack() as stack:
        classes = [SizeClass(DIGEST, BLOCK, EACH * PEERS)]
        theirs = stack.enter_context(Arena.create(tmp_path / "reader", classes, epoch=1))
        reader: Transport = plane(theirs)
        stack.push_async_callback(reader.close)
        dead: list[Transport] = []
        reads: list[tuple[Rig, Connection, Fault | None]] = []
        for number in range(PEERS):
            arena = Arena.create(tmp_path / f"owner-{number}", [SizeClass(DIGEST, BLOCK, EACH)], epoch=number + 2)
            stack.enter_context(arena)
            owner: Transport = plane(arena)
            stack.push_async_callback(owner.close)
            descriptor, fault = await owner.export(), None
            if plane is TcpTransport and number % 8 in (1, 3, 5):
                fault = MADE_FAULTS[number % 8 // 2]
                descriptor = await stack.enter_async_context(faulty_owner(arena, fault))
            elif plane is TcpTransport and number % 8 == 7:
                dead.append(owner)
            reads.append((Rig(owner, arena, reader, theirs), await reader.connect(descriptor, deadline_s=DEADLINE_S), fault))
        for owner in dead:
            await owner.close()

        held = []  # made before anything is timed: it holds up the loop for everybody
        for rig, _, _ in reads:
            held.append(rig.store(range(EACH), lock=None if rig.owner in dead else 7))
            if rig.owner in dead:
                rig.capabilities[7] = bytes(64)  # as good as any

        async def read(number: int) -> tuple[list[ReadStatus], float]:
            (rig, connection, _), stored = reads[number], held[number]
            blocks = rig.request(stored, first=EACH * number)
            outcome, seconds = await took(_settled(connection.read(blocks, deadline_s=SHORT_S)))
            return rig.expect(outcome, blocks, stored), seconds

        for number, (statuses, seconds) in enumerate(await asyncio.gather(*map(read, range(PEERS)))):
            rig, _, fault = reads[number]
            assert seconds <= SHORT_S + DEADLINE_SLACK_S
            if rig.owner in dead or fault is Fault.GARBAGE:
                assert set(statuses) == {ReadStatus.PEER_LOST}
                assert seconds <= PROMPT_S
            elif fault is Fault.SLOW:
                assert set(statuses) == {ReadStatus.LATE}
            elif fault is Fault.CLOSING:
                assert set(statuses) <= {ReadStatus.OK, ReadStatus.PEER_LOST}
            else:
                assert set(statuses) == {ReadStatus.OK}
                assert seconds <= PROMPT_S, "the silent ones held nothing that it needed"


async def _settled(read) -> ReadOutcome:
    outcome: ReadOutcome = await read
    await outcome.settled
    return outcome

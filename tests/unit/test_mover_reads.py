"""Reads inside the mover that nobody expected to end so."""

from __future__ import annotations

import asyncio

import pytest

from peer_agent.mover.backend import PeerMemory
from peer_agent.mover.messages import Read
from peer_agent.mover.reads import Peer, Reading


class Failing:
    """Reads of which one group fails, late, while others may still be got."""

    async def _run(self, reading: Reading) -> None:
        reading.link = object()  # type: ignore[assignment]
        await asyncio.sleep(0)
        raise RuntimeError("a bug")


async def test_late_read_is_never_settled_when_it_ended_by_a_bug() -> None:
    wanted = Read(1, 1, 0, bytes(32), bytes(32), 32, bytes(32), bytes(8))
    reading = Reading(Failing(), Peer(PeerMemory(bytes(16), 1 << 20, b"")), wanted)  # type: ignore[arg-type]
    await asyncio.sleep(0)
    assert await reading.statuses() is None
    with pytest.raises(RuntimeError, match="a bug"):
        await reading.settle()

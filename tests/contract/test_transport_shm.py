"""What only the shm plane does: a peer's arena is mapped in a thread, which nobody may be waiting for when it is done."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from peer_agent.memory.arena import Arena
from peer_agent.memory.layout import SizeClass
from peer_agent.testing.leaks import descriptors
from peer_agent.transport import shm
from peer_agent.transport.check_movers import eventually
from peer_agent.transport.shm import ShmTransport


@pytest.mark.parametrize("cancelled", [False, True])
async def test_no_descriptor_is_left_when_nobody_waits_for_a_connect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cancelled: bool
) -> None:
    with Arena.create(tmp_path / "arena", [SizeClass(b"n" * 32, 1000, 4)], epoch=1) as arena:
        plane = ShmTransport(arena)
        descriptor = await plane.export()
        connection = await plane.connect(descriptor, deadline_s=20)  # starts what stays open: the pool's thread, the mapping
        await connection.close()
        here, opens, boot_id = threading.Event(), threading.Event(), shm._boot_id()

        def slow_boot_id() -> bytes:
            here.set()
            assert opens.wait(20)
            return boot_id

        monkeypatch.setattr(shm, "_boot_id", slow_boot_id)
        before = descriptors().items()
        connecting = asyncio.create_task(plane.connect(descriptor, deadline_s=20 if cancelled else 0.01))
        await eventually(here.is_set)
        if cancelled:
            connecting.cancel()
        await asyncio.wait([connecting])
        assert connecting.cancelled() if cancelled else isinstance(connecting.exception(), ConnectionError)
        closed = asyncio.Event()
        monkeypatch.setattr(Arena, "close", _announced(Arena.close, closed))
        opens.set()
        await asyncio.wait_for(closed.wait(), 20)
        assert not descriptors().items() - before
        await plane.close()


def _announced(close: Callable[[Arena], None], closed: asyncio.Event) -> Callable[[Arena], None]:
    def announced(arena: Arena) -> None:
        close(arena)
        closed.set()

    return announced

"""The agent's side of a device's mover: copies are over only when they are, and pools are closed whatever was late."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest

from kvdir.errors import ConfigError, TooLarge
from kvdir.testing.wait import eventually
from peer_agent.memory.arena import Arena
from peer_agent.memory.device_fake import FakeDevice
from peer_agent.memory.layout import SizeClass
from peer_agent.mover import process
from peer_agent.mover.child import MoverChild
from peer_agent.mover.device_calls import OpenPool
from peer_agent.server import device_movers
from peer_agent.server.device_movers import DeviceMover, DeviceMovers

CLASS = SizeClass(b"d" * 32, 4096, 4)


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    with Arena.create(tmp_path / "arena", [CLASS], epoch=1) as arena:
        yield arena


@pytest.fixture
async def mover(arena: Arena) -> AsyncIterator[DeviceMover]:
    mover = DeviceMover(arena, "fake:0")
    await mover.start()
    yield mover
    await mover.close()


def is_mapped(mover: DeviceMover) -> bool:
    return "kvdir-fake-device" in Path(f"/proc/{mover.pid}/maps").read_text()


async def test_stage_is_settled_only_when_its_mover_is_dead_and_not_when_it_hung_up(mover: DeviceMover):
    """It may end slowly, with a copy of its device still under way."""
    pid, child = mover.pid, mover._process._child
    os.kill(pid, signal.SIGSTOP)
    assert child is not None
    child._hang_up()
    await asyncio.wait_for(mover.settle(1), 10)
    assert not psutil.pid_exists(pid)


async def test_pool_is_asked_for_again_and_closed_when_the_first_answer_came_too_late(arena: Arena, mover: DeviceMover):
    with FakeDevice(seed=0) as device:
        pool = device.allocate(slots=4, segment_bytes=[4096])
        opening = OpenPool(7, device.export_handle(pool), 4, 4096, arena.path, arena.arena_id)
        os.kill(mover.pid, signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            await mover.open(opening, until_s=time.monotonic() + 0.05)
        os.kill(mover.pid, signal.SIGCONT)
        await mover.open(opening, until_s=time.monotonic() + 5)
        assert mover._opened == {7: mover._process._child.opened.incarnation}
        assert is_mapped(mover)
        await mover.close_pool(7)
        assert not is_mapped(mover)


async def test_close_does_not_wait_for_a_mover_that_is_starting(arena: Arena):
    mover = DeviceMover(arena, "fake:0")
    starting = asyncio.create_task(mover.start())
    await asyncio.sleep(0)
    await asyncio.wait_for(mover.close(), 5)
    with pytest.raises(ConfigError, match="closing"):
        await starting


async def test_close_ends_when_a_mover_that_is_starting_does_not_die(arena: Arena, monkeypatch: pytest.MonkeyPatch):
    """As one does that hangs in a driver of the kernel."""
    undead = asyncio.Event()

    async def end(child: MoverChild) -> None:
        await undead.wait()

    monkeypatch.setattr(device_movers, "CLOSE_S", 0.05)
    monkeypatch.setattr(process, "CLOSE_S", 0.05)
    mover = DeviceMover(arena, "fake:0")
    starting = asyncio.create_task(mover.start())
    await eventually(lambda: mover._process._child is not None)
    child = mover._process._child
    with monkeypatch.context() as patched:
        patched.setattr(MoverChild, "end", end)
        await asyncio.wait_for(mover.close(), 2)
        undead.set()
        with pytest.raises(ConfigError, match="closing"):
            await starting
    assert child is not None
    await child.end()


async def test_no_mover_is_started_for_one_more_name_when_there_are_many(arena: Arena, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device_movers, "MAX_DEVICES", 1)
    movers = DeviceMovers(arena, kinds=("fake",))
    try:
        first = await movers.of("fake:0")
        with pytest.raises(TooLarge, match="1 devices"):
            await movers.of("fake:00")
        assert await movers.of("fake:0") is first
        assert list(movers.pids()) == ["fake:0"]
    finally:
        await movers.close()

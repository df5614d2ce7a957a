"""The kernel knows whether a writer lives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from peer_agent.memory import presence


@pytest.fixture
def arena(tmp_path: Path) -> Path:
    path = tmp_path / "arena"
    path.write_bytes(bytes(4096))
    return path


def test_not_held_when_released_or_closed(arena: Path):
    agent, engine = os.open(arena, os.O_RDWR), os.open(arena, os.O_RDWR)
    try:
        assert not presence.is_held(agent, 5)
        presence.hold(engine, 5)
        assert presence.is_held(agent, 5)
        assert not presence.is_held(agent, 6)
        presence.release(engine, 5)
        assert not presence.is_held(agent, 5)
        presence.hold(engine, 5)
    finally:
        os.close(engine)
    assert not presence.is_held(agent, 5)
    os.close(agent)


def test_refused_when_another_process_holds_the_session(arena: Path):
    first, second = os.open(arena, os.O_RDWR), os.open(arena, os.O_RDWR)
    presence.hold(first, 2**64 - 1)
    with pytest.raises(BlockingIOError, match="another process"):
        presence.hold(second, 2**64 - 1)
    os.close(first)
    os.close(second)


def test_not_held_when_the_process_was_killed(arena: Path):
    code = (
        "import os, sys; from peer_agent.memory import presence\n"
        f"presence.hold(os.open({str(arena)!r}, os.O_RDWR), 9); print('held', flush=True); sys.stdin.read()"
    )
    agent = os.open(arena, os.O_RDWR)
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        assert engine.stdout.readline() == "held\n"
        assert presence.is_held(agent, 9)
        engine.kill()
        engine.wait()
    assert not presence.is_held(agent, 9)
    os.close(agent)

"""When a peer is worth a call: the circuit breaker, and sharing one connect."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import grpc.aio
import pytest

from kvdir.location import NodeTrust, StreamState
from kvdir.testing.clock import ManualClock
from peer_agent.server.peer import PeerFailure
from peer_agent.server.peers import Peers
from peer_agent.server.tasks import OwnedTasks


class Rig:
    def __init__(self) -> None:
        self.clock = ManualClock(100.0)
        self.tasks = OwnedTasks(limit=8)
        self.channels = 0
        self.peers = Peers(
            me="me", epoch=1, planes=(), channel=self.channel, connect_timeout_s=0.2, breaker_s=1.0, breaker_max_s=3.0,
            max_flight_bytes=1 << 20, tasks=self.tasks, clock=self.clock,
        )  # fmt: skip

    def channel(self, address: str) -> grpc.aio.Channel:
        self.channels += 1
        return grpc.aio.insecure_channel(address)

    def skipped_for_s(self) -> float:
        figures = self.peers.figures().get("n")
        return figures.skip_until_s - self.clock.now_s if figures else 0.0


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    made = Rig()
    yield made
    await made.peers.close()
    await made.tasks.close(timeout_s=1)


def node(address: str) -> NodeTrust:
    return NodeTrust("n", 7, StreamState.SYNCED, "", 0.0, 0, address)


async def test_pause_doubles_up_to_its_limit_when_a_peer_stays_dead(rig: Rig):
    pauses = []
    for _ in range(4):
        with pytest.raises(PeerFailure) as caught:
            await rig.peers.reach(node("127.0.0.1:1"), timeout_s=2)
        assert not caught.value.late
        pauses.append(rig.skipped_for_s())
        rig.clock.advance(rig.skipped_for_s())
    assert pauses == [1.0, 2.0, 3.0, 3.0]


async def test_one_connect_is_shared_when_several_loads_need_the_peer(rig: Rig):
    outcomes = await asyncio.gather(
        *(rig.peers.reach(node("127.0.0.1:1"), timeout_s=2) for _ in range(5)), return_exceptions=True
    )
    assert all(isinstance(outcome, PeerFailure) for outcome in outcomes)
    assert rig.channels == 1


async def test_each_waits_no_longer_than_its_own_deadline_when_the_peer_is_silent(rig: Rig):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, never answers
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(PeerFailure) as caught:
            await rig.peers.reach(node(address), timeout_s=0.02)
        assert caught.value.late
        with pytest.raises(PeerFailure, match=r"cannot be reached|no connection to"):
            await rig.peers.reach(node(address), timeout_s=5)
    assert rig.channels == 1


async def test_a_second_try_is_made_by_one_load_while_others_go_on_skipping(rig: Rig):
    with pytest.raises(PeerFailure):
        await rig.peers.reach(node("127.0.0.1:1"), timeout_s=2)
    rig.clock.advance(1.0)
    assert rig.skipped_for_s() == 0
    trying = asyncio.ensure_future(rig.peers.reach(node("127.0.0.1:1"), timeout_s=2))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert rig.skipped_for_s() > 0, "others skip it until the try has succeeded"
    with pytest.raises(PeerFailure):
        await trying


async def test_background_work_is_bounded(rig: Rig):
    tasks = OwnedTasks(limit=1)
    forever = asyncio.Event()
    assert tasks.start(forever.wait(), name="first") is not None
    assert tasks.start(forever.wait(), name="second") is None
    await tasks.close(timeout_s=0.01)
    assert len(tasks) == 0
    assert tasks.failures == 0

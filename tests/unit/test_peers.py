"""When a peer is worth a call: the circuit breaker, sharing one connect, and letting go of connections."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest

from kvdir.fingerprint import Fingerprints
from kvdir.location import NodeTrust, StreamState
from kvdir.rpc.channel import Options
from kvdir.rpc.tls import Dialer
from kvdir.testing.clock import ManualClock
from kvdir.testing.wait import eventually
from peer_agent.core.schedule import Priority, Schedule
from peer_agent.server.peer import PeerFailure
from peer_agent.server.peers import AVOID_S, IDLE_S, LOSSES, RENEW_S, Peers
from peer_agent.server.tasks import OwnedTasks
from peer_agent.server.turns import Turns
from peer_agent.transport.base import Capabilities
from peer_agent.v1 import peer_pb2, peer_pb2_grpc


class Plane:
    """Connects at once, or fails with `error`; counts connections that are open."""

    def __init__(self, name: str = "plain") -> None:
        self.name = name
        self.open = 0
        self.error: Exception | None = None

    def capabilities(self) -> Capabilities:
        return Capabilities(same_host_only=False, gpu=False, verifies="checksum", owner_checks_lock=True)

    async def connect(self, descriptor: bytes, *, deadline_s: float) -> Plane:
        if self.error is not None:
            raise self.error
        self.open += 1
        return self

    async def close(self) -> None:
        self.open -= 1


class SilentPlane(Plane):
    """Nobody answers there: connecting takes all of its time."""

    async def connect(self, descriptor: bytes, *, deadline_s: float) -> Plane:
        await asyncio.sleep(deadline_s)
        raise ConnectionError("no answer in time")


class Owner(peer_pb2_grpc.PeerServicer):
    """Node "n", which offers the plain plane, or `planes`; cancels hellos while `cancelling`; locks once it may `answer`."""

    def __init__(self, *planes: str) -> None:
        self.cancelling = False
        self.planes = planes or ("plain",)
        self.asked, self.answer = asyncio.Event(), asyncio.Event()

    async def Hello(self, request, context):
        if self.cancelling:
            await context.abort(grpc.StatusCode.CANCELLED, "not now")
        offers = [peer_pb2.TransportOffer(transport=name, descriptor=b"\1") for name in self.planes]
        return peer_pb2.HelloResponse(protocol_version=1, node="n", epoch=7, transports=offers)

    async def Lock(self, request, context):
        self.asked.set()
        await self.answer.wait()
        return peer_pb2.LockResponse(protocol_version=1, epoch=7, lock=5, blocks=bytes(32))


@contextlib.asynccontextmanager
async def serving(owner: Owner) -> AsyncIterator[str]:
    server = grpc.aio.server()
    peer_pb2_grpc.add_PeerServicer_to_server(owner, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


class Counted(Dialer):
    def __init__(self, rig: Rig) -> None:
        super().__init__()
        self.rig = rig
        self.renewals = 0

    @property
    def generation(self) -> int:
        return self.renewals

    def aio(self, address: str, *, options: Options, server_name: str = "") -> grpc.aio.Channel:
        self.rig.channels += 1
        return super().aio(address, options=options, server_name=server_name)


class Rig:
    def __init__(self, *preferred: Plane) -> None:
        self.plane = Plane()
        self.clock = ManualClock(100.0)
        self.tasks = OwnedTasks(limit=8)
        self.channels = 0
        self.dialer = Counted(self)
        self.turns = turns = Turns(Schedule(peer_bytes=1 << 20, total_bytes=1 << 20), clock=self.clock)
        self.peers = Peers(
            me="me", epoch=1, planes=(*preferred, self.plane), dialer=self.dialer, connect_timeout_s=0.2,
            breaker_s=1.0, breaker_max_s=3.0, turns=turns, tasks=self.tasks, clock=self.clock,
        )  # fmt: skip

    def skipped_for_s(self) -> float:
        return max(0.0, self.peers.figures("n").skip_until_s - self.clock.now_s)


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


async def test_background_work_is_refused_when_its_owner_has_closed():
    tasks = OwnedTasks(limit=8)
    refused: list[bool] = []

    async def starts_more_when_cancelled() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            refused.append(tasks.start(asyncio.sleep(60), name="too late") is None)

    assert tasks.start(starts_more_when_cancelled(), name="first") is not None
    await tasks.close(timeout_s=0.01)
    assert refused == [True]
    assert len(tasks) == 0


async def test_connection_is_closed_when_all_background_work_is_taken(rig: Rig):
    async with serving(Owner()) as address:
        peer = await rig.peers.reach(node(address), timeout_s=2)
        release = asyncio.Event()
        for _ in range(8):
            assert rig.tasks.start(release.wait(), name="taken") is not None
        rig.peers.failed(peer)
        await eventually(lambda: rig.plane.open == 0, within_s=2, what="closed")
        release.set()


async def test_one_failure_is_counted_once_when_several_readers_report_it(rig: Rig):
    async with serving(Owner()) as address:
        peer = await rig.peers.reach(node(address), timeout_s=2)
        for _ in range(10):
            rig.peers.failed(peer)
        assert rig.skipped_for_s() == 1.0
        rig.clock.advance(1.0)
        again = await rig.peers.reach(node(address), timeout_s=2)
        rig.peers.failed(peer)
        assert not again.broken
        assert rig.skipped_for_s() <= 0


@pytest.mark.parametrize(
    "error", [ConnectionError("refused"), ValueError("garbage"), OSError(errno.EMFILE, os.strerror(errno.EMFILE))]
)
async def test_plane_that_cannot_connect_is_a_failure_of_the_peer_whatever_the_reason(rig: Rig, error: Exception):
    rig.plane.error = error
    async with serving(Owner()) as address:
        with pytest.raises(PeerFailure, match="no common data plane"):
            await rig.peers.reach(node(address), timeout_s=2)


async def test_next_plane_is_taken_when_nobody_answers_on_a_better_one():
    rig = Rig(SilentPlane("silent"))
    async with serving(Owner("silent", "plain")) as address:
        assert (await rig.peers.reach(node(address), timeout_s=2)).plane == "plain"
    await rig.peers.close()


async def test_new_connection_does_not_wait_until_the_old_one_is_closed(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    async with serving(Owner()) as address:
        old = await rig.peers.reach(node(address), timeout_s=2)
        closing, go = asyncio.Event(), asyncio.Event()

        async def slow() -> None:
            closing.set()
            await go.wait()

        monkeypatch.setattr(old, "close", slow)
        old.broken = True
        new = await rig.peers.reach(node(address), timeout_s=2)
        assert new is not old
        await asyncio.wait_for(closing.wait(), 2)
        go.set()


async def test_connection_stays_while_reads_come_in_over_it(rig: Rig):
    async with serving(Owner()) as address:
        peer = await rig.peers.reach(node(address), timeout_s=2)
        for _ in range(3):
            rig.clock.advance(IDLE_S / 2)
            rig.peers.observed(peer, size_bytes=1 << 20, took_s=0.01, queued_bytes=0, complete=True)
            rig.peers.drop_idle()
            assert not peer.broken
        rig.clock.advance(2 * IDLE_S)
        rig.peers.drop_idle()
        assert peer.broken


async def test_hello_that_the_peer_cancels_is_its_failure(rig: Rig):
    owner = Owner()
    owner.cancelling = True
    async with serving(owner) as address:
        with pytest.raises(PeerFailure):
            await rig.peers.reach(node(address), timeout_s=2)
        owner.cancelling = False
        rig.clock.advance(1.0)
        assert not (await rig.peers.reach(node(address), timeout_s=2)).broken


async def test_nodes_that_never_return_are_forgotten(rig: Rig):
    for number in range(50):
        name = f"pod-{number}"
        with pytest.raises(PeerFailure):
            await rig.peers.reach(NodeTrust(name, 7, StreamState.SYNCED, "", 0.0, 0, "127.0.0.1:1"), timeout_s=2)
    assert rig.peers.figures("pod-49").skip_until_s > 0
    rig.clock.advance(3600.0)
    rig.peers.drop_idle()
    assert all(rig.peers.figures(f"pod-{number}").skip_until_s == 0 for number in range(50))


async def test_a_plane_is_tried_last_for_a_while_when_its_reads_are_lost_and_another_one_works():
    rig = Rig(Plane("fragile"))
    async with serving(Owner("fragile", "plain")) as address:
        for _ in range(LOSSES):
            peer = await rig.peers.reach(node(address), timeout_s=2)
            assert peer.plane == "fragile"
            rig.peers.lost(peer)
            rig.peers.lost(peer)  # by another read of the same connection
        peer = await rig.peers.reach(node(address), timeout_s=2)
        assert peer.plane == "plain"
        rig.clock.advance(AVOID_S + 1)
        rig.peers.failed(peer)
        assert (await rig.peers.reach(node(address), timeout_s=2)).plane == "fragile"
    await rig.peers.close()
    await rig.tasks.close(timeout_s=1)


async def test_connection_is_made_anew_once_it_rests_when_our_certificate_was_renewed(rig: Rig):
    async with serving(Owner()) as address:
        peer = await rig.peers.reach(node(address), timeout_s=20)
        rig.clock.advance(RENEW_S + 1)
        rig.peers.drop_idle()
        assert await rig.peers.reach(node(address), timeout_s=20) is peer
        rig.dialer.renewals += 1
        rig.clock.advance(RENEW_S / 2)
        rig.peers.drop_idle()
        assert await rig.peers.reach(node(address), timeout_s=20) is peer, "something may be under way"
        rig.clock.advance(RENEW_S + 1)
        rig.peers.drop_idle()
        assert await rig.peers.reach(node(address), timeout_s=20) is not peer


async def test_connection_goes_on_when_our_certificate_was_renewed_and_a_read_is_under_way(rig: Rig):
    async with serving(Owner()) as address:
        peer = await rig.peers.reach(node(address), timeout_s=20)
        rig.dialer.renewals += 1
        async with rig.turns.turn(
            peer="n", request=1, priority=Priority.LOAD, size_bytes=1, until_s=rig.clock() + 10 * RENEW_S
        ) as mine:
            assert mine
            rig.clock.advance(RENEW_S + 1)
            rig.peers.drop_idle()
            assert not peer.broken
        rig.peers.drop_idle()
        assert peer.broken


async def test_connection_goes_on_when_our_certificate_was_renewed_and_a_lock_is_under_way(rig: Rig):
    owner = Owner()
    async with serving(owner) as address:
        peer = await rig.peers.reach(node(address), timeout_s=20)
        rig.dialer.renewals += 1
        asked = asyncio.create_task(peer.lock(b"d" * 32, Fingerprints(b"f" * 16, 16), reader="me", lease_s=1.0, timeout_s=20))
        await asyncio.wait_for(owner.asked.wait(), 20)
        rig.clock.advance(RENEW_S + 1)
        rig.peers.drop_idle()
        owner.answer.set()
        assert (await asked).lock == 5
        rig.peers.drop_idle()
        assert peer.broken

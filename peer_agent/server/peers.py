"""Connections to other agents: who they are now (epoch), by which plane their blocks come, and whether calling them pays.

Rules:
- One connection per node, made on first use by one task that all who need it share; each waits no longer than its own deadline.
- Hello first; the answer must name the node that was meant. A plane is taken in our order of preference, the next one when it
  cannot connect. None but the last one may take all of the time: a plane whose packets are dropped must not hide the next one.
- Circuit breaker per node: after a failure the node is skipped for breaker_s, doubling to breaker_max_s. When the pause is
  over, the first load tries, and everyone else goes on skipping the node until that try has succeeded. So a dead peer costs
  one connect timeout per pause, not one per request. Being late counts as failure only when the peer had a fair chance:
  connect_timeout_s in one call, or LATE_LIMIT calls in a row; else a caller with a tight deadline would cut it off for others.
- A plane whose reads broke LOSSES connections in a row is tried after the others for AVOID_S: a path may be broken for bytes
  only, or our mover may crash at every read, while tcp works.
- What many loads see fail at once is one failure: who reports a connection that is already replaced or dropped, is late.
- Failures are values for the reader (`PeerFailure`), never this agent's problem.

Does not: decide whom to ask (peer_agent/core/plan.py) or what to do with bytes (peer_agent/server/reader.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc.aio

from kvdir.location import NodeTrust
from kvdir.obs.definition import Histogram
from kvdir.obs.labels import RATIO_BUCKETS
from kvdir.obs.logs import say
from kvdir.obs.spans import Kind, span
from kvdir.rpc.channel import client_options
from kvdir.rpc.tls import PLAINTEXT, Dialer
from peer_agent.core.figures import Figures
from peer_agent.core.nominees import PeerFigures
from peer_agent.server.peer import Peer, PeerFailure, say_hello
from peer_agent.server.tasks import OwnedTasks
from peer_agent.server.turns import Turns
from peer_agent.transport.base import Connection, Transport
from peer_agent.v1 import peer_pb2

log = logging.getLogger(__name__)

LATE_LIMIT = 3

PLANE_SHARE = 0.6
"""Of the time that is left for connecting, for a plane while there is another one to be tried."""

LOSSES = 2
AVOID_S = 60.0

IDLE_S = 60.0
"""After so long without use a connection is closed: a mapped arena keeps the memory of a peer that died."""

RENEW_S = 2.0
"""One with an older certificate than ours is now, as soon as it is likely that nothing is under way."""

FORGET_S = 300.0
"""After so long a failed node that nobody asks for is forgotten: names of nodes that never return must not pile up."""

CLOSE_S = 1.0


@dataclass(slots=True)
class _Breaker:
    failures: int = 0
    skip_until_s: float = 0.0


@dataclass(slots=True)
class _Losses:
    """Of one plane to one life of a peer: connections that broke in a read, since a read of it was whole."""

    connections: int = 0
    last_s: float = 0.0


class Peers:
    """All peers of this agent, by node name."""

    def __init__(
        self,
        *,
        me: str,
        epoch: int,
        planes: Sequence[Transport],
        dialer: Dialer = PLAINTEXT,
        tls_name: Callable[[str], str] = lambda node: "",
        connect_timeout_s: float,
        breaker_s: float,
        breaker_max_s: float,
        turns: Turns,
        tasks: OwnedTasks,
        clock: Callable[[], float],
    ) -> None:
        self._me = me
        self._epoch = epoch
        self._planes = planes
        self._dialer = dialer
        self._tls_name = tls_name
        self._connect_timeout_s = connect_timeout_s
        self._breaker_s = breaker_s
        self._breaker_max_s = breaker_max_s
        self._turns = turns
        self._learnt = Figures()
        self.predictions = {plane.name: Histogram(RATIO_BUCKETS) for plane in planes}  # of reads
        self._tasks = tasks
        self._clock = clock
        self._peers: dict[str, Peer] = {}
        self._connecting: dict[str, asyncio.Task[Peer | PeerFailure]] = {}
        self._breakers: dict[str, _Breaker] = {}
        self._losses: dict[tuple[str, int, str], _Losses] = {}  # node, epoch, plane
        self._closing = OwnedTasks(limit=None)  # at most one for each connection that was made; none may be left out

    def figures(self, name: str, *, besides: int = 0) -> PeerFigures:
        """What the plan wants to know about a node. besides: the request that asks; its own bytes are no queue to it."""
        peer, breaker = self._peers.get(name), self._breakers.get(name)
        plane = peer.plane if peer else ""
        return PeerFigures(
            path=self._learnt.estimate(name, plane, now_s=self._clock()),
            plane=plane,
            same_host=bool(peer and peer.same_host),
            connected=peer is not None,
            skip_until_s=breaker.skip_until_s if breaker else 0.0,
            queued_bytes=self._turns.queued_bytes(name, besides=besides),
        )

    def observed(self, peer: Peer, *, size_bytes: int, took_s: float, queued_bytes: int, complete: bool) -> None:
        """Learns from one read that was let fly. See Figures.observe."""
        peer.used_s = self._clock()
        ratio = self._learnt.observe(
            peer.node,
            peer.plane,
            size_bytes=size_bytes,
            took_s=took_s,
            queued_bytes=queued_bytes,
            now_s=self._clock(),
            complete=complete,
        )
        if complete:
            self._losses.pop(_path(peer), None)
            self.predictions[peer.plane].add(ratio)

    async def reach(self, node: NodeTrust, *, timeout_s: float) -> Peer:
        """The connection to this node, made now if need be. Raises PeerFailure."""
        peer = self._peers.get(node.node)
        if peer is not None and not peer.broken and peer.address == node.peer_address:
            peer.used_s = self._clock()
            return peer
        connecting = self._connecting.get(node.node)
        if connecting is None:
            started = self._tasks.start(self._replace(node), name=f"connect-{node.node}")
            if started is None:
                raise PeerFailure(f"{node.node}: too much background work")
            connecting = self._connecting[node.node] = started
            started.add_done_callback(lambda _: self._connecting.pop(node.node, None))
        done, _ = await asyncio.wait({connecting}, timeout=timeout_s)
        if not done:
            raise PeerFailure(f"{node.node}: no connection in time", late=True)
        if connecting.cancelled():
            raise PeerFailure(f"{node.node}: not connected, this agent is shutting down")
        outcome = connecting.result()
        if isinstance(outcome, PeerFailure):
            raise outcome
        return outcome

    def failed(self, peer: Peer) -> None:
        """The peer stopped answering or its plane broke: a new connection, after a pause."""
        if self._peers.get(peer.node) is peer:
            self._trip(peer.node)
            self._drop(peer)

    def lost(self, peer: Peer) -> None:
        """`failed` in a read; perhaps it is the plane that is to blame."""
        if self._peers.get(peer.node) is peer:
            losses = self._losses.setdefault(_path(peer), _Losses())
            losses.connections += 1
            losses.last_s = self._clock()
        self.failed(peer)

    def late(self, peer: Peer, *, waited_s: float) -> None:
        """It missed a deadline after waited_s."""
        peer.lates += 1
        if waited_s >= self._connect_timeout_s or peer.lates >= LATE_LIMIT:
            self.failed(peer)

    def answered(self, peer: Peer, *, took_s: float) -> None:
        """It works: forget earlier failures. took_s: of the lock that it answered."""
        peer.lates = 0
        self._learnt.observe_lock(peer.node, took_s=took_s, now_s=self._clock())
        self._breakers.pop(peer.node, None)

    def drop_idle(self) -> None:
        """Closes connections that nobody has used for IDLE_S, or for RENEW_S if they were made with a certificate that has been
        renewed, and over which nothing is under way; forgets failures after FORGET_S.
        """
        now_s, generation = self._clock(), self._dialer.generation
        for name in [name for name, breaker in self._breakers.items() if now_s - breaker.skip_until_s > FORGET_S]:
            del self._breakers[name]
        self._losses = {path: losses for path, losses in self._losses.items() if now_s - losses.last_s <= AVOID_S}
        for peer in tuple(self._peers.values()):
            busy = peer.asking or self._turns.queued_bytes(peer.node, besides=0)  # no request has number 0
            if not busy and now_s - peer.used_s > (IDLE_S if peer.generation == generation else RENEW_S):
                self._drop(peer)

    def planes_in_use(self) -> dict[str, int]:
        """Connected peers per plane."""
        counts: dict[str, int] = {}
        for peer in list(self._peers.values()):  # a copy: metrics are collected in another thread
            if not peer.broken:
                counts[peer.plane] = counts.get(peer.plane, 0) + 1
        return counts

    @property
    def fallbacks(self) -> int:
        """Connected peers that are reached by another plane than the first that both sides have."""
        return sum(peer.fallback and not peer.broken for peer in list(self._peers.values()))

    async def close(self) -> None:
        for task in list(self._connecting.values()):
            task.cancel()
        await asyncio.gather(*self._connecting.values(), return_exceptions=True)
        await asyncio.gather(*(peer.close() for peer in self._peers.values()))
        self._peers.clear()
        await self._closing.close(timeout_s=CLOSE_S)

    async def _replace(self, node: NodeTrust) -> Peer | PeerFailure:
        if (old := self._peers.get(node.node)) is not None:
            self._drop(old)
        failed_before = node.node in self._breakers
        if failed_before:
            self._trip(node.node)  # until this try has succeeded, others skip the node; a first contact they wait for
        try:
            peer, round_trip_s = await self._connect(node)
        except PeerFailure as failure:
            if not failed_before:
                self._trip(node.node)
            say(log, logging.INFO, "peer not connected", peer=node.node, address=node.peer_address, error=failure)
            return failure
        self._breakers.pop(node.node, None)
        self._peers[node.node] = peer
        self._learnt.observe_lock(peer.node, took_s=round_trip_s, now_s=self._clock())
        peer.used_s = self._clock()
        say(
            log, logging.INFO, "peer connected",
            peer=peer.node, epoch=f"{peer.epoch:016x}", address=peer.address, plane=peer.plane,
        )  # fmt: skip
        return peer

    async def _connect(self, node: NodeTrust) -> tuple[Peer, float]:
        """With the round trip of its Hello."""
        generation = self._dialer.generation
        channel = self._dialer.aio(node.peer_address, options=client_options(), server_name=self._tls_name(node.node))
        until_s = asyncio.get_running_loop().time() + self._connect_timeout_s
        with span("connect", Kind.CLIENT) as mine:
            mine.set("kvdir.peer", node.node)
            mine.server(node.peer_address)
            return await self._greeted(node, channel, until_s, generation)

    async def _greeted(self, node: NodeTrust, channel: grpc.aio.Channel, until_s: float, generation: int) -> tuple[Peer, float]:
        """Closes the channel when it comes to nothing."""
        try:
            async with asyncio.timeout_at(until_s):
                hello, round_trip_s = await say_hello(
                    channel,
                    me=self._me,
                    epoch=self._epoch,
                    planes=[plane.name for plane in self._planes],
                    timeout_s=self._connect_timeout_s,
                )
                if hello.node != node.node:
                    raise PeerFailure(
                        f"{node.peer_address} answers as {hello.node!r}, not {node.node!r}: the directory is behind"
                    )
                plane, connection = await self._open_plane(hello, until_s=until_s)
            return Peer(
                node.node, node.peer_address, channel, hello, connection,
                plane=plane.name, same_host=plane.capabilities().same_host_only,
                fallback=plane.name != self._first(hello), generation=generation,
            ), round_trip_s  # fmt: skip
        except TimeoutError as error:
            await channel.close()
            raise PeerFailure(f"{node.node}: no connection to {node.peer_address} in {self._connect_timeout_s} s") from error
        except BaseException:
            await channel.close()
            raise

    async def _open_plane(self, hello: peer_pb2.HelloResponse, *, until_s: float) -> tuple[Transport, Connection]:
        """until_s: of the event loop's clock."""
        offers = {offer.transport: offer.descriptor for offer in hello.transports}
        common = [plane for plane in self._planes if plane.name in offers]
        common.sort(key=lambda plane: self._avoided((hello.node, hello.epoch, plane.name)))  # stable: else our order
        reasons = [f"{plane.name}: not offered" for plane in self._planes if plane.name not in offers]
        for plane in common:
            left_s = until_s - asyncio.get_running_loop().time()
            share = 1.0 if plane is common[-1] else PLANE_SHARE
            try:
                return plane, await plane.connect(offers[plane.name], deadline_s=share * left_s)
            except (OSError, ValueError) as error:  # ConnectionError, or we are out of descriptors
                reasons.append(f"{plane.name}: {error}")
        raise PeerFailure(f"{hello.node}: no common data plane ({'; '.join(reasons)})")

    def _first(self, hello: peer_pb2.HelloResponse) -> str:
        """The plane that we would use, were there nothing against it."""
        offered = {offer.transport for offer in hello.transports}
        return next((plane.name for plane in self._planes if plane.name in offered), "")

    def _avoided(self, path: tuple[str, int, str]) -> bool:
        losses = self._losses.get(path)
        return losses is not None and losses.connections >= LOSSES and self._clock() - losses.last_s <= AVOID_S

    def _drop(self, peer: Peer) -> None:
        """Closes it in the background; reads under way end as lost."""
        peer.broken = True
        if self._peers.get(peer.node) is peer:
            del self._peers[peer.node]
        self._closing.start(peer.close(), name=f"close-{peer.node}")

    def _trip(self, name: str) -> None:
        breaker = self._breakers.setdefault(name, _Breaker())
        pause_s = min(self._breaker_s * 2**breaker.failures, self._breaker_max_s)
        breaker.failures = min(breaker.failures + 1, 16)
        breaker.skip_until_s = self._clock() + pause_s


def _path(peer: Peer) -> tuple[str, int, str]:
    return peer.node, peer.epoch, peer.plane

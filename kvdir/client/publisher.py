"""Publishes an owner's stream to one coordinator, for as long as it runs: connect, say what there is, reconnect.

Rules: never raises because of the network, never blocks the owner (it reads from the bounded outbox), never spins: connects
are tried with jittered, growing intervals. A fenced epoch stops for good and says so. One publisher per coordinator;
several may read the same outbox. Of those whose coordinators share a store one speaks and the others stand by (standby.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from kvdir.client.publish_call import Evict, PublishCall, PublishCounters, PublisherIdentity, Source, Wishes, vouches
from kvdir.client.standby import Standby
from kvdir.core.event import Doubt, Event, HeartbeatFigures
from kvdir.core.outbox import OwnerOutbox
from kvdir.core.sender import StreamSender
from kvdir.errors import KvdirError
from kvdir.location import StreamState
from kvdir.namespace import Namespace
from kvdir.obs.logs import say
from kvdir.rpc.channel import DEFAULT_MAX_MESSAGE_BYTES, client_options
from kvdir.rpc.status import from_rpc_error
from kvdir.rpc.tls import PLAINTEXT, Dialer
from kvdir.v1 import events_pb2_grpc

__all__ = ["Backoff", "Dial", "HeartbeatFigures", "Publisher", "PublisherIdentity", "PublisherStats"]

log = logging.getLogger("kvdir.publisher")

Dial = Callable[[], AbstractAsyncContextManager[Any]]
"""Connects and begins a publish call; leaving the block ends both. Raises Unavailable. Simulations bring their own."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Intervals between connects: uniform between half and the whole of base_s * 2**failures, at most limit_s.

    limit_s is one default heartbeat: a partition that heals is repaired within two, whatever the failures before.
    """

    base_s: float = 0.1
    limit_s: float = 1.0

    def interval_s(self, failures: int, rng: random.Random) -> float:
        whole_s = min(self.base_s * float(1 << min(failures, 16)), self.limit_s)
        return whole_s * (0.5 + rng.random() / 2)


@dataclass(frozen=True, slots=True)
class PublisherStats:
    """A snapshot of counters. state: as the coordinator last said. position, acked_seq: sent and acknowledged up to here.

    standby: another publisher speaks to the store that this one's coordinator shares.
    """

    address: str
    connected: bool
    coordinator: str
    state: StreamState | None
    fenced: str
    last_error: str
    position: int
    acked_seq: int
    calls: int
    batches: int
    events: int
    heartbeats: int
    snapshots: int
    sketches: int
    replays: int
    lost_events: int
    skipped_events: int
    evicted_blocks: int
    standby: bool = False


class Publisher:
    """See the module docstring. snapshot, heartbeat, evict, doubt: see publish_call.Source; all are called on the event loop.

    loss: share of batches to drop after they were numbered, to try out loss; replayed ones are dropped alike.
    silence_s: a coordinator that does not answer for so long is given up and connected to again.
    chunk_blocks: of one message of a snapshot. dial: gRPC to `address` by `dialer` unless given.
    standby: shared by the publishers of one owner.
    """

    def __init__(
        self,
        address: str,
        identity: PublisherIdentity,
        outbox: OwnerOutbox,
        *,
        snapshot: Callable[[], tuple[int, Iterable[Event]]],
        heartbeat: Callable[[], HeartbeatFigures],
        on_fenced: Callable[[str], None] | None = None,
        loss: float = 0.0,
        rng: random.Random | None = None,
        backoff: Backoff | None = None,
        connect_timeout_s: float = 1.0,
        silence_s: float = 5.0,
        linger_s: float = 0.002,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        chunk_blocks: int = 8192,
        evict: Evict | None = None,
        dial: Dial | None = None,
        dialer: Dialer = PLAINTEXT,
        standby: Standby | None = None,
        doubt: Callable[[], Doubt] = vouches,
    ) -> None:
        self._address = address
        self._source = Source(outbox, snapshot, heartbeat, chunk_blocks, evict, doubt)
        self._sender = StreamSender(outbox)
        self._wishes = Wishes(identity)
        self._counters = PublishCounters()
        self._on_fenced = on_fenced
        self._loss = loss
        self._rng = rng or random.Random()
        self._backoff = backoff or Backoff()
        self._connect_timeout_s = connect_timeout_s
        self._silence_s = silence_s
        self._linger_s = linger_s
        self._options = client_options(max_message_bytes=max_message_bytes)
        self._dial = dial or self._dial_grpc
        self._dialer = dialer
        self._standby = standby or Standby()
        self._fenced = ""
        self._last_error = ""

    def announce(self, namespaces: tuple[Namespace, ...]) -> None:
        """Replaces the announced namespaces. Call it before the first event of a new one goes into the outbox."""
        identity = self._wishes.identity
        self._wishes.identity = PublisherIdentity(
            identity.node,
            identity.epoch,
            identity.peer_address,
            identity.started_unix_ms,
            namespaces,
            identity.agent_version,
        )
        self._wishes.identity_changed = True
        self._wishes.wake.set()

    def doubted(self) -> None:
        """The owner's doubt has changed: tell it now. Call it before the first event that is newer than a doubt is appended."""
        self._wishes.wake.set()

    def leave(self) -> None:
        """Says goodbye in the call under way, if any, after which `run` returns: this epoch's blocks vanish at once."""
        self._wishes.leave = True
        self._wishes.wake.set()
        self._standby.stir()

    def step_back(self) -> None:
        """Ends the call under way without a goodbye: another publisher was welcomed to the same store."""
        self._wishes.step_back = True
        self._wishes.wake.set()

    def stats(self) -> PublisherStats:
        counters, sender = self._counters, self._sender
        return PublisherStats(
            address=self._address,
            connected=counters.connected,
            coordinator=counters.coordinator,
            state=counters.state if counters.connected else None,
            fenced=self._fenced,
            last_error=self._last_error,
            position=sender.position,
            acked_seq=sender.acked_seq,
            calls=counters.calls,
            batches=counters.batches,
            events=counters.events,
            heartbeats=counters.heartbeats,
            snapshots=counters.snapshots,
            sketches=counters.sketches,
            replays=sender.replays,
            lost_events=counters.lost_events,
            skipped_events=sender.skipped_events,
            evicted_blocks=counters.evicted_blocks,
            standby=not counters.connected and self._standby.waits(self),
        )

    async def run(self) -> None:
        """Until cancelled, fenced, or `leave`. Owns its connection; leaves no task behind."""
        unsubscribe = self._source.outbox.subscribe(self._wishes.wake.set)
        failures = 0
        try:
            while not self._fenced and not self._wishes.leave:
                await self._standby.turn(self, leaving=lambda: self._wishes.leave)
                if self._wishes.leave:
                    break
                self._wishes.step_back = False
                try:
                    welcomed = await self._connect_once()
                finally:
                    self._standby.over(self)
                if self._fenced or self._wishes.leave:
                    break
                failures = 0 if welcomed else failures + 1
                await self._pause(self._backoff.interval_s(failures, self._rng))
        finally:
            unsubscribe()
            self._standby.left(self)
        if self._fenced and self._on_fenced is not None:
            self._on_fenced(self._fenced)

    async def _connect_once(self) -> bool:
        """One connection, from connect to its end. True if the coordinator welcomed us."""
        publish_call: PublishCall | None = None
        try:
            async with self._dial() as call:
                if self._wishes.leave or self._wishes.step_back:
                    return False  # a hello now could take the name or the store from another, only to give it up
                self._counters.calls += 1
                publish_call = PublishCall(
                    call,
                    self._source,
                    self._sender,
                    self._wishes,
                    self._counters,
                    loss=self._loss,
                    rng=self._rng,
                    silence_s=self._silence_s,
                    linger_s=self._linger_s,
                    on_welcome=lambda store_id: self._standby.welcomed(self, store_id),
                )
                await publish_call.run()
            if not self._wishes.step_back:
                self._failed("the coordinator ended the call")
        except grpc.RpcError as error:
            self._failed(str(from_rpc_error(error, target=self._address)))
        except KvdirError as error:
            self._failed(str(error))
        except TimeoutError:
            self._failed(f"{self._address}: no answer within {self._silence_s:g} s")
        except asyncio.InvalidStateError:
            self._failed(f"{self._address}: the call ended while writing")
        self._fenced = publish_call.fenced if publish_call else ""
        return publish_call is not None and publish_call.welcomed

    @contextlib.asynccontextmanager
    async def _dial_grpc(self) -> AsyncIterator[Any]:
        channel = self._dialer.aio(self._address, options=self._options)
        try:
            patience_s = self._dialer.patience_s(self._address, self._connect_timeout_s)
            await self._dialer.connected(channel, target=self._address, timeout_s=patience_s)
            yield events_pb2_grpc.EventsStub(channel).Publish()
        finally:
            await channel.close()

    def _failed(self, error: str) -> None:
        if error != self._last_error:
            say(log, logging.INFO, "publisher not connected", error=error)
        self._last_error = error

    async def _pause(self, interval_s: float) -> None:
        """Waits, but not when somebody wants us to leave. Events in the outbox do not shorten it."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + interval_s
        while not self._wishes.leave and loop.time() < end_s:
            self._wishes.wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(end_s - loop.time()):
                    await self._wishes.wake.wait()

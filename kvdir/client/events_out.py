"""What this host holds, told to others in the standard envelope (RFC Mooncake 1527) over ZeroMQ, as engines tell it.

    PUB      [topic "", number 8 bytes big-endian, payload]; a number is skipped where events were lost, so a loss is visible
    ROUTER   asked with ["", first number], answers with what the ring still has from there on, then the end marker -1

Rules: reads outboxes, never their owners, so it cannot hold anybody up; everything is bounded (a slow subscriber loses messages
to libzmq and sees a hole, a replay has a deadline and waits for its reader rather than dropping in the middle). When an owner's
outbox is replaced (a restarted engine) or ends, its blocks are cleared first. Binds; others connect. Runs on one event loop, on
which the outboxes must be filled, too. Needs pyzmq (extra `engines`). Does not: encode (kvdir/engines/rfc1527.py), or send a
snapshot: a consumer that comes late has what the ring has, as with an engine's own stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvdir.client.engine_socket import zmq_module
from kvdir.core.event import Event
from kvdir.core.outbox import OwnerOutbox
from kvdir.engines.rfc1527 import encode_batch, envelopes
from kvdir.engines.wire import END_SEQ
from kvdir.errors import Unavailable
from kvdir.location import Tier
from kvdir.namespace import Namespace
from kvdir.obs.logs import say_bug

log = logging.getLogger("kvdir.events_out")

RING_MESSAGES = 10_000
RING_BYTES = 64 << 20
MESSAGE_EVENTS = 64
MESSAGE_BYTES = 1 << 20
REPLAY_S = 10.0

Namespaces = Callable[[], Mapping[bytes, Namespace]]


@dataclass(slots=True)
class _Source:
    """One owner. told: places (namespace digest, tier) that events were sent about."""

    outbox: OwnerOutbox
    namespaces: Namespaces
    unsubscribe: Callable[[], None]
    next_seq: int = 1
    told: set[tuple[bytes, int]] = field(default_factory=set)


class EventsOut:
    """See the module docstring. messages, lost_events: figures since the start."""

    def __init__(
        self, endpoint: str, replay_endpoint: str = "", *, ring_messages: int = RING_MESSAGES, ring_bytes: int = RING_BYTES
    ) -> None:
        self._zmq = zmq_module()
        self._wanted = (endpoint, replay_endpoint)
        self._ring: deque[tuple[int, bytes]] = deque()
        self._ring_bytes = 0
        self._bounds = (ring_messages, ring_bytes)
        self._sources: dict[str, _Source] = {}
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._sockets: list[Any] = []
        self._context: Any = None
        self._next = 0
        self.endpoint = self.replay_endpoint = ""
        self.messages = 0
        self.lost_events = 0

    def open(self) -> None:
        """Binds, on the running loop. endpoint, replay_endpoint: where, with the port that was given. Raises Unavailable."""
        zmq = self._zmq
        self._context = zmq.asyncio.Context()
        try:
            publisher, self.endpoint = self._bind(zmq.PUB, self._wanted[0])
            self._start(self._publish(publisher), "events-out")
            if self._wanted[1]:
                router, self.replay_endpoint = self._bind(zmq.ROUTER, self._wanted[1])
                self._start(self._replays(router), "events-out-replay")
        except Unavailable:
            self._context.destroy(linger=0)
            raise

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(_say_why)
        self._tasks.append(task)

    async def close(self) -> None:
        """Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        for name in list(self._sources):
            self._sources.pop(name).unsubscribe()
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    def follow(self, name: str, outbox: OwnerOutbox, namespaces: Namespaces) -> None:
        """Tells what `outbox` says from its oldest event on, with `name` as backend_id. One that had the name is cleared."""
        self.forget(name)
        unsubscribe = outbox.subscribe(self._wake.set)
        self._sources[name] = _Source(outbox, namespaces, unsubscribe, outbox.oldest_seq)
        self._wake.set()

    def forget(self, name: str) -> None:
        """The owner is gone: clears what was told of it."""
        source = self._sources.pop(name, None)
        if source is None:
            return
        source.unsubscribe()
        events = [Event.cleared(Tier(tier), digest) for digest, tier in sorted(source.told)]
        if events:
            self._append(name, source, events, source.outbox.last_seq + 1)
            self._wake.set()

    async def _publish(self, publisher: Any) -> None:
        sent = 0
        while True:
            await self._wake.wait()
            self._wake.clear()
            for name, source in list(self._sources.items()):
                # Whoever is replaced or forgotten while we send was cleared: what it still says must not come behind that.
                while self._sources.get(name) is source and self._take(name, source):
                    sent = await self._send(publisher, sent)
                    await asyncio.sleep(0)  # sending alone does not yield, and a burst must not hold up the loop
            sent = await self._send(publisher, sent)

    def _take(self, name: str, source: _Source) -> bool:
        """The next events of an owner, into the ring; whether there were any."""
        batch = source.outbox.read(source.next_seq, max_events=MESSAGE_EVENTS, max_bytes=MESSAGE_BYTES)
        first = batch.first_seq if batch is not None else source.outbox.last_seq + 1
        if first > source.next_seq:
            self.lost_events += first - source.next_seq
            self._next += 1
        source.next_seq = first if batch is None else batch.last_seq + 1
        if batch is None:
            return False
        self._append(name, source, batch.events, batch.first_seq)
        return True

    def _append(self, name: str, source: _Source, events: tuple[Event, ...] | list[Event], first_event_id: int) -> None:
        source.told |= {(event.namespace_digest, event.tier) for event in events if event.namespace_digest}
        now_s = time.time()
        told = envelopes(
            events, source.namespaces(), backend_id=name, first_event_id=first_event_id, timestamp_ms=int(now_s * 1000)
        )
        if told:
            payload = encode_batch(told, ts_s=now_s)
            self._ring.append((self._next, payload))
            self._ring_bytes += len(payload)
            self._next += 1
            messages, size = self._bounds
            while len(self._ring) > messages or (self._ring_bytes > size and len(self._ring) > 1):
                self._ring_bytes -= len(self._ring.popleft()[1])

    async def _send(self, publisher: Any, sent: int) -> int:
        """Sends what the ring has from number `sent` on. Returns the number after it."""
        late = []
        for number, payload in reversed(self._ring):
            if number < sent:
                break
            late.append((number, payload))
        for number, payload in reversed(late):
            await publisher.send_multipart([b"", number.to_bytes(8, "big"), payload])
            self.messages += 1
            sent = number + 1
        return sent

    async def _replays(self, router: Any) -> None:
        """One at a time, each within REPLAY_S: who asks and does not read costs the next one that."""
        zmq = self._zmq
        while True:
            parts = await router.recv_multipart()
            if len(parts) != 3 or len(parts[2]) != 8:
                continue
            first = int.from_bytes(parts[2], "big")
            answers = [(number, payload) for number, payload in self._ring if number >= first] + [(END_SEQ, b"")]
            with contextlib.suppress(TimeoutError, zmq.ZMQError):
                async with asyncio.timeout(REPLAY_S):
                    for number, payload in answers:
                        await router.send_multipart([parts[0], b"", b"", number.to_bytes(8, "big"), payload])

    def _bind(self, kind: int, endpoint: str) -> tuple[Any, str]:
        zmq = self._zmq
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        if kind == zmq.ROUTER:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # wait for a slow reader, or fail; never drop in the middle
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise Unavailable(f"events_out: cannot bind {endpoint}: {error}; choose another port") from error
        return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)


def _say_why(task: asyncio.Task[None]) -> None:
    """A task of ours ends only when it is cancelled; anything else is a bug, and readers would wait for ever."""
    if not task.cancelled() and (error := task.exception()) is not None:
        say_bug(log, "events out has ended", error, fix="restart the agent")

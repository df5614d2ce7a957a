"""The ZeroMQ side of one engine stream: a subscription, who is at its other end, and questions to the replay socket.

Rules: every wait has a deadline; what libzmq queues for us is bounded by HWM messages, beyond which it drops, which shows as a
hole in the engine's numbers; reconnecting, with growing intervals, is libzmq's. A replay has a socket of its own, so that a
late answer to one question is never taken for that to another. libzmq's heartbeats find a peer that is gone without a word.
Needs pyzmq, which comes with the extra `engines`. Does not: number, decode or repair. Protocol: docs/engines/events.md.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from kvdir.client.engine_sources import EngineSource
from kvdir.engines import END_SEQ, Frame, read_frame
from kvdir.engines.wire import MAX_PAYLOAD_BYTES
from kvdir.errors import Unavailable, Unsupported

HWM = 100_000
"""Messages; vLLM's own default at its end."""
REPLAY_HWM = 20_000
"""vLLM keeps 10,000 batches; a replay is taken as fast as it comes, because a ROUTER drops what does not fit."""
REPLAY_SILENCE_S = 2.0
REPLAY_TOTAL_S = 30.0
GARBAGE_MESSAGES = 64
"""Passed over between two looks at the loop."""
HEARTBEAT_MS = 2_000
SILENCE_MS = 6_000
RECONNECT_MS = 100
RECONNECT_MAX_MS = 2_000


def zmq_module() -> Any:
    """pyzmq with its asyncio part. Raises Unsupported with what to install."""
    try:
        import zmq
        import zmq.asyncio
        import zmq.utils.monitor
    except ImportError as error:
        raise Unsupported("engine streams need pyzmq: pip install 'kvdir[engines]' (or pyzmq)") from error
    return zmq


class Peers:
    """Which connections speak ZMTP, by what a monitor tells: their descriptors when they open and close, none when they shake
    hands. Whoever only looks whether the port is open closes a connection, too. Two that open at once may be taken for each
    other, until HANDSHAKE_IVL ends the one that does not speak.
    """

    def __init__(self) -> None:
        self._new: set[int] = set()
        self._known: set[int] = set()
        self._shaken = 0

    @property
    def any(self) -> bool:
        return bool(self._known) or self._shaken > 0

    def opened(self, descriptor: int) -> None:
        self._new.add(descriptor)

    def shook(self) -> None:
        """One of the new ones, whichever."""
        self._shaken += 1
        self._settle()

    def closed(self, descriptor: int) -> None:
        self._new.discard(descriptor)
        self._known.discard(descriptor)
        self._settle()

    def _settle(self) -> None:
        if self._shaken >= len(self._new):
            self._known |= self._new
            self._new.clear()
            self._shaken = 0


class EngineSocket:
    """One subscription. Open it on the event loop; `close` it there. connected: somebody is at the other end who speaks ZMTP.

    connects: how often that came to be, so that whoever remembers the number notices a break. malformed: messages in no form.
    """

    def __init__(self, source: EngineSource) -> None:
        self._zmq = zmq_module()
        self._source = source
        self._context = self._zmq.asyncio.Context.instance()
        self._socket: Any = None
        self._plain: Any = None
        self._monitor: Any = None
        self._watching: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self.connected = False
        self.connects = 0
        self.malformed = 0

    def open(self) -> None:
        """Raises Unavailable: bind addresses may be taken, or of another host."""
        zmq, source = self._zmq, self._source
        sub = self._socket = self._context.socket(zmq.SUB)
        self._plain = zmq.Socket.shadow(sub.underlying)  # the same one, without asyncio
        for option, value in (
            (zmq.LINGER, 0), (zmq.RCVHWM, HWM), (zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES), (zmq.RECONNECT_IVL, RECONNECT_MS),
            (zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS), (zmq.HEARTBEAT_IVL, HEARTBEAT_MS), (zmq.HEARTBEAT_TIMEOUT, SILENCE_MS),
            (zmq.HANDSHAKE_IVL, SILENCE_MS), (zmq.IPV6, "[" in source.endpoint),
        ):  # fmt: skip
            sub.setsockopt(option, int(value))
        sub.setsockopt(zmq.SUBSCRIBE, source.topic.encode())
        opened, shaken, closed = zmq.EVENT_CONNECTED | zmq.EVENT_ACCEPTED, zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED
        monitor = self._monitor = sub.get_monitor_socket(opened | shaken | closed)
        self._watching = asyncio.create_task(self._watch(monitor), name=f"engine-monitor-{source.endpoint}")
        try:
            (sub.bind if source.bind else sub.connect)(source.endpoint)
        except zmq.ZMQError as error:
            verb = "bind" if source.bind else "connect to"
            raise Unavailable(f"cannot {verb} {source.endpoint}: {error}") from error

    async def close(self) -> None:
        """Idempotent."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching})
            self._watching = None
        if self._socket is not None:
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._socket.close(0)
            self._socket = self._plain = self._monitor = None
        self.connected = False

    async def receive(self) -> Frame | None:
        """The next message; None when somebody came or went, or after much that is none of a stream."""
        frame = self._ready()
        if frame is not None:
            return frame
        readable = asyncio.ensure_future(self._socket.poll(flags=self._zmq.POLLIN))
        changed = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait({readable, changed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiting in (readable, changed):
                waiting.cancel()
            await asyncio.gather(readable, changed, return_exceptions=True)
        self._changed.clear()
        return self._ready()

    def _ready(self) -> Frame | None:
        """A message that is there already, without going through the event loop: most of them in a burst."""
        zmq = self._zmq
        for _ in range(GARBAGE_MESSAGES):
            try:
                parts = self._plain.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            frame = read_frame(parts)
            if frame is not None:
                return frame
            self.malformed += 1
        return None

    async def replay(self, first_seq: int) -> AsyncGenerator[Frame, None]:
        """What the engine still has from first_seq on, up to its end marker. Raises Unavailable when it falls silent before."""
        zmq, endpoint = self._zmq, self._source.replay
        dealer = self._context.socket(zmq.DEALER)
        try:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.RCVHWM, REPLAY_HWM)
            dealer.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES)
            dealer.setsockopt(zmq.IPV6, int("[" in endpoint))
            dealer.connect(endpoint)
            async with asyncio.timeout(REPLAY_TOTAL_S) as total:
                await dealer.send_multipart([b"", first_seq.to_bytes(8, "big")])
                while await dealer.poll(int(1000 * REPLAY_SILENCE_S), zmq.POLLIN):
                    frame = read_frame(await dealer.recv_multipart())
                    if frame is None:
                        self.malformed += 1
                    elif frame.seq == END_SEQ:
                        return
                    else:
                        yield frame
        except TimeoutError as error:
            raise Unavailable(f"replay from {endpoint} took longer than {REPLAY_TOTAL_S:g} s") from error
        except zmq.ZMQError as error:
            raise Unavailable(f"replay from {endpoint}: {error}") from error
        finally:
            dealer.close(0)
        del total
        raise Unavailable(f"replay from {endpoint}: nothing within {REPLAY_SILENCE_S:g} s")

    async def _watch(self, monitor: Any) -> None:
        """Follows the connections of the subscription; one that connects has one, one that binds any number."""
        zmq, peers = self._zmq, Peers()
        with contextlib.suppress(zmq.ZMQError):
            while True:
                message = await zmq.utils.monitor.recv_monitor_message(monitor)
                if message["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    peers.shook()
                    self.connects += 1
                elif message["event"] == zmq.EVENT_DISCONNECTED:
                    peers.closed(message["value"])
                elif message["event"] in (zmq.EVENT_CONNECTED, zmq.EVENT_ACCEPTED):
                    peers.opened(message["value"])
                self.connected = peers.any
                self._changed.set()

"""One connection of an owner's stream to one coordinator, from Hello to its end. Protocol: proto/kvdir/v1/events.proto.

One writer decides what goes out next, in this order: a changed hello, a new doubt, what was asked for ("replay unavailable"), a
heartbeat that is due, the next chunk of a snapshot, the next batch under credit. One reader takes what the coordinator says.
Interleaving: reader and writer share state between awaits only, on one loop; a request for replay that arrives while a
batch is being written moves the sender's position, and the next batch comes from there.
Every wait ends: a coordinator that says nothing for `silence_s` (it answers every heartbeat) is given up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from kvdir.core.event import NO_DOUBT, Doubt, Event, EvictRequest, EvictResult, HeartbeatFigures, SnapshotChunk
from kvdir.core.outbox import OwnerOutbox
from kvdir.core.sender import StreamSender
from kvdir.core.snapshot import snapshot_chunks
from kvdir.errors import RemoteProtocolError
from kvdir.location import StreamState
from kvdir.namespace import Namespace
from kvdir.obs.logs import say
from kvdir.rpc.event_codec import (
    decode_evict_request,
    encode_batch,
    encode_chunk,
    encode_evict_result,
    encode_heartbeat,
    encode_hello,
    encode_sketch,
)
from kvdir.rpc.lookup_codec import check_version
from kvdir.v1 import events_pb2

log = logging.getLogger("kvdir.publisher")

_GOODBYE_S = 1.0
_SHARED_SILENCE_HEARTBEATS, _SHARED_SILENCE_S = 2.5, 1.0
"""A coordinator that others stand by for is given up sooner, but not below a second: going on elsewhere costs a replay."""
_FLUSHED_BATCHES = 8
_STATES = frozenset(int(state) for state in StreamState)


@dataclass(frozen=True, slots=True)
class PublisherIdentity:
    """Who publishes. epoch: random 64 bits, new for every lifetime of the stream. peer_address: of the node's Peer service."""

    node: str
    epoch: int
    peer_address: str
    started_unix_ms: int
    namespaces: tuple[Namespace, ...] = ()
    agent_version: str = ""


Evict = Callable[[EvictRequest], EvictResult]


def vouches() -> Doubt:
    """Of an owner that always knows what it holds."""
    return NO_DOUBT


@dataclass(frozen=True, slots=True)
class Source:
    """Where the contents come from. snapshot: (at_seq, all that is held as of it), taken at one moment. heartbeat: of now.

    chunk_blocks: of one message of a snapshot. evict: does what a quota asks, at once; None: never evicts on request.
    doubt: of now.
    """

    outbox: OwnerOutbox
    snapshot: Callable[[], tuple[int, Iterable[Event]]]
    heartbeat: Callable[[], HeartbeatFigures]
    chunk_blocks: int = 8192
    evict: Evict | None = None
    doubt: Callable[[], Doubt] = vouches


@dataclass(slots=True)
class PublishCounters:
    """Of one publisher, over all its calls. lost_events: dropped on purpose, to try out loss. evicted_blocks: for quotas."""

    calls: int = 0
    batches: int = 0
    events: int = 0
    heartbeats: int = 0
    snapshots: int = 0
    sketches: int = 0
    lost_events: int = 0
    evicted_blocks: int = 0
    state: StreamState | None = None
    coordinator: str = ""
    store_id: str = ""
    connected: bool = False


@dataclass(slots=True)
class Wishes:
    """What others want of the call under way: a new identity to be told, to leave, or to step back without a goodbye."""

    identity: PublisherIdentity
    identity_changed: bool = False
    leave: bool = False
    step_back: bool = False
    wake: asyncio.Event = field(default_factory=asyncio.Event)


class PublishCall:
    """Runs one call. After `run`, `fenced` says whether this epoch may never publish again, and why.

    on_welcome: told the store id; returns whether others stand by for that store.
    """

    def __init__(
        self,
        call: Any,
        source: Source,
        sender: StreamSender,
        wishes: Wishes,
        counters: PublishCounters,
        *,
        loss: float,
        rng: random.Random,
        silence_s: float,
        linger_s: float,
        on_welcome: Callable[[str], bool],
    ) -> None:
        self._call = call
        self._source = source
        self._sender = sender
        self._wishes = wishes
        self._epoch = wishes.identity.epoch
        self._counters = counters
        self._loss = loss
        self._rng = rng
        self._silence_s = silence_s
        self._linger_s = linger_s
        self._on_welcome = on_welcome
        self._asked: deque[events_pb2.PublishRequest] = deque()
        self._snapshot_id = 0
        self._sketch_request: events_pb2.SketchRequest | None = None
        self._chunks: Iterator[SnapshotChunk] | None = None
        self._heartbeat_s = 1.0
        self._ended = False
        self.welcomed = False
        self.fenced = ""

    async def run(self) -> None:
        """Until the call ends. Raises what gRPC raises, TimeoutError on silence, RemoteProtocolError on nonsense."""
        async with asyncio.timeout(self._silence_s) as patience:
            self._patience = patience
            hello_seq = self._source.outbox.last_seq
            await self._call.write(self._hello(hello_seq, self._sender.introduced(self._source.doubt())))
            if not self._open(await self._read(), hello_seq):
                return
            reader = asyncio.create_task(self._listen())
            try:
                await self._write_all()
            finally:
                reader.cancel()
                (result,) = await asyncio.gather(reader, return_exceptions=True)
                self._counters.connected = False
            if isinstance(result, Exception):
                raise result

    def _hello(self, last_seq: int, doubt: Doubt = NO_DOUBT) -> events_pb2.PublishRequest:
        identity, self._wishes.identity_changed = self._wishes.identity, False
        return encode_hello(
            node=identity.node,
            epoch=identity.epoch,
            last_seq=last_seq,
            peer_address=identity.peer_address,
            started_unix_ms=identity.started_unix_ms,
            namespaces=identity.namespaces,
            agent_version=identity.agent_version,
            doubt=doubt,
        )

    def _open(self, response: events_pb2.PublishResponse | None, hello_seq: int) -> bool:
        if response is None:
            raise RemoteProtocolError("the coordinator ended the call without an answer to hello")
        match response.WhichOneof("message"):
            case "fenced":
                self.fenced = response.fenced.reason
                return False
            case "welcome":
                welcome = response.welcome
            case other:
                raise RemoteProtocolError(f"the coordinator answered hello with {other}")
        check_version(welcome.protocol_version)
        self.welcomed = self._counters.connected = True
        self._counters.state = None  # what the last call was told says nothing about this coordinator, which may know nothing
        self._counters.coordinator, self._counters.store_id = welcome.coordinator, welcome.store_id
        self._heartbeat_s = (welcome.heartbeat_interval_ms or 1000) / 1000
        if self._on_welcome(welcome.store_id):
            self._silence_s = min(self._silence_s, max(_SHARED_SILENCE_S, _SHARED_SILENCE_HEARTBEATS * self._heartbeat_s))
        else:
            self._silence_s = max(self._silence_s, 3 * self._heartbeat_s)  # it answers heartbeats, so it may be silent as long
        self._hear()
        if not self._sender.opened(resume_seq=welcome.resume_seq, hello_seq=hello_seq, credit=welcome.credit_events or 1024):
            self._say_unavailable()
        return True

    # -- reading ---------------------------------------------------------------------------------------------------------

    async def _read(self) -> events_pb2.PublishResponse | None:
        response = await self._call.read()
        if response is grpc.aio.EOF:
            return None
        self._hear()
        answer: events_pb2.PublishResponse = response
        return answer

    def _hear(self) -> None:
        self._patience.reschedule(asyncio.get_running_loop().time() + self._silence_s)

    async def _listen(self) -> None:
        try:
            while (response := await self._read()) is not None:
                self._take(response)
                self._wishes.wake.set()
                if self.fenced:
                    return
        finally:
            self._ended = True
            self._wishes.wake.set()

    def _take(self, response: events_pb2.PublishResponse) -> None:
        match response.WhichOneof("message"):
            case "ack":
                self._sender.ack(response.ack.seq)
                state = int(response.ack.state)
                self._counters.state = StreamState(state) if state in _STATES else None
            case "replay_request":
                if not self._sender.replay(response.replay_request.first_seq):
                    self._say_unavailable()
            case "snapshot_request":
                self._snapshot_id = response.snapshot_request.snapshot_id
            case "sketch_request":
                self._sketch_request = response.sketch_request
            case "fenced":
                self.fenced = response.fenced.reason or "fenced"
            case "namespace_refused":
                refused = response.namespace_refused
                digest = refused.namespace_digest.hex()[:16]
                say(log, logging.WARNING, "namespace refused", namespace=digest, reason=refused.words)
            case "evict_request" if response.evict_request.epoch == self._epoch:
                self._evict(decode_evict_request(response.evict_request))
            case _:
                pass  # from a newer coordinator; what we do not know we are not asked for

    def _evict(self, request: EvictRequest) -> None:
        """Done before the next message is read, so no request outlives the call in which it came."""
        source = self._source
        if source.evict is not None:
            result = source.evict(request)
        else:
            result = EvictResult(request.request_id, 0, source.outbox.last_seq, "this owner does not evict on request")
        self._counters.evicted_blocks += result.evicted_blocks
        self._asked.append(encode_evict_result(self._epoch, result))

    def _say_unavailable(self) -> None:
        oldest_seq = self._source.outbox.replayable_from
        self._asked.append(
            events_pb2.PublishRequest(replay_unavailable=events_pb2.ReplayUnavailable(epoch=self._epoch, oldest_seq=oldest_seq))
        )

    # -- writing ---------------------------------------------------------------------------------------------------------

    async def _write_all(self) -> None:
        clock = asyncio.get_running_loop().time
        due_s = clock()
        while not (self._ended or self._wishes.step_back):
            if self._wishes.identity_changed:
                await self._write_identity()
            elif self._newly_in_doubt:
                await self._write_figures()
            elif self._asked:
                await self._call.write(self._asked.popleft())
            elif self._wishes.leave:
                await self._say_goodbye()
                return
            elif clock() >= due_s:
                due_s = clock() + self._heartbeat_s
                await self._write_heartbeat()
            elif not (await self._write_chunk() or await self._write_sketch() or await self._write_batch()):
                await self._idle(due_s - clock())

    async def _write_identity(self) -> None:
        while self._wishes.identity_changed:
            await self._call.write(self._hello(self._source.outbox.last_seq))

    async def _write_heartbeat(self) -> None:
        # The owner's counts go along only when every event before them was sent: so send those first, within reason, and
        # nothing of a namespace that came meanwhile before it is announced.
        for _ in range(_FLUSHED_BATCHES):
            held_up = self._chunks is not None or self._newly_in_doubt or self._wishes.identity_changed
            if held_up or not await self._write_batch():
                break
        await self._write_identity()
        await self._write_figures()

    @property
    def _newly_in_doubt(self) -> bool:
        return self._sender.newly_in(self._source.doubt())

    async def _write_figures(self) -> None:
        self._counters.heartbeats += 1
        heartbeat = self._sender.heartbeat(self._source.heartbeat(), self._source.doubt())
        await self._call.write(encode_heartbeat(self._epoch, heartbeat))

    async def _write_chunk(self) -> bool:
        """Chunks are never lost on purpose: inside one call nothing gets lost, and the end of the call discards them all."""
        if self._snapshot_id:
            at_seq, entries = self._source.snapshot()
            self._sender.snapshot_taken(at_seq)
            self._chunks = snapshot_chunks(self._snapshot_id, at_seq, entries, max_blocks=self._source.chunk_blocks)
            self._counters.snapshots += 1
            self._snapshot_id = 0
        if self._chunks is None:
            return False
        chunk = next(self._chunks)
        if chunk.last:
            self._chunks = None
        await self._call.write(encode_chunk(self._epoch, chunk))
        return True

    async def _write_sketch(self) -> bool:
        """As soon as every event was sent, so that both ends stand at the same number; the newest request counts."""
        request = self._sketch_request
        if request is None or not self._sender.caught_up:
            return False
        self._sketch_request = None
        parts = frozenset((part.namespace_digest, int(part.tier)) for part in request.parts)
        statement = self._sender.sketch(request.request_id, cells=request.cells, parts=parts)
        if statement is None:
            return False  # unknown here at the moment; the coordinator's deadline passes, and it asks for a snapshot
        self._counters.sketches += 1
        await self._call.write(encode_sketch(self._epoch, statement))
        return True

    async def _write_batch(self) -> bool:
        batch = self._sender.next_batch()
        if batch is None:
            return False
        if self._loss and self._rng.random() < self._loss:
            self._counters.lost_events += len(batch.events)
            return True
        self._counters.batches += 1
        self._counters.events += len(batch.events)
        await self._call.write(encode_batch(self._epoch, batch))
        return True

    async def _idle(self, timeout_s: float) -> None:
        wake = self._wishes.wake
        wake.clear()
        if self._ended or timeout_s <= 0:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await wake.wait()
                if self._linger_s and not self._ended:
                    await asyncio.sleep(self._linger_s)  # neighbours of the event that woke us travel in the same message

    async def _say_goodbye(self) -> None:
        async with asyncio.timeout(_GOODBYE_S):
            await self._call.write(events_pb2.PublishRequest(goodbye=events_pb2.Goodbye(epoch=self._epoch)))
            await self._call.done_writing()
            while not self._ended:
                self._wishes.wake.clear()
                await self._wishes.wake.wait()

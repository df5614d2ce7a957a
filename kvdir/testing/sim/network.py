"""The network between agents and coordinator: connects calls, and decides what becomes of every message.

Faults: loss, duplicates, delay; events lost by count or share; partitions (what is sent is held, and goes on afterwards); calls
that break (what was in flight is gone, or arrives after the next call has begun); a coordinator that is away.
Rules: every decision comes from one seeded generator, so equal inputs give equal runs; hello and welcome are not lost singly (a
call opens, or it does not); a process that dies takes along the calls whose hello nobody has read yet, because a dead process
opens no connection. Messages are counted by kind and passed on; what they mean is not known here.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import zlib
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from kvdir.core.feedback import StaleReport
from kvdir.errors import KvdirError, Unavailable
from kvdir.rpc.event_codec import encode_stale_report
from kvdir.server.events_service import EventsService
from kvdir.testing.sim.wire import Call, ClientCall, Pipe, ServerContext

CONNECT_TIMEOUT_S = 1.0
_OPENING = frozenset({"hello", "welcome"})
_ONCE = frozenset({"hello", "goodbye"})
_ROUTINE = frozenset({"heartbeat", "ack"})
_RECENT = 60


def name_of(node: int | str) -> str:
    """Nodes are called node-0, node-1 and so on; numbers stand for them."""
    return node if isinstance(node, str) else f"node-{node}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Of every message, in both directions: share lost, share that comes twice, delay from delay_s to delay_s + jitter_s."""

    loss: float = 0.0
    duplicates: float = 0.0
    delay_s: float = 0.001
    jitter_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Delivery:
    """A message that arrived; as text for people."""

    at_s: float
    node: str
    upward: bool
    message: Any

    def __str__(self) -> str:
        text = " ".join(str(self.message).split())
        return f"{self.at_s:10.3f} {self.node} {'->' if self.upward else '<-'} {text[:160]}"


class Watcher(Protocol):
    """Looks on. What it returns is called when the message has been handled."""

    def twice(self, first_s: float) -> Callable[[], None]:
        """A message comes again; it came first at first_s, and no other message in that call came in between."""

    def feedback(self, report: StaleReport) -> Callable[[], None]:
        """A reader's report comes."""


@dataclass(slots=True)
class _Drops:
    """Events of one node still to be lost, and the share of its batches lost."""

    events: int = 0
    share: float = 0.0


class Network:
    """See the module docstring. `node` is a number or a name.

    sent, sent_bytes: by (node, kind of message), lost ones included. lost: messages by kind. bugs: what handlers raised that is
    no KvdirError. recent: the last messages, without heartbeats and acks that say nothing new. digest: of everything that
    arrived and when, to compare runs.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        rng: random.Random,
        faults: Faults,
        watcher: Watcher,
    ) -> None:
        self.faults = faults
        self.service: EventsService | None = None
        self.sent: Counter[tuple[str, str]] = Counter()
        self.sent_bytes: Counter[tuple[str, str]] = Counter()
        self.lost: Counter[str] = Counter()
        self.bugs: list[str] = []
        self.recent: deque[Delivery] = deque(maxlen=_RECENT)
        self.deliveries = 0
        self.digest = 0
        self._loop = loop
        self._rng = rng
        self._watcher = watcher
        self._routine: dict[tuple[str, str], Any] = {}
        self._drops: dict[str, _Drops] = {}
        self._partitioned: set[str] = set()
        self._calls: list[Call] = []
        self._tasks: set[asyncio.Task[None]] = set()

    # -- faults ----------------------------------------------------------------------------------------------------------

    def drop_events(self, node: int | str, *, count: int = 0, share: float = 0.0) -> None:
        """The next `count` events of a node are lost, and from now on this share of its batches. Both 0: none any more."""
        self._drops[name_of(node)] = _Drops(count, share)

    def partition(self, node: int | str) -> None:
        """Nothing gets through, and nobody is told. What is sent meanwhile arrives after `rejoin`, as TCP would have it."""
        self._partitioned.add(name_of(node))

    def rejoin(self, node: int | str) -> None:
        """Ends a partition."""
        name = name_of(node)
        if name in self._partitioned:
            self._partitioned.remove(name)
            for call in self._calls_of(name):
                call.up.release()
                call.down.release()

    def cut(self, node: int | str, *, late_s: float = 0.0) -> None:
        """The agent sees its calls break. What it had sent is gone or, with late_s, arrives in so many seconds."""
        error = Unavailable(f"simulated: the connection of {node} was cut")
        for call in self._calls_of(name_of(node)):
            call.down.snap(error)
            if late_s:
                call.up.hold_back(late_s)
                call.up.close(error)
            else:
                call.up.snap(error)

    def died(self, node: str, life: int) -> None:
        """The process is gone. What it had sent still arrives, in calls that have begun."""
        error = Unavailable(f"simulated: {node} died")
        for call in self._calls_of(node):
            if call.life == life:
                call.down.snap(error)
                if call.up.delivered:
                    call.up.close(error)
                else:
                    call.up.snap(error)

    def coordinator_died(self, *, silently: bool = False) -> None:
        """Every call breaks, and connecting is refused until there is a `service` again. silently: no agent is told."""
        self.service = None
        error = Unavailable("simulated: the coordinator died")
        for call in tuple(self._calls):
            call.up.snap(error)
            if silently:
                call.down.mute()
            else:
                call.down.snap(error)

    def heal(self) -> None:
        """No faults any more; what was held goes on."""
        self.faults = Faults()
        self._drops.clear()
        for node in sorted(self._partitioned):
            self.rejoin(node)

    # -- calls -----------------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def dial(self, node: str, life: int) -> AsyncIterator[ClientCall]:
        """A publish call, as kvdir.client.publisher.Dial wants it."""
        deadline_s = self._loop.time() + CONNECT_TIMEOUT_S
        while node in self._partitioned:
            if self._loop.time() >= deadline_s:
                raise Unavailable(f"simulated: no connection within {CONNECT_TIMEOUT_S:g} s")
            await asyncio.sleep(CONNECT_TIMEOUT_S / 8)
        await asyncio.sleep(self._delay_s())
        call = self._open(node, life)
        try:
            yield ClientCall(call)
        finally:
            call.up.close(Unavailable(f"simulated: {node} hung up"))

    def report_stale(self, report: StaleReport, *, delay_s: float = 0.0) -> None:
        """A reader's feedback travels to the coordinator, like any other message."""
        for _ in range(self._fate("report")):
            self._loop.call_later(delay_s + self._delay_s(), self._deliver_report, report)

    def begin_call(self, node: str, life: int, requests: list[Any]) -> None:
        """A call that says just these messages: for what no publisher of today would do."""
        if self.service is not None:
            call = self._open(node, life)
            for request in requests:
                call.up.send(request)
            call.up.close()

    def inject(self, node: str, request: Any) -> None:
        """A message of unknown origin turns up in the newest call of a node; nothing when it has none."""
        calls = [call for call in self._calls_of(node) if call.up.delivered and not call.down.ended]
        if calls:
            calls[-1].up.send(request)

    def repeat(self, node: str, number: int) -> None:
        """A batch, heartbeat or the like that came in the newest call of a node some time ago comes once more."""
        calls = [call for call in self._calls_of(node) if call.up.history and not call.down.ended]
        if calls:
            history = calls[-1].up.history
            calls[-1].up.send(history[number % len(history)])

    def _open(self, node: str, life: int) -> Call:
        if self.service is None:
            raise Unavailable("simulated: connection refused")
        call = Call(self, self._loop, node, life)
        self._calls.append(call)
        handler = self._start(self._serve(self.service, call))
        call.up.on_end = lambda error: None if error is None else _cancel(handler)
        return call

    async def _serve(self, service: EventsService, call: Call) -> None:
        error: Exception | None = Unavailable("simulated: the coordinator hung up")
        try:
            await service.Publish(None, ServerContext(call, twice=self._watcher.twice))
            error = None
        except KvdirError as refused:
            error = refused
        except Exception as bug:
            self.bugs.append(f"the publish call of {call.node} failed: {bug!r}")
        finally:
            call.down.close(error)
            self._calls.remove(call)

    def _deliver_report(self, report: StaleReport) -> None:
        if self.service is not None:
            self._start(self._report(self.service, report))

    async def _report(self, service: EventsService, report: StaleReport) -> None:
        handled = self._watcher.feedback(report)
        try:
            with contextlib.suppress(KvdirError):
                await service.ReportStale(encode_stale_report(report), None)
        except Exception as bug:
            self.bugs.append(f"a report of stale blocks failed: {bug!r}")
        handled()

    def _start(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _calls_of(self, node: str) -> list[Call]:
        return [call for call in self._calls if call.node == node]

    # -- what pipes ask (wire.Carrier) -----------------------------------------------------------------------------------

    def copies(self, pipe: Pipe, message: Any) -> list[Any]:
        kind = message.WhichOneof("message") or "nothing"
        self.sent[pipe.node, kind] += 1
        self.sent_bytes[pipe.node, kind] += message.ByteSize()
        if kind == "batch" and pipe.node in self._drops:
            message = self._drop(self._drops[pipe.node], message)
            if message is None:
                self.lost[kind] += 1
                return []
        if kind == "heartbeat" and message.heartbeat.doubt.number:
            return [
                message
            ]  # told before newer events of the same call, in which nothing is really lost before what follows it
        return [message] * self._fate(kind)

    def delay_s(self) -> float:
        return self._delay_s()

    def held(self, node: str) -> bool:
        return node in self._partitioned

    def arrived(self, pipe: Pipe, message: Any) -> None:
        now_s = self._loop.time()
        self.deliveries += 1
        kind = message.WhichOneof("message")
        self.digest = zlib.crc32(f"{now_s:.6f} {pipe.node} {kind} {message.ByteSize()}".encode(), self.digest)
        if pipe.upward and kind not in _ONCE:
            pipe.history.append(message)
        if kind not in _ROUTINE or self._routine.get((pipe.node, kind)) != message:
            self._routine[pipe.node, kind] = message
            self.recent.append(Delivery(now_s, pipe.node, pipe.upward, message))

    def _delay_s(self) -> float:
        jitter_s = self.faults.jitter_s
        return self.faults.delay_s + (self._rng.random() * jitter_s if jitter_s else 0.0)

    def _fate(self, kind: str) -> int:
        """How often a message arrives."""
        faults = self.faults
        if faults.loss and kind not in _OPENING and self._rng.random() < faults.loss:
            self.lost[kind] += 1
            return 0
        return 2 if faults.duplicates and self._rng.random() < faults.duplicates else 1

    def _drop(self, drops: _Drops, message: Any) -> Any:
        """What is left of a batch; None when all of it is lost."""
        events = len(message.batch.events)
        count = min(drops.events, events)
        drops.events -= count
        if count == events or (drops.share and self._rng.random() < drops.share):
            return None
        if count:
            message = type(message).FromString(message.SerializeToString())
            del message.batch.events[:count]
            message.batch.first_seq += count
        return message


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()

"""One publish call of one stream, from the store's side: takes messages in order, writes them, and only then counts them in.

    reader ──put──▶ [ bounded queue ] ──▶ run: plan ▶ write ▶ commit ──▶ Ack        one task: every call of a stream in order
                                             └ now and then: save (trust, position), counts

Rules: several streams go side by side, one stream's calls never; neighbouring batches travel together. A write that fails is
done again for PATIENCE_S, during which the stream is untrusted and says why; after that, or when the store has lost what it had
taken, the call ends: whoever takes the stream next, here or elsewhere, resumes at the saved position, and the owner sends the
rest again from its ring. A full store costs blocks, not the call: removals go on, and the stream says what is missing.
Does not: decide what to ask the owner for (core/shared_stream.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from kvdir.core.admission import Hello
from kvdir.core.event import Batch, Heartbeat, SnapshotChunk
from kvdir.core.fleet import SavedNode
from kvdir.core.namespaces import Announced
from kvdir.core.node import HolderKey
from kvdir.core.shared_stream import SharedStream
from kvdir.core.snapshot import Intake
from kvdir.core.store_steps import Clear, Held, Step, Write, rounds
from kvdir.location import StreamState
from kvdir.obs.logs import say
from kvdir.rpc.saved_codec import encode_saved
from kvdir.server.connections import Connection
from kvdir.server.publishers import Publisher, without
from kvdir.server.shared.link import StoreLink
from kvdir.store.base import Change, ChangeKind, Position, StoreFull, StoreUnavailable, Writer

log = logging.getLogger("kvdir.events")

AnswerT = TypeVar("AnswerT")

QUEUED_MESSAGES = 64
GROUP_BLOCKS = 4096
"""Of one call to the store: some 50 ms of a server, so that others get their turn and the deadline is far."""
PATIENCE_S = 5.0
"""So long a store that is away is asked again before the call ends; a fail-over of Redis Cluster takes some seconds."""
AGAIN_S = 0.05
RESTLESS_S = 1.0
"""A stream that never rests is looked after so often all the same."""
CHANGED_S = 0.05
"""A changed state is saved no sooner after the last save: a stream under loss changes it with every batch."""


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The owner leaves on purpose."""


@dataclass(frozen=True, slots=True)
class ReplayUnavailable:
    """The owner's ring does not reach back so far."""


@dataclass(frozen=True, slots=True)
class End:
    """No more messages will come."""


@dataclass(frozen=True, slots=True)
class Nudge:
    """Something else wants to be done."""


Message = Batch | Heartbeat | SnapshotChunk | Hello | ReplayUnavailable | Goodbye | End | Nudge


class Session:
    """See the module docstring. `run` ends with the call; what it raises says why. writer: from `take`.

    record, saved_s: what was last saved, and when. attended_s: when its deadlines were last looked at.
    """

    def __init__(
        self,
        link: StoreLink,
        stream: SharedStream,
        writer: Writer,
        connection: Connection[SharedStream],
        *,
        coordinator: str,
        timeout_s: float,
        save_every_s: float,
        publisher: Publisher,
    ) -> None:
        self.stream = stream
        self.connection = connection
        self.snapshots_applied = 0
        self._restated = asyncio.Event()
        self._link = link
        self._store = link.store
        self._writer = writer
        self._coordinator = coordinator
        self._timeout_s = timeout_s
        self._save_every_s = save_every_s
        self.publisher = publisher
        self._queue: asyncio.Queue[Message] = asyncio.Queue(QUEUED_MESSAGES)
        self._held_back: Message | None = None
        self._busy = False
        self._beat = 0
        self.record = b""
        self.saved_s = float("-inf")
        self._saved_state: StreamState | None = None
        self.attended_s = time.monotonic()

    @property
    def token(self) -> int:
        return self._writer.token

    @property
    def idle(self) -> bool:
        """Nothing received is waiting to be taken: silence is the owner's."""
        return not self._busy and self._held_back is None and self._queue.empty()

    def ready(self, now_s: float) -> bool:
        """Whether its deadlines can be looked at: those of a request only at rest, for what we wait for may be waiting here."""
        return self.idle or (self.stream.cursor.running is None and now_s - self.attended_s >= RESTLESS_S)

    async def put(self, message: Message) -> None:
        """Waits while too much is waiting already."""
        await self._queue.put(message)

    def nudge(self) -> None:
        """The state has changed, or something is to be dropped. Full of messages it comes round by itself."""
        with contextlib.suppress(asyncio.QueueFull):
            self._queue.put_nowait(Nudge())

    async def restate(self, *, timeout_s: float) -> bool:
        """Has the owner restate what it holds; False when that took longer."""
        self._restated.clear()
        self.stream.cursor.want_snapshot()
        try:
            async with asyncio.timeout(timeout_s):
                await self._restated.wait()
        except TimeoutError:
            return False
        return True

    async def run(self) -> None:
        """Until the owner ends it. Raises what the store raises: nothing that failed was counted in."""
        await self._save()
        while True:
            message = await self._next()
            self._busy = True
            try:
                if message is not None and not await self._take(message):
                    return
                if self._save_due():
                    await self._save()
            finally:
                self._busy = False
            if message is not None:
                self.connection.heard(now=isinstance(message, Heartbeat))

    # -- messages --------------------------------------------------------------------------------------------------------

    async def _next(self) -> Message | None:
        """The next message, or None when there is none until a save is due."""
        held_back, self._held_back = self._held_back, None
        if held_back is not None:
            return held_back
        if not self._queue.empty():
            return self._queue.get_nowait()
        try:
            async with asyncio.timeout(max(0.0, self._due_s() - time.monotonic())):
                return await self._queue.get()
        except TimeoutError:
            return None

    async def _take(self, message: Message) -> bool:
        """False: this was the last one."""
        stream, now_s = self.stream, time.monotonic()
        match message:
            case Batch():
                await self._apply(self._group(message))
            case Heartbeat():
                if stream.heartbeat(message, now_s=now_s):
                    await self._count()
            case SnapshotChunk():
                await self._chunk(message)
            case ReplayUnavailable():
                stream.cursor.replay_unavailable(now_s=now_s)
            case Hello():
                self.publisher.refuse(stream.node, await self.announce(message), self.connection.say)
            case Goodbye():
                await self._leave()
                return False
            case End():
                return False
            case Nudge():
                await self._drop()
        return True

    def _group(self, first: Batch) -> list[Batch]:
        """The batch and its neighbours that have arrived: one round trip for all of them."""
        group, size = [first], sum(event.blocks for event in first.events)
        while size < GROUP_BLOCKS and not self._queue.empty():
            message = self._queue.get_nowait()
            if not isinstance(message, Batch):
                self._held_back = message
                break
            group.append(message)
            size += sum(event.blocks for event in message.events)
        return group

    async def announce(self, hello: Hello) -> tuple[Announced, ...]:
        """Namespaces, address and doubt. Returns the namespaces that the owner may not store."""
        stream = self.stream
        stream.cursor.doubted(hello.doubt, now_s=time.monotonic())
        stream.peer_address, stream.started_unix_ms = hello.peer_address, hello.started_unix_ms
        foreign = self.publisher.foreign(hello)
        for announced in without(hello, foreign).namespaces:
            fault = await self._link.announce(announced)
            known = self._link.namespaces.get(announced.digest)
            if known is not None and known.namespace.tenant not in self.publisher.stores:
                foreign += (announced,)  # learned of meanwhile, under the digest that it gave
            elif known is not None and not fault:
                stream.namespaces[announced.digest] = known
            else:
                reason = f"namespace {announced.digest.hex()[:16]}: {fault}"
                say(log, logging.WARNING, "namespace refused", node=stream.node, reason=reason)
        return foreign

    # -- writing ---------------------------------------------------------------------------------------------------------

    async def _apply(self, batches: Sequence[Batch]) -> None:
        stream = self.stream
        await self._do(stream.plan(batches, now_s=time.monotonic()), stream.holders, visible=True)
        stream.commit(batches, now_s=time.monotonic())

    async def _do(self, steps: Sequence[Step], holders: dict[HolderKey, Held], *, visible: bool) -> None:
        writes: list[Write] = []
        for step in steps:
            if isinstance(step, Write):
                writes.append(step)
                continue
            await self._write(writes, holders, visible=visible)
            writes = []
            await self._clear(step)
        await self._write(writes, holders, visible=visible)

    async def _write(self, writes: Sequence[Write], holders: dict[HolderKey, Held], *, visible: bool) -> None:
        new = list(dict.fromkeys(write.key for write in writes if write.stored and write.key not in holders))
        if new:
            numbers = await self._store.create(self._writer, new, visible=visible, deadline_s=self._timeout_s)
            for key, number in zip(new, numbers, strict=True):
                holders[key] = Held(number, self.stream.namespaces[key[0]], key[1])
        known = [(write, holders[write.key]) for write in writes if write.key in holders]
        try:
            await self._change(known)
        except StoreFull as error:
            if not visible:
                raise  # of a snapshot nothing is kept unless it is whole
            self.stream.store_full(f"the store is full: {error}", now_s=time.monotonic())
            await self._change([(write, held) for write, held in known if not write.stored])

    async def _change(self, writes: Sequence[tuple[Write, Held]]) -> None:
        for part in rounds(writes, max_blocks=GROUP_BLOCKS):
            changes = [_change(write, held) for write, held in part]
            call = partial(self._store.write, self._writer, changes, deadline_s=self._timeout_s)
            results = await self._until_taken("write", call)
            for (write, held), blocks in zip(part, results, strict=True):
                self.stream.changed(write, held, blocks)

    async def _until_taken(self, method: str, call: Callable[[], Awaitable[AnswerT]]) -> AnswerT:
        """Asks again while the store is away, within PATIENCE_S; the stream says so meanwhile."""
        end_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                answer = await self._link.timed(method, call())
            except StoreUnavailable as error:
                if time.monotonic() >= end_s:
                    raise
                self.stream.store_away(str(error))
                self.connection.heard(now=True)  # so the owner hears that it is so, and that we live
                if method != "save" and self._saved_state is StreamState.SYNCED:
                    with contextlib.suppress(StoreUnavailable):  # part of the store may be there, and others believe it
                        await self._save_now()
                await asyncio.sleep(AGAIN_S)
            else:
                self.stream.store_away("")
                return answer

    async def _clear(self, step: Clear) -> None:
        self.stream.cleared(step.keys)
        await self._drop()

    async def _drop(self) -> None:
        doomed = tuple(self.stream.doomed)
        if doomed:
            await self._until_taken("swap", lambda: self._store.swap(self._writer, drop=doomed, deadline_s=self._timeout_s))
            self.stream.doomed = [number for number in self.stream.doomed if number not in doomed]

    # -- snapshots and counts --------------------------------------------------------------------------------------------

    async def _chunk(self, chunk: SnapshotChunk) -> None:
        stream = self.stream
        verdict = stream.chunk(chunk, now_s=time.monotonic())
        if verdict is Intake.IGNORE:
            return
        if verdict is Intake.REFUSE:
            stream.refused(now_s=time.monotonic())
            await self._drop()
            return
        await self._drop()
        try:
            await self._do(stream.entries(chunk, now_s=time.monotonic()), stream.fresh, visible=False)
        except StoreFull as error:
            stream.refused(now_s=time.monotonic())
            stream.store_full(f"the store is full: {error}", now_s=time.monotonic())
            await self._drop()
            return
        if verdict is Intake.COMPLETE:
            show = [held.number for held in stream.fresh.values()]
            drop = [held.number for held in stream.holders.values()]
            call = partial(self._store.swap, self._writer, show=show, drop=drop, deadline_s=self._timeout_s)
            await self._until_taken("swap", call)
            blocks = stream.swapped(now_s=time.monotonic())
            self.snapshots_applied += 1
            self._restated.set()
            say(log, logging.INFO, "snapshot applied", node=stream.node, blocks=blocks)

    async def _count(self) -> None:
        """Whether the store still has what it took; what it says in sum is then held against the owner's word."""
        stream = self.stream
        await self._until_taken("write", partial(self._store.write, self._writer, (), deadline_s=self._timeout_s))
        roster = await self._until_taken("roster", partial(self._store.roster, deadline_s=self._timeout_s))
        ours = (line for line in roster.holders.values() if (line.node, line.epoch) == (stream.node, stream.epoch))
        stream.listed({line.number: line.visible for line in ours}, now_s=time.monotonic())
        await self._drop()
        numbers = [held.number for held in stream.holders.values()]
        counts = await self._until_taken("counts", partial(self._store.counts, numbers, deadline_s=self._timeout_s))
        stream.counted(counts.blocks, now_s=time.monotonic())

    # -- what others see -------------------------------------------------------------------------------------------------

    def _due_s(self) -> float:
        changed = self.stream.state is not self._saved_state
        return self.saved_s + (CHANGED_S if changed else self._save_every_s)

    def _save_due(self) -> bool:
        return time.monotonic() >= self._due_s()

    async def _save(self) -> None:
        """For the other coordinators: how far this stream can be trusted, and where to resume it."""
        await self._until_taken("save", self._save_now)

    async def _save_now(self) -> None:
        stream, now_s = self.stream, time.monotonic()
        state, seq = stream.state, stream.position(now_s=now_s)
        self._beat += 1
        saved = SavedNode(
            view=stream.view(now_s),
            beat=self._beat,
            coordinator=self._coordinator,
            exact=stream.cursor.exact,
            resumable=seq is not None,
            namespaces=tuple(stream.namespaces),
        )
        position = None if seq is None else Position(stream.epoch, seq)
        record = encode_saved(saved, now_s=now_s)
        await self._store.save(self._writer, position=position, record=record, deadline_s=self._timeout_s)
        self.record, self.saved_s, self._saved_state = record, now_s, state

    async def _leave(self) -> None:
        """The epoch ends: its blocks vanish for everybody at once."""
        stream = self.stream
        stream.cursor.fence(f"node {stream.node} said goodbye", now_s=time.monotonic())
        stream.discard()
        stream.cleared(tuple(stream.holders))
        await self._drop()
        await self._save()


def _change(write: Write, held: Held) -> Change:
    kind = ChangeKind.STORE if write.stored else ChangeKind.REMOVE
    return Change(kind, held.number, held.namespace.scope, write.packed, write.width)

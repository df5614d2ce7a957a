"""The event stream of one data-parallel rank of an engine, followed for as long as it runs, and published as a stream of ours.

    SUB ────────┐                                    ┌─▶ AskReplay ─▶ DEALER ─┐
                ├─▶ inbox ─▶ EngineCursor ─ effects ─┼─▶ Deliver ─▶ decode ─▶ EngineLife ─▶ coordinators
    replay ─────┘       (bounded)                    ├─▶ NewLife ─▶ a new EngineLife
     ▲────────────────────────────────────────────── └─▶ doubt
Rules: what the engine said is in the directory, or there is a doubt with its words: while the engine is not connected, while
what it held before us is not known, after a loss that nothing can repair. An engine that stays away for GONE_S has its blocks
taken out. Never in the way of the loop it runs on: batches are decoded in a thread where that takes long, and folded in slices
of SLICE_BLOCKS. Does not: find engines (engine_streams.py), decode (kvdir/engines) or number (cursor.py). ADR: docs/adr/0017.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvdir.client.engine_findings import FindingKind, Findings
from kvdir.client.engine_judge import BlockSizes, Judge
from kvdir.client.engine_life import GOODBYE_S, EngineLife, Publishing
from kvdir.client.engine_options import EngineOptions
from kvdir.client.engine_socket import EngineSocket
from kvdir.client.engine_sources import EngineSource
from kvdir.engines import (
    COUNTS_COPIES,
    END_SEQ,
    AskReplay,
    Cleared,
    CursorEffect,
    DecodedBatch,
    Deliver,
    EngineCursor,
    EngineEvent,
    EngineIdentity,
    Frame,
    Lost,
    NewLife,
    Owner,
    Reason,
    Residency,
    decode,
)
from kvdir.errors import Unavailable
from kvdir.obs.logs import say

log = logging.getLogger("kvdir.engines")

SLICE_BLOCKS = 1024
"""Folded between two looks at the loop: some 1 to 2 ms."""
THREAD_BYTES = 64 << 10
"""Batches from this size on are decoded in a thread."""
INBOX_MESSAGES = 256
GONE_S = 15.0
NOBODY_S = 3.0
PROBE_S = 5.0
LOOK_S = 1.0
_NOTHING_REJECTED: Mapping[Reason, int] = {}
REOPEN_S = 2.0


@dataclass(slots=True)
class StreamFigures:
    """Since the start, over all. last_event_s: monotonic; 0: none yet. rejected: events that were not taken, by reason."""

    batches: int = 0
    events: int = 0
    payload_bytes: int = 0
    last_event_s: float = 0.0
    restarts: int = 0
    rejected: Counter[Reason] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class _Replayed:
    """frame: None when the replay has failed."""

    request_id: int
    frame: Frame | None


class EngineStream:
    """See the module docstring. name: in the directory. expected: block sizes by model, of what else is served on this node."""

    def __init__(
        self,
        name: str,
        engine: EngineOptions,
        source: EngineSource,
        publishing: Publishing,
        *,
        expected: Callable[[], BlockSizes],
        gone_s: float = GONE_S,
        probe_s: float = PROBE_S,
    ) -> None:
        self.name = name
        self.engine = engine
        self.source = source
        self.figures = StreamFigures()
        self.findings = Findings(name)
        self._publishing = publishing
        self._gone_s = gone_s
        self._probe_s = probe_s
        self._inbox: asyncio.Queue[Frame | _Replayed | None] = asyncio.Queue(INBOX_MESSAGES)
        self._socket = EngineSocket(source)
        self._helpers: dict[str, asyncio.Task[None]] = {}
        self._connects = 0
        self._started = False
        self._down_s: float | None = time.monotonic()
        self._up_s = 0.0
        self.judge = Judge(engine, source, self.findings, expected=expected)
        self._begin_cursor()
        self._new_life()

    def _new_life(self) -> None:
        engine = self.engine
        identity = EngineIdentity(
            model=self.source.model,
            hash_scheme=engine.hash_scheme,
            hash_seed=engine.hash_seed,
            block_tokens=engine.block_tokens,
        )
        residency = Residency(
            identity, copies=engine.dialect in COUNTS_COPIES, full_reports=engine.full_reports, max_blocks=engine.max_blocks
        )
        self._owner = Owner(engine.owner)
        self.life = EngineLife(self.name, residency, self._publishing, doubt=self._why_not(), on_fenced=self._fenced)

    # -- from outside ----------------------------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Whether somebody is at the other end of the subscription."""
        return self._socket.connected

    @property
    def malformed(self) -> int:
        """Messages that are none of an event stream."""
        return self._socket.malformed

    def in_words(self) -> str:
        """For people: "following", or what stands in the way."""
        said = [finding.words for finding in self.findings.all]
        return "; ".join(said) or (self.life.doubt.words if self.life.doubt.lasts else "following")

    async def run(self) -> None:
        """Until cancelled. However it ends, it says goodbye, so that its blocks vanish at once. Raises nothing but bugs."""
        self.life.start()
        try:
            await self._open()
            await self._help("receive", self._receive())
            while True:
                await self._step()
        finally:
            for task in self._helpers.values():
                task.cancel()
            await asyncio.gather(*self._helpers.values(), return_exceptions=True)
            await self._socket.close()
            await self.life.publishers.leave(timeout_s=GOODBYE_S)

    # -- helpers, which only fill the inbox ------------------------------------------------------------------------------

    async def _open(self) -> None:
        while True:
            try:
                self._socket.open()
            except Unavailable as error:
                await self._socket.close()
                self.findings.found(FindingKind.NOBODY, str(error), now_s=time.monotonic())
                await asyncio.sleep(REOPEN_S)
            else:
                return

    async def _receive(self) -> None:
        """What comes live; None when somebody came or went."""
        while True:
            await self._inbox.put(await self._socket.receive())

    async def _replay(self, ask: AskReplay) -> None:
        """The answers to one question."""
        last: Frame | None = Frame(END_SEQ, b"")
        try:
            async with contextlib.aclosing(self._socket.replay(ask.first_seq)) as frames:
                async for frame in frames:
                    await self._inbox.put(_Replayed(ask.request_id, frame))
        except Unavailable as error:
            last = None
            say(log, logging.INFO, "replay failed", stream=self.name, error=error)
        await self._inbox.put(_Replayed(ask.request_id, last))

    async def _help(self, what: str, work: Coroutine[Any, Any, None]) -> None:
        """Runs beside us; what it replaces is over, or void."""
        before = self._helpers.get(what)
        if before is not None:
            before.cancel()
            await asyncio.wait({before})
        self._helpers[what] = asyncio.create_task(work, name=f"engine-{what}-{self.name}")

    def _look_at_helpers(self) -> None:
        """A helper never ends with an error; one that does is a bug of ours, and ends us with it."""
        for what, task in list(self._helpers.items()):
            if task.done():
                del self._helpers[what]
                if not task.cancelled():
                    task.result()

    # -- following -------------------------------------------------------------------------------------------------------

    async def _step(self) -> None:
        """The next message, or whatever is due without one."""
        message = await self._next()
        self._look_at_helpers()
        now_s = time.monotonic()
        await self._look_at_connection(now_s)
        match message:
            case Frame(seq, payload):
                await self._execute(self.cursor.live(seq, payload, now_s))
            case _Replayed(request_id, None):
                await self._execute(self.cursor.failed(request_id, now_s))
            case _Replayed(request_id, Frame(seq, payload)):
                await self._execute(self.cursor.replayed(request_id, seq, payload, now_s))
            case _ if self._inbox.empty() and self.connected:
                await self._execute(self.cursor.tick(now_s))  # what a deadline waits for may be waiting in the inbox

    async def _next(self) -> Frame | _Replayed | None:
        if not self._inbox.empty():
            return self._inbox.get_nowait()
        wake_s = self.cursor.wake_s if self._started else None
        timeout_s = LOOK_S if wake_s is None else min(LOOK_S, max(0.01, wake_s - time.monotonic()))
        try:
            async with asyncio.timeout(timeout_s):
                return await self._inbox.get()
        except TimeoutError:
            return None

    async def _look_at_connection(self, now_s: float) -> None:
        if self._socket.connects != self._connects:
            self._connects, self._up_s, self._down_s = self._socket.connects, now_s, None
            self.findings.gone(FindingKind.NOBODY, FindingKind.SILENT)
            begin = self.cursor.reconnected if self._started else self.cursor.start
            self._started = True
            await self._execute(begin(now_s))
        if self.connected:
            if not self.figures.last_event_s and now_s - self._up_s > self.engine.quiet_s:
                self.findings.found(FindingKind.SILENT, self.judge.silent(), now_s=now_s)
            return
        if self._down_s is None:
            self._down_s = now_s
            self._settle_doubt()
        away_s = now_s - self._down_s
        if away_s > NOBODY_S:
            self.findings.found(FindingKind.NOBODY, self.judge.nobody(), now_s=now_s)
        if away_s > self._gone_s and self.life.residency.blocks:
            await self._replace_life(f"nobody serves {self.source.endpoint} any more")
            self._begin_cursor()

    async def _execute(self, effects: list[CursorEffect]) -> None:
        for effect in effects:
            self._settle_doubt(begins_only=True)
            match effect:
                case Deliver(seq, payload):
                    await self._deliver(seq, payload)
                case AskReplay():
                    await self._help("replay", self._replay(effect))
                case NewLife(reason):
                    self.figures.restarts += 1
                    await self._replace_life(reason)
                case Lost(first_seq, last_seq):
                    say(log, logging.WARNING, "engine events lost", stream=self.name, first=first_seq, last=last_seq)
        self._settle_doubt()

    async def _deliver(self, seq: int, payload: bytes) -> None:
        """Decodes and folds one batch."""
        dialect, door = self.engine.dialect, self.judge.door
        if len(payload) < THREAD_BYTES:
            batch = decode(dialect, payload, door=door, owner=self._owner)
        else:
            batch = await asyncio.to_thread(decode, dialect, payload, door=door, owner=self._owner)
        now_s = time.monotonic()
        self.figures.batches += 1
        self.figures.events += len(batch.events)
        self.figures.payload_bytes += len(payload)
        if batch.events:
            self.figures.last_event_s = now_s
            self.findings.gone(FindingKind.SILENT)
        self.judge.look(batch, now_s)
        self._settle_doubt(begins_only=True)
        cleared, doubt = False, ""
        for number, piece in enumerate(slices(batch, SLICE_BLOCKS)):
            if number:
                await asyncio.sleep(0)
            applied = self.life.apply(piece)
            cleared, doubt = cleared or applied.cleared, applied.doubt or doubt
            self.figures.rejected.update(applied.rejected)
            self.judge.rejected(applied.rejected, now_s)
        if cleared:
            await self._execute(self.cursor.cleared(seq))
        if doubt:
            await self._execute(self.cursor.uncertain(seq, doubt))

    # -- lives -----------------------------------------------------------------------------------------------------------

    async def _replace_life(self, why: str) -> None:
        """The registration of the new one fences the old: its blocks are gone at once."""
        say(log, logging.WARNING, "engine stream begins anew", stream=self.name, why=why)
        await self.life.publishers.abandon()
        self.judge.begin()
        self._new_life()
        self.life.start()

    def _fenced(self, reason: str) -> None:
        self.judge.fenced(reason, time.monotonic())

    def _begin_cursor(self) -> None:
        self.cursor = EngineCursor(replay=bool(self.source.replay), probe_s=self._probe_s)
        self._started = False

    def _why_not(self) -> str:
        """Why nobody can vouch for what is held; empty: we can."""
        if self._down_s is not None:
            return self.judge.nobody()
        return "; ".join(filter(None, (self.cursor.doubt, self.judge.mismatch)))

    def _settle_doubt(self, *, begins_only: bool = False) -> None:
        words = self._why_not()
        if words or not begins_only:
            self.life.set_doubt(words)
        if self.cursor.lost_batches and self.cursor.lost:
            self.findings.found(FindingKind.LOST, self.cursor.lost, now_s=time.monotonic())
        else:
            self.findings.gone(FindingKind.LOST)


def slices(batch: DecodedBatch, max_blocks: int) -> Iterator[DecodedBatch]:
    """The same batch in pieces that take about as long each. What was rejected is said once."""
    piece: list[EngineEvent] = []
    room, rejected = max_blocks, batch.rejected
    for event in batch.events:
        for part in _parts(event, max_blocks):
            blocks = 0 if isinstance(part, Cleared) else part.blocks
            if piece and blocks > room:
                yield batch._replace(events=tuple(piece), rejected=rejected)
                piece, room, rejected = [], max_blocks, _NOTHING_REJECTED
            piece.append(part)
            room -= blocks
    if piece or rejected:
        yield batch._replace(events=tuple(piece), rejected=rejected)


def _parts(event: EngineEvent, max_blocks: int) -> Iterator[EngineEvent]:
    """Each with the parent of the whole: a report of blocks that are held already is one in every part."""
    if isinstance(event, Cleared) or event.blocks <= max_blocks:
        yield event
        return
    step = max_blocks * event.width
    for at in range(0, len(event.packed), step):
        yield event._replace(packed=event.packed[at : at + step])

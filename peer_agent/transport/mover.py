"""Planes whose library runs in a mover process: one-sided gets through UCX or NIXL (peer_agent/mover).

Rules:
- The owner cannot check locks: a lock protects the blocks, generation and checksum protect the reader (csrc/gets.hpp says why
  that is enough). Grants are not looked at.
- Every life of an owner's mover has its incarnation: `export` answers anew after a restart, and the new mover refuses the old
  descriptor. What is not a descriptor (checksum) never reaches a library.
- Our own mover's death is PEER_LOST for the reads under way, settled once it has been reaped. The next read waits for the new
  mover, READY_S at most, and connects again with the same descriptor.
- A read is LATE by its deadline, mover or no mover. `settled` is done when the mover said so, or is dead.
- A peer's mover that restarted makes reads PEER_LOST; the caller says hello again and gets the new descriptor.

Does not: touch UCX or NIXL. A fault in them ends a child process, never this one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Mapping

from kvdir.errors import ConfigError
from peer_agent import _native
from peer_agent.memory.arena import Arena
from peer_agent.mover.backend import BackendError
from peer_agent.mover.child import Asked, MoverSpec
from peer_agent.mover.messages import Connect, Failure, Forget, Opened, Question, Reply
from peer_agent.mover.process import MoverProcess
from peer_agent.transport.base import Capabilities, ReadList, ReadOutcome, ReadStatus
from peer_agent.transport.mover_answers import all_settled, questions, settled_of, statuses_of
from peer_agent.transport.mover_descriptor import MoverDescriptor
from peer_agent.transport.outcomes import check_shape, settled_outcome, uniform_outcome, uniform_statuses

READY_S = 1.0
CLOSE_S = 2.5
ANSWER_S = 0.01
"""How long after the deadline the mover's own word is waited for."""


class MoverTransport:
    """Owner's and reader's side for one arena. backend, settings: peer_agent/mover/backends.py and the backend's file."""

    def __init__(self, arena: Arena, *, backend: str, settings: Mapping[str, str] | None = None, name: str = "") -> None:
        self.name = name or backend
        self._arena = arena
        self.process = MoverProcess(MoverSpec(backend, arena.fd, arena.arena_bytes, dict(settings or {})))
        self._starting: asyncio.Task[Opened] | None = None
        self._numbers = itertools.count(1)
        self._connections: set[MoverConnection] = set()

    def capabilities(self) -> Capabilities:
        return Capabilities(same_host_only=False, gpu=False, verifies="checksum", owner_checks_lock=False)

    async def export(self) -> bytes:
        """ConfigError: the backend cannot work here; says what is missing. ConnectionError: the mover is being restarted."""
        opened = await self._opened()
        arena = self._arena
        return MoverDescriptor(opened.incarnation, arena.epoch, arena.arena_bytes, opened.descriptor).pack(self.name)

    def grant(self, lock: int, records: bytes, *, expires_s: float, capability: bytes) -> None:
        """Nothing to do: readers see the arena itself."""

    def revoke(self, lock: int) -> None:
        """Nothing to do: the generation changes before a slot is reused."""

    async def connect(self, descriptor: bytes, *, deadline_s: float) -> MoverConnection:
        until_s = time.monotonic() + deadline_s
        wanted = MoverDescriptor.parse(descriptor, self.name)
        connection = MoverConnection(self, self._arena, self.process, wanted, next(self._numbers))
        await self._opened(until_s=until_s)
        try:
            await connection.open(until_s=until_s)
        except TimeoutError:
            connection.abandon()
            raise ConnectionError(f"no answer from the peer's {self.name} mover in {deadline_s} s") from None
        except BaseException:
            connection.abandon()
            raise
        self._connections.add(connection)
        return connection

    def forget(self, connection: MoverConnection) -> None:
        self._connections.discard(connection)

    def stats(self) -> dict[str, int]:
        """mover_starts, mover_kills (silent ones), peers."""
        return {"mover_starts": self.process.starts, "mover_kills": self.process.kills, "peers": len(self._connections)}

    @property
    def pid(self) -> int:
        """Of our mover; 0 while there is none."""
        return self.process.pid

    @property
    def lanes(self) -> dict[str, int]:
        """Paths in use, and by how many connections."""
        counts: dict[str, int] = {}
        for connection in tuple(self._connections):
            for lane in connection.lanes:
                counts[lane] = counts.get(lane, 0) + 1
        return counts

    async def close(self) -> None:
        for connection in tuple(self._connections):
            await connection.close()
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait({self._starting}, timeout=CLOSE_S)
        await self.process.close()

    async def _opened(self, *, until_s: float | None = None) -> Opened:
        """What our mover said of itself; the first caller starts it.

        until_s: of time.monotonic(). None: waits as long as the first start takes, and for no later one.
        """
        if self._starting is None:
            self._starting = asyncio.create_task(self.process.start(), name=f"start-{self.name}")
        if not self._starting.done():
            await asyncio.wait({self._starting}, timeout=None if until_s is None else until_s - time.monotonic())
        if not self._starting.done():
            raise ConnectionError(f"our {self.name} mover is still starting")
        if self._starting.cancelled():
            raise ConnectionError("closed")
        try:
            self._starting.result()
        except BackendError as error:
            raise ConfigError([f"transports: {fault}" for fault in error.faults]) from error
        return await self.process.ready(until_s=time.monotonic() if until_s is None else until_s)


class MoverConnection:
    """One peer, through whichever mover of ours is up."""

    def __init__(
        self, transport: MoverTransport, arena: Arena, process: MoverProcess, peer: MoverDescriptor, number: int
    ) -> None:
        self._transport = transport
        self._arena = arena
        self._process = process
        self._peer = peer
        self._number = number
        self._known_to = b""  # incarnation of the mover of ours that knows this peer
        self._introducing = asyncio.Lock()
        self._closed = False
        self.lanes: tuple[str, ...] = ()

    async def open(self, *, until_s: float) -> None:
        """Introduces the peer to our mover unless it knows it. Raises ConnectionError, ValueError."""
        async with asyncio.timeout(until_s - time.monotonic()), self._introducing:
            if self._closed:
                raise ConnectionError("closed")
            opened = await self._process.ready(until_s=min(until_s, time.monotonic() + READY_S))
            if opened.incarnation == self._known_to:
                return
            reply = await self._ask(
                lambda ticket: Connect(
                    ticket,
                    self._number,
                    self._peer.incarnation,
                    self._peer.arena_bytes,
                    self._peer.backend_part,
                    int(until_s * 1e9),
                )
            )
            self.lanes = tuple(reply.body.decode().split(",")) if reply.body else ()
            self._known_to = opened.incarnation

    async def read(self, blocks: ReadList, *, deadline_s: float) -> ReadOutcome:
        until_s = time.monotonic() + deadline_s
        check_shape(blocks)
        _native.plan_gets(self._arena.region, blocks.records, blocks.destinations, self._peer.arena_bytes)  # ValueError
        if len(blocks) == 0:
            return uniform_outcome(blocks, ReadStatus.OK)
        if self._closed:
            return uniform_outcome(blocks, ReadStatus.PEER_LOST)
        if blocks.epoch != self._peer.epoch:
            return uniform_outcome(blocks, ReadStatus.STALE)
        asked: list[Asked] = []
        try:
            await self.open(until_s=until_s)
            for question in questions(blocks, self._number, until_s):
                asked.append(self._process.ask(question))  # noqa: PERF401 (may raise in between)
        except (ConnectionError, TimeoutError, ValueError):
            self._abort(asked)
            late = time.monotonic() >= until_s
            statuses = uniform_statuses(blocks, ReadStatus.LATE if late else ReadStatus.PEER_LOST)
            return settled_outcome(blocks, statuses, settled=settled_of(asked))
        return await self._outcome(blocks, asked, until_s)

    def abandon(self) -> None:
        """Closes what may have come into being, without waiting for it."""
        self._closed = True
        with contextlib.suppress(ConnectionError):
            self._process.ask(lambda ticket: Forget(ticket, self._number))

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._transport.forget(self)
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._ask(lambda ticket: Forget(ticket, self._number))
        except (ConnectionError, TimeoutError):
            return  # the mover has ended, or is stuck and will be: its reads are settled then

    async def _ask(self, make: Callable[[int], Question]) -> Reply:
        """Raises what the mover says, as the kind of exception that it was there."""
        answer = await asyncio.shield(self._process.ask(make).answer)
        assert isinstance(answer, Reply)
        match answer.failure:
            case Failure.NONE:
                return answer
            case Failure.VALUE:
                raise ValueError(answer.reason)
            case Failure.LATE | Failure.CONNECTION | Failure.OS:
                raise ConnectionError(answer.reason)

    def _abort(self, asked: list[Asked]) -> None:
        for one in asked:
            self._process.abort(one)

    async def _outcome(self, blocks: ReadList, asked: list[Asked], until_s: float) -> ReadOutcome:
        """Collects the answers, or what there is of them at the deadline."""
        try:
            answers = {one.answer for one in asked}
            await asyncio.wait(answers, timeout=max(0.0, until_s - time.monotonic()) + ANSWER_S)
        except asyncio.CancelledError:
            self._abort(asked)
            await all_settled(asked)
            raise
        return settled_outcome(blocks, statuses_of(blocks, asked), settled=settled_of(asked))

"""One mover process from its start until it has been reaped: its socket, what was asked of it, and its end.

Rules:
- A question that is under way when the process ends is answered by MoverLost, and settled, only after it has been reaped.
- Sending never blocks: what the socket does not take waits here, bounded by the questions that may be open.
- It hangs up before it waits: a mover that sees its socket closed ends by itself; one that does not is killed.

Does not: start another one (process.py).
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from peer_agent.mover import contain
from peer_agent.mover.backend import BackendError
from peer_agent.mover.messages import (
    MAX_MESSAGE_BYTES,
    Answer,
    Done,
    Late,
    Open,
    Opened,
    Question,
    Refused,
    Reply,
    Settled,
    decode_answer,
    encode,
)

START_S = 30.0
POPULATE_S = 1.0
END_S = 1.0


class MoverLost(ConnectionError):
    """The mover ended, or is not there. Nothing that it did is under way any more."""


@dataclass(slots=True, eq=False)
class Asked:
    """A question under way. answer: Reply, Done or Late, or MoverLost. settled: nothing writes on its behalf any more."""

    ticket: int
    answer: asyncio.Future[Reply | Done | Late]
    settled: asyncio.Future[None]


@dataclass(frozen=True, slots=True)
class MoverSpec:
    """What a mover is started with. arena_fd: stays open as long as movers are started.

    start_s: longest start; 0: START_S, and POPULATE_S more for each GiB of the arena. preexec: runs in the child first, for
    tests.
    """

    backend: str
    arena_fd: int
    arena_bytes: int
    settings: Mapping[str, str] = field(default_factory=dict)
    start_s: float = 0.0
    preexec: Callable[[], None] | None = None


class MoverChild:
    """ending: why it ended, or must. gone: it hung up, or was hung up on. reaped: it is dead, and writes nothing any more."""

    def __init__(self, spec: MoverSpec) -> None:
        self._spec = spec
        self._start_s = spec.start_s or START_S + POPULATE_S * spec.arena_bytes / (1 << 30)
        self.opened: Opened | None = None
        self.asked: dict[int, Asked] = {}
        self.ending = ""
        self._loop = asyncio.get_running_loop()
        self.gone: asyncio.Future[None] = self._loop.create_future()
        self.reaped: asyncio.Future[None] = self._loop.create_future()
        self._first: asyncio.Future[Answer] = self._loop.create_future()
        self._unsent: deque[bytes] = deque()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self._process = subprocess.Popen(
                    contain.command(theirs.fileno()),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env=contain.environment(os.environ),
                    pass_fds=(theirs.fileno(), spec.arena_fd),
                    preexec_fn=spec.preexec,
                )
            except BaseException:
                self._control.close()
                raise
        self.pid = self._process.pid
        self._control.setblocking(False)
        self._loop.add_reader(self._control, self._receive)

    async def open(self) -> None:
        """Waits until it is ready. Raises BackendError."""
        self.send(Open(self._spec.backend, dict(self._spec.settings), self._spec.arena_fd, self._spec.arena_bytes))
        either: list[asyncio.Future[Any]] = [self._first, self.gone]
        await asyncio.wait(either, timeout=self._start_s, return_when=asyncio.FIRST_COMPLETED)
        if not self._first.done():
            why = "ended while it started; its last words are in the log" if self.gone.done() else "did not start in time"
            raise BackendError(f"{self._spec.backend}: the mover process {why}")
        first = self._first.result()
        if isinstance(first, Refused):
            raise BackendError(*first.faults)
        if not isinstance(first, Opened):
            raise BackendError(f"{self._spec.backend}: the mover began with a {type(first).__name__}")
        self.opened = first

    def ask(self, ticket: int, make: Callable[[int], Question]) -> Asked:
        """Sends make(ticket). Raises MoverLost, or ValueError for a message that is too large."""
        if self.gone.done():
            raise MoverLost(f"the {self._spec.backend} mover has ended")
        asked = Asked(ticket, self._loop.create_future(), self._loop.create_future())
        self.send(make(ticket))
        self.asked[ticket] = asked
        return asked

    def send(self, question: Question) -> None:
        self._unsent.append(encode(question))
        if len(self._unsent) == 1:
            self._flush()

    async def end(self) -> None:
        """Kills it unless it is dead, reaps it, and ends what was asked. Idempotent."""
        self._hang_up()
        if self._process.returncode is None:
            await self._reap()
        _finish(self.reaped)
        lost = MoverLost(f"the {self._spec.backend} mover ended ({self.ending})")
        for asked in self.asked.values():
            if not asked.answer.done():
                asked.answer.set_exception(lost)
                asked.answer.exception()  # a question that nobody waits for any more is no bug
            _finish(asked.settled)
        self.asked.clear()

    async def _reap(self) -> None:
        """Waits for a mover that has been hung up on, first kindly."""
        watch = os.pidfd_open(self.pid)
        dead: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(watch, _finish, dead)
        try:
            if self.opened is not None and not self.ending:
                await asyncio.wait({dead}, timeout=END_S)
            if not dead.done():
                self._process.send_signal(signal.SIGKILL)
                await asyncio.shield(dead)
        finally:
            self._loop.remove_reader(watch)
            os.close(watch)
        code = self._process.wait()
        self.ending = self.ending or (f"signal {-code}" if code < 0 else f"exit {code}")

    def _hang_up(self) -> None:
        if self._control.fileno() >= 0:
            self._loop.remove_reader(self._control)
            self._loop.remove_writer(self._control)
            self._control.close()
        _finish(self.gone)

    def _receive(self) -> None:
        try:
            while data := self._control.recv(MAX_MESSAGE_BYTES):
                self._take(decode_answer(data))
        except BlockingIOError:
            return
        except (OSError, msgspec.DecodeError) as error:
            if not isinstance(error, ConnectionError):
                self.ending = f"sent nonsense: {error}"
        self._hang_up()

    def _take(self, answer: Answer) -> None:
        match answer:
            case Opened() | Refused():
                if not self._first.done():
                    self._first.set_result(answer)
            case Late():
                asked = self.asked.get(answer.ticket)
                if asked is not None and not asked.answer.done():
                    asked.answer.set_result(answer)
            case Settled():
                self._settle(answer.ticket)
            case Reply() | Done():
                asked = self.asked.get(answer.ticket)
                if asked is not None and not asked.answer.done():
                    asked.answer.set_result(answer)
                self._settle(answer.ticket)

    def _settle(self, ticket: int) -> None:
        asked = self.asked.pop(ticket, None)
        if asked is not None:
            _finish(asked.settled)

    def _flush(self) -> None:
        try:
            while self._unsent:
                self._control.send(self._unsent[0])
                self._unsent.popleft()
        except BlockingIOError:
            self._loop.add_writer(self._control, self._flush)
            return
        except OSError:
            self._hang_up()
            return
        self._loop.remove_writer(self._control)


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)

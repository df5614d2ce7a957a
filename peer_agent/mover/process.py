"""The agent's side of a mover: start it, watch it, end it, reap it, start it again.

    starting -- Opened --> up -- exit, or silence for HANG_S --> (SIGKILL) --> reaped --> pause --> starting
       |
       +- Refused, or nothing within start_s: BackendError at the first start, a pause afterwards

Rules:
- A mover's end is never the agent's: every question under way ends with MoverLost, and is settled only then, when the process
  has been reaped. A dead process does not write.
- A mover that does not answer pings (stopped, swapped out, stuck in a library) is killed. Reads keep their own deadlines
  meanwhile.
- Pauses between starts double from RESTART_S to RESTART_MAX_S and are forgotten after a life of STABLE_S.
- The number of open questions is bounded, and so is what waits for the socket.

Does not: know what questions mean (peer_agent/transport/mover.py), or run inside the mover (main.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvdir.obs.logs import say
from peer_agent.mover import contain
from peer_agent.mover.backend import BackendError
from peer_agent.mover.messages import (
    MAX_MESSAGE_BYTES,
    Abort,
    Answer,
    Done,
    Late,
    Open,
    Opened,
    Ping,
    Question,
    Refused,
    Reply,
    Settled,
    decode_answer,
    encode,
)

PING_S = 1.0
HANG_S = 3.0
START_S = 30.0
POPULATE_S = 1.0
END_S = 1.0
RESTART_S = 0.1
RESTART_MAX_S = 10.0
STABLE_S = 10.0
MAX_QUESTIONS = 256

log = logging.getLogger(__name__)


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
    """What a mover is started with. arena_fd: stays open as long as movers are started."""

    backend: str
    arena_fd: int
    arena_bytes: int
    settings: Mapping[str, str] = field(default_factory=dict)
    start_s: float = 0.0
    """Longest start; 0: START_S, and POPULATE_S more for each GiB of the arena."""
    preexec: Callable[[], None] | None = None
    """Runs in the child before it starts; for tests of limits."""


class MoverProcess:
    """One mover after the other, of one kind. `start` once; `close` ends it."""

    def __init__(self, spec: MoverSpec) -> None:
        self._spec = spec
        self._child: _Child | None = None
        self._up = asyncio.Event()
        self._supervisor: asyncio.Task[None] | None = None
        self._tickets = itertools.count(1)
        self.starts = 0
        self.kills = 0
        self.last_end = ""

    async def start(self) -> Opened:
        """Waits for the first mover to be ready. Raises BackendError; close() is still due then."""
        child = await self._launch()
        self._supervisor = asyncio.create_task(self._supervise(child), name=f"mover-{self._spec.backend}")
        assert child.opened is not None
        return child.opened

    @property
    def pid(self) -> int:
        """Of the mover that is up; 0 while there is none."""
        return self._child.pid if self._child is not None and self._up.is_set() else 0

    async def ready(self, *, until_s: float) -> Opened:
        """What the mover that is up said of itself; waits for one until time.monotonic() until_s. Raises MoverLost."""
        if not self._up.is_set():
            if self._supervisor is None or self._supervisor.done():
                raise MoverLost("the mover is closed")
            try:
                async with asyncio.timeout(until_s - time.monotonic()):
                    await self._up.wait()
            except TimeoutError:
                raise MoverLost(f"the {self._spec.backend} mover is being restarted ({self.last_end})") from None
        assert self._child is not None
        assert self._child.opened is not None
        return self._child.opened

    def ask(self, make: Callable[[int], Question]) -> Asked:
        """Sends make(ticket). Raises MoverLost when no mover is up, ValueError when the message is too large."""
        if self._child is None or not self._up.is_set():
            raise MoverLost(f"no {self._spec.backend} mover is up")
        if len(self._child.asked) >= MAX_QUESTIONS:
            raise MoverLost(f"{MAX_QUESTIONS} questions to the {self._spec.backend} mover are under way")
        return self._child.ask(next(self._tickets), make)

    def abort(self, asked: Asked) -> None:
        """Makes a Read late now."""
        if self._child is not None and asked.ticket in self._child.asked:
            self._child.send(Abort(asked.ticket))

    async def close(self) -> None:
        """Ends the mover; every question under way ends as MoverLost. Idempotent."""
        if self._supervisor is not None and not self._supervisor.done():
            self._supervisor.cancel()
            await asyncio.wait({self._supervisor})
        self._up.clear()
        if self._child is not None:
            await self._child.end()

    async def _launch(self) -> _Child:
        child = self._child = _Child(self._spec)
        self.starts += 1
        try:
            await child.open()
        except BaseException:
            await child.end()
            raise
        self._up.set()
        return child

    async def _supervise(self, child: _Child) -> None:
        pause_s = RESTART_S
        while True:
            begun_s = time.monotonic()
            await self._watch(child)
            self._up.clear()
            await child.end()
            self.last_end = child.ending
            say(log, logging.WARNING, "mover ended", backend=self._spec.backend, why=child.ending)
            pause_s = RESTART_S if time.monotonic() - begun_s > STABLE_S else min(pause_s * 2, RESTART_MAX_S)
            child, pause_s = await self._relaunch(pause_s)

    async def _relaunch(self, pause_s: float) -> tuple[_Child, float]:
        while True:
            await asyncio.sleep(pause_s)
            try:
                return await self._launch(), pause_s
            except (BackendError, OSError) as error:
                self.last_end = str(error)
                pause_s = min(pause_s * 2, RESTART_MAX_S)
                say(log, logging.WARNING, "mover did not start", backend=self._spec.backend, error=error, again_s=pause_s)

    async def _watch(self, child: _Child) -> None:
        """Until it has ended, or must: `ending` says why."""
        unanswered: Asked | None = None
        silent_s = 0.0
        while not child.gone.done():
            await asyncio.wait({child.gone}, timeout=PING_S)
            if child.gone.done():
                return
            if unanswered is None or unanswered.answer.done():
                unanswered = child.ask(next(self._tickets), Ping)
                silent_s = 0.0
            elif (silent_s := silent_s + PING_S) >= HANG_S:
                self.kills += 1
                child.ending = f"did not answer for {silent_s:.0f} s"
                return


class _Child:
    """One mover process from its start until it has been reaped."""

    def __init__(self, spec: MoverSpec) -> None:
        self._spec = spec
        self._start_s = spec.start_s or START_S + POPULATE_S * spec.arena_bytes / (1 << 30)
        self.opened: Opened | None = None
        self.asked: dict[int, Asked] = {}
        self.ending = ""
        self._loop = asyncio.get_running_loop()
        self.gone: asyncio.Future[None] = self._loop.create_future()
        self._first: asyncio.Future[Answer] = self._loop.create_future()
        self._unsent: deque[bytes] = deque()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                contain.command(theirs.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=contain.environment(os.environ),
                pass_fds=(theirs.fileno(), spec.arena_fd),
                preexec_fn=spec.preexec,
            )
        self.pid = self._process.pid
        self._control = ours
        ours.setblocking(False)
        self._loop.add_reader(ours, self._receive)

    async def open(self) -> None:
        """Raises BackendError."""
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
        with contextlib.suppress(ValueError):
            self._loop.remove_writer(self._control)


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)

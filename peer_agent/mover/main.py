"""The mover process: messages in, one backend, answers out. `python -m peer_agent.mover CONTROL_FD PARENT_PID`.

Rules:
- It ends when the agent's side of the control socket is gone, whatever is under way.
- Every question is answered once; a question that cannot be decoded, or an exception nobody expected, ends the process: the
  agent sees it, settles everything and starts a new one. Nothing is swallowed to keep going in an unknown state.
- Answers never block: what the socket does not take waits in a queue, bounded by the questions that the agent may have open.
- It leaves through os._exit: destructors of the libraries are not worth a crash (NIXL's crash beside a system libibverbs).

Does not: decide anything about blocks (reads.py), or survive its agent (contain.py).
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import secrets
import socket
import sys
import time
from collections import deque
from collections.abc import Coroutine
from typing import Any

import msgspec

from kvdir.obs.logs import LogfmtFormatter, say_bug
from peer_agent import _native
from peer_agent.mover import contain
from peer_agent.mover.backend import Backend, BackendError, Memory, PeerMemory, Service
from peer_agent.mover.backends import make_backend
from peer_agent.mover.messages import (
    MAX_BODY_BYTES,
    MAX_MESSAGE_BYTES,
    Abort,
    Answer,
    Call,
    Connect,
    Done,
    Failure,
    Forget,
    Late,
    Open,
    Opened,
    Ping,
    Question,
    Read,
    Refused,
    Reply,
    Settled,
    decode_question,
    encode,
)
from peer_agent.mover.reads import SCRATCH_BYTES, Peer, Reading, Reads

OPEN_S = 30.0
EXIT_REFUSED = 3
EXIT_BROKEN = 4

log = logging.getLogger("peer_agent.mover")

_FAILURES = (
    (ConnectionError, Failure.CONNECTION),
    (TimeoutError, Failure.LATE),
    (ValueError, Failure.VALUE),
    (OSError, Failure.OS),
)


def main() -> None:
    contain.enter(parent=int(sys.argv[2]))
    lines = logging.StreamHandler()
    lines.setFormatter(LogfmtFormatter())
    logging.basicConfig(handlers=[lines], level=logging.INFO)
    asyncio.run(_live(socket.socket(fileno=int(sys.argv[1]))))


async def _live(control: socket.socket) -> None:
    """Leaves from inside the loop: closing it would wait for tasks that a library may never end."""
    try:
        code = await _run(control)
    except BaseException as error:
        say_bug(log, "mover ends", error, pid=os.getpid())
        code = EXIT_BROKEN
    sys.stderr.flush()
    os._exit(code)


async def _run(control: socket.socket) -> int:
    control.settimeout(OPEN_S)
    data = control.recv(MAX_MESSAGE_BYTES)
    if not data:
        return 0
    wanted = decode_question(data)
    if not isinstance(wanted, Open):
        raise ValueError(f"the first message is a {type(wanted).__name__}, not Open")
    try:
        backend = make_backend(wanted.backend, wanted.settings)
        memory = _map(wanted)
        descriptor = await backend.open(memory)
    except BackendError as error:
        control.send(encode(Refused(list(error.faults))))
        return EXIT_REFUSED
    control.send(encode(Opened(memory.incarnation, descriptor, backend.about())))
    control.setblocking(False)
    mover = Mover(control, backend, memory)
    await mover.serve()
    return 0


def _map(wanted: Open) -> Memory:
    """The arena by its inherited descriptor. The mapping lives as long as the process."""
    arena = _native.Mapping(wanted.arena_fd, wanted.arena_bytes, writable=True)
    arena.advise_huge(True)
    arena.prefault(huge=False, threads=1)  # or a page fault at each first touch, on an older kernel
    scratch = mmap.mmap(-1, SCRATCH_BYTES)
    return Memory(memoryview(arena), wanted.arena_fd, memoryview(scratch), secrets.token_bytes(16))


class Mover:
    """Serves one agent over `control`."""

    def __init__(self, control: socket.socket, backend: Backend | Service, memory: Memory) -> None:
        self._control = control
        self._backend = backend
        self._reads = Reads(backend, memory) if isinstance(backend, Backend) else None
        self._peers: dict[int, Peer] = {}
        self._readings: dict[int, Reading] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._unsent: deque[bytes] = deque()
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def serve(self) -> None:
        """Until the agent hangs up. Raises what no question may raise."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._bug)
        loop.add_reader(self._control, self._receive)
        await self._ended

    def _receive(self) -> None:
        try:
            while not self._ended.done():
                data = self._control.recv(MAX_MESSAGE_BYTES)
                if not data:
                    self._end(None)
                    return
                self._take(decode_question(data))
        except BlockingIOError:
            pass
        except (ConnectionError, msgspec.DecodeError) as error:
            self._end(None if isinstance(error, ConnectionError) else error)

    def _take(self, question: Question) -> None:
        match question:
            case Ping():
                self._send(Reply(question.ticket))
            case Read():
                self._begin_read(question)
            case Abort():
                reading = self._readings.get(question.ticket)
                if reading is not None:
                    reading.abort()
            case Connect():
                self._spawn(self._answer(question.ticket, self._connect(question), deadline_ns=question.deadline_ns))
            case Forget():
                self._spawn(self._answer(question.ticket, self._forget(question.peer)))
            case Call():
                self._spawn(self._answer(question.ticket, self._call(question), deadline_ns=question.deadline_ns))
            case Open():
                self._end(ValueError("opened twice"))

    async def _connect(self, question: Connect) -> bytes:
        """A peer that cannot be connected stays known, without a link, until it is forgotten."""
        if self._reads is None:
            raise ValueError("this mover runs a service, no transfers")
        memory = PeerMemory(question.incarnation, question.arena_bytes, question.descriptor)
        peer = self._peers.setdefault(question.peer, Peer(memory))
        link = await self._reads.connect(peer)
        return ",".join(link.lanes).encode()

    async def _forget(self, number: int) -> bytes:
        peer = self._peers.pop(number, None)
        if peer is not None and self._reads is not None:
            peer.forgotten = True
            await self._reads.drop(peer)
        return b""

    async def _call(self, question: Call) -> bytes:
        if not isinstance(self._backend, Service):
            raise ValueError("this mover's backend takes no calls")
        body: bytes = await self._backend.call(question.method, question.body)
        if len(body) > MAX_BODY_BYTES:
            raise ValueError(f"{question.method} answered {len(body)} bytes; at most {MAX_BODY_BYTES} fit")
        return body

    async def _answer(self, ticket: int, work: Coroutine[Any, Any, bytes], *, deadline_ns: int | None = None) -> None:
        left_s = None if deadline_ns is None else deadline_ns / 1e9 - time.monotonic()
        try:
            async with asyncio.timeout(left_s):
                body = await work
        except (OSError, ValueError) as error:
            failure = next(failure for kind, failure in _FAILURES if isinstance(error, kind))
            self._send(Reply(ticket, failure, str(error) or "not done in time"))
        else:
            self._send(Reply(ticket, body=body))

    def _begin_read(self, question: Read) -> None:
        """At once, not in a task: an Abort may be the very next message."""
        peer = self._peers.get(question.peer)
        if peer is None or self._reads is None:
            self._send(Reply(question.ticket, Failure.CONNECTION, "unknown peer"))
            return
        reading = self._readings[question.ticket] = self._reads.start(peer, question)
        self._spawn(self._end_read(question.ticket, reading))

    async def _end_read(self, ticket: int, reading: Reading) -> None:
        try:
            statuses = await reading.statuses()
            if statuses is not None:
                self._send(Done(ticket, statuses))
                return
            self._send(Late(ticket, bytes(reading.verdict)))
            await reading.settle()
            self._send(Settled(ticket))
        except ValueError as error:
            self._send(Reply(ticket, Failure.VALUE, str(error)))
        finally:
            del self._readings[ticket]

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._end(error)

    def _bug(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An exception in a callback, such as a library that can be progressed no more."""
        loop.default_exception_handler(context)
        self._end(context.get("exception") or RuntimeError(context["message"]))

    def _end(self, error: BaseException | None) -> None:
        if self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)

    def _send(self, answer: Answer) -> None:
        self._unsent.append(encode(answer))
        if len(self._unsent) == 1:
            self._flush()

    def _flush(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._unsent:
                self._control.send(self._unsent[0])
                self._unsent.popleft()
        except BlockingIOError:
            loop.add_writer(self._control, self._flush)
            return
        except ConnectionError:
            self._end(None)
            return
        loop.remove_writer(self._control)

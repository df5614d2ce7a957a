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
- The number of open questions is bounded.

Does not: talk to it (child.py), know what questions mean (peer_agent/transport/mover.py), or run inside the mover (main.py).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable

from kvdir.obs import trace
from kvdir.obs.logs import say, say_bug
from peer_agent.mover.backend import BackendError
from peer_agent.mover.child import Asked, MoverChild, MoverLost, MoverSpec
from peer_agent.mover.messages import Abort, Opened, Ping, Question

PING_S = 1.0
HANG_S = 3.0
CLOSE_S = 5.0
RESTART_S = 0.1
RESTART_MAX_S = 10.0
STABLE_S = 10.0
MAX_QUESTIONS = 1024

log = logging.getLogger(__name__)


class MoverProcess:
    """One mover after the other, of one kind. `start` once; `close` ends it."""

    def __init__(self, spec: MoverSpec) -> None:
        self._spec = spec
        self._child: MoverChild | None = None
        self._up = asyncio.Event()
        self._supervisor: asyncio.Task[None] | None = None
        self._tickets = itertools.count(1)
        self.starts = 0
        self.kills = 0
        self.last_end = ""

    async def start(self) -> Opened:
        """Waits for the first mover to be ready. Raises BackendError; close() is still due then."""
        child = await self._launch()
        self._supervisor = asyncio.create_task(
            self._supervise(child), name=f"mover-{self._spec.backend}", context=trace.detached()
        )
        self._supervisor.add_done_callback(self._unsupervised)
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

    async def reaped(self) -> None:
        """At once while a mover is up; else once the last one is dead. `ask` fails earlier: from when it has hung up."""
        if self._child is not None and self._child.gone.done():
            await asyncio.shield(self._child.reaped)

    async def close(self) -> None:
        """Ends the mover; every question under way ends as MoverLost. Idempotent."""
        if self._supervisor is not None and not self._supervisor.done():
            self._supervisor.cancel()
            await asyncio.wait({self._supervisor}, timeout=CLOSE_S)  # it may be waiting for one that does not die
        self._up.clear()
        if self._child is None:
            return
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._child.end()
        except TimeoutError:  # stuck in the kernel: what it may still write to stays unsettled
            say(log, logging.ERROR, "mover does not die", backend=self._spec.backend, pid=self._child.pid)

    async def _launch(self) -> MoverChild:
        try:
            child = self._child = MoverChild(self._spec)
        except OSError as error:
            raise BackendError(f"{self._spec.backend}: no mover process can be started: {error}") from error
        self.starts += 1
        try:
            await child.open()
        except BaseException:
            await child.end()
            raise
        self._up.set()
        return child

    async def _supervise(self, child: MoverChild) -> None:
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

    async def _relaunch(self, pause_s: float) -> tuple[MoverChild, float]:
        while True:
            await asyncio.sleep(pause_s)
            try:
                return await self._launch(), pause_s
            except BackendError as error:
                self.last_end = str(error)
                pause_s = min(pause_s * 2, RESTART_MAX_S)
                say(log, logging.WARNING, "mover did not start", backend=self._spec.backend, error=error, again_s=pause_s)

    async def _watch(self, child: MoverChild) -> None:
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

    def _unsupervised(self, supervisor: asyncio.Task[None]) -> None:
        self._up.clear()
        if not supervisor.cancelled() and (error := supervisor.exception()) is not None:
            say_bug(log, "supervision of the mover failed", error, backend=self._spec.backend)

"""The coordinator's side of its lookup workers: starts them, counts for them, starts dead ones again, ends them.

    starting -- "ready" --> up -- exit, or no sign of life for HANG_S --> (SIGKILL) --> reaped --> pause --> starting

Rules:
- a worker that does not start at first is an error of the configuration; later it is tried again, after pauses that double from
  RESTART_S to RESTART_MAX_S and are forgotten after a life of STABLE_S;
- the end of a worker costs its clients a new connection, to another process of this port, and the coordinator nothing;
- each worker has one task here, which owns its process; `close` awaits all of them, by force after the grace.
Does not: answer lookups (lookup_worker.py), or write the region (the directory's index does, and RegionRoster).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from pathlib import Path

import msgspec

from kvdir.errors import ConfigError
from kvdir.obs.logs import say
from kvdir.obs.process_figures import ProcessFigures, read
from kvdir.rpc.channel import MAX_STREAMS
from kvdir.server.config import CoordinatorConfig
from kvdir.server.lookup_worker import READY, WorkerSpec
from kvdir.server.shared_port import SharedPort
from kvdir.server.worker_place import WorkerPlace

START_S = 20.0
LOOK_S = 0.5
HANG_S = 3.0
RESTART_S = 0.1
RESTART_MAX_S = 10.0
STABLE_S = 10.0
END_S = 2.0

log = logging.getLogger("kvdir.workers")


class LookupWorkers:
    """`up`: those that serve now. restarts, kills: since the start."""

    def __init__(self, config: CoordinatorConfig, place: WorkerPlace, port: SharedPort) -> None:
        self._config = config
        self._place = place
        self._port = port
        self._supervisors: list[asyncio.Task[None]] = []
        self._processes: dict[int, Process] = {}
        self._counted: dict[int, ProcessFigures] = {}
        self._draining = False
        self.started = False
        self.up: set[int] = set()
        self.restarts = 0
        self.kills = 0

    @property
    def port(self) -> int:
        """Which the coordinator has to listen on, too."""
        return self._port.port

    async def start(self) -> None:
        """All of them, ready. Raises ConfigError; `close` is due in any case."""
        numbers = range(self._config.lookup_workers)
        started = await asyncio.gather(*(self._launch(number) for number in numbers), return_exceptions=True)
        for outcome in started:
            if isinstance(outcome, OSError):
                raise ConfigError([f"lookup_workers: no process can be started: {outcome}"]) from outcome
            if isinstance(outcome, BaseException):
                raise outcome
        self.started = True
        for number in numbers:
            self._supervisors.append(asyncio.create_task(self._supervise(number), name=f"lookup worker {number}"))

    def pids(self) -> dict[int, int]:
        """By number, of those that live."""
        return {number: process.pid for number, process in self._processes.items()}

    def figures(self) -> list[ProcessFigures]:
        """What each has counted so far, over all its lives; as last read where that cannot be, for counters never fall."""
        for number in range(self._config.lookup_workers):
            if (found := read(self._place.figures(number))) is not None:
                self._counted[number] = found
        return list(self._counted.values())

    def fault(self) -> str:
        """Which workers are missing, in words; the coordinator serves without them."""
        missing = self._config.lookup_workers - len(self.up)
        return f"({missing} of {self._config.lookup_workers} lookup workers are down)" if missing else ""

    def drain(self) -> None:
        """Tells all to end: their clients go elsewhere, calls under way finish within the grace. None is started any more."""
        self._draining = True
        for supervisor in self._supervisors:
            supervisor.cancel()
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.terminate()

    async def close(self) -> None:
        """Drains, and waits until all have ended, killing those that take longer than the grace."""
        if not self._draining:
            self.drain()
        await asyncio.gather(*self._supervisors, return_exceptions=True)
        await asyncio.gather(*(self._end(number) for number in tuple(self._processes)))

    async def kill(self) -> None:
        """Ends those that still live, at once."""
        await asyncio.gather(*(self._kill(number) for number in tuple(self._processes)))

    async def _launch(self, number: int) -> None:
        spec = msgspec.json.encode(self._spec(number)).decode()
        # The same code as here, whatever lies in the directory that we were started in: -P, and our own path.
        command = [sys.executable, "-P", "-m", "kvdir.server.lookup_worker", spec]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        process = await asyncio.create_subprocess_exec(*command, stdin=DEVNULL, stdout=PIPE, env=env)
        self._processes[number] = process
        assert process.stdout is not None
        try:
            async with asyncio.timeout(START_S):
                said = await process.stdout.readline()
        except TimeoutError:
            said = b""
        if said != READY:
            await self._kill(number)
            raise ConfigError([f"lookup_workers: worker {number} did not start; its last words are above, in the log"])
        self.up.add(number)

    def _spec(self, number: int) -> WorkerSpec:
        config, place = self._config, self._place
        return WorkerSpec(
            number=number,
            parent=os.getpid(),
            listen=self._port.address,
            index=str(place.path / "index"),
            main=place.socket,
            main_connections=2 + (config.max_streams + config.max_watchers) // MAX_STREAMS,
            figures=str(place.figures(number)),
            max_fingerprints=config.max_fingerprints,
            max_message_bytes=config.max_message_bytes,
            max_lookup_streams=config.max_lookup_streams,
            max_deadline_s=config.max_deadline_s,
            grace_s=config.grace_s,
            log_level=config.log_level,
            log_format=config.log_format,
            otlp_endpoint=config.otlp_endpoint,
            trace_ratio=config.trace_ratio,
            name=config.name or socket.gethostname(),
            secured=bool(config.tls_cert),
            policy=str(Path(config.policy).absolute()) if config.policy else "",
            max_requests_per_s=config.max_requests_per_s,
            max_streams_per_identity=config.max_streams_per_identity,
            tls=config.tls,
        )

    async def _supervise(self, number: int) -> None:
        pause_s = RESTART_S
        while True:
            began_s = time.monotonic()
            why = await self._watch(number)
            self.up.discard(number)
            self.restarts += 1
            if time.monotonic() - began_s > STABLE_S:
                pause_s = RESTART_S
            say(log, logging.WARNING, "lookup worker ended", number=number, why=why, again_s=pause_s)
            pause_s = await self._relaunch(number, pause_s)

    async def _relaunch(self, number: int, pause_s: float) -> float:
        """Returns the next pause."""
        while True:
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, RESTART_MAX_S)
            try:
                await self._launch(number)
            except (ConfigError, OSError) as error:
                say(log, logging.WARNING, "lookup worker did not start", number=number, error=error, again_s=pause_s)
            else:
                return pause_s

    async def _watch(self, number: int) -> str:
        """Until it has ended, or had to be ended. Returns why."""
        process = self._processes[number]
        ended = asyncio.create_task(process.wait())
        silent_looks = 0
        try:
            while not ended.done():
                await asyncio.wait({ended}, timeout=LOOK_S)
                silent_looks = silent_looks + 1 if self._silent_s(number) > HANG_S else 0
                if not ended.done() and silent_looks > 1:  # once: we may all have been stopped, and it had no turn yet
                    self.kills += 1
                    await self._kill(number)
                    return f"no sign of life for {HANG_S:g} s"
        finally:
            ended.cancel()
        self._processes.pop(number, None)
        return f"exit code {process.returncode}"

    def _silent_s(self, number: int) -> float:
        figures = read(self._place.figures(number))
        return 0.0 if figures is None else (time.monotonic_ns() - figures.alive_ns) / 1e9

    async def _kill(self, number: int) -> None:
        process = self._processes.pop(number)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()

    async def _end(self, number: int) -> None:
        try:
            async with asyncio.timeout(self._config.grace_s + END_S):
                await self._processes[number].wait()
        except TimeoutError:
            await self._kill(number)
        self._processes.pop(number, None)
        self.up.discard(number)

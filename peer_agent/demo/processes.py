"""One child process of the demo: started, heard to be ready, and ended by its pid whatever happens.

Rules: a child says that it is ready by one JSON line on stdout (`--output json`); stderr goes to a log file whose end is shown
when it fails. It has a session of its own, so that Ctrl-C reaches only the demo, which then ends it; and the kernel ends
it (PR_SET_PDEATHSIG, prctl(2)) should the demo itself be killed. Variables of our own prefixes are not handed down,
because the demo is to run the same everywhere. Does not: know what it starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvdir.cli.output import CommandFailed, Exit

LOG_TAIL_LINES = 12
OWN_PREFIXES = ("KVDIR_", "PEER_AGENT_")

# Runs before the program, in its process: asks for SIGTERM when the parent ends, then becomes the program.
GUARD = """
import ctypes, os, sys
parent = int(sys.argv[1])
ctypes.CDLL(None).prctl(1, 15)
if os.getppid() != parent:
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


class Child:
    """A running process. `ready`: what it said when it was."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self.log = log
        self.ready: dict[str, Any] = {}
        self._process = process

    @classmethod
    async def start(
        cls, name: str, arguments: Sequence[str], *, log: Path, ready_s: float, prefix: Sequence[str] = ()
    ) -> Child:
        """Starts `python arguments...` and waits for the ready line. CommandFailed with the end of the log otherwise.

        prefix: a command that runs the one behind it in its own place, say in another network namespace.
        """
        guarded = ["-I", "-S", "-c", GUARD, str(os.getpid()), sys.executable, *arguments]
        with log.open("ab") as stderr:
            process = await asyncio.create_subprocess_exec(
                *prefix,
                sys.executable,
                *guarded,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                env={name: value for name, value in os.environ.items() if not name.startswith(OWN_PREFIXES)},
                start_new_session=True,
            )
        child = cls(name, process, log)
        try:
            child.ready = await child._hear_ready(ready_s)
        except BaseException:
            await child.end(grace_s=0)
            raise
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    async def kill(self) -> None:
        """SIGKILL, and waits until it is gone."""
        await self.end(grace_s=0)

    async def end(self, *, grace_s: float) -> int:
        """SIGTERM, after `grace_s` SIGKILL; returns the exit status. Safe to call again, and it always waits for the end."""
        if self.running and grace_s > 0:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    return await self._process.wait()
        if self.running:
            self._signal(signal.SIGKILL)
        return await self._process.wait()

    def log_tail(self) -> str:
        """The last lines it wrote to stderr."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(f"  {line}" for line in lines[-LOG_TAIL_LINES:])

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def _hear_ready(self, ready_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(ready_s):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise self._failed(f"was not ready within {ready_s:g} s") from None
        try:
            said = msgspec.json.decode(line)
        except msgspec.DecodeError:
            said = None
        if not isinstance(said, dict) or "error" in said:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await self._process.wait()
            raise self._failed(f"did not start (exit status {self._process.returncode})")
        return said

    def _failed(self, what: str) -> CommandFailed:
        return CommandFailed(f"{self.name} {what}; the end of its log:\n{self.log_tail()}", exit=Exit.START, slug="start")

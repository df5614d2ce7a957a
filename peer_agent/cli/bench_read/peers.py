"""Other libraries as subjects: NIXL and Mooncake Transfer Engine, each with an owner and a reader process of its own.

The processes run peer_program.py under a Python that has the library, and talk JSON lines with us. They map the same two arena
files that our planes use, so everybody moves the same blocks between the same pages. A library that is missing, does not start
or crashes is left out with its reason; the bench goes on. Outside of their turns the processes are stopped (SIGSTOP): NIXL
polls all the time, and on few cores everybody else would pay for it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peer_agent.cli.bench_read.cells import Request, packed_offset, size_class
from peer_agent.cli.bench_read.owner import DEADLINE_S
from peer_agent.cli.bench_read.subjects import Packed, SubjectFailed
from peer_agent.memory.arena import Arena
from peer_agent.memory.layout import HEADER_BYTES

PROGRAM = Path(__file__).with_name("peer_program.py")


@dataclass(frozen=True, slots=True)
class PeerSetup:
    """A library and how it is tuned. `environment` is added to ours."""

    name: str
    library: str
    says: str
    environment: Mapping[str, str] = field(default_factory=dict)


_NIXL = {"UCX_NET_DEVICES": "lo", "NIXL_LOG_LEVEL": "ERROR", "UCX_LOG_LEVEL": "error"}
_POLLING = "its progress threads off, both sides polling"

SETUPS = (
    PeerSetup("raw_nixl_default", "nixl-threads", "NIXL as installed, all lanes it finds on one host", _NIXL),
    PeerSetup("raw_nixl", "nixl", f"NIXL, all lanes it finds on one host; {_POLLING}", _NIXL),
    PeerSetup("raw_nixl_tcp", "nixl", f"NIXL over TCP; {_POLLING}", {**_NIXL, "UCX_TLS": "tcp"}),
    PeerSetup(
        "raw_nixl_tcp_tuned",
        "nixl",
        f"NIXL over TCP, 64 KiB segments; {_POLLING}",
        {**_NIXL, "UCX_TLS": "tcp", "UCX_TCP_TX_SEG_SIZE": "64K"},
    ),
    PeerSetup("mooncake", "mooncake", "Mooncake Transfer Engine over TCP as installed"),
    PeerSetup(
        "mooncake_tuned",
        "mooncake",
        "Mooncake over TCP, connection pool, 1 MiB slices",
        {"MC_TCP_ENABLE_CONNECTION_POOL": "1", "MC_SLICE_SIZE": str(1 << 20)},
    ),
)


class PeerProcess:
    """One side: a child that answers each JSON line with one, `{"ok": ...}` or `{"error": "..."}`."""

    def __init__(self, process: asyncio.subprocess.Process, log: Any) -> None:
        self._process = process
        self._log = log
        self.pid = process.pid

    @classmethod
    async def start(cls, python: str, setup: PeerSetup, side: str) -> PeerProcess:
        log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        process = await asyncio.create_subprocess_exec(
            python,
            str(PROGRAM),
            setup.library,
            side,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env={**os.environ, **_library_path(python, setup.library), **setup.environment},
            limit=1 << 24,
        )
        return cls(process, log)

    async def ask(self, **message: Any) -> Any:
        """Raises SubjectFailed: it said so, ended, or did not answer in time."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(DEADLINE_S):
                self._process.stdin.write(json.dumps(message).encode() + b"\n")
                await self._process.stdin.drain()
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise SubjectFailed(f"no answer to {message['do']!r} within {DEADLINE_S:.0f} s") from None
        except ConnectionError:
            line = b""
        if not line:
            raise SubjectFailed(await self._epitaph(message["do"]))
        answer = json.loads(line)
        if "error" in answer:
            raise SubjectFailed(answer["error"])
        return answer["ok"]

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def close(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        self._log.close()

    async def _epitaph(self, doing: str) -> str:
        with suppress(TimeoutError):
            async with asyncio.timeout(1):
                await self._process.wait()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines() or ["it said nothing"]
        return f"ended with {self._process.returncode} while asked to {doing}: {lines[-1]}"


class Peer(Packed):
    """One library, reading through its own two processes."""

    kind = "peer"

    def __init__(self, setup: PeerSetup, owning: PeerProcess, reading: PeerProcess, reader: Arena) -> None:
        super().__init__(reader, setup.name, reader_pids=(reading.pid,), owner_pids=(owning.pid,))
        self._reading = reading
        self._processes = (owning, reading)

    @classmethod
    async def open(cls, setup: PeerSetup, python: str, *, owner: Arena, reader: Arena) -> Peer:
        """Raises SubjectFailed: not installed, or does not start."""
        owner_process = await PeerProcess.start(python, setup, "owner")
        peer = cls(setup, owner_process, await PeerProcess.start(python, setup, "reader"), reader)
        try:
            offer = await owner_process.ask(do="serve", path=owner.path)
            await peer._reading.ask(do="connect", path=reader.path, offer=offer)
        except BaseException:
            await peer.close()
            raise
        peer.pause()
        return peer

    async def prepare(self, block_bytes: int, blocks: int, owner: Arena) -> None:
        """Descriptors of all slots of a size are made once, outside of the timed part. The caller has resumed it."""
        of = size_class(owner, block_bytes)
        await self._reading.ask(
            do="prepare",
            first=of.first + HEADER_BYTES,
            stride=of.stride,
            slots=of.slots,
            length=block_bytes,
            blocks=blocks,
            into=packed_offset(self._reader),
        )

    def resume(self) -> None:
        for process in self._processes:
            process.signal(signal.SIGCONT)

    def pause(self) -> None:
        for process in self._processes:
            process.signal(signal.SIGSTOP)

    async def run(self, request: Request) -> float:
        """What a stopped process pays for waking is not its library's: one block is read before, untimed."""
        await self._reading.ask(do="read", slots=request.slots[:1])
        return float(await self._reading.ask(do="read", slots=list(request.slots)))

    async def close(self) -> None:
        for process in self._processes:
            await process.close()


def _library_path(python: str, library: str) -> dict[str, str]:
    """Mooncake needs a libibverbs that must be hidden from NIXL: taken from `system/` beside bin/, if it is there."""
    found = sorted({str(file.parent) for file in (Path(python).parent.parent / "system").glob("**/lib*.so*")})
    if library != "mooncake" or not found:
        return {}
    return {"LD_LIBRARY_PATH": ":".join([*found, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])}

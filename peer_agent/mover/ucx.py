"""UCX in the mover: one worker (csrc/worker.hpp) on the event loop, gets over RDMA lanes.

Descriptor part, little endian:

    u8 layout version (1) | u8 UCX major | u8 UCX minor | u8 1: emulated lanes | u16 n | n B worker address | remote key

Rules:
- Versions are compared before anything of the peer's reaches UCX: both sides 1.19 or newer, of the same major.
- A link exists only after the peer's mover has confirmed its incarnation (worker.hpp says why) and its lanes have passed
  lanes.py.
- The worker sleeps on its event descriptor; while there is work it is progressed in slices of SLICE_NS between other events.

Settings: library (path of libucp), emulated (lanes for TESTING ONLY, such as "tcp"), gpu ("1": CUDA lanes too; nothing sets
it, since no plane moves device memory yet), and UCX_* for UCX itself, which like the environment cannot overrule the lanes.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from peer_agent.mover import _ucx, lanes, libucp
from peer_agent.mover.backend import Backend, BackendError, Gets, Link, Memory, PeerMemory, Settings

SLICE_NS = 500_000
MINIMUM = (1, 19)
_HEAD = struct.Struct("<BBBBH")
_LAYOUT = 1

T = TypeVar("T")


class UcxBackend(Backend):
    """One worker for all peers of this agent."""

    def __init__(self, settings: Settings) -> None:
        self._library = settings.get("library", "")
        self._emulated = settings.get("emulated", "")
        self._gpu = settings.get("gpu") == "1"
        self._extra = {name.removeprefix("UCX_"): value for name, value in settings.items() if name.startswith("UCX_")}
        self._version = (0, 0, 0)
        self._worker: _ucx.Worker
        self._tickets = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[int]] = {}
        self._due = False
        self._memory: Memory

    async def open(self, memory: Memory) -> bytes:
        self._memory = memory
        path = self._load()
        chosen = self._settings()
        pinned_bytes = len(memory.arena) + len(memory.scratch)
        if not self._emulated and (faults := libucp.rdma_faults(path, pinned_bytes=pinned_bytes)):
            raise BackendError(*faults)
        try:
            self._worker = _ucx.Worker(path, tuple(chosen.items()), memory.incarnation)
            key = self._worker.map(memory.arena_address, len(memory.arena), True)
            self._worker.map(memory.scratch_address, len(memory.scratch), False)
        except RuntimeError as error:
            raise BackendError(f"ucx: {error} (UCX_TLS={chosen['TLS']}, RDMA devices: {_devices()})") from error
        asyncio.get_running_loop().add_reader(self._worker.fileno(), self._progress)
        self._progress()
        address = self._worker.address()
        major, minor, _ = self._version
        head = _HEAD.pack(_LAYOUT, major, minor, bool(self._emulated), len(address))
        return head + address + key

    async def connect(self, peer: PeerMemory) -> Link:
        wanted = _Descriptor.parse(peer.descriptor)
        self._compare(wanted)
        try:
            number, answered = self._begin(
                lambda ticket: self._worker.connect(wanted.address, wanted.key, peer.incarnation, ticket)
            )
        except RuntimeError as error:
            raise ConnectionError(f"{error}; does a lane lead there ({self._emulated or 'RDMA'})?") from error
        link = UcxLink(self, number)
        try:
            status = await answered
            if status != 0:
                raise ConnectionError(f"the peer's mover does not take us: {self.reason(status)}; it may have restarted")
            link.lanes = self._check_lanes(number)
        except BaseException:
            self._begin(partial(self._worker.close, number))  # nothing was got over it, so nobody needs to wait for its end
            raise
        return link

    def about(self) -> dict[str, str]:
        version = ".".join(map(str, self._version))
        return {"library": f"UCX {version}", "path": self._library, "emulated": self._emulated, "devices": _devices()}

    async def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._worker.fileno())

    # for UcxLink

    async def get(self, link: int, gets: Gets) -> int:
        _, ended = self._begin(lambda ticket: self._worker.get(link, gets.local, gets.remote, gets.lengths, ticket))
        return await ended

    async def end(self, link: int) -> None:
        _, ended = self._begin(lambda ticket: self._worker.close(link, ticket))
        await ended

    def failed(self, link: int) -> bool:
        return self._worker.failed(link)

    def reason(self, status: int) -> str:
        return self._worker.reason(status)

    def _load(self) -> str:
        # Read by UCX when it is loaded: its signal handlers would hold a dying mover back.
        os.environ.update(UCX_HANDLE_ERRORS="none", UCX_ERROR_SIGNALS="", UCX_WARN_UNUSED_ENV_VARS="n")
        self._library = path = libucp.find_libucp(self._library)
        if not path:
            raise BackendError(f"ucx: no libucp on this machine; {libucp.INSTALL}")
        try:
            self._version = _ucx.version(path)
        except RuntimeError as error:
            raise BackendError(f"ucx: {path} cannot be used: {error}; {libucp.INSTALL}") from error
        return path

    def _settings(self) -> dict[str, str]:
        """Of UCX; what the environment says is not in here unless it must not count."""
        defaults = lanes.defaults(emulated=self._emulated)
        open_ones = {name: value for name, value in defaults.items() if f"UCX_{name}" not in os.environ}
        return open_ones | self._extra | lanes.enforced(emulated=self._emulated, gpu=self._gpu)

    def _compare(self, peer: _Descriptor) -> None:
        """ConnectionError unless both sides can read each other's keys."""
        theirs, ours = (peer.major, peer.minor), self._version[:2]
        if theirs < MINIMUM or theirs[0] != ours[0]:
            older = "the peer's" if theirs < ours else "this node's"
            raise ConnectionError(
                f"the peer has UCX {theirs[0]}.{theirs[1]}, we have {ours[0]}.{ours[1]}; upgrade {older} "
                f"(both need {MINIMUM[0]}.{MINIMUM[1]} or newer of one major)"
            )
        if peer.emulated and not self._emulated:
            raise ConnectionError("the peer serves emulated lanes (allow_emulated_rma, for tests); we use RDMA only")

    def _check_lanes(self, link: int) -> tuple[str, ...]:
        if self._worker.failed(link):  # behind its welcome; UCX is asked nothing about such an endpoint
            raise ConnectionError("the peer's mover has gone")
        found = self._worker.lanes(link)
        forbidden = [] if self._emulated else lanes.refused(transport for transport, _ in found)
        if forbidden:
            raise ConnectionError(f"UCX chose lanes on which gets are emulated ({', '.join(forbidden)}); only RDMA is allowed")
        return tuple(dict.fromkeys(f"{transport}/{device}" for transport, device in found))

    def _begin(self, call: Callable[[int], T]) -> tuple[T, asyncio.Future[int]]:
        """What `call` of a new ticket returns, and the status that the ticket will end with."""
        ticket = next(self._tickets)
        answer = call(ticket)
        ended = self._waiting[ticket] = asyncio.get_running_loop().create_future()
        self._progress_soon()
        return answer, ended

    def _progress(self) -> None:
        idle, ended = self._worker.progress(SLICE_NS)
        for ticket, status in ended:
            future = self._waiting.pop(ticket, None)
            if future is not None and not future.done():
                future.set_result(status)
        if not idle:
            self._progress_soon()

    def _progress_soon(self) -> None:
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._progress_due)

    def _progress_due(self) -> None:
        self._due = False
        self._progress()


class UcxLink(Link):
    """One endpoint."""

    lanes: tuple[str, ...] = ()

    def __init__(self, backend: UcxBackend, number: int) -> None:
        self._backend = backend
        self._number = number

    @property
    def broken(self) -> bool:
        return self._backend.failed(self._number)

    async def gets(self, gets: Gets) -> None:
        status = await self._backend.get(self._number, gets)
        if status != 0:
            raise ConnectionError(f"UCX: {self._backend.reason(status)}")

    async def close(self) -> None:
        await self._backend.end(self._number)


@dataclass(frozen=True, slots=True)
class _Descriptor:
    major: int
    minor: int
    emulated: bool
    address: bytes
    key: bytes

    @classmethod
    def parse(cls, data: bytes) -> _Descriptor:
        """ValueError for garbage."""
        if len(data) <= _HEAD.size or data[0] != _LAYOUT:
            raise ValueError(f"not a UCX descriptor of layout {_LAYOUT}: {len(data)} bytes")
        _, major, minor, emulated, length = _HEAD.unpack_from(data)
        address, key = data[_HEAD.size : _HEAD.size + length], data[_HEAD.size + length :]
        if not address or len(address) != length or not key:
            raise ValueError("UCX descriptor without a whole address and key")
        return cls(major, minor, emulated == 1, address, key)


def _devices() -> str:
    return ", ".join(libucp.rdma_devices()) or "none"

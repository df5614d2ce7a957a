"""NIXL in the mover: for machines whose engine image brings NIXL, and no other UCX that could be used.

Descriptor part, little endian:

    u8 layout version (1) | u8 1: emulated lanes | u8 n | n B NIXL version | u64 address of the arena |
    u64 address of the identity | the rest: NIXL's agent metadata, without the agent's name that it begins with

Rules:
- NIXL tells nobody when a transfer that was given up has stopped writing: after `releaseXferReq` late bytes still landed. So
  it is given up by waiting for its end, SETTLE_S at most; then only a dead process is proof, and `close` raises Unsettled,
  which ends this mover. Other peers' reads are lost with it: where both can be had, the ucx plane is the better one.
- Its progress thread sleeps on UCX's event descriptor and wakes every PROGRESS_MS besides. (NIXL's own Python face hard-codes a
  delay of 0, with which that thread takes a whole core; therefore the bindings underneath are used.) There is no event for
  a transfer's end: it is asked for in each turn of the loop for SPIN_S, then after pauses that grow.
- Remote agents are added and removed one at a time, each once, however many links share it. Every one gets a name of its own
  from us: NIXL refuses a name that is taken, and for ever one whose metadata was bad once, so that a peer could cut us off from
  another one by naming it.
- A link exists only after the peer's identity, 16 bytes in a page of its mover, has been read and is the one we look for.
- Lanes are restricted for UCX as a whole (lanes.py). NIXL does not say which ones an endpoint took.

Settings: emulated (lanes of UCX that are no RDMA, such as "tcp": TESTING ONLY), gpu ("1": CUDA lanes too), and UCX_* for UCX
itself, which cannot overrule the lanes.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import itertools
import mmap
import os
import struct
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from peer_agent.mover import lanes
from peer_agent.mover.backend import Backend, BackendError, Gets, Link, Memory, PeerMemory, Settings, address_of
from peer_agent.mover.nixl_lists import Grid, Handle, rows

SETTLE_S = 0.5
SPIN_S = 0.0005
PAUSES_S = (0.001, 0.01)
PROGRESS_MS = 20

DISTRIBUTIONS = ("nixl", "nixl-cu12", "nixl-cu13")
INSTALL = (
    "use the engine image's own NIXL, or pip install --no-deps nixl-cu12 (with its dependencies it brings gigabytes of torch "
    "that nobody needs here)"
)
_HEAD = struct.Struct("<BBB")
_ADDRESSES = struct.Struct("<QQ")
_LAYOUT = 1
_IDENTITY_BYTES = 16
_LANDINGS = 4096
_MAX_METADATA_BYTES = 14 << 10


class Unsettled(Exception):
    """Something may still write and nothing but the end of this process can stop it."""


class NixlBackend(Backend):
    """One NIXL agent for all peers of this kvdir agent."""

    def __init__(self, settings: Settings) -> None:
        emulated = settings.get("emulated", "")
        named = {name.removeprefix("UCX_"): value for name, value in settings.items() if name.startswith("UCX_")}
        self._ucx = (
            lanes.defaults(emulated=emulated) | named | lanes.enforced(emulated=emulated, gpu=settings.get("gpu") == "1")
        )
        self._tls = self._ucx["TLS"]
        self._emulated = bool(emulated)
        self._remotes: dict[PeerMemory, Remote] = {}
        self._numbers = itertools.count(1)

    async def open(self, memory: Memory) -> bytes:
        os.environ.update({f"UCX_{name}": value for name, value in self._ucx.items()})  # read when NIXL loads UCX, below
        self._bindings, self._version = _load()
        page = memoryview(mmap.mmap(-1, _IDENTITY_BYTES * (1 + _LANDINGS)))
        page[:_IDENTITY_BYTES] = memory.incarnation
        self._page, self._landings = page, itertools.count()
        regions = [memory.arena, memory.scratch, page]
        try:
            self._agent = self._make_agent(name := f"kvdir-{memory.incarnation.hex()}")
            for region in regions:
                where = [(address_of(region), len(region), 0, "")]
                self._agent.registerMem(self._bindings.nixlRegDList(self._bindings.DRAM_SEG, where), [])
            metadata = bytes(self._agent.getLocalMD())
        except Exception as error:  # NIXL's exceptions have no common base
            raise BackendError(f"nixl: {self._version} cannot start here: {error!r} ({self._missing()})") from error
        if not metadata.startswith(_prefix(name)):
            raise BackendError(f"nixl: metadata of version {self._version} begins otherwise than we know; {INSTALL}")
        if len(metadata) > _MAX_METADATA_BYTES:
            raise BackendError(f"nixl: {len(metadata)} bytes of metadata do not fit; name fewer devices in UCX_NET_DEVICES")
        ours = self._bindings.NIXL_INIT_AGENT
        self._grids = [Grid(self._bindings, self._agent, ours, address_of(region), len(region)) for region in regions]
        version = self._version.encode()
        head = _HEAD.pack(_LAYOUT, self._emulated, len(version)) + version
        return head + _ADDRESSES.pack(memory.arena_address, address_of(page)) + metadata[len(_prefix(name)) :]

    async def connect(self, peer: PeerMemory) -> Link:
        wanted = _Descriptor.parse(peer.descriptor)
        self._compare(wanted)
        remote = self._remotes.get(peer)
        if remote is None or remote.broken:
            remote = self._remotes[peer] = self._add(wanted, peer)
        remote.links += 1
        link = NixlLink(self, remote)
        try:
            await self._recognise(remote, wanted.identity_address, peer.incarnation)
        except BaseException:
            await link.close()
            raise
        return link

    def about(self) -> dict[str, str]:
        return {"library": f"NIXL {self._version}", "emulated": str(int(self._emulated)), "lanes": self._tls}

    async def close(self) -> None:
        """The end of the process is what frees NIXL's things; its destructors crash beside a system libibverbs."""

    # for links

    @property
    def lanes(self) -> tuple[str, ...]:
        return (f"one of {self._tls}",)

    def request(self, remote: Remote, gets: Gets) -> Handle:
        """A transfer of all of them, from prepared lists where all lie on the grid of slots, else described one by one.

        Raises what NIXL raises, such as for memory that the peer's descriptor does not have.
        """
        there, here, lengths = (np.frombuffer(packed, "<u8") for packed in (gets.remote, gets.local, gets.lengths))
        ours = next(grid for grid in self._grids if grid.holds(int(here[0])))
        length = int(lengths[0])
        if (lengths == length).all():
            local, distant = ours.find(here - np.uint64(ours.base), length), remote.grid.find(there, length)
            if local is not None and distant is not None:
                return int(self._agent.makeXferReq(self._bindings.NIXL_READ, *local, *distant, b"", [], False))
        return self._described(remote.name, here, there + np.uint64(remote.grid.base), lengths)

    async def transfer(self, remote: Remote, handle: Handle) -> None:
        """Returns when it has ended well. ConnectionError: its endpoint has failed, which ends what was under way on it."""
        bindings = self._bindings
        begun_s = time.monotonic()
        try:
            state = self._agent.postXferReq(handle, b"")
            while state == bindings.NIXL_IN_PROG:
                await asyncio.sleep(_pause_s(time.monotonic() - begun_s))
                state = self._agent.getXferStatus(handle)
        except Exception as error:
            remote.broken = True
            raise ConnectionError(f"NIXL: {error!r}") from error
        if state != bindings.NIXL_SUCCESS:
            remote.broken = True
            raise ConnectionError(f"NIXL: a transfer ended in state {state}")

    def release(self, handle: Handle) -> None:
        self._agent.releaseXferReq(handle)

    async def leave(self, remote: Remote) -> None:
        """One link less; the last one takes the remote agent with it. Raises Unsettled."""
        remote.links -= 1
        if remote.links == 0:
            if self._remotes.get(remote.peer) is remote:
                del self._remotes[remote.peer]
            await remote.remove()

    # parts

    def _make_agent(self, name: str) -> Any:
        config = self._bindings.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = PROGRESS_MS * 1000
        config.useListenThread = False
        config.syncMode = self._bindings.NIXL_THREAD_SYNC_STRICT
        agent = self._bindings.nixlAgent(name, config)
        agent.createBackend("UCX", {})
        return agent

    def _missing(self) -> str:
        devices = sorted(os.listdir("/sys/class/infiniband")) if os.path.isdir("/sys/class/infiniband") else []
        return f"lanes {self._tls}; RDMA devices: {', '.join(devices) or 'none'}; RDMA also needs memlock for the whole arena"

    def _compare(self, peer: _Descriptor) -> None:
        """NIXL promises nothing about metadata of another version."""
        theirs, ours = peer.version.split(".")[:2], self._version.split(".")[:2]
        if theirs != ours:
            older = "the peer's" if theirs < ours else "this node's"
            raise ConnectionError(f"the peer has NIXL {peer.version}, we have {self._version}; upgrade {older}")
        if peer.emulated and not self._emulated:
            raise ConnectionError("the peer serves emulated lanes (allow_emulated_rma, for tests); we use RDMA only")

    def _add(self, wanted: _Descriptor, peer: PeerMemory) -> Remote:
        name = f"kvdir-{peer.incarnation.hex()}-{next(self._numbers)}"
        try:
            self._agent.loadRemoteMD(_prefix(name) + wanted.metadata)
        except Exception as error:
            raise ConnectionError(f"NIXL does not take the peer's metadata: {error!r}") from error
        grid = Grid(self._bindings, self._agent, name, wanted.arena_address, peer.arena_bytes)
        return Remote(self._agent, name, peer, grid)

    async def _recognise(self, remote: Remote, identity_address: int, incarnation: bytes) -> None:
        """Reads the peer's identity. Landings are used again: a late one brings this very peer's identity, or a wrong one."""
        at = _IDENTITY_BYTES * (1 + next(self._landings) % _LANDINGS)
        here, there, length = (
            np.array([value], "<u8") for value in (address_of(self._page) + at, identity_address, _IDENTITY_BYTES)
        )
        try:
            handle = self._described(remote.name, here, there, length)
        except Exception as error:
            raise ConnectionError(f"NIXL: the peer's identity cannot be read: {error!r}") from error
        try:
            await self.transfer(remote, handle)
        finally:
            self.release(handle)
        if self._page[at : at + _IDENTITY_BYTES] != incarnation:
            raise ConnectionError("the peer's mover has another incarnation; ask it again")

    def _described(self, name: str, here: Any, there: Any, lengths: Any) -> Handle:
        bindings = self._bindings
        ours, theirs = (bindings.nixlXferDList(bindings.DRAM_SEG, rows(side, lengths)) for side in (here, there))
        return int(self._agent.createXferReq(bindings.NIXL_READ, ours, theirs, name, b"", []))


class Remote:
    """A peer's agent as ours knows it. under_way: a future for each transfer that may write into slots, and whose it is."""

    def __init__(self, agent: Any, name: str, peer: PeerMemory, grid: Grid) -> None:
        self.name = name
        self.peer = peer
        self.grid = grid
        self.links = 0
        self.broken = False
        self.under_way: dict[asyncio.Future[None], NixlLink] = {}
        self._agent = agent

    async def remove(self) -> None:
        """Disconnects, once nothing is under way. Raises Unsettled."""
        await _ended(self.under_way)
        self.broken = True
        self.grid.close()
        self._agent.invalidateRemoteMD(self.name)


class NixlLink(Link):
    def __init__(self, backend: NixlBackend, remote: Remote) -> None:
        self._backend = backend
        self._remote = remote
        self._closed = False

    @property
    def lanes(self) -> tuple[str, ...]:
        return self._backend.lanes

    @property
    def broken(self) -> bool:
        return self._closed or self._remote.broken

    async def gets(self, gets: Gets) -> None:
        if self.broken:
            raise ConnectionError("closed, or the peer is gone")
        try:
            handle = self._backend.request(self._remote, gets)
        except Exception as error:
            raise ConnectionError(f"NIXL: {error!r}") from error
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._remote.under_way[ended] = self
        try:
            await self._backend.transfer(self._remote, handle)
        finally:
            self._backend.release(handle)
            del self._remote.under_way[ended]
            ended.set_result(None)
        if self._closed:
            raise ConnectionError("closed")

    async def close(self) -> None:
        """Raises Unsettled."""
        if self._closed:
            return
        self._closed = True
        await _ended([future for future, link in self._remote.under_way.items() if link is self])
        await self._backend.leave(self._remote)


async def _ended(under_way: Iterable[asyncio.Future[None]]) -> None:
    """Waits for transfers to end by themselves. Raises Unsettled."""
    left = set(under_way)
    if left and (await asyncio.wait(left, timeout=SETTLE_S))[1]:
        raise Unsettled(f"NIXL still has a transfer under way {SETTLE_S} s after it was given up")


@dataclass(frozen=True, slots=True)
class _Descriptor:
    version: str
    emulated: bool
    arena_address: int
    identity_address: int
    metadata: bytes

    @classmethod
    def parse(cls, data: bytes) -> _Descriptor:
        """ValueError for garbage."""
        if len(data) < _HEAD.size or data[0] != _LAYOUT:
            raise ValueError("not a nixl descriptor")
        _, emulated, length = _HEAD.unpack_from(data)
        at = _HEAD.size + length
        if len(data) <= at + _ADDRESSES.size:
            raise ValueError("a nixl descriptor that was cut")
        arena_address, identity_address = _ADDRESSES.unpack_from(data, at)
        version = data[_HEAD.size : at].decode()  # UnicodeDecodeError is a ValueError
        return cls(version, emulated == 1, arena_address, identity_address, data[at + _ADDRESSES.size :])


def _prefix(name: str) -> bytes:
    """What NIXL's metadata of an agent begins with."""
    return b"nixlSerDes|Agent" + len(name).to_bytes(8, "little") + name.encode() + b"|"


def _pause_s(elapsed_s: float) -> float:
    """Until a transfer is asked again: none at first, then an eighth of its age."""
    shortest, longest = PAUSES_S
    return 0.0 if elapsed_s < SPIN_S else min(max(elapsed_s / 8, shortest), longest)


def _load() -> tuple[ModuleType, str]:
    """NIXL's bindings and their version. Raises BackendError."""
    for distribution in DISTRIBUTIONS:
        try:
            version = importlib.metadata.version(distribution)
            return importlib.import_module(f"{distribution.replace('-', '_')}._bindings"), version
        except (importlib.metadata.PackageNotFoundError, ModuleNotFoundError):
            continue
        except ImportError as error:
            raise BackendError(f"nixl: {distribution} {version} cannot be loaded: {error}") from error
    raise BackendError(f"nixl: NIXL is not installed for {sys.executable}; {INSTALL}, or leave 'nixl' out of transports")

"""NIXL in the mover: for machines whose engine image brings NIXL, and no other UCX that could be used.

Descriptor part, little endian:

    u8 layout version (1) | u8 1: emulated lanes | u8 n | n B NIXL version | u64 address of the arena |
    u64 address of the identity | the rest: NIXL's agent metadata, without the agent's name that it begins with

Rules:
- NIXL tells nobody when a transfer that was given up has stopped writing: after `releaseXferReq` late bytes still landed. So
  it is given up by waiting for its end, SETTLE_S at most; then, and when NIXL fails for other reasons than a lost peer, only a
  dead process is proof: Unsettled ends this mover. Other peers' reads are lost with it: where both can be had, the ucx plane
  is the better one.
- There is no event for a transfer's end: it is asked for in each turn of the loop for SPIN_S, then after pauses that grow.
  NIXL's progress thread polls, too, as long as a transfer is under way; both sleep when none is.
- A peer's agent is added once, however many links share it, and stays known without any, for the next one: where the peer
  lives on, removing it leaves a connection open on both sides for good. So only broken ones go, and the idle beyond MAX_IDLE.
- A link exists only after the peer's identity, 16 bytes in a page of its mover, has been read and is the one we look for.
- Lanes are restricted for UCX as a whole (lanes.py). NIXL does not say which ones an endpoint took.

Settings: emulated (lanes of UCX that are no RDMA, such as "tcp": TESTING ONLY), gpu (as for ucx), and UCX_* for UCX itself,
which cannot overrule the lanes.
"""

from __future__ import annotations

import asyncio
import itertools
import mmap
import os
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from peer_agent.mover import lanes
from peer_agent.mover.backend import Backend, BackendError, Gets, Link, Memory, PeerMemory, Settings, Unsettled, address_of
from peer_agent.mover.nixl_agent import Handle, NixlAgent, NixlError
from peer_agent.mover.nixl_lists import Grid

SETTLE_S = 0.5
SPIN_S = 0.002
PAUSES_S = (0.001, 0.01)

MAX_IDLE = 64

_HEAD = struct.Struct("<BBB")
_ADDRESSES = struct.Struct("<QQ")
_LAYOUT = 1
_IDENTITY_BYTES = 16
_LANDINGS = 4096
_MAX_METADATA_BYTES = 14 << 10


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
        self._agent = NixlAgent(f"kvdir-{memory.incarnation.hex()}")
        page = memoryview(mmap.mmap(-1, _IDENTITY_BYTES * (1 + _LANDINGS)))
        page[:_IDENTITY_BYTES] = memory.incarnation
        self._page, self._landings = page, itertools.count()
        for region in (memory.arena, memory.scratch, page):
            self._agent.register(address_of(region), len(region))
        self._grids = [Grid(self._agent, "", address_of(region), len(region)) for region in (memory.arena, memory.scratch)]
        metadata, version = self._agent.metadata(), self._agent.version.encode()
        if len(metadata) > _MAX_METADATA_BYTES:
            raise BackendError(f"nixl: {len(metadata)} bytes of metadata do not fit; name fewer devices in UCX_NET_DEVICES")
        head = _HEAD.pack(_LAYOUT, self._emulated, len(version)) + version
        return head + _ADDRESSES.pack(memory.arena_address, address_of(page)) + metadata

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
            remote.broken |= remote.links == 1  # not worth keeping
            await link.close()
            raise
        return link

    def about(self) -> dict[str, str]:
        return {"library": f"NIXL {self._agent.version}", "emulated": str(int(self._emulated)), "lanes": self._tls}

    async def close(self) -> None:
        """The end of the process is what frees NIXL's things; its destructors crash beside a system libibverbs."""

    # for links

    @property
    def lanes(self) -> tuple[str, ...]:
        return ("one of " + self._tls.replace(",", "|"),)

    async def read(self, remote: Remote, gets: Gets, link: NixlLink) -> None:
        """Returns when every byte has arrived. ConnectionError: no more will be written. Unsettled: that is not known."""
        try:
            handle = self._request(remote, gets)
        except NixlError as error:
            raise ConnectionError(f"the peer's memory is not as it says: {error}") from error
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        remote.under_way[ended] = link
        try:
            await self._transfer(handle)
        except ConnectionError:
            remote.broken = True
            raise
        except NixlError as error:
            raise Unsettled(str(error)) from error
        finally:
            self._agent.release(handle)
            del remote.under_way[ended]
            ended.set_result(None)

    async def leave(self, remote: Remote) -> None:
        """One link less; the last one leaves the peer's agent idle, or takes it along if it is broken. Raises Unsettled."""
        remote.links -= 1
        if remote.links:
            return
        if self._remotes.get(remote.peer) is remote:
            del self._remotes[remote.peer]
        if remote.broken:
            await remote.remove()
            return
        self._remotes[remote.peer] = remote  # behind all others
        idle = [other for other in self._remotes.values() if not other.links]
        if len(idle) > MAX_IDLE:
            del self._remotes[idle[0].peer]
            await idle[0].remove()

    # parts

    def _compare(self, peer: _Descriptor) -> None:
        """NIXL promises nothing about metadata of another version."""
        theirs, ours = _release(peer.version), _release(self._agent.version)
        if theirs != ours:
            older = "the peer's" if theirs < ours else "this node's"
            raise ConnectionError(f"the peer has NIXL {peer.version}, we have {self._agent.version}; upgrade {older}")
        if peer.emulated and not self._emulated:
            raise ConnectionError("the peer serves emulated lanes (allow_emulated_rma, for tests); we use RDMA only")

    def _add(self, wanted: _Descriptor, peer: PeerMemory) -> Remote:
        name = f"kvdir-{peer.incarnation.hex()}-{next(self._numbers)}"
        self._agent.add(name, wanted.metadata)
        return Remote(self._agent, name, peer, Grid(self._agent, name, wanted.arena_address, peer.arena_bytes))

    async def _recognise(self, remote: Remote, identity_address: int, incarnation: bytes) -> None:
        """Reads the peer's identity. Landings are used again: a late one brings this very peer's identity, or a wrong one."""
        at = _IDENTITY_BYTES * (1 + next(self._landings) % _LANDINGS)
        places = (address_of(self._page) + at, identity_address, _IDENTITY_BYTES)
        try:
            handle = self._agent.read(remote.name, *(np.array([place], "<u8") for place in places))
            try:
                await self._transfer(handle)
            except ConnectionError:
                remote.broken = True
                raise
            finally:
                self._agent.release(handle)
        except NixlError as error:
            raise ConnectionError(f"the peer's identity cannot be read: {error}") from error
        if self._page[at : at + _IDENTITY_BYTES] != incarnation:
            raise ConnectionError("the peer's mover has another incarnation; ask it again")

    def _request(self, remote: Remote, gets: Gets) -> Handle:
        """A transfer of all of them, from prepared lists where all lie on the grid of slots, else described one by one."""
        there, here, lengths = (np.frombuffer(packed, "<u8") for packed in (gets.remote, gets.local, gets.lengths))
        grid = next(grid for grid in self._grids if grid.holds(int(here[0])))
        length = int(lengths[0])
        if (lengths == length).all():
            ours, theirs = grid.find(here - np.uint64(grid.base), length), remote.grid.find(there, length)
            if ours is not None and theirs is not None:
                return self._agent.read_prepared(ours, theirs)
        return self._agent.read(remote.name, here, there + np.uint64(remote.grid.base), lengths)

    async def _transfer(self, handle: Handle) -> None:
        begun_s = time.monotonic()
        ended = self._agent.post(handle)
        while not ended:
            await asyncio.sleep(_pause_s(time.monotonic() - begun_s))
            ended = self._agent.ended(handle)


class Remote:
    """A peer's agent as ours knows it. under_way: a future for each transfer that may write into slots, and whose it is."""

    def __init__(self, agent: NixlAgent, name: str, peer: PeerMemory, grid: Grid) -> None:
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
        self._agent.remove(self.name)


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
        await self._backend.read(self._remote, gets, self)
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


def _release(version: str) -> tuple[int, ...]:
    """Major and minor number."""
    return tuple(int(part) if part.isdigit() else 0 for part in version.split(".")[:2])


def _pause_s(elapsed_s: float) -> float:
    """Until a transfer is asked again: none at first, then an eighth of its age."""
    shortest, longest = PAUSES_S
    return 0.0 if elapsed_s < SPIN_S else min(max(elapsed_s / 8, shortest), longest)

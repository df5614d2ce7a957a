"""The plane that works everywhere: framed reads on connections of their own, served and received natively.

Frames, their drawing and what the owner checks: csrc/wire.hpp, csrc/tcp_server.hpp. The wire carries lock, epoch, slot offset
and generation, never an address; the owner maps them to memory under a live grant only.

Descriptor, little endian: u8 layout version (1) | u8 zero | u16 port | u64 epoch | UTF-8 host.

Rules:
- The owner's thread and the reader's calls never hold the GIL while bytes move.
- A reader has at most `connections_per_peer` connections to a peer, one read at a time on each; who finds none free waits
  within its deadline. A connection that was late or broke is replaced by the next read.
- A reused connection may have died while it was idle. A read that finds it dead before any block was decided is tried once
  more on a fresh one; a fresh one that fails is the peer's failure.
- Native reads write from their own thread only and end by their deadline, so every outcome is settled.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import struct
import threading
import time
import weakref
from dataclasses import dataclass
from functools import partial

from peer_agent import _native
from peer_agent.memory.arena import Arena
from peer_agent.transport.base import Capabilities, ReadList, ReadOutcome, ReadStatus
from peer_agent.transport.movers import Movers
from peer_agent.transport.outcomes import check_shape, settled_outcome, uniform_outcome

DESCRIPTOR_VERSION = 1
_DESCRIPTOR = struct.Struct("<BBHQ")


class TcpTransport:
    """Owner's and reader's side for one arena."""

    name = "tcp"

    def __init__(
        self,
        arena: Arena,
        *,
        listen_host: str = "127.0.0.1",
        port: int = 0,
        advertise_host: str = "",
        threads: int = 4,
        connections_per_peer: int = 2,
        max_connections: int = 256,
        check: bool = True,
    ) -> None:
        """listen_host is numeric. advertise_host is what peers connect to, a name or an address; default: listen_host.

        check: compare payload checksums. Without it a block is believed on header and generation alone, as TCP delivered it.
        """
        if not advertise_host and ipaddress.ip_address(listen_host).is_unspecified:
            raise ValueError(f"listening on {listen_host} says nothing to peers; set the advertised host as well")
        self._arena = arena
        self._listen_host = listen_host
        self._port = port
        self._advertise_host = advertise_host or listen_host
        self._connections_per_peer = connections_per_peer
        self._max_connections = max_connections
        self._check = check
        self._movers = Movers("tcp-read", threads=threads)
        self._server: _native.TcpServer | None = None
        self._connections: weakref.WeakSet[TcpPeer] = weakref.WeakSet()

    def capabilities(self) -> Capabilities:
        verifies = "checksum" if self._check else "generation"
        return Capabilities(same_host_only=False, gpu=False, verifies=verifies, owner_checks_lock=True)

    async def export(self) -> bytes:
        """Raises OSError when the port is in use; the message says what to do."""
        if self._server is None:
            self._server = _native.TcpServer(
                self._arena.region,
                self._arena.epoch,
                self._listen_host,
                self._port,
                max_connections=self._max_connections,
            )
        fixed = _DESCRIPTOR.pack(DESCRIPTOR_VERSION, 0, self._server.port, self._arena.epoch)
        return fixed + self._advertise_host.encode()

    def grant(self, lock: int, records: bytes, *, expires_s: float) -> None:
        if self._server is None:
            raise RuntimeError("export the tcp plane before granting reads of it")
        self._server.grant(lock, records, int(expires_s * 1e9))

    def revoke(self, lock: int) -> None:
        if self._server is not None:
            self._server.revoke(lock)

    def stats(self) -> dict[str, int]:
        """The owner's counters since `export`; see _native.TcpServer.stats."""
        return self._server.stats() if self._server is not None else {}

    async def connect(self, descriptor: bytes, *, deadline_s: float) -> TcpPeer:
        wanted = _Descriptor.parse(descriptor)
        until_s = time.monotonic() + deadline_s
        address = await _resolve(wanted.host, until_s=until_s)
        pool = _Pool(address, wanted.port)
        try:
            first = await self._movers.run(partial(pool.take, int(until_s * 1e9)), abort=pool.close, until_s=until_s)
        except TimeoutError:
            raise ConnectionError("no thread was free to connect in time; raise tcp's thread count") from None
        pool.give(first)
        peer = TcpPeer(self._arena, pool, self._movers, connections=self._connections_per_peer, check=self._check)
        self._connections.add(peer)
        return peer

    async def close(self) -> None:
        for connection in tuple(self._connections):
            await connection.close()
        self._connections.clear()
        self._movers.close()
        if self._server is not None:
            self._server.close()


class TcpPeer:
    """The connections to one peer."""

    def __init__(self, arena: Arena, pool: _Pool, movers: Movers, *, connections: int, check: bool) -> None:
        self._arena = arena
        self._pool = pool
        self._movers = movers
        self._free = asyncio.Semaphore(connections)
        self._check = check

    async def read(self, blocks: ReadList, *, deadline_s: float) -> ReadOutcome:
        check_shape(blocks)
        until_s = time.monotonic() + deadline_s
        call = _Read(self._pool, blocks, memoryview(self._arena.region), int(until_s * 1e9), check=self._check)
        try:
            async with asyncio.timeout(deadline_s):
                await self._free.acquire()
        except TimeoutError:
            return uniform_outcome(blocks, ReadStatus.LATE)
        try:
            statuses = await self._movers.run(call, abort=call.stop, until_s=until_s)
        except TimeoutError:
            return uniform_outcome(blocks, ReadStatus.LATE)
        except ConnectionError:
            lost = ReadStatus.LATE if time.monotonic() >= until_s else ReadStatus.PEER_LOST
            return uniform_outcome(blocks, lost)
        finally:
            self._free.release()
        return settled_outcome(blocks, statuses)

    async def close(self) -> None:
        self._pool.close()


class _Pool:
    """Open connections to one address. Used from mover threads; a lock guards the lists, never a call that waits."""

    def __init__(self, address: str, port: int) -> None:
        self._address = address
        self._port = port
        self._lock = threading.Lock()
        self._idle: list[_native.TcpConnection] = []
        self._used: set[_native.TcpConnection] = set()
        self._closed = False

    def take(self, deadline_ns: int, *, fresh: bool = False) -> _native.TcpConnection:
        """An idle connection, or a new one. Raises ConnectionError."""
        with self._lock:
            connection = self._idle.pop() if self._idle and not fresh else None
        if connection is None:
            connection = _native.TcpConnection(self._address, self._port, deadline_ns)
        with self._lock:
            if not self._closed:
                self._used.add(connection)
                return connection
        connection.close()
        raise ConnectionError("closed")

    def give(self, connection: _native.TcpConnection) -> None:
        with self._lock:
            self._used.discard(connection)
            if not connection.broken and not self._closed:
                self._idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        """Ends reads in progress as PEER_LOST; nothing can be taken afterwards."""
        with self._lock:
            self._closed = True
            connections = [*self._idle, *self._used]
            self._idle.clear()
        for connection in connections:
            connection.close()


class _Read:
    """One read as a call for a mover thread."""

    def __init__(self, pool: _Pool, blocks: ReadList, region: memoryview, deadline_ns: int, *, check: bool) -> None:
        self._pool = pool
        self._blocks = blocks
        self._region = region
        self._deadline_ns = deadline_ns
        self._check = check
        self._connection: _native.TcpConnection | None = None
        self._stopped = False

    def stop(self) -> None:
        self._stopped = True
        if self._connection is not None:
            self._connection.close()

    def __call__(self) -> bytes:
        reused, statuses = self._once(fresh=False)
        dead = bytes([ReadStatus.PEER_LOST])
        if reused and not self._stopped and statuses.strip(dead) == b"":
            _, statuses = self._once(fresh=True)
        return statuses

    def _once(self, *, fresh: bool) -> tuple[bool, bytes]:
        connection = self._pool.take(self._deadline_ns, fresh=fresh)
        self._connection = connection
        blocks = self._blocks
        try:
            if self._stopped:  # told to stop before there was a connection to close
                connection.close()
            return not fresh, connection.read(
                blocks.lock,
                blocks.epoch,
                blocks.records,
                blocks.namespace_digest,
                blocks.fingerprints,
                blocks.width,
                self._region,
                blocks.destinations,
                self._check,
                self._deadline_ns,
            )
        finally:
            self._pool.give(connection)


@dataclass(frozen=True, slots=True)
class _Descriptor:
    port: int
    epoch: int
    host: str

    @classmethod
    def parse(cls, descriptor: bytes) -> _Descriptor:
        """ValueError for garbage."""
        if len(descriptor) <= _DESCRIPTOR.size or descriptor[0] != DESCRIPTOR_VERSION:
            raise ValueError(f"not a tcp descriptor of version {DESCRIPTOR_VERSION}: {len(descriptor)} bytes")
        _, _, port, epoch = _DESCRIPTOR.unpack_from(descriptor)
        host = descriptor[_DESCRIPTOR.size :].decode()  # UnicodeDecodeError is a ValueError
        if port == 0 or not host.isprintable() or len(host) > 253:
            raise ValueError("tcp descriptor without a usable host and port")
        return cls(port, epoch, host)


async def _resolve(host: str, *, until_s: float) -> str:
    """A numeric address of `host`. Raises ConnectionError."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        async with asyncio.timeout(until_s - time.monotonic()):
            found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError) as error:
        raise ConnectionError(f"cannot resolve {host!r}: {error or 'no answer in time'}; advertise an address") from error
    return str(found[0][4][0])

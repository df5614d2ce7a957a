"""The plane that works everywhere: framed reads on connections of their own, served and received natively.

Frames, their drawing and what the owner checks: csrc/wire.hpp, csrc/tcp_server.hpp. The wire carries the lock's capability,
slot offset and generation, never an address; the owner maps them to memory under a live grant only.

Descriptor, little endian: u8 layout version | u8 zero | u16 port | u64 epoch | UTF-8 host. Version 1: plaintext. Version 2: the
same, but all connections are TLS (csrc/tls.hpp), which a reader that knows only version 1 must not try.

Rules:
- The owner's thread and the reader's calls never hold the GIL while bytes move.
- Connections and reads of one peer: tcp_peer.py.
- With TLS here, peers without are refused in both directions, and the other way round: nobody falls back to plaintext.
"""

from __future__ import annotations

import ipaddress
import struct
import time
import weakref
from dataclasses import dataclass

from peer_agent import _native
from peer_agent.memory.arena import Arena
from peer_agent.transport.base import Capabilities
from peer_agent.transport.movers import Movers
from peer_agent.transport.names import Names
from peer_agent.transport.tcp_peer import TcpPeer

PLAIN_VERSION = 1
TLS_VERSION = 2
DESCRIPTOR = struct.Struct("<BBHQ")


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
        movers: Movers | None = None,
        connections_per_peer: int = 2,
        max_connections: int = 256,
        check: bool = True,
        tls: _native.TlsCredentials | None = None,
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
        self._tls = tls
        self._movers = (movers or Movers()).attach()
        self._server: _native.TcpServer | None = None
        self._names = Names()
        self._peers: weakref.WeakSet[TcpPeer] = weakref.WeakSet()

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
                tls=self._tls,
            )
        version = PLAIN_VERSION if self._tls is None else TLS_VERSION
        fixed = DESCRIPTOR.pack(version, 0, self._server.port, self._arena.epoch)
        return fixed + self._advertise_host.encode()

    def grant(self, lock: int, records: bytes, *, expires_s: float, capability: bytes) -> None:
        if self._server is None:
            raise RuntimeError("export the tcp plane before granting reads of it")
        self._server.grant(capability, records)  # which names the lock and its end, too

    def revoke(self, lock: int) -> None:
        if self._server is not None:
            self._server.revoke(lock)

    @property
    def port(self) -> int:
        """Where the owner's side listens; 0 before `export`."""
        return self._server.port if self._server is not None else 0

    def stats(self) -> dict[str, int]:
        """The owner's counters since `export`; see _native.TcpServer.stats and, as tls_*, TlsCredentials.stats."""
        served = self._server.stats() if self._server is not None else {}
        handshakes = self._tls.stats() if self._tls is not None else {}
        return served | {f"tls_{name}": count for name, count in handshakes.items()}

    @property
    def tls_expires_unix_s(self) -> int:
        """When our certificate ends; 0 without TLS."""
        return self._tls.expires_unix_s if self._tls is not None else 0

    async def connect(self, descriptor: bytes, *, deadline_s: float) -> TcpPeer:
        wanted = _Descriptor.parse(descriptor)
        self._refuse_other_security(wanted)
        until_s = time.monotonic() + deadline_s
        address = await self._names.resolve(wanted.host, until_s=until_s)
        peer = TcpPeer(
            self._arena,
            address,
            wanted.port,
            self._movers,
            connections=self._connections_per_peer,
            check=self._check,
            tls=self._tls,
        )
        await peer.warm_up(until_s=until_s)
        self._peers.add(peer)
        return peer

    def _refuse_other_security(self, wanted: _Descriptor) -> None:
        if wanted.tls and self._tls is None:
            raise ConnectionError("its tcp plane needs TLS: set data_tls_cert, data_tls_key and data_tls_ca on this node, too")
        if self._tls is not None and not wanted.tls:
            raise ConnectionError(
                "its tcp plane has no TLS and ours asks for it: set data_tls_cert, data_tls_key and data_tls_ca there"
            )

    async def close(self) -> None:
        for peer in tuple(self._peers):
            await peer.close()
        await self._movers.close()
        if self._server is not None:
            self._server.close()


@dataclass(frozen=True, slots=True)
class _Descriptor:
    port: int
    epoch: int
    host: str
    tls: bool

    @classmethod
    def parse(cls, descriptor: bytes) -> _Descriptor:
        """ValueError for garbage."""
        if len(descriptor) <= DESCRIPTOR.size or descriptor[0] not in (PLAIN_VERSION, TLS_VERSION):
            raise ValueError(f"not a tcp descriptor of version {PLAIN_VERSION} or {TLS_VERSION}: {len(descriptor)} bytes")
        version, _, port, epoch = DESCRIPTOR.unpack_from(descriptor)
        host = descriptor[DESCRIPTOR.size :].decode()  # UnicodeDecodeError is a ValueError
        if port == 0 or not host.isprintable() or len(host) > 253:
            raise ValueError("tcp descriptor without a usable host and port")
        return cls(port, epoch, host, version == TLS_VERSION)

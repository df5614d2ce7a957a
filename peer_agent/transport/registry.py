"""Names of the data planes and how each is made. The composition root calls `open_transports`; nobody else picks classes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvdir.errors import ConfigError
from kvdir.rpc.certificates import TlsFiles
from kvdir.rpc.open_files import part_of_open_files
from peer_agent.memory.arena import Arena
from peer_agent.mover import lanes
from peer_agent.transport.base import Transport
from peer_agent.transport.mover import MoverTransport
from peer_agent.transport.movers import Movers
from peer_agent.transport.shm import ShmTransport
from peer_agent.transport.tcp import TcpTransport
from peer_agent.transport.tls import plane_credentials


@dataclass(frozen=True, slots=True)
class PlaneOptions:
    """What an agent's configuration says about its data planes.

    listen_host, port, advertise_host: of the tcp plane; port 0 takes any free one. verify_shm: compare checksums on the shm
    plane too, not only generations. allow_emulated_rma, ucp_library: of the planes in mover processes. movers: the native
    threads that shm and tcp share. tls: certificates of the tcp plane; None: plaintext.
    """

    listen_host: str = "127.0.0.1"
    port: int = 0
    advertise_host: str = ""
    connections_per_peer: int = 2
    max_connections: int = 256
    verify_shm: bool = False
    allow_emulated_rma: bool = False
    ucp_library: str = ""
    tls: TlsFiles | None = None
    movers: Movers = field(default_factory=Movers)

    @property
    def emulated(self) -> str:
        """Lanes that are no RDMA and allowed all the same, comma separated."""
        return ",".join(lanes.EMULATED) if self.allow_emulated_rma else ""


def _shm(arena: Arena, options: PlaneOptions) -> Transport:
    return ShmTransport(arena, movers=options.movers, check=options.verify_shm)


def _tcp(arena: Arena, options: PlaneOptions) -> Transport:
    return TcpTransport(
        arena,
        listen_host=options.listen_host,
        port=options.port,
        advertise_host=options.advertise_host,
        movers=options.movers,
        connections_per_peer=options.connections_per_peer,
        max_connections=part_of_open_files(0.25, most=options.max_connections),
        tls=plane_credentials(options.tls) if options.tls is not None else None,
    )


def _ucx(arena: Arena, options: PlaneOptions) -> Transport:
    return MoverTransport(arena, backend="ucx", settings={"library": options.ucp_library, "emulated": options.emulated})


def _nixl(arena: Arena, options: PlaneOptions) -> Transport:
    return MoverTransport(arena, backend="nixl", settings={"emulated": options.emulated})


FACTORIES: Mapping[str, Callable[[Arena, PlaneOptions], Transport]] = {"shm": _shm, "tcp": _tcp, "ucx": _ucx, "nixl": _nixl}


def open_transports(names: Sequence[str], arena: Arena, *, options: PlaneOptions | None = None) -> dict[str, Transport]:
    """Planes by name, in the given order (best first). ConfigError lists unknown and repeated names, or names a bad file."""
    known = ", ".join(FACTORIES)
    faults = [f"unknown transport {name!r}; known are: {known}" for name in names if name not in FACTORIES]
    faults += [f"transport {name!r} is listed twice" for name in dict.fromkeys(names) if list(names).count(name) > 1]
    if not names:
        faults.append(f"no transport is configured; known are: {known}")
    if faults:
        raise ConfigError(faults)
    options = options or PlaneOptions()
    return {name: FACTORIES[name](arena, options) for name in names}


async def current_offers(planes: Mapping[str, Transport]) -> dict[str, bytes]:
    """Descriptors for Peer.Hello of the planes that serve at this moment. A mover that is being restarted offers nothing."""
    offers = {}
    for name, plane in planes.items():
        with contextlib.suppress(ConnectionError):
            offers[name] = await plane.export()
    return offers

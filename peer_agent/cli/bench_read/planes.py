"""Our planes as the bench opens them, by the names that its rows have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvdir.errors import ConfigError, KvdirError
from kvdir.rpc.certificates import TlsFiles
from kvdir.testing.certificates import shared_certificates
from peer_agent.memory.arena import Arena
from peer_agent.transport.base import Transport
from peer_agent.transport.mover import MoverTransport
from peer_agent.transport.registry import PlaneOptions, open_transports

NATIVE = ("shm", "tcp", "tcp_tls")
PLANES = (*NATIVE, "ucx", "nixl")
_TLS = "_tls"

Opened = tuple[dict[str, Transport], dict[str, str]]


@dataclass(frozen=True, slots=True)
class PlaneSetup:
    """allow_emulated_rma: ucx and nixl over loopback instead of RDMA. tls: of tcp_tls."""

    allow_emulated_rma: bool = False
    tls: TlsFiles | None = None

    @classmethod
    def create(cls, planes: Sequence[str], *, allow_emulated_rma: bool) -> PlaneSetup:
        try:
            tls = shared_certificates().files("node") if any(name.endswith(_TLS) for name in planes) else None
        except KvdirError:  # no openssl tool; opening the plane says so
            tls = None
        return cls(allow_emulated_rma, tls)


def open_planes(names: Sequence[str], arena: Arena, setup: PlaneSetup) -> Opened:
    """The planes by name, and why others cannot be had. ValueError for an unknown name."""
    opened: dict[str, Transport] = {}
    left_out: dict[str, str] = {}
    shared = PlaneOptions(allow_emulated_rma=setup.allow_emulated_rma)
    for name in names:
        if name not in PLANES:
            raise ValueError(f"unknown plane {name!r}; known are {', '.join(PLANES)}")
        plane, secured = name.removesuffix(_TLS), name.endswith(_TLS)
        if secured and setup.tls is None:
            left_out[name] = "certificates are made by the openssl tool, which is not installed"
            continue
        try:
            options = replace(shared, tls=setup.tls if secured else None)
            opened[name] = open_transports([plane], arena, options=options)[plane]
        except KvdirError as error:
            left_out[name] = reason(error)
    return opened, left_out


def reason(error: KvdirError) -> str:
    """On one line, without the words for who configures an agent."""
    faults = error.faults if isinstance(error, ConfigError) else (str(error),)
    return "; ".join(fault.removeprefix("transports: ") for fault in faults)


def mover_pids(transport: Transport) -> tuple[int, ...]:
    """Of the process that works for a plane, where there is one."""
    return (transport.pid,) if isinstance(transport, MoverTransport) else ()

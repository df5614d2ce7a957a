"""Our planes as the bench opens them, by the name a row has."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from peer_agent.memory.arena import Arena
from peer_agent.transport.base import Transport
from peer_agent.transport.shm import ShmTransport
from peer_agent.transport.tcp import TcpTransport

PLANES: Mapping[str, Callable[[Arena], Transport]] = {"shm": ShmTransport, "tcp": TcpTransport}


def open_plane(name: str, arena: Arena) -> Transport:
    if name not in PLANES:
        raise ValueError(f"unknown plane {name!r}; known are {', '.join(PLANES)}")
    return PLANES[name](arena)

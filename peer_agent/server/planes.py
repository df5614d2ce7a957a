"""The data planes that an agent's configuration asks for, over its arena and serving; what cannot be is refused at start.

Does not: choose among them (peers.py), or implement any (peer_agent/transport).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvdir.errors import ConfigError
from peer_agent.memory.arena import Arena
from peer_agent.server.config import AgentConfig, join_address, split_address
from peer_agent.transport.base import Transport
from peer_agent.transport.registry import PlaneOptions
from peer_agent.transport.tcp import TcpTransport

OpenPlanes = Callable[..., dict[str, Transport]]
"""As transport/registry.py opens them; tests put in planes with faults."""


def build_planes(config: AgentConfig, arena: Arena, open_planes: OpenPlanes) -> dict[str, Transport]:
    """By name, in the order of preference; each is the caller's to close. Raises ConfigError."""
    host, port = split_address(config.data_listen)
    options = PlaneOptions(
        listen_host=host,
        port=port,
        advertise_host=split_address(config.advertise)[0] if config.advertise else "",
        allow_emulated_rma=config.allow_emulated_rma,
        ucp_library=config.ucp_library,
        tls=config.data_tls,
    )
    return open_planes(config.transports, arena, options=options)


async def export(config: AgentConfig, planes: Mapping[str, Transport]) -> None:
    """Starts serving; what cannot is refused here, not at the first Hello. Raises ConfigError."""
    try:
        for plane in planes.values():
            await plane.export()
    except OSError as error:
        raise ConfigError([f"data_listen: cannot listen on {config.data_listen}: {error}"]) from error


def data_address(config: AgentConfig, planes: Mapping[str, Transport]) -> str:
    """Where the tcp plane serves; empty without one."""
    tcp = planes.get("tcp")
    return join_address(split_address(config.data_listen)[0], tcp.port) if isinstance(tcp, TcpTransport) else ""

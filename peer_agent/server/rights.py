"""Which role may call which method of an agent. Who calls, and what a policy gives them: kvdir/rpc/gate.py."""

from __future__ import annotations

from kvdir.core.policy import Role
from kvdir.rpc.gate import CallLimits
from kvdir.rpc.security import Security
from peer_agent.server.config import AgentConfig
from peer_agent.v1 import engine_pb2, peer_pb2

_PEER, _ENGINE = (
    peer_pb2.DESCRIPTOR.services_by_name["Peer"],
    engine_pb2.DESCRIPTOR.services_by_name["Engine"],
)

RIGHTS = {
    **{f"/{_PEER.full_name}/{method.name}": frozenset((Role.AGENT,)) for method in _PEER.methods},
    **{f"/{_ENGINE.full_name}/{method.name}": frozenset((Role.ENGINE,)) for method in _ENGINE.methods},
    f"/{_ENGINE.full_name}/Inventory": frozenset((Role.ENGINE, Role.ADMIN)),
}


def agent_security(config: AgentConfig) -> Security:
    """Raises ConfigError for a policy that cannot be used."""
    return Security(
        policy=config.policy,
        secured=config.tls is not None,
        rights=RIGHTS,
        limits=CallLimits(max_requests_per_s=config.max_requests_per_s, max_streams=config.max_streams_per_identity),
    )

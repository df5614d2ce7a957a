"""The agent's events in the standard envelope (`events_out`): of its own arena, and of the engines it follows.

Does not: encode or send (kvdir/client/events_out.py, kvdir/engines/rfc1527.py).
"""

from __future__ import annotations

from kvdir.client.events_out import EventsOut
from kvdir.core.outbox import OwnerOutbox
from kvdir.errors import ConfigError, KvdirError
from peer_agent.server.config import AgentConfig
from peer_agent.server.store import Store


def open_events_out(config: AgentConfig, outbox: OwnerOutbox, store: Store) -> EventsOut | None:
    """Bound and following the arena's outbox; None when it is off. Raises ConfigError for want of pyzmq or the port."""
    if not config.events_out:
        return None
    try:
        out = EventsOut(config.events_out, config.events_replay)
        out.open()
    except KvdirError as error:
        raise ConfigError([f"events_out: {error}"]) from error
    out.follow(config.node_name, outbox, lambda: store.namespaces)
    return out

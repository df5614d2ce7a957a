"""The channel from the engine library to its agent. A session that begins after our certificate was renewed gets a new one, as
gRPC would show the old certificate for as long as a channel lives, also when it connects again.

Does not: attach, or know sessions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvdir.rpc.channel import client_options
from kvdir.rpc.tls import Dialer, TlsFiles
from peer_agent.v1 import engine_pb2_grpc


class AgentLine:
    """channel, stub: of now; blocking or those of grpc.aio. dialer: for others with the same certificate."""

    def __init__(self, address: str, tls: TlsFiles | Dialer | None, *, aio: bool) -> None:
        self.dialer = Dialer.of(tls)
        self._address = address
        self._dial: Callable[..., Any] = self.dialer.aio if aio else self.dialer.blocking
        self._open()

    @property
    def outdated(self) -> bool:
        """Whether there is a newer certificate than the one it shows."""
        return self._generation != self.dialer.generation

    def renew(self) -> Any:
        """If outdated, opens another channel and closes the old one. Returns what closing returns: of aio, to be awaited."""
        if not self.outdated:
            return None
        old = self.channel
        self._open()
        return old.close()

    def _open(self) -> None:
        self._generation = self.dialer.generation  # before dialling: what is renewed in between is seen later
        self.channel: Any = self._dial(self._address, options=client_options())
        self.stub: Any = engine_pb2_grpc.EngineStub(self.channel)

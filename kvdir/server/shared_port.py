"""A port that several processes of one coordinator listen on (SO_REUSEPORT), and nobody else.

    hold: bind without SO_REUSEPORT (in use: refused, whoever has it, sharing or not), then allow sharing; never listen
    main process, workers: bind and listen with SO_REUSEPORT beside it

Rules: the socket is held for as long as the coordinator lives, so a second coordinator is refused also in the moments in which
none of our processes listens. The kernel gives connections only to sockets that listen. Sharing needs the same user.
"""

from __future__ import annotations

import errno
import socket

from kvdir.errors import ConfigError


class SharedPort:
    """Holds every address of `host`; `port` 0 takes a free one. Raises ConfigError when it is in use."""

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self._sockets: list[socket.socket] = []
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, kind, protocol, _, address in dict.fromkeys(found):
                self._hold(family, kind, protocol, (address[0], self.port, *address[2:]))
            if not self._sockets:
                raise OSError(errno.EADDRNOTAVAIL, "none of its addresses is this machine's")
        except OSError as error:
            self.close()
            fix = "give an address of this machine, and a port that this user may have, with --listen"
            if error.errno == errno.EADDRINUSE:
                fix = (
                    f"stop the process that has it (`ss -ltnp | grep {self.port}` names it), "
                    "or give another port with --listen (port 0 takes a free one)"
                )
            raise ConfigError([f"listen: {host}:{self.port} cannot be used ({error.strerror}): {fix}"]) from error

    @property
    def address(self) -> str:
        """For gRPC."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def close(self) -> None:
        for held in self._sockets:
            held.close()
        self._sockets.clear()

    def _hold(self, family: int, kind: int, protocol: int, address: tuple[object, ...]) -> None:
        try:
            held = socket.socket(family, kind, protocol)
        except OSError as error:
            if error.errno == errno.EAFNOSUPPORT:
                return  # a name may stand for an IPv6 address, too, where there is no IPv6
            raise
        self._sockets.append(held)
        if family == socket.AF_INET6:
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier life may be in TIME_WAIT
        try:
            held.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            self._sockets.pop().close()
            return
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)  # nobody binds the port for himself from now on
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self.port = held.getsockname()[1]

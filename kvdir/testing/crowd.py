"""Many connections to one address that do nothing, and what a process costs meanwhile. For tests of daemons under them.

Linux only (reads /proc). Does not: speak any protocol.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Cost:
    """Of a process, now. cpu_s: since its start."""

    rss_bytes: int
    threads: int
    descriptors: int
    cpu_s: float

    @classmethod
    def of(cls, pid: int) -> Self:
        proc = Path(f"/proc/{pid}")
        fields = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines() if ":" in line)
        times = (proc / "stat").read_text().rpartition(")")[2].split()
        return cls(
            rss_bytes=int(fields["VmRSS"].split()[0]) * 1024,
            threads=int(fields["Threads"]),
            descriptors=len(os.listdir(proc / "fd")),
            cpu_s=(int(times[11]) + int(times[12])) / _TICKS,
        )


class Crowd:
    """Connections that were begun at once to one address; none of them waits for anything."""

    def __init__(self, address: str, count: int, *, saying: bytes = b"", within_s: float = 20.0) -> None:
        """saying: the first and last thing each says. Those that were not taken within_s say nothing."""
        host, _, port = address.rpartition(":")
        self.address = address
        self._sockets = [socket.socket() for _ in range(count)]
        for sock in self._sockets:
            sock.setblocking(False)
            sock.connect_ex((host, int(port)))
        if saying:
            self._say(saying, time.monotonic() + within_s)

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _say(self, words: bytes, until_s: float) -> None:
        with selectors.DefaultSelector() as selector:
            for sock in self._sockets:
                selector.register(sock, selectors.EVENT_WRITE)
            while selector.get_map() and time.monotonic() < until_s:
                for key, _ in selector.select(0.1):
                    selector.unregister(key.fileobj)
                    assert isinstance(key.fileobj, socket.socket)
                    with contextlib.suppress(OSError):  # it was closed before we came to it
                        key.fileobj.send(words)


@contextlib.contextmanager
def open_files(count: int) -> Iterator[None]:
    """This process may have so many descriptors, as far as the system lets it; the limit is put back."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count if hard == resource.RLIM_INFINITY else min(count, hard)), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

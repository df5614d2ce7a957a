"""One coordinator of a LocalCluster with a network of its own to every agent: what can befall it, and what it believes.

Several of them know nothing of each other; each is published to by every agent. Faults of a network are between this
coordinator and the agents, so a partition can part a single agent from a single coordinator. Does not: own time, nodes or their
truth; the cluster does.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvdir.core.checkpoint import VERSION as CHECKPOINT_VERSION
from kvdir.core.checkpoint import Head, decode_head, frames, parse
from kvdir.core.digests import DigestsView, stream_digests
from kvdir.core.directory import Directory
from kvdir.core.feedback import StaleReport
from kvdir.core.restore import restore
from kvdir.fingerprint import Fingerprints
from kvdir.index import BlockIndex, Index, Sketch
from kvdir.index.reference import ReferenceIndex, ReferenceSketch
from kvdir.location import NodeTrust, Tier
from kvdir.namespace import Namespace
from kvdir.obs.metrics import CoordinatorMetrics
from kvdir.server.config import CoordinatorConfig
from kvdir.server.coordinator import Coordinator
from kvdir.server.events_service import EventsService
from kvdir.testing.sim.belief import LocalDirectory
from kvdir.testing.sim.invariants import Violation, Watch, broken
from kvdir.testing.sim.loop import SimulatedLoop
from kvdir.testing.sim.network import Faults, Network, name_of
from kvdir.testing.sim.node import START_UNIX_S, Blocks, LocalNode, fingerprints_of

if TYPE_CHECKING:
    from kvdir.testing.sim.cluster import LocalCluster


BOUND_BYTES = 128
"""Of a bound, for a block: so that what is stored at once always fits (core/room.py)."""


class LocalCoordinator(Coordinator):
    """The real one, on simulated time."""

    def __init__(self, config: CoordinatorConfig, directory: Directory, loop: SimulatedLoop, *, name: str) -> None:
        super().__init__(config, directory, CoordinatorMetrics(), name=name, version="simulated")
        self._loop = loop

    def now_s(self) -> float:
        return self._loop.time()


class Site:
    """See the module docstring. number: from 0. clock_offset_s: how far its wall clock is off; nothing may depend on it.

    registered: lives, as (node, epoch), that the coordinator of today was seen to know. checks: of its promises, so far.
    """

    def __init__(self, cluster: LocalCluster, number: int, loop: SimulatedLoop, rng: random.Random, faults: Faults) -> None:
        self.number = number
        self.clock_offset_s = 0.0
        self.registered: set[tuple[str, int]] = set()
        self.checks = 0
        self.checked_s = loop.time()
        self.directory = LocalDirectory(self)
        self._cluster = cluster
        self._loop = loop
        self._checked = -1
        self._checkpoint: tuple[float, bytes] | None = None
        self.network = Network(loop, rng, faults, Watch(self))
        self.coordinator = self._start()

    def check(self, *, sums: bool = True) -> None:
        """Raises Violation for the first promise that is broken now. A coordinator that is away promises nothing."""
        if self.network.service is None:
            return
        self.checks += 1
        for words in broken(self, sums=sums):
            raise self.violation(words)
        self.checked_s = self.now_s

    def digests_view(self) -> DigestsView:
        """What `kvdir diff` compares."""
        return DigestsView(self.coordinator.name, stream_digests(self.coordinator.directory, now_s=self.now_s))

    def tick(self) -> None:
        """As the coordinator's own ticker; what arrived since is checked."""
        if self.network.service is None:
            return
        self.coordinator.tick()
        if self.watch and self._checked != self.network.deliveries:
            self._checked = self.network.deliveries
            try:
                self.check(sums=False)
            except Violation as violation:
                self.note(violation)

    # -- what can befall it ------------------------------------------------------------------------------------------------

    def kill_coordinator(self, *, silently: bool = False) -> None:
        """It is gone, with all it knew, until `restart_coordinator`. silently: as when its machine dies, no agent is told."""
        self.network.coordinator_died(silently=silently)

    def write_checkpoint(self) -> None:
        """The coordinator keeps what it believes, for a warm restart."""
        unix_s = START_UNIX_S + self.now_s + self.clock_offset_s
        head = Head(CHECKPOINT_VERSION, self._cluster.seed, int(self.now_s), unix_s, "coordinator")
        self._checkpoint = self.now_s, b"".join(frames(self.coordinator.directory, head))

    def restart_coordinator(self, *, warm: bool = False) -> None:
        """A new coordinator takes the place of the old one. It knows nothing or, if warm, what the last checkpoint says."""
        self.network.coordinator_died()
        self.registered.clear()
        self.coordinator = self._start()
        if warm and self._checkpoint is not None:
            written_s, content = self._checkpoint
            (_, head), *parsed = parse([content])
            age_s = self.now_s - written_s
            restore(self.coordinator.directory, decode_head(head), parsed, now_s=self.now_s, age_s=age_s)

    def reconcile(self, node: int | str, *, timeout_s: float = 10.0) -> NodeTrust:
        """Asks for an absolute statement, as `kvdir reconcile` does, and waits for it. Raises InvalidInput, Violation."""
        name = name_of(node)
        self.directory.core.want_snapshot(name)
        if not self._loop.run_until_complete(self.coordinator.wait_snapshot(name, timeout_s=timeout_s)):
            raise self.violation(f"{name} was not reconciled within {timeout_s:g} s")
        self._cluster.raise_faults()
        return self.directory.trust(name)

    def report_absent(self, node: int | str, blocks: Blocks, *, tier: Tier = Tier.CPU, delay_s: float = 0.0) -> None:
        """A reader says that the owner answered "absent" just now (which the caller has made true, or not)."""
        life = self.node(node).life
        digest = self.digests[0]
        report = StaleReport(life.node.name, life.epoch, life.outbox.last_seq, digest, tier, fingerprints_of(blocks), "reader")
        self.network.report_stale(report, delay_s=delay_s)

    def violation(self, words: str) -> Violation:
        """With what came before it."""
        where = f"{self.coordinator.name}: " if len(self._cluster.sites) > 1 else ""
        return Violation(where + words, at_s=self.now_s, recent=tuple(self.network.recent))

    def _start(self) -> LocalCoordinator:
        cluster = self._cluster
        native = cluster.index == "native" and not cluster.max_blocks
        oracle: Any = ReferenceIndex(seed=cluster.seed, max_blocks=cluster.max_blocks)  # it takes its own sketch only
        index: BlockIndex = Index(seed=cluster.seed) if native else oracle
        new_sketch = functools.partial(Sketch if native else ReferenceSketch, cluster.sketch_cells)
        limits = dataclasses.replace(cluster.limits, sketch_cells=cluster.sketch_cells)
        if cluster.max_blocks:
            limits = dataclasses.replace(limits, max_index_bytes=cluster.max_blocks * BOUND_BYTES)
        directory = Directory(index, new_sketch, limits, now_s=self.now_s)
        name = "coordinator" if not self.number else f"coordinator-{self.number}"
        coordinator = LocalCoordinator(cluster.config, directory, self._loop, name=name)
        self.network.service = EventsService(coordinator)
        return coordinator

    # -- of the cluster, as steps and invariants see it from here ------------------------------------------------------------

    @property
    def now_s(self) -> float:
        return self._loop.time()

    @property
    def tick_s(self) -> float:
        return self._cluster.tick_s

    @property
    def watch(self) -> bool:
        return self._cluster.watch

    @property
    def nodes(self) -> Sequence[LocalNode]:
        return self._cluster.nodes

    @property
    def namespaces(self) -> Sequence[Namespace]:
        return self._cluster.namespaces

    @property
    def digests(self) -> Sequence[bytes]:
        return self._cluster.digests

    @property
    def block_bytes(self) -> Mapping[bytes, int]:
        return self._cluster.block_bytes

    def node(self, node: int | str) -> LocalNode:
        return self._cluster.node(node)

    def universe(self) -> dict[bytes, list[Fingerprints]]:
        return self._cluster.universe()

    def advance(self, seconds: float) -> None:
        self._cluster.advance(seconds)

    def note(self, violation: Violation) -> None:
        self._cluster.note(violation)

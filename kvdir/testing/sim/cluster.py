"""LocalCluster: agents, network and coordinator in one thread, on a clock that moves only when told. No sockets, no waiting.

What runs is what runs in production: the publisher with its outbox, the codec, the events service, the directory, the native
index. Simulated are time, the connections, and what the nodes hold. Equal arguments and equal calls give equal runs.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import random
from types import TracebackType
from typing import Literal, Self

from kvdir.client.publisher import Backoff
from kvdir.core.checkpoint import VERSION as CHECKPOINT_VERSION
from kvdir.core.checkpoint import Head, decode_head, frames, parse
from kvdir.core.directory import Directory, Limits
from kvdir.core.feedback import StaleReport
from kvdir.core.restore import restore
from kvdir.core.sketches import SKETCH_CELLS
from kvdir.fingerprint import Fingerprints
from kvdir.index import BlockIndex, Index, Sketch
from kvdir.index.reference import ReferenceIndex, ReferenceSketch
from kvdir.location import NodeTrust, Tier
from kvdir.namespace import Namespace
from kvdir.obs.metrics import CoordinatorMetrics
from kvdir.server.config import CoordinatorConfig
from kvdir.server.coordinator import Coordinator
from kvdir.server.events_service import EventsService
from kvdir.testing.clock import ManualClock
from kvdir.testing.sim.belief import LocalDirectory
from kvdir.testing.sim.invariants import Violation, Watch, broken, unsettled
from kvdir.testing.sim.loop import SimulatedLoop
from kvdir.testing.sim.network import Faults, Network, name_of
from kvdir.testing.sim.node import START_UNIX_S, Blocks, LocalNode, NodeSetup, fingerprints_of

START_S = 1000.0
SETTLE_HEARTBEATS = 30
_LIST = 16_384


class LocalCoordinator(Coordinator):
    """The real one, on simulated time."""

    def __init__(self, config: CoordinatorConfig, directory: Directory, loop: SimulatedLoop) -> None:
        super().__init__(config, directory, CoordinatorMetrics(), name="coordinator", version="simulated")
        self._loop = loop

    def now_s(self) -> float:
        return self._loop.time()


class LocalCluster:
    """A cluster for tests, as a context manager:

        from kvdir.testing import LocalCluster

        def test_usage_is_untrusted_until_the_loss_is_repaired():
            with LocalCluster(nodes=3, seed=7) as cluster:
                cluster.settle()
                cluster.network.drop_events(1, share=1.0)
                cluster.node(1).store(range(100))         # block numbers, or Fingerprints
                cluster.advance(1.1)                      # one heartbeat: the loss is seen
                assert not cluster.directory.blocks(1).trusted
                cluster.network.heal()
                cluster.settle()                          # repaired by itself, or AssertionError
                assert cluster.directory.blocks(1).require_trusted() == 100
                cluster.reconcile(1)                      # an absolute statement, as `kvdir reconcile` asks for

    `network`: loss, duplicates, delay, partitions, broken calls. `node(i)`: store, remove, clear, lose, restart, start_twice,
    kill, leave, and a wall clock that may be off. `directory`: what the coordinator believes: trust, blocks, lookup, holders,
    claims. `coordinator` is the real one; `restart_coordinator` begins with an empty one, or with what `write_checkpoint` kept.

    Time moves in `advance`, `settle` and `reconcile` only. After every tick in which something arrived, every promise is
    checked against the owners' truth (invariants.py); the first that is broken is raised as Violation. watch=False leaves that
    out, for large contents. Not inside a running event loop: it brings its own.

    seed: of the network, the epochs and the index. faults: of the network, from the start. ring_events: size of the agents'
    outboxes. sketch_cells: at both ends, 0 for agents that keep no sketches. config, limits: of the coordinator; limits wins.
    silence_s, backoff: of the publishers. index: "native", or "reference" for the oracle.
    """

    def __init__(
        self,
        *,
        nodes: int = 3,
        seed: int = 0,
        faults: Faults | None = None,
        namespaces: int = 1,
        ring_events: int = 65_536,
        sketch_cells: int = SKETCH_CELLS,
        chunk_blocks: int = 8_192,
        config: CoordinatorConfig | None = None,
        limits: Limits | None = None,
        silence_s: float = 5.0,
        backoff: Backoff | None = None,
        tick_s: float = 0.05,
        index: Literal["native", "reference"] = "native",
        watch: bool = True,
    ) -> None:
        self.config = config or CoordinatorConfig()
        self.limits = limits or self.config.limits()
        self.namespaces = [_namespace(number) for number in range(namespaces)]
        self.digests = [namespace.digest for namespace in self.namespaces]
        self.block_bytes = {namespace.digest: namespace.block_bytes for namespace in self.namespaces}
        self.tick_s = tick_s
        self.watch = watch
        self.checks = 0
        self.checked_s = START_S
        self.directory = LocalDirectory(self)
        self._index = index
        self._sketch_cells = sketch_cells or SKETCH_CELLS
        self._rng = random.Random(seed)
        self._seed = seed
        self._checked = -1
        self._checkpoint: tuple[float, bytes] | None = None
        self._universe: dict[bytes, list[Fingerprints]] = {}
        self._universe_size = -1
        self._violation: Violation | None = None
        self._until: asyncio.Future[None] | None = None
        self._loop = SimulatedLoop(ManualClock(START_S))
        network_rng = random.Random(self._rng.random())
        self.network = Network(self._loop, network_rng, faults or Faults(), Watch(self))
        self.coordinator = self._start_coordinator()
        setup = NodeSetup(
            loop=self._loop,
            dial=self.network.dial,
            died=self.network.died,
            now_s=self._loop.time,
            namespaces=self.namespaces,
            digests=self.digests,
            ring_events=ring_events,
            sketch_cells=sketch_cells,
            chunk_blocks=chunk_blocks,
            silence_s=silence_s,
            backoff=backoff or Backoff(),
        )
        self.nodes = [LocalNode(name_of(number), f"10.0.0.{number}:7411", setup, self._rng) for number in range(nodes)]
        self._by_name = {node.name: node for node in self.nodes}
        self._loop.call_later(tick_s, self._tick)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends every task and closes the loop."""
        self._loop.shut()

    # -- time ------------------------------------------------------------------------------------------------------------

    @property
    def now_s(self) -> float:
        """Simulated monotonic seconds."""
        return self._loop.time()

    @property
    def heartbeat_s(self) -> float:
        return self.config.heartbeat_interval_ms / 1000

    def advance(self, seconds: float) -> None:
        """Lets everything happen that is due. Raises Violation."""
        until = self._until = self._loop.create_future()
        timer = self._loop.call_later(seconds, _complete, until)
        try:
            self._loop.run_until_complete(until)
        finally:
            timer.cancel()
            self._until = None
        self._raise_faults()

    def settle(self, *, heartbeats: float = SETTLE_HEARTBEATS) -> float:
        """Until every stream is synced, every view trusted and equal to its owner's truth.

        Returns how many heartbeats that took. Raises Violation when it takes more than `heartbeats`, saying what stands in the
        way.
        """
        start_s = self.now_s
        limit_s = start_s + heartbeats * self.heartbeat_s
        while words := list(unsettled(self)):
            if self.now_s >= limit_s:
                raise self.violation(f"not settled within {heartbeats:g} heartbeats: " + "; ".join(words))
            self.advance(min(self.tick_s, self.heartbeat_s / 4))
        self.check()
        return (self.now_s - start_s) / self.heartbeat_s

    def check(self, *, sums: bool = True) -> None:
        """Raises Violation for the first promise that is broken now. A coordinator that is away promises nothing."""
        if self.network.service is None:
            return
        self.checks += 1
        for words in broken(self, sums=sums):
            raise self.violation(words)
        self.checked_s = self.now_s

    # -- nodes and coordinator -------------------------------------------------------------------------------------------

    def node(self, node: int | str) -> LocalNode:
        """By number or name."""
        return self.nodes[node] if isinstance(node, int) else self._by_name[node]

    def reconcile(self, node: int | str, *, timeout_s: float = 10.0) -> NodeTrust:
        """Asks for an absolute statement, as `kvdir reconcile` does, and waits for it. Raises InvalidInput, Violation."""
        name = name_of(node)
        self.directory.core.want_snapshot(name)
        if not self._loop.run_until_complete(self.coordinator.wait_snapshot(name, timeout_s=timeout_s)):
            raise self.violation(f"{name} was not reconciled within {timeout_s:g} s")
        self._raise_faults()
        return self.directory.trust(name)

    def kill_coordinator(self, *, silently: bool = False) -> None:
        """It is gone, with all it knew, until `restart_coordinator`. silently: as when its machine dies, no agent is told."""
        self.network.coordinator_died(silently=silently)

    def write_checkpoint(self) -> None:
        """The coordinator keeps what it believes, for a warm restart."""
        unix_s = START_UNIX_S + self.now_s
        head = Head(CHECKPOINT_VERSION, self._seed, int(self.now_s), unix_s, "coordinator")
        self._checkpoint = self.now_s, b"".join(frames(self.coordinator.directory, head))

    def restart_coordinator(self, *, warm: bool = False) -> None:
        """A new coordinator takes the place of the old one. It knows nothing or, if warm, what the last checkpoint says."""
        self.network.coordinator_died()
        for node in self.nodes:
            for life in node.lives:
                life.registered = False
        self.coordinator = self._start_coordinator()
        if warm and self._checkpoint is not None:
            written_s, content = self._checkpoint
            (_, head), *parsed = parse([content])
            age_s = self.now_s - written_s
            restore(self.coordinator.directory, decode_head(head), parsed, now_s=self.now_s, age_s=age_s)

    def report_absent(self, node: int | str, blocks: Blocks, *, tier: Tier = Tier.CPU, delay_s: float = 0.0) -> None:
        """A reader says that the owner answered "absent" just now (which the caller has made true, or not)."""
        life = self.node(node).life
        digest = self.digests[0]
        report = StaleReport(life.node.name, life.epoch, life.outbox.last_seq, digest, tier, fingerprints_of(blocks), "reader")
        self.network.report_stale(report, delay_s=delay_s)

    def universe(self) -> dict[bytes, list[Fingerprints]]:
        """Every fingerprint that some node ever held, by namespace, in lists that one lookup takes."""
        lives = [life for node in self.nodes for life in node.lives]
        size = sum(len(life.ledger.ever) for life in lives)
        if size != self._universe_size:
            items = sorted({(item[0], len(item[2]), item[2]) for life in lives for item in life.ledger.ever})
            lists: dict[tuple[bytes, int], list[bytes]] = {}
            for digest, width, fingerprint in items:
                lists.setdefault((digest, width), []).append(fingerprint)
            self._universe_size, self._universe = size, {}
            for (digest, _), found in lists.items():
                parts = [Fingerprints.of(found[at : at + _LIST]) for at in range(0, len(found), _LIST)]
                self._universe.setdefault(digest, []).extend(parts)
        return self._universe

    # -- inside ----------------------------------------------------------------------------------------------------------

    def _start_coordinator(self) -> LocalCoordinator:
        native = self._index == "native"
        index: BlockIndex = Index(seed=self._seed) if native else ReferenceIndex(seed=self._seed)  # type: ignore[assignment]
        new_sketch = functools.partial(Sketch if native else ReferenceSketch, self._sketch_cells)
        limits = dataclasses.replace(self.limits, sketch_cells=self._sketch_cells)
        directory = Directory(index, new_sketch, limits, now_s=self._loop.time())
        coordinator = LocalCoordinator(self.config, directory, self._loop)
        self.network.service = EventsService(coordinator)
        return coordinator

    def _tick(self) -> None:
        self._loop.call_later(self.tick_s, self._tick)
        if self.network.service is None:
            return
        self.coordinator.tick()
        if self.watch and self._checked != self.network.deliveries:
            self._checked = self.network.deliveries
            try:
                self.check(sums=False)
            except Violation as violation:
                self.note(violation)

    def note(self, violation: Violation) -> None:
        """Ends `advance` with it."""
        self._violation = self._violation or violation
        if self._until is not None and not self._until.done():
            self._until.set_exception(violation)

    def violation(self, words: str) -> Violation:
        """With what came before it."""
        return Violation(words, at_s=self.now_s, recent=tuple(self.network.recent))

    def _raise_faults(self) -> None:
        if self._violation is not None:
            raise self._violation
        faults = [*self._loop.faults, *self.network.bugs]
        faults += [life.fault for node in self.nodes for life in node.lives if life.fault]
        if faults:
            raise self.violation("; ".join(faults))


def _complete(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


@functools.cache
def _namespace(number: int) -> Namespace:
    return Namespace.create(
        model=f"simulated-{number}",
        weights="none",
        kv_dtype="bfloat16",
        layout="NHD",
        block_tokens=16,
        groups=[{"kind": "full", "layers": 1 + number, "kv_heads": 1, "head_dim": 8}],
        position="none",
        parallel="replicated",
        adapter="none",
        hash_scheme="chain",
        hash_seed="0",
        cache_policy="exact",
    )

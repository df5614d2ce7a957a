"""LocalCluster: agents, networks and coordinators in one thread, on a clock that moves only when told. No sockets, no waiting.

What runs is what runs in production: the publisher with its outbox, the codec, the events service, the directory, the native
index. Simulated are time, the connections, and what the nodes hold. Equal arguments and equal calls give equal runs.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Iterator
from types import TracebackType
from typing import Literal, Self

from kvdir.client.publisher import Backoff
from kvdir.core.diff import Verdict, compare
from kvdir.core.directory import Limits
from kvdir.core.sketches import SKETCH_CELLS
from kvdir.fingerprint import Fingerprints
from kvdir.location import NodeTrust, Tier
from kvdir.namespace import Namespace
from kvdir.server.config import CoordinatorConfig
from kvdir.testing.clock import ManualClock
from kvdir.testing.sim.belief import LocalDirectory
from kvdir.testing.sim.invariants import Violation, unsettled
from kvdir.testing.sim.loop import SimulatedLoop
from kvdir.testing.sim.network import Faults, Network, name_of
from kvdir.testing.sim.node import Blocks, LocalNode, NodeSetup
from kvdir.testing.sim.site import LocalCoordinator, Site

START_S = 1000.0
SETTLE_HEARTBEATS = 30
_LIST = 16_384


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

    coordinators: agents publish to each; `sites` are they, with a network of its own each. `network`, `directory` and
    `coordinator` here are of the first.

    seed: of the network, the epochs and the index. faults: of the network, from the start. ring_events: size of the agents'
    outboxes. sketch_cells: at both ends, 0 for agents that keep no sketches. config, limits: of the coordinator; limits wins.
    silence_s, backoff: of the publishers. index: "native", or "reference" for the oracle. max_blocks: bound of the index,
    which is the oracle then, and agents say only what changes (core/room.py); 0: none.
    """

    def __init__(
        self,
        *,
        nodes: int = 3,
        coordinators: int = 1,
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
        max_blocks: int = 0,
        watch: bool = True,
    ) -> None:
        self.config = config or CoordinatorConfig()
        self.limits = limits or self.config.limits()
        self.namespaces = [_namespace(number) for number in range(namespaces)]
        self.digests = [namespace.digest for namespace in self.namespaces]
        self.block_bytes = {namespace.digest: namespace.block_bytes for namespace in self.namespaces}
        self.tick_s = tick_s
        self.watch = watch
        self.index = index
        self.max_blocks = max_blocks
        self.sketch_cells = sketch_cells or SKETCH_CELLS
        self.seed = seed
        self._rng = random.Random(seed)
        self._universe: dict[bytes, list[Fingerprints]] = {}
        self._universe_size = -1
        self._violation: Violation | None = None
        self._until: asyncio.Future[None] | None = None
        self._loop = SimulatedLoop(ManualClock(START_S))
        self.sites: list[Site] = []
        for number in range(coordinators):
            self.sites.append(Site(self, number, self._loop, random.Random(self._rng.random()), faults or Faults()))
        setup = NodeSetup(
            loop=self._loop,
            dials=[site.network.dial for site in self.sites],
            died=self._died,
            now_s=self._loop.time,
            namespaces=self.namespaces,
            digests=self.digests,
            ring_events=ring_events,
            sketch_cells=sketch_cells,
            exact=max_blocks > 0,
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
        self.raise_faults()

    def settle(self, *, heartbeats: float = SETTLE_HEARTBEATS) -> float:
        """Until every stream is synced, every view trusted and equal to its owner's truth, at every coordinator.

        Returns how many heartbeats that took. Raises Violation when it takes more than `heartbeats`, saying what stands in the
        way.
        """
        start_s = self.now_s
        limit_s = start_s + heartbeats * self.heartbeat_s
        while words := list(self._unsettled()):
            if self.now_s >= limit_s:
                raise self.violation(f"not settled within {heartbeats:g} heartbeats: " + "; ".join(words))
            self.advance(min(self.tick_s, self.heartbeat_s / 4))
        self.check()
        return (self.now_s - start_s) / self.heartbeat_s

    def check(self, *, sums: bool = True) -> None:
        """Raises Violation for the first promise that is broken now, at any coordinator."""
        for site in self.sites:
            site.check(sums=sums)

    # -- nodes and coordinator -------------------------------------------------------------------------------------------

    def node(self, node: int | str) -> LocalNode:
        """By number or name."""
        return self.nodes[node] if isinstance(node, int) else self._by_name[node]

    @property
    def network(self) -> Network:
        """Of the first coordinator."""
        return self.sites[0].network

    @property
    def coordinator(self) -> LocalCoordinator:
        """The first one."""
        return self.sites[0].coordinator

    @property
    def directory(self) -> LocalDirectory:
        """What the first coordinator believes."""
        return self.sites[0].directory

    @property
    def checks(self) -> int:
        return sum(site.checks for site in self.sites)

    def reconcile(self, node: int | str, *, timeout_s: float = 10.0) -> NodeTrust:
        """Site.reconcile of the first coordinator."""
        return self.sites[0].reconcile(node, timeout_s=timeout_s)

    def kill_coordinator(self, *, silently: bool = False) -> None:
        """Site.kill_coordinator of the first one."""
        self.sites[0].kill_coordinator(silently=silently)

    def write_checkpoint(self) -> None:
        """Site.write_checkpoint of the first coordinator."""
        self.sites[0].write_checkpoint()

    def restart_coordinator(self, *, warm: bool = False) -> None:
        """Site.restart_coordinator of the first one."""
        self.sites[0].restart_coordinator(warm=warm)

    def report_absent(self, node: int | str, blocks: Blocks, *, tier: Tier = Tier.CPU, delay_s: float = 0.0) -> None:
        """Site.report_absent to the first coordinator."""
        self.sites[0].report_absent(node, blocks, tier=tier, delay_s=delay_s)

    def heal(self) -> None:
        """No faults any more, anywhere; coordinators that are away come back, empty."""
        for site in self.sites:
            site.network.heal()
            if site.network.service is None:
                site.restart_coordinator()

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

    def _tick(self) -> None:
        self._loop.call_later(self.tick_s, self._tick)
        for site in self.sites:
            site.tick()

    def _died(self, node: str, life: int) -> None:
        for site in self.sites:
            site.network.died(node, life)

    def _unsettled(self) -> Iterator[str]:
        for site in self.sites:
            yield from unsettled(site)
        if len(self.sites) > 1:
            rows = compare({site.coordinator.name: site.digests_view() for site in self.sites})
            for row in rows:
                life = self.node(row.node).life_of(row.epoch)
                if life is None or not life.alive:
                    continue  # what the dead said may differ
                if self.max_blocks and life.outbox.sketches is None:
                    continue  # entries were evicted, and its owner never says what would settle it
                if row.verdict is not Verdict.EQUAL:
                    yield f"{row.node}: {row.verdict}, {row.words}"

    def note(self, violation: Violation) -> None:
        """Ends `advance` with it."""
        self._violation = self._violation or violation
        if self._until is not None and not self._until.done():
            self._until.set_exception(violation)

    def violation(self, words: str) -> Violation:
        """With what came before it at the first coordinator."""
        return self.sites[0].violation(words)

    def raise_faults(self) -> None:
        """Raises Violation for what went wrong since, in tasks that nobody waits for."""
        if self._violation is not None:
            raise self._violation
        faults = [*self._loop.faults, *(bug for site in self.sites for bug in site.network.bugs)]
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

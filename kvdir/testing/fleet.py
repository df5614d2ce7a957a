"""A fleet in one process: hundreds of nodes, several coordinators, churn and failures, on the real cores and a manual clock.

    request -> one of two nodes -> local hits; the rest: lookup at its coordinator (the next one if that is away) -> owners
    node --batches, heartbeats, sketches, snapshot chunks--> every coordinator, each over a link of its own
    coordinator --requests for replay, sketch or snapshot--> node

Real are Directory with its cursors, repair and native index, and outbox, senders (one a coordinator) and sketches of each node;
simulated are time, links and what nodes hold. A link is a call: what is under way when it breaks is lost, the next one begins
with a hello. While it is cut nothing passes, and neither side is told. Equal setup and requests give equal results.

Does not: say what goes wrong when (fleet_faults.py), or move bytes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from kvdir.core.directory import Directory, Hello, Limits, Welcomed
from kvdir.core.effects import Effect, RequestReplay, RequestSketch, RequestSnapshot
from kvdir.core.feedback import StaleReport
from kvdir.core.namespaces import Announced
from kvdir.core.node import Stream
from kvdir.index import Sketch, open_index
from kvdir.location import StreamState
from kvdir.testing.agenda import Agenda
from kvdir.testing.clock import ManualClock
from kvdir.testing.fleet_node import (
    FleetNode,
    Link,
    batch_arrives,
    chunk_arrives,
    goodbye_arrives,
    heartbeat_arrives,
    sketch_arrives,
    unavailable_arrives,
)
from kvdir.testing.fleet_results import FleetOutcome, FleetSetup
from kvdir.testing.fleet_watch import FleetWatch
from kvdir.testing.sim_reads import PeerReads
from kvdir.testing.simulate import trace_namespace
from kvdir.testing.trace import Request

SETTLE_LIMIT_S = 120.0
SHOWN_VIOLATIONS = 10
LIMITS = Limits(stale_after_s=5.0, expire_after_s=30.0, forget_after_s=120.0, max_streams=16_384)


class Fleet:
    """One run. `progress`: called after every request."""

    def __init__(self, setup: FleetSetup, *, progress: Callable[[], None] = lambda: None) -> None:
        self.setup = setup
        self.outcome = FleetOutcome()
        self.agenda = Agenda(ManualClock())
        self.rng = random.Random(setup.seed)
        self.loss = 0.0
        self.nodes: dict[str, FleetNode] = {}
        self.directories: list[Directory | None] = [None] * setup.coordinators
        self._progress = progress
        self._namespace = trace_namespace()
        self._announced = Announced(self._namespace.digest, self._namespace.canonical().encode(), self._namespace.block_bytes)
        self.watch = FleetWatch(self)
        self._reads: list[PeerReads] = []
        for number in range(setup.coordinators):
            self.start_coordinator(number)

    # -- what happens (also called by fleet_faults.py) ---------------------------------------------------------------------

    def note(self, words: str) -> None:
        self.outcome.faults.append((round(self.agenda.now_s, 2), words))

    def start_node(self, name: str) -> None:
        """A node begins a life with nothing; one of that name that lives is gone."""
        if name in self.nodes:
            self.stop_node(name, silently=True)
        node = FleetNode(
            name,
            self.rng.getrandbits(63) + 1,
            self.setup.coordinators,
            namespace_digest=self._namespace.digest,
            capacity_blocks=self.setup.blocks_per_node,
        )
        self.nodes[name] = self.watch.lives[name, node.epoch] = node
        for link in node.links:
            self.connect(node, link)
        self.agenda.later(self.rng.random() * self.setup.heartbeat_s, partial(self._beat, node))

    def stop_node(self, name: str, *, silently: bool = False, politely: bool = False) -> None:
        """It dies; its calls break, unless its machine died, too. politely: it says goodbye first."""
        node = self.nodes[name]
        for link in node.links:
            if politely:
                self._send(node, link, goodbye_arrives)
            link.open = False
            if not silently and not politely:
                self._disconnect(link)
        node.alive = False
        node.memory.clear()

    def connect(self, node: FleetNode, link: Link) -> None:
        """A call begins, now or when it can."""
        if not node.alive or link.open:
            return
        directory = self.directories[link.number]
        if directory is None or link.cut:
            self.agenda.later(0.5 + self.rng.random(), partial(self.connect, node, link))
            return
        last_seq = node.outbox.last_seq
        hello = Hello(node.name, node.epoch, last_seq, f"{node.name}:1", namespaces=(self._announced,))
        welcomed = directory.hello(hello, now_s=self.agenda.now_s)
        if not isinstance(welcomed, Welcomed):
            return
        link.stream, link.connection, link.open = welcomed.stream, welcomed.connection, True
        link.calls += 1
        if not node.opened(welcomed.resume_seq, via=link.sender):
            self._send(node, link, unavailable_arrives)
        self._publish(node, link)

    def cut(self, node: FleetNode, number: int) -> None:
        """Nothing passes between the node and a coordinator any more, and neither is told."""
        node.links[number].cut = True

    def mend(self, node: FleetNode, number: int) -> None:
        """The call of before is over; the node calls again."""
        link = node.links[number]
        link.cut = link.open = False
        link.calls += 1
        self.agenda.later(self.rng.random(), partial(self.connect, node, link))

    def start_coordinator(self, number: int) -> None:
        """With nothing. One that was there is gone, with all it knew."""
        limits = replace(LIMITS, max_index_bytes=self.setup.max_index_bytes)
        index = open_index(seed=self.setup.seed + number, max_bytes=self.setup.max_index_bytes)
        directory = self.directories[number] = Directory(index, Sketch, limits, now_s=self.agenda.now_s)
        reads = PeerReads(
            directory,
            self.nodes,
            self.outcome.reads,
            namespace_digest=self._namespace.digest,
            owner_answers=True,
            report=partial(self._report_stale, number),
            explain=self.setup.explain,
        )
        self._reads[number : number + 1] = [reads]
        self._tick(number, directory)

    def stop_coordinator(self, number: int) -> None:
        """It dies; every call breaks."""
        directory = self.directories[number]
        assert directory is not None
        self.watch.retired.append(directory)
        self.directories[number] = None
        for node in self.live():
            link = node.links[number]
            link.open, link.stream = False, None
            link.calls += 1
            self.agenda.later(self.rng.random(), partial(self.connect, node, link))

    def live(self) -> list[FleetNode]:
        return [node for node in self.nodes.values() if node.alive]

    # -- the run -----------------------------------------------------------------------------------------------------------

    def run(self, requests: Iterable[Request]) -> FleetOutcome:
        """Serves all requests, then heals what is broken and lets everything settle."""
        self.agenda.every(self.setup.sample_s, self.watch.sample)
        for request in requests:
            self.agenda.advance_to(request.at_s)
            self._serve(request)
            self._progress()
        self.agenda.advance_to(max(self.agenda.now_s, self.setup.duration_s))
        self._settle()
        self.watch.finish()
        return self.outcome

    def _serve(self, request: Request) -> None:
        now_s, out = self.agenda.now_s, self.outcome.reads
        live = self.live()
        pair = self.rng.sample(live, 2) if len(live) > 1 else live
        if not pair:
            return
        node = min(pair, key=lambda each: each.outstanding_blocks(now_s, self.setup.blocks_per_s))
        missing = [at for at, block in enumerate(request.blocks) if block not in node.memory]
        node.memory.touch(request.blocks)
        found = self._read(node, request, missing, now_s) if missing else set()
        out.requests += 1
        out.blocks += len(request.blocks)
        out.hit_local += len(request.blocks) - len(missing)
        out.hit_peer += len(found)
        out.recomputed += len(missing) - len(found)
        node.add_work(len(missing) - len(found))
        node.store(request.blocks[at] for at in missing)
        for link in node.links:
            self._publish(node, link)

    def _read(self, node: FleetNode, request: Request, missing: list[int], now_s: float) -> set[int]:
        """At the node's own coordinator, or the next one that it reaches and that knows the namespace by now."""
        self.outcome.lookups += 1
        first = hash(node.epoch) % self.setup.coordinators
        for step in range(self.setup.coordinators):
            number = (first + step) % self.setup.coordinators
            directory = self.directories[number]
            if directory is not None and directory.namespaces.get(self._announced.digest) and not node.links[number].cut:
                return self._reads[number].read(node, request, missing, now_s=now_s)
        self.outcome.failed_lookups += 1
        return set()

    def _report_stale(self, number: int, report: StaleReport) -> None:
        def arrive() -> None:
            directory = self.directories[number]
            if directory is not None:
                directory.report_stale(report, now_s=self.agenda.now_s)

        self.agenda.later(self.setup.delay_s, arrive)

    # -- links -------------------------------------------------------------------------------------------------------------

    def _send(self, node: FleetNode, link: Link, arrive: Callable[[Directory, Stream, float], object]) -> None:
        """`arrive(directory, stream, now_s)` is called when the message arrives, if it does."""
        stream, call = link.stream, link.calls
        if not link.open or stream is None:
            return
        self.outcome.reads.messages += 1
        if link.cut:
            self.outcome.messages_cut += 1
            return
        if self.loss and self.rng.random() < self.loss:
            self.outcome.reads.messages_lost += 1
            return

        def arrived() -> None:
            directory = self.directories[link.number]
            if directory is None or link.calls != call:
                self.outcome.messages_cut += 1
            else:
                arrive(directory, stream, self.agenda.now_s)

        self.agenda.later(self.setup.delay_s, arrived)

    def _publish(self, node: FleetNode, link: Link) -> None:
        if not link.open:
            return
        for batch in node.batches(via=link.sender):
            self._send(
                node,
                link,
                partial(batch_arrives, batch),
            )

    def _beat(self, node: FleetNode) -> None:
        if not node.alive:
            return
        for link in node.links:
            if link.open:
                heartbeat = node.heartbeat(via=link.sender)
                self.outcome.heartbeats += 1
                self._send(node, link, partial(heartbeat_arrives, heartbeat))
        self.agenda.later(self.setup.heartbeat_s, partial(self._beat, node))

    def _disconnect(self, link: Link) -> None:
        directory = self.directories[link.number]
        if directory is not None and link.stream is not None and not link.cut:
            directory.disconnected(link.stream, link.connection, now_s=self.agenda.now_s)

    def _tick(self, number: int, directory: Directory) -> None:
        if self.directories[number] is not directory:
            return
        for effect in directory.tick(now_s=self.agenda.now_s):
            if isinstance(effect, RequestReplay | RequestSketch | RequestSnapshot):
                node = self.nodes[effect.node]
                if node.epoch == effect.epoch and node.alive and not node.links[number].cut:
                    self.agenda.later(self.setup.delay_s, partial(self._repair, node, node.links[number], effect))
        self.agenda.later(self.setup.tick_s, partial(self._tick, number, directory))

    def _repair(self, node: FleetNode, link: Link, effect: Effect) -> None:
        """A request of the coordinator reaches the node."""
        match effect:
            case RequestReplay(first_seq=first_seq):
                if not link.sender.replay(first_seq):
                    self._send(node, link, unavailable_arrives)
            case RequestSketch():
                statement = node.sketch(effect, via=link.sender)
                if statement is not None:
                    self._send(node, link, partial(sketch_arrives, statement))
            case RequestSnapshot(snapshot_id=number):
                for chunk in node.snapshot(number, via=link.sender):
                    self._send(
                        node,
                        link,
                        partial(chunk_arrives, chunk),
                    )
        self._publish(node, link)

    # -- the end -----------------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        self.loss, ended_s = 0.0, self.agenda.now_s
        for number, directory in enumerate(self.directories):
            if directory is None:
                self.start_coordinator(number)
            for node in self.live():
                if node.links[number].cut:
                    self.mend(node, number)
        while not self._settled() and self.agenda.now_s - ended_s < SETTLE_LIMIT_S:
            self.agenda.advance_to(self.agenda.now_s + self.setup.tick_s)
        self.outcome.settle_s = round(self.agenda.now_s - ended_s, 3) if self._settled() else None

    def _settled(self) -> bool:
        return all(
            link.stream is not None
            and link.open
            and link.stream.cursor.state is StreamState.SYNCED
            and link.stream.cursor.applied_seq == node.outbox.last_seq
            and sum(holder.claimed for holder in link.stream.holders.values()) == len(node.memory)
            for node in self.live()
            for link in node.links
        )

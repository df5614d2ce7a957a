"""Replays a trace in one process on the real cores: directory, stream cursors, outboxes, native index; time and network are
simulated. For plotting hit rate against staleness, and for judging a routing policy before it meets a cluster.

    request -> router -> node: local hits; the rest: directory.lookup -> rank -> owner -> stored here, published
    node --batches, heartbeats, sketches, snapshot chunks--> [lost with probability `loss`, else `delay_s` later] --> directory
    directory.tick --requests for replay, sketch or snapshot--> [`delay_s` later] --> node

Rules: equal setup and trace give equal results. Requests happen at the times of the trace; a load takes no time, bytes are
not moved, a node computes `blocks_per_s` (which matters only to the router). Messages of one node stay in order.
`trust_violations` counts trusted figures that did not equal the owner's truth at that sequence number: it must stay 0.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import partial

from kvdir.core.directory import Directory, Hello, Limits, Welcomed
from kvdir.core.effects import Effect, RequestReplay, RequestSketch, RequestSnapshot
from kvdir.core.feedback import StaleReport
from kvdir.core.namespaces import Announced
from kvdir.core.node import Stream
from kvdir.index import Sketch, open_index
from kvdir.location import StreamState
from kvdir.namespace import Namespace
from kvdir.testing.agenda import Agenda
from kvdir.testing.clock import ManualClock
from kvdir.testing.routing import Router
from kvdir.testing.sim_node import SimNode
from kvdir.testing.sim_reads import PeerReads
from kvdir.testing.sim_results import Outcome, RepairCost, Sample, Setup
from kvdir.testing.sim_trust import TrustWatch
from kvdir.testing.trace import Request

EPOCH_BASE = 0x5EED_0000_0000_0001
TICK_S = 0.05
SETTLE_LIMIT_S = 120.0


class Simulation:
    """One replay. `progress`: called after every request."""

    def __init__(self, setup: Setup, *, progress: Callable[[], None] = lambda: None) -> None:
        self.setup = setup
        self.outcome = Outcome()
        self._progress = progress
        self._agenda = Agenda(ManualClock())
        self._rng = random.Random(setup.seed)
        self._router = Router(setup.policy, nodes=setup.nodes, rng=random.Random(setup.seed + 1))
        self._namespace = trace_namespace()
        self._digest = self._namespace.digest
        self.directory = Directory(open_index(seed=setup.seed), Sketch, Limits(), now_s=0.0)
        self.nodes = [self._node(number) for number in range(setup.nodes)]
        self._streams = {node.name: self._hello(node) for node in self.nodes}
        self._by_name = {node.name: node for node in self.nodes}
        self._watches = {name: TrustWatch(name, now_s=0.0) for name in self._by_name}
        self._reads = PeerReads(
            self.directory,
            self._by_name,
            self.outcome,
            namespace_digest=self._digest,
            owner_answers=setup.owner_answers,
            report=self._report_stale,
        )
        self._loss = setup.loss
        self._marks = (0, 0, 0)

    def run(self, requests: Iterable[Request]) -> Outcome:
        """Replays all of them, then lets the streams settle."""
        self._agenda.every(TICK_S, self._tick)
        self._agenda.every(self.setup.sample_s, self._sample)
        for number, node in enumerate(self.nodes):
            first_s = self.setup.heartbeat_s * number / len(self.nodes)
            self._agenda.every(self.setup.heartbeat_s, partial(self._beat, node), first_s=first_s)
        for request in requests:
            self._agenda.advance_to(request.at_s)
            self._serve(request)
            self._progress()
        self._sample()
        self._settle()
        self._finish()
        return self.outcome

    # -- the read path ---------------------------------------------------------------------------------------------------

    def _serve(self, request: Request) -> None:
        now_s, out = self._agenda.now_s, self.outcome
        outstanding = [node.outstanding_blocks(now_s, self.setup.blocks_per_s) for node in self.nodes]
        node = self.nodes[self._router.choose(outstanding, request.blocks)]
        missing = [at for at, block in enumerate(request.blocks) if block not in node.memory]
        node.memory.touch(request.blocks)
        found = self._reads.read(node, request, missing, now_s=now_s) if missing else set()
        recomputed = len(missing) - len(found)
        out.requests += 1
        out.blocks += len(request.blocks)
        out.hit_local += len(request.blocks) - len(missing)
        out.hit_peer += len(found)
        out.recomputed += recomputed
        node.add_work(recomputed)
        node.store(request.blocks[at] for at in missing)
        self._publish(node)

    def _report_stale(self, report: StaleReport) -> None:
        def arrive() -> None:
            feedback = self.directory.report_stale(report, now_s=self._agenda.now_s)
            self.outcome.stale_reports_taken += not feedback.ignored_reason
            self._watch(self._streams[report.node])

        self._agenda.later(self.setup.delay_s, arrive)

    # -- the streams -----------------------------------------------------------------------------------------------------

    def _publish(self, node: SimNode) -> None:
        stream = self._streams[node.name]
        for batch in node.batches():
            self._send(stream, partial(self.directory.batch, stream, batch.first_seq, batch.events))

    def _beat(self, node: SimNode) -> None:
        stream = self._streams[node.name]
        self._send(stream, partial(self.directory.heartbeat, stream, node.heartbeat()))

    def _send(self, stream: Stream, arrive: Callable[..., None]) -> None:
        """`arrive(now_s=...)` is called when the message of `stream` arrives, if it does."""
        self.outcome.messages += 1
        if self._rng.random() < self._loss:
            self.outcome.messages_lost += 1
            return

        def arrived() -> None:
            arrive(now_s=self._agenda.now_s)
            self._watch(stream)

        self._agenda.later(self.setup.delay_s, arrived)

    def _tick(self) -> None:
        effects = self.directory.tick(now_s=self._agenda.now_s)
        for stream in self._streams.values():
            self._watch(stream)
        for effect in effects:
            if self.setup.repair:
                self._agenda.later(self.setup.delay_s, partial(self._repair, effect))

    def _repair(self, effect: Effect) -> None:
        """A request of the coordinator reaches the node."""
        directory = self.directory
        match effect:
            case RequestReplay(node=name, first_seq=first_seq):
                node, stream = self._by_name[name], self._streams[name]
                if not node.sender.replay(first_seq):
                    self._send(stream, partial(directory.replay_unavailable, stream))
                self._publish(node)
            case RequestSketch(node=name):
                node, stream = self._by_name[name], self._streams[name]
                statement = node.sketch(effect)
                if statement is not None:
                    self._send(stream, partial(directory.sketch, stream, statement))
            case RequestSnapshot(node=name, snapshot_id=snapshot_id):
                node, stream = self._by_name[name], self._streams[name]
                for chunk in node.snapshot(snapshot_id):
                    self._send(stream, partial(directory.snapshot_chunk, stream, chunk))
                self._publish(node)

    # -- figures ---------------------------------------------------------------------------------------------------------

    def _watch(self, stream: Stream) -> None:
        self._watches[stream.node].see(_trusted(stream), now_s=self._agenda.now_s)

    def _sample(self) -> None:
        out = self.outcome
        streams = list(self._streams.values())
        blocks, local, peer = self._marks
        self._marks = (out.blocks, out.hit_local, out.hit_peer)
        out.timeline.append(
            Sample(
                at_s=round(self._agenda.now_s, 3),
                blocks=out.blocks - blocks,
                hit_local=out.hit_local - local,
                hit_peer=out.hit_peer - peer,
                streams_synced=sum(stream.cursor.state is StreamState.SYNCED for stream in streams),
                views_trusted=sum(self._check_trust(stream) for stream in streams),
                missing_events=sum(stream.cursor.missing_events for stream in streams),
                error_blocks=sum(abs(self._claimed(node) - len(node.memory)) for node in self.nodes),
            )
        )

    def _check_trust(self, stream: Stream) -> int:
        """Trusted figures of a stream, each held against the owner's truth at that sequence number."""
        trusted = 0
        for holder in stream.holders.values():
            figure = stream.blocks_figure(holder)
            if figure.trusted:
                trusted += 1
                truth = self._by_name[stream.node].blocks_at(stream.cursor.applied_seq)
                self.outcome.trust_violations += figure.value != truth
        return trusted

    def _claimed(self, node: SimNode) -> int:
        return sum(holder.blocks for holder in self._streams[node.name].holders.values())

    def _settled(self) -> bool:
        synced = all(stream.cursor.state is StreamState.SYNCED for stream in self._streams.values())
        return synced and all(self._claimed(node) == len(node.memory) for node in self.nodes)

    def _settle(self) -> None:
        self._loss = 0.0
        ended_s = self._agenda.now_s
        while not self._settled() and self._agenda.now_s - ended_s < SETTLE_LIMIT_S:
            self._agenda.advance_to(self._agenda.now_s + TICK_S)
        self.outcome.settle_s = round(self._agenda.now_s - ended_s, 3) if self._settled() else None

    def _finish(self) -> None:
        out, now_s = self.outcome, self._agenda.now_s
        cursors = [stream.cursor for stream in self._streams.values()]
        out.gaps = sum(cursor.gaps for cursor in cursors)
        for ask, tally in self.directory.repairs.items():
            out.repairs[ask.value] = RepairCost(
                asked=tally.asked, done=tally.done, failed=tally.failed, bytes=tally.bytes, seconds=round(tally.seconds, 3)
            )
        out.untrusted = [watch.total(now_s=now_s) for watch in self._watches.values()]
        untrusted_s = sum(time.total_s for time in out.untrusted)
        out.untrusted_share = round(untrusted_s / (now_s * len(cursors)), 4) if now_s else 0.0
        work = [node.total_work_blocks for node in self.nodes]
        out.imbalance = round(max(work) * len(work) / sum(work), 3) if sum(work) else 1.0

    # -- setting up ------------------------------------------------------------------------------------------------------

    def _node(self, number: int) -> SimNode:
        name = f"node-{number:02d}"
        return SimNode(
            name,
            EPOCH_BASE + number,
            namespace_digest=self._digest,
            capacity_blocks=self.setup.blocks_per_node,
            message_blocks=self.setup.message_blocks,
        )

    def _hello(self, node: SimNode) -> Stream:
        announced = Announced(self._digest, self._namespace.canonical().encode(), self._namespace.block_bytes)
        welcomed = self.directory.hello(Hello(node.name, node.epoch, 0, namespaces=(announced,)), now_s=0.0)
        assert isinstance(welcomed, Welcomed)
        node.opened(welcomed.resume_seq)
        return welcomed.stream


def _trusted(stream: Stream) -> bool:
    synced = stream.cursor.state is StreamState.SYNCED
    return synced and not any(holder.doubt for holder in stream.holders.values())


def trace_namespace(*, block_bytes: int = 128 * 2**10) -> Namespace:
    """The namespace under which trace blocks are stored: 512 tokens a block, contents made up."""
    return Namespace.create(
        model="trace-replay",
        weights="none",
        kv_dtype="uint8",
        layout="opaque",
        block_tokens=512,
        groups=[{"kind": "full", "layers": 1, "kv_heads": 1, "head_dim": 1}],
        position="none",
        parallel="replicated",
        adapter="none",
        hash_scheme="kvdir-trace-blake2b",
        hash_seed="0",
        cache_policy="exact",
        bytes_override=block_bytes,
    )

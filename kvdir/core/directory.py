"""The directory: who (probably) holds which block, and how far each node's part can be trusted. The one mutator.

Owns nodes, streams, namespaces, holders and the block index. Inputs are method calls with `now_s`; what the outside must
do comes out of `tick` and `take_effects` as values. Soft state throughout: owners can always restate it.

Rules:
- a node has one live epoch; a newer one, by registration and never by clock, fences the older at once and drops its blocks;
- fenced streams are never returned, streams silent for `stale_after_s` are flagged, and after `expire_after_s` left out;
- a snapshot fills fresh holders beside the old ones and takes their place in one step, so a broken one changes nothing;
- nothing a stream sends can change what another stream said;
- mirrors (mirror.py) are told of every change, in order.
Does not: read a clock, talk to anybody, decide who may ask. Events are applied in ingest.py, answers built in lookup.py, and
streams repaired in mending.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvdir.core.admission import Counters, Hello, Limits, Refused, Welcomed, fence_words
from kvdir.core.answer import Lookup
from kvdir.core.effects import Effect, Fence, StateChanged
from kvdir.core.event import Event, Heartbeat, SnapshotChunk
from kvdir.core.feedback import Feedback, StaleReport, take_feedback
from kvdir.core.holders import HolderTable
from kvdir.core.ingest import Ingest
from kvdir.core.lookup import Answers
from kvdir.core.mending import Mender
from kvdir.core.mirror import Mirror, MirroredIndex, Mirrors, introduce
from kvdir.core.namespaces import NamespaceTable
from kvdir.core.node import Node, Stream, need
from kvdir.core.orphans import Orphanage
from kvdir.core.policy import ALL, Grant
from kvdir.core.reconcile import Reconciler
from kvdir.core.repair import Ask, new_tallies
from kvdir.core.room import Room
from kvdir.core.sketches import SketchStatement
from kvdir.core.story import Kind, Story
from kvdir.core.stream import StreamCursor
from kvdir.errors import InvalidInput, Overloaded, TooLarge
from kvdir.fingerprint import Fingerprints
from kvdir.location import MinTrust, StreamState

if TYPE_CHECKING:
    from kvdir.index import BlockIndex, BlockSketch

__all__ = ["Counters", "Directory", "Hello", "Limits", "Refused", "Welcomed"]


class Directory:
    """See the module docstring."""

    def __init__(
        self, index: BlockIndex, new_sketch: Callable[[], BlockSketch], limits: Limits | None = None, *, now_s: float
    ) -> None:
        self.limits = limits or Limits()
        self._mirrors = Mirrors()
        self.index: BlockIndex = MirroredIndex(index, self._mirrors.each)
        self.nodes: dict[str, Node] = {}
        self.namespaces = NamespaceTable(limit=self.limits.max_namespaces, mirrors=self._mirrors.each)
        self.holders: HolderTable[Stream] = HolderTable(self.index, new_sketch, mirrors=self._mirrors.each)
        self.room = Room(self.index, self.holders, max_bytes=self.limits.max_index_bytes, mirrors=self._mirrors.each)
        self.ingest = Ingest(self.index, self.holders, self.namespaces, self.room)
        self.reconciler = Reconciler(self.ingest, cells=self.limits.sketch_cells, wait_s=2 * self.limits.repair.idle_s)
        self.repairs = new_tallies()
        self.counters = Counters()
        self.warming = True
        self.partial = False
        self.story = Story()
        self.orphans = Orphanage(limit_s=self.limits.forget_after_s, enforce=self.limits.forget)
        self.started_s = now_s
        self._answers = Answers(self.holders)
        self._effects: list[Effect] = []
        self._mender = Mender(self.ingest, self.reconciler, self.holders, self.repairs, self.counters, self._effects)
        self._connections = 0
        self._free_slots: list[int] = []

    def add_mirror(self, mirror: Mirror, *, now_s: float) -> None:
        """From now on it is told what changes; first what there is, except for blocks: see `index.dump`.

        A checkpoint is restored before, not behind it.
        """
        introduce(mirror, self.namespaces, self.nodes.values(), self.holders, now_s=now_s)
        self._mirrors.each.append(mirror)

    def remove_mirror(self, mirror: Mirror) -> None:
        """It is told nothing more."""
        self._mirrors.each.remove(mirror)

    # -- streams ---------------------------------------------------------------------------------------------------------

    def hello(self, hello: Hello, *, now_s: float) -> Welcomed | Refused:
        """Registers an epoch or resumes it. Raises InvalidInput without name or epoch, Overloaded beyond max_streams."""
        if not hello.node or not hello.epoch:
            raise InvalidInput("hello needs a node name and an epoch other than 0")
        node = self.nodes.get(hello.node)
        if node is None:
            if len(self.nodes) >= self.limits.max_streams and not self._make_room(now_s):
                raise Overloaded(f"more than {self.limits.max_streams} nodes: raise max_streams or use other coordinators")
            node = self.add_node(hello.node)
        if hello.epoch in node.fenced:
            newer = node.fenced[hello.epoch]
            return Refused(newer, fence_words(hello.node, newer))
        stream = node.stream
        if stream is None or stream.epoch != hello.epoch:
            if stream is not None:
                self._fence(node, stream, hello.epoch, fence_words(hello.node, hello.epoch), now_s)
            cursor = StreamCursor(self.limits.repair, now_s=now_s, tallies=self.repairs)
            stream = node.stream = Stream(hello.node, hello.epoch, cursor, slot=node.slot)
            self.story.note(now_s, hello.node, hello.epoch, Kind.REGISTERED, f"at {hello.peer_address or '?'}")
        self._mender.discard_fresh(stream)
        self._speaks(stream, now_s)
        refused = self.announce(stream, hello, now_s=now_s)
        self._connections += 1
        stream.connection, stream.opened_s, stream.compared = self._connections, now_s, False
        resume_seq = stream.cursor.open(hello.last_seq, now_s=now_s)
        self._mirrors.state(stream, now_s)
        return Welcomed(stream, stream.connection, resume_seq, refused)

    def add_node(self, name: str) -> Node:
        """A node that was not known, without a stream."""
        slot = self._free_slots.pop() if self._free_slots else len(self.nodes)
        node = self.nodes[name] = Node(name, slot)
        return node

    def announce(self, stream: Stream, hello: Hello, *, now_s: float) -> tuple[str, ...]:
        """Namespaces, address and doubt of a stream, also in the middle of a call. Returns what was refused, in words."""
        stream.cursor.doubted(hello.doubt, now_s=now_s)
        stream.peer_address, stream.started_unix_ms = hello.peer_address, hello.started_unix_ms
        stream.untold = True
        refused = []
        for announced in hello.namespaces:
            fault = self.namespaces.announce(announced)
            if fault:
                refused.append(f"namespace {announced.digest.hex()[:16]}: {fault}")
            else:
                stream.namespaces |= {announced.digest}
        self.counters.namespaces_refused += len(refused)
        self._mirrors.state(stream, now_s)
        return tuple(refused)

    def withdraw(self, stream: Stream, digests: Iterable[bytes], *, now_s: float) -> None:
        """The owner may not speak of these namespaces any more: what it said of them goes."""
        if self.ingest.withdraw(stream, frozenset(digests)):
            self._mirrors.state(stream, now_s)

    def batch(self, stream: Stream, first_seq: int, events: Sequence[Event], *, now_s: float) -> None:
        """Applies a batch: its turn, a hint, or a duplicate; the cursor knows."""
        self.counters.batches += 1
        if first_seq < 1 or not self._speaks(stream, now_s):
            self.ingest.rejected["fenced" if stream.fenced else "bad-sequence"] += len(events)
            return
        if stream.cursor.repairing(Ask.REPLAY):
            self.repairs[Ask.REPLAY].bytes += sum(event.size_bytes for event in events)
        stream.hinted = not stream.cursor.complete
        skip = stream.cursor.batch(first_seq, len(events), now_s=now_s)
        if stream.cursor.state is not StreamState.SYNCED:
            self._mirrors.state(stream, now_s)
        self.story.batch(now_s, stream.node, stream.epoch, first_seq, events, skip)
        apply = self.ingest.apply
        for offset in range(skip, len(events)):
            apply(stream, first_seq + offset, events[offset], now_s)
        stream.hinted = False
        self._mirrors.state(stream, now_s)

    def heartbeat(self, stream: Stream, heartbeat: Heartbeat, *, now_s: float) -> None:
        """Liveness, convergent figures, tail loss, and the owner's own counts held against ours."""
        if not self._speaks(stream, now_s):
            return
        stream.cursor.doubted(heartbeat.doubt, now_s=now_s)
        stream.cursor.heartbeat(heartbeat.last_seq, now_s=now_s)
        stream.figures, stream.heartbeat_s = replace(heartbeat.figures, counts=None), now_s
        stream.dropped_events = heartbeat.dropped_events
        self.reconciler.compare(stream, heartbeat, now_s=now_s)
        self._mirrors.state(stream, now_s)

    def sketch(self, stream: Stream, statement: SketchStatement, *, now_s: float) -> None:
        """The answer to a request for a sketch; one that nobody asked for changes nothing."""
        if self._speaks(stream, now_s):
            self._mender.sketch(stream, statement, now_s=now_s)
            self._mirrors.state(stream, now_s)

    def replay_unavailable(self, stream: Stream, *, now_s: float) -> None:
        """The owner's ring begins after what we need: the next tick asks for a sketch or a snapshot."""
        if self._speaks(stream, now_s):
            stream.cursor.replay_unavailable(now_s=now_s)
            self._mirrors.state(stream, now_s)

    def snapshot_chunk(self, stream: Stream, chunk: SnapshotChunk, *, now_s: float) -> None:
        """One chunk of the snapshot under way; others are ignored. The last one swaps it in."""
        if self._speaks(stream, now_s):
            self._mender.snapshot_chunk(stream, chunk, now_s=now_s)
            self._mirrors.state(stream, now_s)

    def goodbye(self, stream: Stream, *, now_s: float) -> None:
        """The owner leaves on purpose: its epoch ends, its blocks vanish."""
        node = self.nodes[stream.node]
        if not stream.fenced:
            self._fence(node, stream, stream.epoch, f"node {stream.node} said goodbye", now_s)

    def disconnected(self, stream: Stream, connection: int, *, now_s: float) -> None:
        """A call ended. Only the newest call of a stream speaks for it."""
        if stream.connection == connection and not stream.fenced:
            stream.cursor.close(now_s=now_s)
            self._mender.discard_fresh(stream)
            self._mirrors.state(stream, now_s)

    def want_snapshot(self, node: str) -> Stream:
        """Asks for a snapshot of a node at the next tick. Raises InvalidInput for an unknown or fenced node."""
        stream = self._current(node)
        if stream is None or stream.fenced:
            raise InvalidInput(f"no live node {node!r}; `kvdir nodes` lists them")
        stream.cursor.want_snapshot()
        return stream

    # -- questions -------------------------------------------------------------------------------------------------------

    def lookup(
        self,
        namespace_digest: bytes,
        fingerprints: Fingerprints,
        *,
        prefix: bool = False,
        touch: bool = False,
        min_trust: MinTrust = MinTrust.ANY,
        tenants: Grant = ALL,
        now_s: float,
    ) -> Lookup:
        """Who is said to hold which of the blocks. Raises UnknownNamespace, also for tenants that are not these; TooLarge."""
        namespace = self.namespaces.require(namespace_digest, tenants)
        asked = len(fingerprints)
        if asked > self.limits.max_fingerprints:
            raise TooLarge(
                f"{asked} fingerprints in one list, max_fingerprints is {self.limits.max_fingerprints}: split the list"
            )
        found = self.index.lookup(
            fingerprints.packed,
            fingerprints.width,
            scope=namespace.scope,
            prefix=prefix,
            touch_s=int(now_s) if touch else None,
        )
        answer = self._answers.build(found, asked, prefix=prefix, warming=self.warming, now_s=now_s, min_trust=min_trust)
        counters = self.counters
        counters.lookups += 1
        counters.lookup_blocks += asked
        counters.lookup_hits += answer.hits
        counters.lookup_nodes_below_trust += answer.below_trust
        return answer

    def report_stale(self, report: StaleReport, *, tenants: Grant = ALL, now_s: float) -> Feedback:
        """Negative feedback of a reader; see feedback.py for when it counts. Of others than these tenants nothing is held."""
        if self.namespaces.seen(report.namespace_digest, tenants) is None and not tenants.every:
            report = replace(report, namespace_digest=b"")
        self.counters.stale_reports += 1
        stream = self._current(report.node)
        if stream is not None and stream.epoch == report.epoch:
            stream.met_s = now_s
        feedback = take_feedback(self.ingest, stream, report, now_s=now_s)
        self.story.feedback(now_s, report, feedback)
        self.counters.stale_blocks += feedback.removed
        if feedback.removed and stream is not None:
            stream.untold = True  # of fewer blocks another share is confirmed
        if feedback.ignored_reason:
            self.counters.stale_reports_ignored += 1
        return feedback

    # -- time ------------------------------------------------------------------------------------------------------------

    def tick(self, *, now_s: float) -> list[Effect]:
        """Deadlines, staleness, repair, clean-up. Call it every 20 to 100 ms; returns everything to do since the last call."""
        busy = [node for node in self.nodes.values() if node.stream is not None and not self._quiet(node.stream, now_s)]
        if len(busy) > self.limits.max_snapshots:
            busy.sort(key=need, reverse=True)
        running = Counter(node.stream.cursor.running for node in busy if node.stream is not None)
        for node in busy:
            assert node.stream is not None
            running[self._attend(node, node.stream, now_s, running)] += 1
        self._mirrors.tick(self.nodes.values(), now_s)
        for node in self.orphans.tick(self.nodes, now_s=now_s):
            self._forget(node, now_s)
        if self.warming or self.partial:
            self._warm(now_s)
        if self.ingest.sweep_due:
            self.ingest.sweep_due = self.index.sweep(self.limits.sweep_blocks) > 0
        return self.take_effects()

    def take_effects(self) -> list[Effect]:
        """What is to be done now, each once. After `hello` and `goodbye` do not wait for the tick: somebody was fenced."""
        effects = self._effects.copy()
        self._effects.clear()
        return effects

    # -- inside ----------------------------------------------------------------------------------------------------------

    def _current(self, node: str) -> Stream | None:
        known = self.nodes.get(node)
        return known.stream if known else None

    def _fence(self, node: Node, stream: Stream, newer_epoch: int, reason: str, now_s: float) -> None:
        if stream.fenced:
            return
        stream.cursor.fence(reason, now_s=now_s)
        self._drop_blocks(stream)
        self._mirrors.state(stream, now_s)
        node.remember_fence(stream.epoch, newer_epoch)
        self.counters.fenced += 1
        self._effects.append(Fence(node.name, stream.epoch, newer_epoch, reason))

    def _drop_blocks(self, stream: Stream) -> None:
        for holder in stream.holders.values():
            self.ingest.drop(holder)
        stream.holders = {}
        self._mender.discard_fresh(stream)

    def _quiet(self, stream: Stream, now_s: float) -> bool:
        """Whether a tick has nothing to do for it; most streams most of the time, so this is what thousands of nodes cost."""
        cursor = stream.cursor
        return (
            cursor.settled
            and stream.reported is StreamState.SYNCED
            and stream.intake is None
            and now_s - cursor.last_heard_s <= self.limits.stale_after_s
        )

    def _attend(self, node: Node, stream: Stream, now_s: float, running: Mapping[Ask | None, int]) -> Ask | None:
        """Deadlines of one stream. Returns what was asked for; `running` says how many of each kind are under way."""
        cursor = stream.cursor
        ask = cursor.tick(
            now_s=now_s,
            stale_after_s=self.limits.stale_after_s,
            may_snapshot=running[Ask.SNAPSHOT] < self.limits.max_snapshots,
            sketch=self.reconciler.chance(stream, room=running[Ask.SKETCH] < self.limits.max_sketches, now_s=now_s),
        )
        if stream.intake is not None and (ask is not None or not cursor.repairing_snapshot):
            self._mender.discard_fresh(stream)
        if ask is not None:
            self._mender.ask(stream, ask, now_s=now_s)
        self._age(node, stream, now_s)
        if stream.reported is not cursor.state:
            self._effects.append(StateChanged(node.name, stream.epoch, stream.reported, cursor.state, cursor.reason))
            stream.reported = cursor.state
        return ask

    def _age(self, node: Node, stream: Stream, now_s: float) -> None:
        silent_s = now_s - stream.cursor.last_heard_s
        if not stream.hidden and silent_s > self.limits.expire_after_s:
            stream.hidden = True
            self.holders.touch()
            self._mirrors.stream(stream, now_s)

    def _forget(self, node: Node, now_s: float) -> None:
        """The node and its entries go; if it comes back, it is unknown and restates everything."""
        stream = node.stream
        if stream is not None:
            blocks = sum(holder.claimed for holder in stream.holders.values())
            self._drop_blocks(stream)
            self.orphans.dropped(node.name, blocks)
            self.story.note(now_s, node.name, stream.epoch, Kind.ORPHAN, f"forgotten with {blocks:,} blocks after long silence")
            self._mirrors.node_gone(node.slot)
        del self.nodes[node.name]
        self._free_slots.append(node.slot)
        self.namespaces.keep(digest for other in self.nodes.values() if other.stream for digest in other.stream.namespaces)

    def _make_room(self, now_s: float) -> bool:
        """When the table of nodes is full, those who live go before those who are gone."""
        gone = self.nodes.get(self.orphans.longest_gone())
        if gone is not None:
            self._forget(gone, now_s)
        return gone is not None

    def _speaks(self, stream: Stream, now_s: float) -> bool:
        """Every input of a stream passes here: a fenced one is not heard; one left out for its silence shows again."""
        if stream.fenced:
            return False
        if stream.hidden:
            stream.hidden = False
            self.holders.touch()
            self._mirrors.stream(stream, now_s)
        return True

    def _warm(self, now_s: float) -> None:
        """Warming ends once, when every known stream was restated, or at its limit: a lost node must not hold all others.

        Partial: it has ended, and a live stream has still not been restated.
        """
        age_s = now_s - self.started_s
        live = [node.stream for node in self.nodes.values() if node.stream is not None]
        restated = all(s.cursor.restated or s.cursor.state in (StreamState.STALE, StreamState.FENCED) for s in live)
        if self.warming:
            self.warming = age_s < self.limits.warm_limit_s and (age_s < self.limits.warm_up_s or not restated)
        self.partial = not self.warming and not all(s.cursor.restated or s.fenced for s in live)

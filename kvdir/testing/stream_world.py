"""Owners, a hostile network and a directory, moved by hand: the world of the stream model test.

The outbox, sender and directory are the real ones; only the network between them is made. It loses, duplicates, and delivers
what an old connection still had under way after the new one has begun. Owners remember what they held at every sequence
number, so that any figure that claims to be trusted can be held against the truth (`check`).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from kvdir.core.directory import Directory, Hello, Limits, Refused, Welcomed
from kvdir.core.effects import Effect, Fence, RequestReplay, RequestSketch, RequestSnapshot
from kvdir.core.event import Batch, Heartbeat, SnapshotChunk
from kvdir.core.feedback import StaleReport
from kvdir.core.inspect import faults, node_views
from kvdir.core.namespaces import Announced
from kvdir.core.node import Stream
from kvdir.core.repair import RepairPolicy
from kvdir.core.sketches import SketchStatement
from kvdir.core.totals import SumsTrust, sums_view
from kvdir.fingerprint import Fingerprints
from kvdir.index import open_index
from kvdir.location import StreamState, Tier
from kvdir.testing.fake_node import EXAMPLE_NAMESPACE
from kvdir.testing.stream_owner import DIGEST, TIERS, UNIVERSE, Held, Link, Owner, new_sketch

ANNOUNCED = Announced(DIGEST, EXAMPLE_NAMESPACE.canonical().encode(), EXAMPLE_NAMESPACE.block_bytes)
NODES = ("a", "b")
KINDS = ("stored", "stored", "stored", "removed", "removed", "cleared", "unheard", "engine loses", "engine empties")
MISHAPS = (
    "message vanishes", "reconnect", "late delivery", "owner restarts", "zombie returns", "silence", "snapshot wanted",
    "coordinator restarts", "sketch damaged", "directory wrong",
)  # fmt: skip
LIMITS = Limits(
    stale_after_s=5.0,
    expire_after_s=20.0,
    forget_after_s=100.0,
    sketch_cells=64,
    repair=RepairPolicy(idle_s=0.5, total_s=5.0, retry_base_s=0.1, retry_max_s=1.0, spacing_s=0.1),
)
HEALING_HEARTBEATS = 40


class World:
    """Two nodes, a network and a coordinator, moved by hand."""

    def __init__(self, ring_events: int, *, sketches: bool = True) -> None:
        self.sketches = sketches
        self.now_s = 1000.0
        self.epochs = 0
        self.ring_events = ring_events
        self.directory = self._new_directory()
        self.owners = {node: self._new_owner(node, frozenset()) for node in NODES}
        self.zombies: list[Owner] = []
        self.ghosts: list[Link] = []
        self.reports: list[StaleReport] = []
        self.wrong: set[str] = set()
        for owner in self.owners.values():
            self._connect(owner)

    # -- moves -----------------------------------------------------------------------------------------------------------

    def send(self, node: str, lost: list[bool], *, heartbeat: bool, counted: bool = True) -> None:
        """Into the connection, some batches lost before it."""
        owner = self.owners[node]
        link = owner.link or self._connect(owner)
        owner.tell(link.messages)
        for drop in lost:
            batch = owner.sender.next_batch()
            if batch is not None and not drop:
                link.messages.append(batch)
        link.messages.extend(owner.sketch())
        if heartbeat:
            link.messages.append(owner.heartbeat(counted=counted))

    def deliver(self, node: str, count: int, *, twice: bool = False) -> None:
        link = self.owners[node].link
        for _ in range(min(count, len(link.messages) if link else 0)):
            assert link is not None
            message = link.messages.popleft()
            for _ in range(2 if twice else 1):
                self._arrive(link.stream, message)

    def tick(self, seconds: float, *, lose_requests: bool = False) -> None:
        self.now_s += seconds
        self._execute(self.directory.tick(now_s=self.now_s), lose_requests=lose_requests)

    def reader_finds_nothing(self, node: str, tier: Tier, pick: bytes, *, lies: bool, later: bool) -> None:
        owner = self.owners[node]
        if not lies and (pick, tier) in owner.held:
            return
        self.reports.append(StaleReport(node, owner.epoch, owner.outbox.last_seq, DIGEST, tier, Fingerprints.of([pick])))
        if not later:
            self.directory.report_stale(self.reports.pop(), now_s=self.now_s)

    def late_report(self) -> None:
        if self.reports:
            self.directory.report_stale(self.reports.pop(0), now_s=self.now_s)

    def mishap(self, kind: str, node: str, pick: int) -> None:
        """pick: decides what the kind leaves open."""
        owner = self.owners[node]
        match kind:
            case "message vanishes":  # although its connection lives: harsher than gRPC is
                if owner.link and owner.link.messages:
                    at = pick % len(owner.link.messages)
                    message = owner.link.messages[at]
                    if not (isinstance(message, Heartbeat) and message.doubt.number):  # what nothing can make up for
                        del owner.link.messages[at]
            case "reconnect":
                self._cut(owner)
                self._connect(owner)
            case "late delivery":  # of what an old connection still had under way
                self.ghosts = [ghost for ghost in self.ghosts if ghost.messages]
                if self.ghosts:
                    ghost = self.ghosts[pick % len(self.ghosts)]
                    self._arrive(ghost.stream, ghost.messages.popleft())
            case "owner restarts":
                self._cut(owner)
                self.zombies.append(owner)
                self.wrong.discard(node)
                self.owners[node] = self._new_owner(node, owner.held if pick % 2 else frozenset())
                self._connect(self.owners[node])
            case "zombie returns":  # an old process was only asleep
                known = [zombie for zombie in self.zombies if zombie.epoch in self._fences(zombie.node)]
                if known:
                    assert isinstance(self._hello(known[pick % len(known)]), Refused)
            case "silence":
                self.tick(25.0 if pick % 2 else 6.0, lose_requests=True)
            case "sketch damaged":
                owner.damages = pick
            case "directory wrong":  # a bug, a bit: nothing was lost, and what is held is not what was said
                if node in self.directory.nodes and self.sketches:
                    self.corrupt(node, [UNIVERSE[pick % len(UNIVERSE)]])
            case "snapshot wanted":
                if node in self.directory.nodes:
                    self.directory.want_snapshot(node)
            case "coordinator restarts":
                for each in self.owners.values():
                    each.link = None
                self.ghosts.clear()
                self.wrong.clear()
                self.directory = self._new_directory()

    def corrupt(self, node: str, blocks: list[bytes], tier: Tier = Tier.CPU) -> None:
        """The directory gains, or loses, blocks for no reason."""
        stream = self.directory.nodes[node].stream
        holder = stream.holders.get((DIGEST, tier)) if stream else None
        if holder is None:
            return
        self.wrong.add(node)
        packed, index, scope = b"".join(blocks), self.directory.index, holder.namespace.scope
        lost = index.remove(packed, 8, scope=scope, holder=holder.number, sketch=holder.sketch)
        if lost:
            holder.blocks -= lost
        else:
            holder.blocks += index.store(packed, 8, scope=scope, holder=holder.number, now_s=0, sketch=holder.sketch)

    def heal(self) -> None:
        """The network works again: everything is true within HEALING_HEARTBEATS, half a second apart."""
        self.ghosts.clear()
        for owner in self.owners.values():
            if owner.doubt.lasts:
                owner.change("engine empties", TIERS[0], frozenset())
        for _ in range(HEALING_HEARTBEATS):
            for owner in self.owners.values():
                link = owner.link or self._connect(owner)
                self.send(owner.node, [False] * 100, heartbeat=True)
                self.deliver(owner.node, len(link.messages))
            self.tick(0.5)
            self.wrong -= {owner.node for owner in self.owners.values() if self._proved(owner)}
            if all(self._healed(owner) for owner in self.owners.values()):
                break
        self.check()
        for owner in self.owners.values():
            view = next(v for v in node_views(self.directory, now_s=self.now_s) if v.trust.node == owner.node)
            assert view.trust.state is StreamState.SYNCED, view
            assert self._seen(owner.node) == owner.held
            assert all(holding.blocks.trusted for holding in view.holdings)

    # -- what must hold --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        assert not list(faults(self.directory))
        self._check_sums()
        for trust in self._lookup().nodes:
            stream = self.directory.nodes[trust.node].stream
            assert stream is not None
            assert trust.epoch == stream.epoch
            assert trust.state is not StreamState.FENCED
            assert trust.epoch not in self._fences(trust.node)
        for view in node_views(self.directory, now_s=self.now_s):
            owner = self._epoch_of(view.trust.node, view.trust.epoch)
            if owner is None or view.trust.state is StreamState.FENCED or view.trust.node in self.wrong:
                continue
            truth = owner.truth[view.last_seq] if view.last_seq < len(owner.truth) else frozenset()
            for holding in view.holdings:
                if holding.blocks.trusted:
                    assert holding.blocks.value == sum(at == holding.tier for _, at in truth)
            if view.trust.state is StreamState.SYNCED and not self._doubted(view.trust.node):
                assert self._seen(view.trust.node) == truth

    def _check_sums(self) -> None:
        """Counting the trust of sums gives what making all of them gives."""
        counted = SumsTrust(self.directory)
        for node in self.directory.nodes.values():
            if node.stream is not None and not node.stream.fenced:
                counted.add(node.stream)
        totals = sums_view(self.directory, now_s=self.now_s).totals
        assert counted.counts() == Counter((view.scope, view.blocks.trusted) for view in totals)

    # -- plumbing --------------------------------------------------------------------------------------------------------

    def _new_directory(self) -> Directory:
        return Directory(open_index(seed=1), new_sketch, LIMITS, now_s=self.now_s)

    def _new_owner(self, node: str, held: Held) -> Owner:
        self.epochs += 1
        return Owner(node, self.epochs, held, ring_events=self.ring_events, sketches=self.sketches)

    def _hello(self, owner: Owner) -> Welcomed | Refused:
        # started_unix_ms runs backwards: no order may be taken from anybody's clock.
        hello = Hello(
            owner.node,
            owner.epoch,
            owner.outbox.last_seq,
            "host:1",
            10_000 - owner.epoch,
            (ANNOUNCED,),
            owner.sender.introduced(owner.doubt),
        )
        outcome = self.directory.hello(hello, now_s=self.now_s)
        self._execute(self.directory.take_effects(), lose_requests=False)
        return outcome

    def _connect(self, owner: Owner) -> Link:
        hello_seq = owner.outbox.last_seq
        outcome = self._hello(owner)
        assert isinstance(outcome, Welcomed)
        link = owner.link = Link(outcome.stream, outcome.connection)
        if not owner.sender.opened(resume_seq=outcome.resume_seq, hello_seq=hello_seq, credit=10_000):
            link.messages.append("replay unavailable")
        return link

    def _cut(self, owner: Owner) -> None:
        if owner.link is not None:
            self.ghosts.append(owner.link)
            self.directory.disconnected(owner.link.stream, owner.link.number, now_s=self.now_s)
            owner.link = None

    def _arrive(self, stream: Stream, message: Any) -> None:
        match message:
            case Batch():
                self.directory.batch(stream, message.first_seq, message.events, now_s=self.now_s)
            case Heartbeat():
                self.directory.heartbeat(stream, message, now_s=self.now_s)
            case SketchStatement():
                self.directory.sketch(stream, message, now_s=self.now_s)
            case SnapshotChunk():
                self.directory.snapshot_chunk(stream, message, now_s=self.now_s)
            case "replay unavailable":
                self.directory.replay_unavailable(stream, now_s=self.now_s)

    def _execute(self, effects: list[Effect], *, lose_requests: bool) -> None:
        for effect in effects:
            owner = self._epoch_of(getattr(effect, "node", ""), getattr(effect, "epoch", 0))
            if owner is None or owner.link is None:
                continue
            match effect:
                case Fence():
                    owner.link = None
                case RequestReplay() if not lose_requests:
                    if not owner.sender.replay(effect.first_seq):
                        owner.link.messages.append("replay unavailable")
                case RequestSketch() if not lose_requests:
                    owner.asked = effect
                    owner.tell(owner.link.messages)
                    owner.link.messages.extend(owner.sketch())
                case RequestSnapshot() if not lose_requests:
                    owner.tell(owner.link.messages)
                    owner.link.messages.extend(owner.snapshot(effect.snapshot_id))

    def _healed(self, owner: Owner) -> bool:
        stream = self.directory.nodes[owner.node].stream
        return (
            stream is not None
            and stream.cursor.state is StreamState.SYNCED
            and stream.cursor.applied_seq == owner.outbox.last_seq
            and not self._doubted(owner.node)
            and owner.node not in self.wrong
        )

    def _proved(self, owner: Owner) -> bool:
        """Whether the owner's sum and ours were found equal at its last number."""
        stream = self.directory.nodes[owner.node].stream
        seq = owner.outbox.last_seq
        return stream is not None and stream.owner_counts_seq == seq == stream.cursor.applied_seq and not stream.suspects

    def _doubted(self, node: str) -> bool:
        stream = self.directory.nodes[node].stream
        return stream is not None and any(holder.doubt for holder in stream.holders.values())

    def _fences(self, node: str) -> set[int]:
        known = self.directory.nodes.get(node)
        return set(known.fenced) if known else set()

    def _epoch_of(self, node: str, epoch: int) -> Owner | None:
        owners = [*self.owners.values(), *self.zombies]
        return next((owner for owner in owners if (owner.node, owner.epoch) == (node, epoch)), None)

    def _lookup(self) -> Any:
        self.directory.namespaces.announce(ANNOUNCED)
        return self.directory.lookup(DIGEST, Fingerprints.of(UNIVERSE), now_s=self.now_s)

    def _seen(self, node: str) -> Held:
        answer = self._lookup()
        return frozenset(
            (UNIVERSE[at], tier)
            for run in answer
            for holder, tier in run.holders
            if answer.nodes[holder].node == node
            for at in range(run.start, run.start + run.count)
        )

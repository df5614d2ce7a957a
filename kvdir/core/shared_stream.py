"""One stream whose blocks lie in a store that coordinators share: what to write, and what counts as taken. Pure.

    wire --batches--> plan() --steps--> [the store] --changed--> commit() --cursor--> Ack
                                            | a write failed: again; for too long: the call ends, the owner goes back

Rules:
- the cursor counts in only what the store has taken, so an acknowledgement never runs ahead of it and the owner's ring holds
  whatever the store has not;
- steps are done in order, one group at a time, each until the store has taken it; while it does not, the stream is untrusted;
- the position that others may resume at trails by TRAIL_S, because a fail-over of the store may lose its last writes: whoever
  resumes has those sent again;
- our counts are held against the owner's; before they are believed to differ, and after it was away, the store itself is asked
  (`listed`, `counted`), because feedback, loss and fail-overs change it without us. Equal counts are no proof of equal sets, a
  difference is proof of damage.
Does not: keep sketches (repair is replay, then snapshot), read a clock, or talk to the store (server/shared/session.py does).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvdir.core.event import Batch, Event, EventKind, Heartbeat, HeartbeatFigures, OwnerCount, SnapshotChunk
from kvdir.core.feedback import Feedback, StaleReport, not_stored_since
from kvdir.core.namespaces import KnownNamespace
from kvdir.core.node import HolderKey, RecentStores
from kvdir.core.repair import Ask, Chance
from kvdir.core.snapshot import Intake, SnapshotIntake
from kvdir.core.store_steps import Clear, Held, Step, Write, join
from kvdir.core.stream import StreamCursor
from kvdir.core.trust import Convergent, Cumulative
from kvdir.core.views import HoldingView, NodeView
from kvdir.fingerprint import WIDTHS, Fingerprints
from kvdir.location import NodeTrust, StreamState, Tier

_STORED, _REMOVED, _CLEARED = int(EventKind.STORED), int(EventKind.REMOVED), int(EventKind.CLEARED)
_TIERS = frozenset(int(tier) for tier in Tier)

TRAIL_S = 3.0
"""Asynchronous replication lags by milliseconds, seconds at worst; the replay of so much is cheap."""
RECOUNT_S = 30.0
"""How often the store is asked for its counts although ours equal the owner's: what it lost alone shows in no event."""


@dataclass(slots=True, eq=False)
class SharedStream:
    """See the module docstring. rejected: shared by all streams, by reason. doomed: numbers to be dropped in the store.

    stalled: why the store does not take what has arrived; empty when it does. _marks: since when everything up to a number has
    been in the store.
    """

    node: str
    epoch: int
    cursor: StreamCursor
    rejected: Counter[str]
    peer_address: str = ""
    started_unix_ms: int = 0
    namespaces: dict[bytes, KnownNamespace] = field(default_factory=dict)
    holders: dict[HolderKey, Held] = field(default_factory=dict)
    fresh: dict[HolderKey, Held] = field(default_factory=dict)
    doomed: list[int] = field(default_factory=list)
    intake: SnapshotIntake | None = None
    figures: HeartbeatFigures = field(default_factory=HeartbeatFigures)
    heartbeat_s: float = 0.0
    owner_counts: dict[HolderKey, OwnerCount] = field(default_factory=dict)
    owner_counts_seq: int = 0
    dropped_events: int = 0
    unconfirmed_blocks: int = 0
    applied: int = 0
    stalled: str = ""
    recent: RecentStores = field(default_factory=RecentStores)
    _snapshots: int = 0
    _recounted_s: float = float("-inf")
    _comparable: bool = False
    _marks: deque[tuple[float, int]] = field(default_factory=deque)

    # -- events ----------------------------------------------------------------------------------------------------------

    def plan(self, batches: Sequence[Batch], *, now_s: float) -> list[Step]:
        """What the store has to do for these batches: duplicates left out, neighbours joined, bad events counted."""
        steps: list[Step] = []
        next_seq = self.cursor.next_seq
        for batch in batches:
            skip = min(max(0, next_seq - batch.first_seq), len(batch.events))
            for event in batch.events[skip:]:
                step = self._step(event, now_s)
                if step is not None:
                    join(steps, step)
            if batch.first_seq <= next_seq:
                next_seq = max(next_seq, batch.last_seq + 1)
        return steps

    def commit(self, batches: Sequence[Batch], *, now_s: float) -> None:
        """The store has taken all of it."""
        for batch in batches:
            skip = self.cursor.batch(batch.first_seq, len(batch.events), now_s=now_s)
            for offset in range(skip, len(batch.events)):
                event = batch.events[offset]
                if event.kind == _STORED:
                    self.recent.add(batch.first_seq + offset, (event.namespace_digest, event.tier), event.packed, event.width)
                self.applied += 1

    def changed(self, write: Write, held: Held, blocks: int) -> None:
        """The store did this write under this holder, and so many blocks changed.

        What an attempt that failed had changed is in nobody's count until the store is asked, so more may go than we know of.
        """
        held.blocks = max(0, held.blocks + (blocks if write.stored else -blocks))
        if write.stored:
            self.unconfirmed_blocks += blocks

    def store_away(self, reason: str) -> None:
        """The store does not take what has arrived, in words; empty: it does again, and may not be what it was."""
        if self.stalled and not reason:
            self._recounted_s = float("-inf")
        self.stalled = reason

    def store_full(self, reason: str, *, now_s: float) -> None:
        """Blocks were lost because the store takes no more: only an absolute statement makes up for it."""
        self.rejected["store-full"] += 1
        self.cursor.damage(reason, now_s=now_s)

    def cleared(self, keys: Iterable[HolderKey]) -> None:
        """The holders under these keys are doomed."""
        self.doomed += [self.holders.pop(key).number for key in keys if key in self.holders]

    def _step(self, event: Event, now_s: float) -> Step | None:
        kind, tier, digest, packed, width = event
        if kind not in (_STORED, _REMOVED, _CLEARED):
            self.rejected["unknown-kind"] += 1
            self.cursor.damage(f"an event of unknown kind {kind} was skipped", now_s=now_s)
        elif tier not in _TIERS:
            self.rejected["unknown-tier"] += 1
        elif kind == _CLEARED:
            return Clear(tuple((known, tier) for known in self.namespaces if digest in (b"", known)))
        elif digest not in self.namespaces:
            self.rejected["unknown-namespace"] += 1
        elif width not in WIDTHS or len(packed) % width:
            self.rejected["bad-fingerprints"] += 1
            self.cursor.damage(f"an event was skipped: {len(packed)} bytes are no fingerprints of {width}", now_s=now_s)
        elif packed:
            return Write(kind == _STORED, (digest, tier), packed, width)
        return None

    # -- comparing -------------------------------------------------------------------------------------------------------

    def heartbeat(self, heartbeat: Heartbeat, *, now_s: float) -> bool:
        """Takes it in; returns whether the store's counts are wanted (`counted`) before anything is concluded from it."""
        self.cursor.doubted(heartbeat.doubt, now_s=now_s)
        self.cursor.heartbeat(heartbeat.last_seq, now_s=now_s)
        counts = heartbeat.figures.counts
        self.figures, self.heartbeat_s, self.dropped_events = heartbeat.figures, now_s, heartbeat.dropped_events
        self._comparable = False
        if counts is None:
            return False
        keyed = (((count.namespace_digest, count.tier), count) for count in counts)
        self.owner_counts = {key: count for key, count in keyed if key[0] in self.namespaces and key[1] in _TIERS}
        self.owner_counts_seq = heartbeat.last_seq
        self._comparable = self.cursor.complete and self.cursor.applied_seq == heartbeat.last_seq
        return self._comparable and (bool(self._differing()) or now_s - self._recounted_s >= RECOUNT_S)

    def listed(self, shown: Mapping[int, bool], *, now_s: float) -> None:
        """The store's holders of the epoch, and whether each is visible. Call it when no step is under way.

        A fail-over may have brought back what was dropped, and answers for us again; or forgotten what was made or shown.
        """
        known = {held.number for held in (*self.holders.values(), *self.fresh.values())}
        self.doomed += [number for number in shown if number not in known and number not in self.doomed]
        if not all(shown.get(held.number) for held in self.holders.values()):
            self.cursor.damage("the store has forgotten holders", now_s=now_s)

    def counted(self, blocks: Mapping[int, int], *, now_s: float) -> None:
        """What the store says it has by holder number. A difference to the owner's last counts is damage."""
        self._recounted_s = now_s
        for held in self.holders.values():
            held.blocks = blocks.get(held.number, 0)
        differing = self._differing() if self._comparable else []
        if differing:
            key = min(differing)
            stated, held_now = self.owner_counts.get(key), self.holders.get(key)
            theirs, ours = stated.blocks if stated else 0, held_now.blocks if held_now else 0
            self.cursor.contradicted(f"the owner counts {theirs} blocks where the store has {ours}", now_s=now_s)
        self._comparable = False

    def _differing(self) -> list[HolderKey]:
        held = {key: item.blocks for key, item in self.holders.items()}
        stated = {key: count.blocks for key, count in self.owner_counts.items()}
        return [key for key in held.keys() | stated.keys() if held.get(key, 0) != stated.get(key, 0)]

    def not_newer(self, report: StaleReport) -> Fingerprints | Feedback:
        """What of a reader's report no later store contradicts, or why none of it counts (feedback.py)."""
        if self.fenced:
            return Feedback(0, "unknown node")
        if self.epoch != report.epoch:
            return Feedback(0, "old epoch")
        return not_stored_since(self.recent, self.cursor.top_seq, report)

    def retracted(self, key: HolderKey, blocks: int) -> None:
        """The store took so many blocks from the holder on a reader's word: the next comparison asks it for its counts."""
        held = self.holders.get(key)
        if held is not None and blocks:
            held.blocks = max(0, held.blocks - blocks)
            self._recounted_s = float("-inf")

    # -- snapshots -------------------------------------------------------------------------------------------------------

    def tick(self, *, now_s: float, stale_after_s: float, may_snapshot: bool) -> Ask | None:
        """What to ask the owner for now; begins the intake of a snapshot that is asked for."""
        ask = self.cursor.tick(now_s=now_s, stale_after_s=stale_after_s, may_snapshot=may_snapshot, sketch=Chance.USELESS)
        if self.intake is not None and (ask is not None or not self.cursor.repairing_snapshot):
            self.discard()
        if ask is Ask.SNAPSHOT:
            self._snapshots += 1
            self.cursor.asked(ask, self._snapshots, now_s=now_s)
            self.intake = SnapshotIntake(self._snapshots)
        return ask

    @property
    def fenced(self) -> bool:
        return self.cursor.state is StreamState.FENCED

    @property
    def snapshot_id(self) -> int:
        return self._snapshots

    def chunk(self, chunk: SnapshotChunk, *, now_s: float) -> Intake:
        """What to do with it; entries of unknown tiers and namespaces are left out by `entries`."""
        self.cursor.answered(Ask.SNAPSHOT, chunk.snapshot_id, now_s=now_s)
        if self.intake is None or not self.cursor.repairing_snapshot:
            return Intake.IGNORE
        verdict = self.intake.take(chunk)
        if verdict in (Intake.FILL, Intake.COMPLETE):
            self.cursor.snapshot_progress(now_s=now_s)
        return verdict

    def entries(self, chunk: SnapshotChunk, *, now_s: float) -> list[Step]:
        """The writes of one chunk; they go to the fresh holders."""
        steps: list[Step] = []
        for entry in chunk.entries:
            step = self._step(entry, now_s)
            if step is not None:
                join(steps, step)
        return steps

    def refused(self, *, now_s: float) -> None:
        """The snapshot under way comes to nothing."""
        self.discard()
        self.cursor.snapshot_refused(now_s=now_s)

    def discard(self) -> None:
        """What a snapshot had brought so far is given up; its holders are doomed."""
        self.doomed += [held.number for held in self.fresh.values()]
        self.fresh, self.intake = {}, None

    def swapped(self, *, now_s: float) -> int:
        """The store has shown the fresh holders and dropped the old ones. Returns the blocks of the snapshot."""
        assert self.intake is not None
        at_seq, blocks = self.intake.at_seq, self.intake.blocks
        self.holders, self.fresh, self.intake = self.fresh, {}, None
        self.recent.forget(at_seq)
        self.unconfirmed_blocks = 0
        self._marks.clear()  # a fail-over may still undo it, so it is new to everybody
        self.cursor.snapshot_done(at_seq, now_s=now_s)
        return blocks

    # -- what others see -------------------------------------------------------------------------------------------------

    def position(self, *, now_s: float) -> int | None:
        """Where another coordinator may resume; None: nowhere, an absolute statement is needed. Call it with every save.

        What was restated less than TRAIL_S ago may be lost as well as single events, so that nobody may build on it yet.
        """
        if not self.cursor.exact:
            self._marks.clear()
            return None
        if not self._marks or self._marks[-1][1] != self.cursor.applied_seq:
            self._marks.append((now_s, self.cursor.applied_seq))
        while len(self._marks) > 1 and self._marks[1][0] <= now_s - TRAIL_S:
            self._marks.popleft()
        since_s, seq = self._marks[0]
        return seq if since_s <= now_s - TRAIL_S else None

    def open(self, last_seq: int, *, position: int | None, now_s: float) -> int:
        """A call begins; the owner has used numbers up to last_seq. Returns the number to resume after, as StreamCursor.open.

        position: where a coordinator before us stood; None: what the store holds of the epoch are hints.
        """
        if position is not None:
            self.cursor.resumed(position, now_s=now_s)
            self._marks.append((float("-inf"), position))
        resume_seq = self.cursor.open(last_seq, now_s=now_s)
        if last_seq == 0:
            self._marks.append((float("-inf"), 0))  # an epoch begins empty: nothing of that can be lost
        self.recent.forget(self.cursor.top_seq)  # what was stored before is not known one by one
        return resume_seq

    @property
    def state(self) -> StreamState:
        """The cursor's, but nobody is synced while the store does not take what has arrived."""
        state = self.cursor.state
        return StreamState.GAP if self.stalled and state is StreamState.SYNCED else state

    @property
    def reason(self) -> str:
        """Why the state is not `synced`, in words."""
        return "; ".join(filter(None, (self.stalled and f"the store is away: {self.stalled}", self.cursor.reason)))

    def trust(self, now_s: float) -> NodeTrust:
        cursor = self.cursor
        return NodeTrust(
            self.node,
            self.epoch,
            self.state,
            self.reason,
            max(0.0, now_s - cursor.last_heard_s),
            cursor.missing_events,
            self.peer_address,
            self._confirmed(),
        )

    def _confirmed(self) -> float:
        blocks = sum(held.blocks for held in self.holders.values())
        if not self.cursor.exact or not blocks:
            return float(self.cursor.exact)
        return 1.0 - min(self.unconfirmed_blocks, blocks) / blocks

    def view(self, now_s: float) -> NodeView:
        """As operators see it, and as the store keeps it for the other coordinators."""
        cursor = self.cursor
        trusted = self.state is StreamState.SYNCED
        return NodeView(
            trust=self.trust(now_s),
            last_seq=cursor.applied_seq,
            announced_seq=cursor.top_seq,
            gaps=cursor.gaps,
            replays=cursor.replays,
            snapshots=cursor.snapshots,
            sketches=0,
            missed_events=cursor.missed_events,
            used_bytes=Convergent(self.figures.used_bytes, self.heartbeat_s),
            capacity_bytes=Convergent(self.figures.capacity_bytes, self.heartbeat_s),
            dropped_events=self.dropped_events,
            holdings=tuple(self._holding(key, held) for key, held in self.holders.items()),
            untrusted_s=cursor.untrusted_total_s + (0.0 if trusted else now_s - cursor.untrusted_since_s),
            started_unix_ms=self.started_unix_ms,
            namespaces=tuple(sorted(self.namespaces)),
            reads=self.figures.reads,
        )

    def _holding(self, key: HolderKey, held: Held) -> HoldingView:
        count = self.owner_counts.get(key)
        return HoldingView(
            namespace_digest=key[0],
            tier=key[1],
            blocks=self._figure(held.blocks),
            bytes=self._figure(held.blocks * held.namespace.counted_bytes),
            owner_blocks=count.blocks if count else 0,
            owner_at_seq=self.owner_counts_seq,
        )

    def _figure(self, value: int) -> Cumulative:
        cursor = self.cursor
        if self.state is StreamState.SYNCED:
            return Cumulative(value, True, cursor.last_heard_s)
        return Cumulative(value, False, cursor.last_event_s, cursor.untrusted_since_s, self.reason)

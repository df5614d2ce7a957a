"""The cursor of one stream (node, epoch): what arrived, what is missing, and whether figures folded from it can be trusted.

    1 .. next_seq-1              applied in order: the exact state of the owner as of next_seq - 1
    next_seq .. top_seq          some arrived early and were applied as hints, some are missing (holes)

The rule of order. An event is *counted in* only when everything before it is. A batch beyond next_seq is applied at once, as a
hint, and applied again when its turn comes; a batch below it is a duplicate and ignored. Repair by replay therefore means: the
owner goes back to next_seq and sends everything from there on again, in order (go-back-N), nothing newer in between.
Why that is right: let e be the last event of the log that touches a block. After e was applied in order, every other
event touching the block is below next_seq, so ignored; hence the block is as e left it. A replayed `stored` can never
bring back what a later `removed` took, because that `removed` is applied again after it. tests/model proves it.

A snapshot replaces everything and sets next_seq to at_seq + 1, whatever arrived beyond: that will be replayed. A sketch or an
equal digest as of at_seq does the same, but only if nothing beyond at_seq arrived (reconcile.py says why).
Only `synced` (nothing missing, nothing damaged, no doubt of the owner's own, heard lately) makes cumulative figures trusted;
time alone never does. A doubt is a gap that nobody here can close: nothing is asked for on its account, no repair ends it.
Source of the states: docs/protocol.md. No clock here: `now_s` is monotonic seconds.
"""

from __future__ import annotations

from kvdir.core.event import NO_DOUBT, Doubt
from kvdir.core.holes import Holes
from kvdir.core.repair import Ask, Chance, Repair, RepairPolicy, RepairTally, Tallies
from kvdir.location import StreamState


class StreamCursor:
    """See the module docstring. `connected` tells whether somebody is there to be asked for repair."""

    __slots__ = (
        "_damage",
        "_doubt",
        "_holes",
        "_level",
        "_repair",
        "_stale",
        "_top_seq",
        "_wanted",
        "connected",
        "duplicates",
        "fenced_reason",
        "gaps",
        "last_event_s",
        "last_heard_s",
        "missed_events",
        "next_seq",
        "restated",
        "settled",
        "since_s",
        "state",
        "untrusted_since_s",
        "untrusted_total_s",
    )  # fmt: skip

    def __init__(self, policy: RepairPolicy, *, now_s: float, tallies: Tallies | None = None) -> None:
        self.next_seq = 1
        self.connected = False
        self.restated = False
        """Whether an absolute statement was ever heard: only then is what we hold more than a hint."""
        self.settled = False
        """Synced, and nobody wants anything of the owner: the tick has nothing to do here but look at the age."""
        self.gaps = 0
        self.missed_events = 0
        """Numbers that were missing at some time, repaired or not."""
        self.duplicates = 0
        self.fenced_reason = ""
        self.last_heard_s = self.last_event_s = now_s
        self.state = StreamState.GAP
        self.since_s = self.untrusted_since_s = now_s
        self.untrusted_total_s = 0.0
        self._top_seq = 0
        self._holes = Holes()
        self._damage = ""
        self._doubt = NO_DOUBT
        self._wanted = False
        self._stale = False
        self._repair = Repair(policy, tallies)
        self._level = False

    @property
    def applied_seq(self) -> int:
        """Everything up to here was applied in order."""
        return self.next_seq - 1

    @property
    def top_seq(self) -> int:
        """Highest number that arrived or was announced."""
        return self._top_seq

    @property
    def missing_events(self) -> int:
        return self._holes.missing

    @property
    def exact(self) -> bool:
        """Whether what was applied up to applied_seq is the owner's state as of it, as far as anybody knows."""
        return self.restated and not self._damage

    @property
    def replays(self) -> int:
        return self._repair.replays

    @property
    def sketches(self) -> int:
        return self._repair.sketches

    @property
    def snapshots(self) -> int:
        return self._repair.snapshots

    @property
    def sketch_failures(self) -> int:
        """In a row."""
        return self._repair.sketch_failures

    @property
    def running(self) -> Ask | None:
        """The repair that is under way."""
        return self._repair.running

    @property
    def damaged(self) -> bool:
        """Something was not understood or is contradicted: only an absolute statement makes up for it."""
        return bool(self._damage)

    @property
    def complete(self) -> bool:
        """Nothing is missing or damaged: what was applied is the owner's word as of applied_seq, however old or doubted."""
        return self._caught_up

    def repairing(self, ask: Ask) -> bool:
        """Whether this is under way."""
        return self._repair.running is ask

    def tally(self, ask: Ask) -> RepairTally:
        return self._repair.tallies[ask]

    @property
    def reason(self) -> str:
        """Why the state is not `synced`, in words."""
        if self.state is StreamState.SYNCED:
            return ""
        if self.state is StreamState.FENCED:
            return self.fenced_reason
        parts = []
        if self._stale:
            parts.append("not heard within the limit")
        if self._doubt.lasts:
            parts.append(self._doubt.words)
        if self._repair.running:
            parts.append(self._repair.words)
        if self._damage:
            parts.append(self._damage)
        if self._holes:
            first, last = self._holes.ranges[0]
            missing = f"{self.missing_events} event{'s' if self.missing_events > 1 else ''} missing"
            parts.append(f"{missing} from {first}" + (f" to {last}" if last > first else ""))
        elif self.next_seq <= self._top_seq:
            parts.append(f"events {self.next_seq} to {self._top_seq} came out of order")
        if not self.restated:
            parts.append("no absolute statement yet")
        return "; ".join(parts)

    def open(self, last_seq: int, *, now_s: float) -> int:
        """A call of this stream begins; the owner has used numbers up to last_seq. Returns the number to resume after.

        0 means that nothing is known: the owner continues behind last_seq, and is asked for what it had used before.
        """
        self.connected = True
        self._repair.abort()
        if last_seq < self._top_seq:
            # One epoch never counts backwards. What we hold may be of another life: hints, until restated.
            self._holes.clear()
            self.next_seq, self._top_seq, self.restated = 1, 0, False
            self._damage = f"sequence went back to {last_seq} inside one epoch"
        if last_seq == 0 and not self._damage:
            self.restated = True  # an epoch begins empty, by definition
        self._announce(last_seq)
        if self.restated and 1 < self.next_seq <= self._top_seq:
            self._repair.resume(now_s)  # the owner goes back to the number returned here, unasked; after 0 it has to be asked
        self._heard(now_s)
        return self.applied_seq if self.restated else 0

    def close(self, *, now_s: float) -> None:
        """The call ended. Nothing is lost by that alone."""
        self.connected = self._wanted = False
        self._repair.abort()
        self._settle(now_s)

    def batch(self, first_seq: int, count: int, *, now_s: float) -> int:
        """Takes note of `count` events from first_seq on; returns how many of them, from the front, are duplicates.

        The caller applies the rest now, whether it is their turn or they are hints.
        """
        if self._level and first_seq == self.next_seq:
            self.next_seq = first_seq + count
            self._top_seq = first_seq + count - 1
            self.last_heard_s = self.last_event_s = now_s
            return 0
        return self._unusual_batch(first_seq, count, now_s)

    def _unusual_batch(self, first_seq: int, count: int, now_s: float) -> int:
        end = first_seq + count
        if end <= self.next_seq:
            self.duplicates += count
            self._heard(now_s)
            return count
        if first_seq <= self.next_seq:
            skip = self.next_seq - first_seq
            self.next_seq = end
            self._top_seq = max(self._top_seq, end - 1)
            self._holes.fill(1, end - 1)
            self._repair.progress(now_s)
        else:
            skip = 0
            self._missed(first_seq - 1)
            self._top_seq = max(self._top_seq, end - 1)
            self._holes.fill(first_seq, end - 1)
            self._repair.out_of_order()
        self.duplicates += skip
        self.last_event_s = now_s
        self._heard(now_s)
        return skip

    def heartbeat(self, last_seq: int, *, now_s: float) -> None:
        """Everything up to last_seq was sent, or is lost: so the loss of the last event shows."""
        self._missed(last_seq)
        self._heard(now_s)

    def doubted(self, doubt: Doubt, *, now_s: float) -> None:
        """The owner says whether it vouches for its own word; older statements than the last one are passed over."""
        if doubt.number > self._doubt.number:
            self._doubt = doubt
            self._settle(now_s)

    def asked(self, ask: Ask, number: int, *, now_s: float) -> None:
        """What `tick` wanted goes out under this number."""
        self._repair.asked(ask, number, now_s)

    def answered(self, ask: Ask, number: int, *, now_s: float) -> None:
        """Its answer begins to arrive, in time or too late: so long an answer takes."""
        self._repair.answered(ask, number, now_s)

    def damage(self, reason: str, *, now_s: float) -> None:
        """An event was understood too little to be applied: only an absolute statement makes up for it."""
        self._damage = reason
        self._settle(now_s)

    def contradicted(self, reason: str, *, now_s: float) -> None:
        """The owner's figures differ from ours although nothing is missing: silently wrong, until restated."""
        self._repair.contradicted()
        self.damage(reason, now_s=now_s)

    def proved(self, at_seq: int, *, now_s: float) -> None:
        """The owner's figures prove that we hold exactly what it held as of at_seq. Nothing newer was applied."""
        self._restate(at_seq)
        self._repair.proved(now_s)
        self._heard(now_s)

    def resumed(self, at_seq: int, *, now_s: float) -> None:
        """A new cursor goes on where another one of the same epoch stood: everything up to at_seq was applied, in order."""
        self._restate(at_seq)
        self._settle(now_s)

    def sketch_done(self, at_seq: int, *, now_s: float) -> None:
        """The exact difference as of at_seq was applied. Nothing newer was applied before."""
        self._restate(at_seq)
        self._repair.restated(now_s)
        self.last_event_s = now_s
        self._heard(now_s)

    def sketch_refused(self, *, now_s: float) -> None:
        """The sketch under way led nowhere."""
        self._repair.sketch_failed()
        self._heard(now_s)

    def replay_unavailable(self, *, now_s: float) -> None:
        """The owner's ring does not reach back to next_seq."""
        self._repair.replay_failed()
        self._heard(now_s)

    def want_snapshot(self) -> None:
        """Somebody wants an absolute statement although nothing is known to be missing."""
        self._wanted = True
        self.settled = False

    def snapshot_progress(self, *, now_s: float) -> None:
        """A chunk of the snapshot under way arrived."""
        self._repair.progress(now_s)
        self._heard(now_s)

    def snapshot_done(self, at_seq: int, *, now_s: float) -> None:
        """An absolute statement as of at_seq has replaced what was held."""
        self._wanted = False
        self._restate(at_seq)
        self._repair.restated(now_s)
        self.last_event_s = now_s
        self._heard(now_s)

    def snapshot_refused(self, *, now_s: float) -> None:
        """The snapshot under way contradicts itself: discard it, ask again later."""
        self._repair.snapshot_failed(now_s)
        self._heard(now_s)

    def fence(self, reason: str, *, now_s: float) -> None:
        """Final: this epoch is over."""
        self.fenced_reason = reason
        self.connected = False
        self._repair.abort()
        self._settle(now_s)

    def tick(self, *, now_s: float, stale_after_s: float, may_snapshot: bool, sketch: Chance = Chance.USELESS) -> Ask | None:
        """Deadlines and staleness; what to ask the owner for now. The caller sends it, with an id where it needs one."""
        if self.state is StreamState.FENCED:
            return None
        if not self._stale and now_s - self.last_heard_s > stale_after_s:
            self._stale = True
            self._settle(now_s)
        if not self.connected or (self._caught_up and not self._wanted):
            return None  # a stale stream that misses nothing has nothing to repeat
        absolute = bool(self._damage) or not self.restated or self._wanted
        sketch = Chance.USELESS if self._wanted else sketch
        ask = self._repair.tick(now_s, absolute=absolute, sketch=sketch, may_snapshot=may_snapshot)
        self._settle(now_s)
        return ask

    @property
    def repairing_snapshot(self) -> bool:
        return self._repair.running is Ask.SNAPSHOT

    def _restate(self, at_seq: int) -> None:
        self.restated, self._damage = True, ""
        self.next_seq = at_seq + 1
        self._top_seq = max(self._top_seq, at_seq)
        self._holes.fill(1, at_seq)

    def _missed(self, last_seq: int) -> None:
        before = self._top_seq
        if self._announce(last_seq):
            self.gaps += 1
            self._repair.tallies.holes += 1
            self.missed_events += last_seq - before

    def _announce(self, last_seq: int) -> bool:
        if last_seq <= self._top_seq:
            return False
        self._holes.append(self._top_seq + 1, last_seq)
        self._top_seq = last_seq
        return True

    def _heard(self, now_s: float) -> None:
        self.last_heard_s = now_s
        self._stale = False
        self._settle(now_s)

    @property
    def _caught_up(self) -> bool:
        return self.next_seq > self._top_seq and self.restated and not self._damage

    def _settle(self, now_s: float) -> None:
        """Recomputes `state`. The one place where trust is lost or won."""
        caught_up = self._caught_up
        if caught_up:
            self._repair.caught_up(now_s)
        if self.fenced_reason:
            state = StreamState.FENCED
        elif self._stale:
            state = StreamState.STALE
        elif caught_up:
            state = StreamState.GAP if self._doubt.lasts else StreamState.SYNCED
        else:
            state = StreamState.REPAIRING if self._repair.running else StreamState.GAP
        self._level = caught_up and state in (StreamState.SYNCED, StreamState.GAP)
        self.settled = state is StreamState.SYNCED and not self._wanted
        if state is self.state:
            return
        if state is StreamState.SYNCED:
            self.untrusted_total_s += now_s - self.untrusted_since_s
        elif self.state is StreamState.SYNCED:
            self.untrusted_since_s = now_s
        self.state, self.since_s = state, now_s

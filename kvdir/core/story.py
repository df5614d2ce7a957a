"""The story of a node or a block: what touched it lately, from a bounded log. For people who ask "why".

Two rings. *Notes* are rare and say what happened to a node (registered, fenced, state, repair, snapshot, feedback, quota,
eviction, clean-up). *Batches* keep the events themselves, by reference, as they came: on the hot path that is one append
per batch and one addition per event, and nothing per block. The story of a block is found when somebody asks, by searching
the batches (in a thread, from an unchanging copy of the ring); that costs milliseconds then, and nothing before. What a
snapshot named is not kept (it would be the whole directory), only that there was one.

Bounded in notes, batches and bytes; `reaches_back_s` says how far the log goes. Pure.
"""

from __future__ import annotations

import enum
import itertools
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvdir.core.effects import AskEvict, Effect, Fence, RequestReplay, RequestSnapshot, SnapshotApplied, StateChanged
from kvdir.core.event import Event, EventKind, EvictResult
from kvdir.core.feedback import Feedback, StaleReport
from kvdir.location import StreamState, Tier


class Kind(enum.StrEnum):
    """What an entry is about; travels as text, so that later releases may add some."""

    REGISTERED = "registered"
    FENCED = "fenced"
    STATE = "state"
    REPAIR = "repair"
    SNAPSHOT = "snapshot"
    STORED = "stored"
    REMOVED = "removed"
    CLEARED = "cleared"
    EVENTS = "events"
    FEEDBACK = "feedback"
    QUOTA = "quota"
    EVICTED = "evicted"
    ORPHAN = "orphan"
    RESTORED = "restored"


_ALL_BLOCKS = frozenset({Kind.REGISTERED, Kind.FENCED, Kind.SNAPSHOT, Kind.ORPHAN, Kind.RESTORED, Kind.EVICTED})
"""Notes about a node that concern every block it had."""


@dataclass(frozen=True, slots=True)
class StoryEntry:
    """One thing that happened. seq: of the event, 0 where there is none. at_s: monotonic."""

    at_s: float
    node: str
    epoch: int
    kind: str
    words: str
    seq: int = 0


@dataclass(frozen=True, slots=True)
class _Batch:
    at_s: float
    node: str
    epoch: int
    first_seq: int
    events: Sequence[Event]
    skipped: int
    size_bytes: int


class Story:
    """See the module docstring."""

    def __init__(self, *, max_notes: int = 4096, max_batches: int = 4096, max_bytes: int = 16 * 2**20) -> None:
        self._notes: deque[StoryEntry] = deque(maxlen=max_notes)
        self._batches: deque[_Batch] = deque()
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._bytes = 0
        self._forgot_s: float | None = None
        self.noted = 0
        """Notes that were ever written: the number of the newest one."""

    # -- writing -------------------------------------------------------------------------------------------------------------

    def note(self, now_s: float, node: str, epoch: int, kind: Kind, words: str) -> None:
        """Something happened to a node."""
        if len(self._notes) == self._notes.maxlen:
            self._forgot_s = max(self._forgot_s or 0.0, self._notes[0].at_s)
        self._notes.append(StoryEntry(now_s, node, epoch, kind, words))
        self.noted += 1

    def batch(self, now_s: float, node: str, epoch: int, first_seq: int, events: Sequence[Event], skipped: int) -> None:
        """Events arrived; the first `skipped` of them were duplicates."""
        size = 0
        for event in events:
            size += len(event[3])
        self._batches.append(_Batch(now_s, node, epoch, first_seq, events, skipped, size))
        self._bytes += size
        while self._bytes > self._max_bytes or len(self._batches) > self._max_batches:
            gone = self._batches.popleft()
            self._bytes -= gone.size_bytes
            self._forgot_s = gone.at_s

    def feedback(self, now_s: float, report: StaleReport, outcome: Feedback) -> None:
        """A reader said that an owner does not hold blocks."""
        verdict = f"ignored: {outcome.ignored_reason}" if outcome.ignored_reason else f"{outcome.removed} removed"
        blocks = ", ".join(item.hex() for item in report.fingerprints.slice(0, 8))
        more = ", ..." if len(report.fingerprints) > 8 else ""
        words = f"{report.reporter or 'a reader'} found {len(report.fingerprints)} blocks absent ({verdict}): {blocks}{more}"
        self.note(now_s, report.node, report.epoch, Kind.FEEDBACK, words)

    def evicted(self, now_s: float, node: str, epoch: int, result: EvictResult) -> None:
        """An owner answered a quota's request."""
        words = f"evicted {result.evicted_blocks:,} blocks for a quota" + (f" ({result.reason})" if result.reason else "")
        self.note(now_s, node, epoch, Kind.EVICTED, words)

    def effect(self, now_s: float, effect: Effect) -> None:
        """What the core wanted done."""
        match effect:
            case StateChanged():
                before = effect.before.name.lower() if effect.before else "new"
                words = f"{before} -> {effect.after.name.lower()}" + (f": {effect.reason}" if effect.reason else "")
                if effect.after is not StreamState.FENCED:
                    self.note(now_s, effect.node, effect.epoch, Kind.STATE, words)
            case Fence():
                self.note(now_s, effect.node, effect.epoch, Kind.FENCED, effect.reason)
            case RequestReplay():
                words = f"asked to send again from {effect.first_seq} to {effect.last_seq}"
                self.note(now_s, effect.node, effect.epoch, Kind.REPAIR, words)
            case RequestSnapshot():
                self.note(now_s, effect.node, effect.epoch, Kind.REPAIR, f"asked for a snapshot: {effect.reason}")
            case SnapshotApplied():
                words = f"a snapshot of {effect.blocks:,} blocks replaced what was known"
                self.note(now_s, effect.node, effect.epoch, Kind.SNAPSHOT, words)
            case AskEvict(node, epoch, request):
                words = f"asked to evict {request.max_blocks:,} blocks of {request.namespace_digest.hex()[:16]}"
                self.note(now_s, node, epoch, Kind.QUOTA, f"{words} and to keep {request.keep_blocks:,}")
            case _:
                self.note(now_s, effect.node, effect.epoch, Kind.REPAIR, type(effect).__name__)

    # -- reading -------------------------------------------------------------------------------------------------------------

    def reaches_back_s(self, now_s: float) -> float:
        """Everything in the last so many seconds is still known."""
        oldest = [ring[0].at_s for ring in (self._notes, self._batches) if ring]
        since_s = self._forgot_s if self._forgot_s is not None else min(oldest, default=now_s)
        return max(0.0, now_s - since_s)

    def newest(self, count: int) -> list[StoryEntry]:
        """The newest notes about nodes, newest first."""
        return list(itertools.islice(reversed(self._notes), count))

    def pages(self) -> Pages:
        """All that is known now, for reading at leisure: what is written later is not in it."""
        return Pages(tuple(self._notes), tuple(self._batches))


@dataclass(frozen=True, slots=True)
class Pages:
    """A story to read from, unchanging, so also from another thread: searching for a block can take a tenth of a second."""

    notes: tuple[StoryEntry, ...]
    batches: tuple[_Batch, ...]

    def of_node(self, node: str, *, max_entries: int) -> list[StoryEntry]:
        """The newest entries about a node, oldest first; its events batch by batch."""
        notes = [note for note in self.notes if note.node == node]
        batches = [_summary(batch) for batch in self.batches if batch.node == node]
        return _newest(notes + batches, max_entries)

    def of_block(self, fingerprint: bytes, *, max_entries: int) -> list[StoryEntry]:
        """The newest entries about a block, in whatever namespace. The beginning of a fingerprint will do: 8 bytes."""
        events = [entry for batch in self.batches for entry in _touching(batch, fingerprint)]
        nodes = {entry.node for entry in events if entry.kind != Kind.CLEARED}
        mentioned = fingerprint.hex()
        notes = [
            note
            for note in self.notes
            if (note.node in nodes and note.kind in _ALL_BLOCKS) or (note.kind == Kind.FEEDBACK and mentioned in note.words)
        ]
        return _newest([entry for entry in events if entry.node in nodes] + notes, max_entries)


def _newest(entries: Iterable[StoryEntry], max_entries: int) -> list[StoryEntry]:
    return sorted(entries, key=lambda entry: (entry.at_s, entry.seq))[-max_entries:]


def _summary(batch: _Batch) -> StoryEntry:
    blocks: Counter[str] = Counter()
    for event in batch.events:
        blocks[_KINDS.get(event.kind, "unknown")] += event.blocks if event.kind != EventKind.CLEARED else 1
    what = ", ".join(f"{kind} {count:,}" for kind, count in blocks.items())
    again = f", {batch.skipped} of them known already" if batch.skipped else ""
    last_seq = batch.first_seq + len(batch.events) - 1
    words = f"events {batch.first_seq} to {last_seq}: {what}{again}"
    return StoryEntry(batch.at_s, batch.node, batch.epoch, Kind.EVENTS, words, batch.first_seq)


def _touching(batch: _Batch, fingerprint: bytes) -> Iterator[StoryEntry]:
    for offset, event in enumerate(batch.events):
        if event.kind != EventKind.CLEARED and not _names(event, fingerprint):
            continue
        tier = Tier(event.tier).name.lower() if event.tier in _TIERS else str(event.tier)
        namespace = event.namespace_digest.hex()[:16] or "every namespace"
        again = ", known already" if offset < batch.skipped else ""
        words = f"{tier}, {namespace}{again}"
        kind = _KINDS.get(event.kind, "unknown")
        yield StoryEntry(batch.at_s, batch.node, batch.epoch, kind, words, batch.first_seq + offset)


def _names(event: Event, fingerprint: bytes) -> bool:
    wanted = fingerprint[: event.width]  # events carry the beginning of a fingerprint only
    at = event.packed.find(wanted)
    while at >= 0 and at % event.width:
        at = event.packed.find(wanted, at + 1)
    return at >= 0


_KINDS = {int(EventKind.STORED): Kind.STORED, int(EventKind.REMOVED): Kind.REMOVED, int(EventKind.CLEARED): Kind.CLEARED}
_TIERS = frozenset(int(tier) for tier in Tier)

"""Carries out the repair of streams: asks, takes in what comes, puts it in place of what was wrong.

Rules: a snapshot fills fresh holders beside the old ones and takes their place in one step, so a broken one changes nothing;
what comes unasked is ignored.
Does not: decide when to ask for what (repair.py), or whether the stream may speak (directory.py).
"""

from __future__ import annotations

from kvdir.core.admission import Counters
from kvdir.core.effects import Effect, RequestReplay, RequestSnapshot, SketchApplied, SnapshotApplied
from kvdir.core.event import SnapshotChunk
from kvdir.core.holders import HolderTable
from kvdir.core.ingest import Ingest
from kvdir.core.node import Stream
from kvdir.core.reconcile import Reconciler
from kvdir.core.repair import Ask, Tallies
from kvdir.core.sketches import SketchStatement
from kvdir.core.snapshot import Intake, SnapshotIntake


class Mender:
    """Of one directory, whose effects, counters and tallies it adds to."""

    def __init__(
        self,
        ingest: Ingest,
        reconciler: Reconciler,
        holders: HolderTable[Stream],
        repairs: Tallies,
        counters: Counters,
        effects: list[Effect],
    ) -> None:
        self._ingest = ingest
        self._reconciler = reconciler
        self._holders = holders
        self._repairs = repairs
        self._counters = counters
        self._effects = effects
        self._snapshots = 0

    def sketch(self, stream: Stream, statement: SketchStatement, *, now_s: float) -> None:
        """The answer to a request for a sketch; one that nobody asked for changes nothing."""
        blocks = self._reconciler.take(stream, statement, now_s=now_s)
        if blocks is not None:
            self._effects.append(SketchApplied(stream.node, stream.epoch, statement.request_id, blocks))

    def snapshot_chunk(self, stream: Stream, chunk: SnapshotChunk, *, now_s: float) -> None:
        """One chunk of the snapshot under way; others are ignored. The last one swaps it in."""
        stream.cursor.answered(Ask.SNAPSHOT, chunk.snapshot_id, now_s=now_s)
        intake = stream.intake
        if intake is None or not stream.cursor.repairing_snapshot:
            return
        match intake.take(chunk):
            case Intake.IGNORE:
                return
            case Intake.REFUSE:
                self._refuse_snapshot(stream, now_s)
            case verdict:
                stream.cursor.snapshot_progress(now_s=now_s)
                self._repairs[Ask.SNAPSHOT].bytes += sum(entry.size_bytes for entry in chunk.entries)
                if not all(self._ingest.fill(stream, entry, now_s) for entry in chunk.entries):
                    self._refuse_snapshot(stream, now_s)
                elif verdict is Intake.COMPLETE:
                    self._swap(stream, intake, now_s)

    def discard_fresh(self, stream: Stream) -> None:
        """What a snapshot had brought so far goes; what is visible stays."""
        for holder in stream.fresh.values():
            self._ingest.drop(holder)
        stream.fresh, stream.intake = {}, None

    def _refuse_snapshot(self, stream: Stream, now_s: float) -> None:
        self._counters.snapshots_refused += 1
        self.discard_fresh(stream)
        stream.cursor.snapshot_refused(now_s=now_s)

    def _swap(self, stream: Stream, intake: SnapshotIntake, now_s: float) -> None:
        old, stream.holders, stream.fresh = stream.holders, stream.fresh, {}
        for holder in stream.holders.values():
            self._holders.show(holder)
        for holder in old.values():
            self._ingest.drop(holder)
        stream.intake, stream.restored = None, False
        stream.recent.forget(intake.at_seq)
        stream.unconfirmed_blocks = 0
        stream.cursor.snapshot_done(intake.at_seq, now_s=now_s)
        self._counters.snapshots_applied += 1
        self._effects.append(SnapshotApplied(stream.node, stream.epoch, intake.snapshot_id, intake.blocks))

    def ask(self, stream: Stream, ask: Ask, *, now_s: float) -> None:
        """What the stream's repair wants of the owner."""
        if ask is Ask.REPLAY:
            cursor = stream.cursor
            self._effects.append(RequestReplay(stream.node, stream.epoch, cursor.next_seq, cursor.top_seq))
            return
        if ask is Ask.SKETCH:
            self._effects.append(self._reconciler.ask(stream))
            stream.cursor.asked(ask, stream.sketch_id, now_s=now_s)
            return
        self._snapshots += 1
        stream.cursor.asked(ask, self._snapshots, now_s=now_s)
        stream.intake = SnapshotIntake(self._snapshots)
        self._effects.append(RequestSnapshot(stream.node, stream.epoch, self._snapshots, stream.cursor.reason))

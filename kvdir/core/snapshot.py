"""Takes in one snapshot, chunk by chunk, and says when it is whole.

Invariant: a snapshot takes effect only when every chunk came in order, at one sequence number, and its total agrees with its
content; an early end, a repeated or skipped chunk, or a lie about the total changes nothing that was known.
Content goes into fresh holders beside the old ones (directory.py); this file only counts.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator

from kvdir.core.event import Event, EventKind, SnapshotChunk
from kvdir.fingerprint import WIDTHS


class Intake(enum.Enum):
    """What to do with a chunk."""

    IGNORE = "ignore"
    FILL = "fill"
    COMPLETE = "complete"
    REFUSE = "refuse"


class SnapshotIntake:
    """Progress of the snapshot `snapshot_id`. at_seq is that of its first chunk."""

    __slots__ = ("_next_index", "at_seq", "blocks", "fault", "snapshot_id")

    def __init__(self, snapshot_id: int) -> None:
        self.snapshot_id = snapshot_id
        self.at_seq = -1
        self.blocks = 0
        self.fault = ""
        self._next_index = 0

    def take(self, chunk: SnapshotChunk) -> Intake:
        """FILL: apply the entries. COMPLETE: apply them and swap. REFUSE: discard the whole; `fault` says why."""
        if chunk.snapshot_id != self.snapshot_id:
            return Intake.IGNORE
        if chunk.index != self._next_index:
            return self._refuse(f"chunk {chunk.index} came where {self._next_index} was due")
        if self._next_index == 0:
            self.at_seq = chunk.at_seq
        elif chunk.at_seq != self.at_seq:
            return self._refuse(f"at_seq changed from {self.at_seq} to {chunk.at_seq}")
        for entry in chunk.entries:
            if entry.kind != EventKind.STORED or entry.width not in WIDTHS or len(entry.packed) % entry.width:
                return self._refuse("an entry is not a whole `stored` event")
            self.blocks += entry.blocks
        self._next_index += 1
        if not chunk.last:
            return Intake.FILL
        if chunk.total_blocks != self.blocks:
            return self._refuse(f"it claims {chunk.total_blocks} blocks and has {self.blocks}")
        return Intake.COMPLETE

    def _refuse(self, fault: str) -> Intake:
        self.fault = fault
        return Intake.REFUSE


def snapshot_chunks(
    snapshot_id: int, at_seq: int, entries: Iterable[Event], *, max_blocks: int = 8192
) -> Iterator[SnapshotChunk]:
    """The owner's side: cuts a statement into chunks of at most max_blocks; the last one carries the total. Lazy."""
    index = total = room = 0
    parts: list[Event] = []
    for entry in entries:
        at, width = 0, entry.width
        while at < len(entry.packed):
            if room == 0 and parts:
                yield SnapshotChunk(snapshot_id, at_seq, index, tuple(parts))
                index, parts = index + 1, []
            room = room or max_blocks
            piece = entry._replace(packed=entry.packed[at : at + room * width])
            parts.append(piece)
            at += len(piece.packed)
            total += piece.blocks
            room -= piece.blocks
    yield SnapshotChunk(snapshot_id, at_seq, index, tuple(parts), last=True, total_blocks=total)

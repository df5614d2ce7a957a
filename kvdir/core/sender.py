"""One coordinator's view of the owner's outbox: where sending stands, what is unacknowledged, and how to go back.

Rules: events are sent in order and never skipped willingly. A request for replay moves the position back, and sending simply
goes on from there, so nothing newer comes in between (the rule of order in stream.py). A snapshot moves it behind at_seq.
Credit: at most `credit` numbers above the last acknowledged one are under way; what is sent again costs none, the
transport's own flow control paces it. A doubt is told before any event that is newer, its end behind every event that is
older. No I/O: client/publisher.py is the shell around it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from kvdir.core.event import NO_DOUBT, Batch, Doubt, Heartbeat, HeartbeatFigures
from kvdir.core.outbox import OwnerOutbox
from kvdir.core.sketches import SketchStatement


class StreamSender:
    """skipped_events: gone from the outbox before they could be sent here."""

    def __init__(self, outbox: OwnerOutbox, *, max_batch_events: int = 256, max_batch_bytes: int = 256 * 2**10) -> None:
        self._outbox = outbox
        self._max_batch_events = max_batch_events
        self._max_batch_bytes = max_batch_bytes
        self._next_seq = 1
        self._sent_seq = 0
        self._acked_seq = 0
        self._credit = 0
        self._told = NO_DOUBT
        self.skipped_events = 0
        self.replays = 0

    @property
    def position(self) -> int:
        """Everything up to here was sent in this call, or is lost."""
        return self._next_seq - 1

    @property
    def acked_seq(self) -> int:
        return self._acked_seq

    @property
    def caught_up(self) -> bool:
        return self._next_seq > self._outbox.last_seq

    def opened(self, *, resume_seq: int, hello_seq: int, credit: int) -> bool:
        """A call begins. False: the outbox does not reach back to resume_seq; say so to the coordinator."""
        start = resume_seq or hello_seq
        self._next_seq = start + 1
        self._sent_seq = max(self._sent_seq, start)
        self._acked_seq = start
        self._credit = credit
        return start >= hello_seq or start + 1 >= self._outbox.replayable_from

    def ack(self, seq: int) -> None:
        """The coordinator has taken note of everything up to seq."""
        self._acked_seq = max(self._acked_seq, min(seq, self._sent_seq))

    def replay(self, first_seq: int) -> bool:
        """Goes back to first_seq. False: it is no longer kept; say so to the coordinator."""
        if first_seq < self._outbox.replayable_from:
            return False
        self._next_seq = min(self._next_seq, max(first_seq, 1))
        self.replays += 1
        return True

    def snapshot_taken(self, at_seq: int) -> None:
        """An absolute statement as of at_seq goes out now: events up to it need not."""
        self._next_seq = max(self._next_seq, at_seq + 1)
        self._sent_seq = max(self._sent_seq, at_seq)

    def next_batch(self) -> Batch | None:
        """What to send now, and moves on; None when there is nothing, or no credit."""
        room = self._credit - max(0, self.position - self._acked_seq)
        if room <= 0 or self.caught_up:
            return None
        batch = self._outbox.read(self._next_seq, max_events=min(room, self._max_batch_events), max_bytes=self._max_batch_bytes)
        first_seq = batch.first_seq if batch else self._outbox.last_seq + 1
        self.skipped_events += max(0, min(first_seq, self._outbox.oldest_seq) - self._next_seq)  # lost ones are counted there
        self._next_seq = first_seq
        if batch is None:
            self._sent_seq = max(self._sent_seq, self.position)  # lost: may be acknowledged, or they would cost credit for ever
            return None
        self._next_seq = batch.last_seq + 1
        replay = batch.first_seq <= self._sent_seq
        self._sent_seq = max(self._sent_seq, batch.last_seq)
        return batch._replace(replay=replay)

    def sketch(self, request_id: int, *, cells: int, parts: Collection[tuple[bytes, int]]) -> SketchStatement | None:
        """The answer to a request for a sketch; None until every event was sent, or when the owner keeps none."""
        sketches = self._outbox.sketches
        if sketches is None or not self.caught_up:
            return None
        return sketches.statement(request_id, self._outbox.last_seq, cells=cells, wanted=parts)

    def introduced(self, doubt: Doubt) -> Doubt:
        """What the first message of a call says of a doubt: all of it, since that announces every number up to now."""
        self._told = doubt
        return doubt

    def newly_in(self, doubt: Doubt) -> bool:
        """Whether a heartbeat has to go out before the next event."""
        said = self._statement(doubt)
        return said.lasts and said != self._told

    def _statement(self, doubt: Doubt) -> Doubt:
        if doubt.lasts or self.caught_up or doubt == self._told:
            return doubt
        before = Doubt(doubt.number - 1, doubt.words, True)  # it ended with an event that is still to be sent
        return before if before.number > self._told.number else self._told

    def heartbeat(self, figures: HeartbeatFigures, doubt: Doubt = NO_DOUBT) -> Heartbeat:
        """A heartbeat for now. Counts and digests are as of the outbox's last event: they go out only when we stand there."""
        self._told = self._statement(doubt)
        sketches = self._outbox.sketches
        if not self.caught_up:
            figures = replace(figures, counts=None)
        elif sketches is not None:
            figures = replace(figures, counts=sketches.stated(figures.counts))
        return Heartbeat(self.position, figures, self._outbox.dropped_events + self.skipped_events, self._told)

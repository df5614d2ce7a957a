"""The owner's side of a stream: numbers events, keeps the newest for sending and replay, never blocks, never grows.

    ... gone | oldest_seq ............................ last_seq |
                 ^ replay can go back to replayable_from          ^ append

Rules: every event consumes a number, also one that is lost, so a loss is always a visible hole at the other end. Bounded
in events and bytes; when full the oldest go: a sender that had not sent them yet skips them (its loss, counted there), and
a coordinator that needs them again gets a snapshot. One outbox serves any number of senders (sender.py), each with its own
position. Not thread-safe: append from the thread that changes the inventory, so that counts and numbers agree.
"""

from __future__ import annotations

from collections.abc import Callable

from kvdir.core.event import Batch, Event
from kvdir.core.sketches import OwnerSketches


class OwnerOutbox:
    """A log of the last events, by sequence number. A lost event is kept as None.

    dropped_events: numbers consumed without an event anybody could have sent. sketches: of everything held, kept along; for
    owners whose events are exact changes.
    """

    def __init__(self, *, max_events: int = 65_536, max_bytes: int = 16 * 2**20, sketches: OwnerSketches | None = None) -> None:
        if max_events < 1 or max_bytes < 1:
            raise ValueError("the outbox needs room for at least one event")
        self._max_events = max_events
        self._max_bytes = max_bytes
        self._log: list[Event | None] = []
        self._head = 0  # _log[:_head] is gone already; cut off now and then, so that eviction costs O(1)
        self._first_seq = 1
        self._bytes = 0
        self._last_lost_seq = 0
        self._listeners: list[Callable[[], None]] = []
        self.dropped_events = 0
        self.sketches = sketches

    @property
    def last_seq(self) -> int:
        """Highest number consumed; 0 before the first event."""
        return self._first_seq + len(self._log) - self._head - 1

    @property
    def oldest_seq(self) -> int:
        """Lowest number still kept; last_seq + 1 when nothing is."""
        return self._first_seq

    @property
    def replayable_from(self) -> int:
        """From here on every event is kept, without a hole."""
        return max(self._first_seq, self._last_lost_seq + 1)

    @property
    def held_bytes(self) -> int:
        return self._bytes

    def __len__(self) -> int:
        """Numbers kept, lost ones included."""
        return len(self._log) - self._head

    def subscribe(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Calls `listener` after every number consumed; it must only set a flag. Returns how to unsubscribe."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def append(self, event: Event) -> int:
        """Numbers and keeps the event; returns its number. One larger than the whole outbox is lost, visibly."""
        if self.sketches is not None:
            self.sketches.apply(event)
        if event.size_bytes > self._max_bytes:
            return self._lose(1)
        self._log.append(event)
        self._bytes += event.size_bytes
        self._consumed()
        return self.last_seq

    def lose(self, events: int = 1) -> int:
        """Consumes numbers for events that are known to be lost, such as a hole in an engine's own numbering.

        What they said is not known either, so the sketches fall silent until somebody restates what is held.
        """
        if self.sketches is not None:
            self.sketches.lost()
        return self._lose(events)

    def _lose(self, events: int) -> int:
        self._log += [None] * min(events, self._max_events)
        if events > self._max_events:
            self._first_seq += events - self._max_events
        self.dropped_events += events
        self._last_lost_seq = self.last_seq
        self._consumed()
        return self.last_seq

    def read(self, first_seq: int, *, max_events: int, max_bytes: int) -> Batch | None:
        """The first unbroken stretch of kept events at or after first_seq, within the limits (one event always fits)."""
        at = self._head + max(first_seq, self._first_seq) - self._first_seq
        end = len(self._log)
        while at < end and self._log[at] is None:
            at += 1
        if at >= end:
            return None
        start, size = at, 0
        events: list[Event] = []
        while at < end and len(events) < max_events:
            event = self._log[at]
            if event is None or (events and size + event.size_bytes > max_bytes):
                break
            events.append(event)
            size += event.size_bytes
            at += 1
        return Batch(self._first_seq + start - self._head, tuple(events))

    def _consumed(self) -> None:
        while len(self) > self._max_events or self._bytes > self._max_bytes:
            event = self._log[self._head]
            self._log[self._head] = None
            self._bytes -= event.size_bytes if event else 0
            self._head += 1
            self._first_seq += 1
        if self._head > 1024 and self._head * 2 > len(self._log):
            del self._log[: self._head]
            self._head = 0
        for listener in self._listeners:
            listener()

"""Which read may fly now: bytes in flight bounded per peer and over all, by priority, fair between requests.

    per peer                                              over all peers
    LOAD         request 3: [chunk][chunk]   ─┐
    PREFETCH     request 7: [chunk] ...       ├─▶ window ──▶ as much as stays free for others ──▶ in flight
    REPLICATION  request 9: [chunk] ...      ─┘

Rules:
- Per peer at most `peer_bytes` in flight, over all at most `total_bytes`. A chunk larger than its peer's window flies alone
  there, one larger than `total_bytes` alone of all. So nothing waits for ever.
- Priorities are strict, LOAD before PREFETCH before REPLICATION, but for chunks that have waited for `aging_s`: one of them per
  peer and time goes before everything that waits there, so a lower priority moves on however busy the higher ones are.
- Background (PREFETCH, REPLICATION) has at most `background_bytes` in flight at a peer, and begins nothing anywhere while a
  load is being brought, from its first question (`load_began`) to its answer: it would take turns of the event loop from every
  step of it. So a small load beside a large prefetch waits for `background_bytes` at most.
- Requests of one priority at a peer share by bytes: start-time fair queueing (Goyal, Vin, Cheng, IEEE/ACM Trans. on Networking
  5, 1997). The order of one request's chunks is kept.
- Peers do not wait for each other: each has its own queues, and the sum is shared by dynamic thresholds (Choudhury and Hahne,
  IEEE/ACM Trans. on Networking 6, 1998): a peer may have as much in flight as stays free, so slow ones leave room for others.
  A chunk that has waited for `aging_s` because nothing that large was free, is the next to fly.

Pure: tickets are the caller's, time comes in as `now_s`. What waits, waits for something in flight or for a load's end, so
`give_back` and `load_ended` wake it; background that a long load holds back asks with `look` again when it has grown old.
Does not wait or wake itself (peer_agent/server/turns.py).
"""

from __future__ import annotations

import enum
import heapq
import math
from dataclasses import dataclass, field

BACKGROUND_CHUNK_BYTES = 1 << 20
"""Largest chunk that PREFETCH and REPLICATION should ask for."""

_TAGS_KEPT = 256


class Priority(enum.IntEnum):
    """What a read is for; the smaller number goes first."""

    LOAD = 0
    PREFETCH = 1
    REPLICATION = 2


@dataclass(slots=True)
class _Chunk:
    ticket: int
    peer: str
    request: int
    priority: Priority
    size_bytes: int
    asked_s: float
    start_tag: float
    aged: bool = False
    gone: bool = False


_Turn = tuple[bool, Priority, float, int, _Chunk]
"""Whose turn is next, the smallest first: not old, priority, asked_s, ticket."""


@dataclass(slots=True)
class _Class:
    """One priority at one peer. queue: a heap of (start tag, order, chunk); virtual: start tag of what flew last."""

    queue: list[tuple[float, int, _Chunk]] = field(default_factory=list)
    virtual: float = 0.0
    finish_tags: dict[int, float] = field(default_factory=dict)  # by request
    flying_bytes: int = 0

    def push(self, chunk: _Chunk, order: int) -> None:
        chunk.start_tag = max(self.virtual, self.finish_tags.get(chunk.request, 0.0))
        self.finish_tags[chunk.request] = chunk.start_tag + chunk.size_bytes
        if len(self.finish_tags) > _TAGS_KEPT + len(self.queue):  # requests that have ended and owe nothing
            self.finish_tags = {request: tag for request, tag in self.finish_tags.items() if tag > self.virtual}
        heapq.heappush(self.queue, (chunk.start_tag, order, chunk))

    @property
    def head(self) -> _Chunk | None:
        while self.queue and self.queue[0][2].gone:
            heapq.heappop(self.queue)
        return self.queue[0][2] if self.queue else None

    def pop(self) -> None:
        _, _, chunk = heapq.heappop(self.queue)
        self.virtual = max(self.virtual, chunk.start_tag)
        self.flying_bytes += chunk.size_bytes


@dataclass(slots=True)
class _Lane:
    """One peer. asked_bytes: waiting and in flight, by request. aged: chunks in flight that waited too long."""

    classes: dict[Priority, _Class] = field(default_factory=lambda: {priority: _Class() for priority in Priority})
    asked_bytes: dict[int, int] = field(default_factory=dict)
    aged: int = 0

    @property
    def flying_bytes(self) -> int:
        return sum(kind.flying_bytes for kind in self.classes.values())

    def add(self, request: int, size_bytes: int) -> None:
        left = self.asked_bytes.get(request, 0) + size_bytes
        if left:
            self.asked_bytes[request] = left
        else:
            self.asked_bytes.pop(request, None)


class Schedule:
    """All reads of one agent. See the module docstring."""

    def __init__(self, *, peer_bytes: int, total_bytes: int, background_bytes: int = 4 << 20, aging_s: float = 0.5) -> None:
        if min(peer_bytes, total_bytes, background_bytes) <= 0:
            raise ValueError("peer_bytes, total_bytes and background_bytes must be positive")
        self._peer_bytes = peer_bytes
        self._total_bytes = total_bytes
        self._background_bytes = background_bytes
        self.aging_s = aging_s
        self._lanes: dict[str, _Lane] = {}
        self._waiting: dict[int, _Chunk] = {}
        self._flying: dict[int, _Chunk] = {}
        self._held_up: dict[str, tuple[int, float]] = {}  # whose next chunk waits for the sum: bytes to be free; when it is old
        self._bytes = 0
        self._asked = 0
        self._loads = 0  # being brought

    @property
    def in_flight_bytes(self) -> int:
        return self._bytes

    def queued_bytes(self, peer: str, *, besides: int) -> int:
        """Bytes in flight and waiting at this peer of requests other than `besides`: what a read of it comes behind."""
        lane = self._lanes.get(peer)
        return sum(lane.asked_bytes.values()) - lane.asked_bytes.get(besides, 0) if lane else 0

    def flying_bytes(self, peer: str) -> int:
        """Bytes in flight at this peer."""
        lane = self._lanes.get(peer)
        return lane.flying_bytes if lane else 0

    def waiting(self) -> dict[Priority, int]:
        """Chunks that wait, by priority. The one method that another thread may call (metrics)."""
        counts = dict.fromkeys(Priority, 0)
        for chunk in list(self._waiting.values()):  # a copy: the dict may change meanwhile
            counts[chunk.priority] += 1
        return counts

    def load_began(self) -> None:
        """A load of an engine needs something of peers; `load_ended` is due."""
        self._loads += 1

    def load_ended(self, *, now_s: float) -> tuple[int, ...]:
        """Returns the tickets that may fly now: background held back until now, or too old to be held back by other loads."""
        self._loads -= 1
        return self._admit({chunk.peer for chunk in self._waiting.values()}, now_s)

    def look(self, peer: str, *, now_s: float) -> tuple[int, ...]:
        """Returns the tickets that may fly now at this peer because they have waited for aging_s."""
        return self._admit({peer}, now_s)

    def ask(
        self, ticket: int, *, peer: str, request: int, priority: Priority, size_bytes: int, now_s: float
    ) -> tuple[int, ...]:
        """Queues one chunk; returns the tickets that may fly now, this one among them if there is room.

        ticket: not in use. request: whose chunk it is (one load or prefetch); requests share fairly.
        """
        lane = self._lanes.setdefault(peer, _Lane())
        chunk = self._waiting[ticket] = _Chunk(ticket, peer, request, priority, size_bytes, now_s, 0.0)
        self._asked += 1
        lane.classes[priority].push(chunk, self._asked)
        lane.add(request, size_bytes)
        return self._admit({peer}, now_s)

    def give_back(self, ticket: int, *, now_s: float) -> tuple[int, ...]:
        """The chunk has landed, or its caller no longer waits; returns the tickets that may fly now."""
        flown = self._flying.pop(ticket, None)
        chunk = flown or self._waiting.pop(ticket, None)
        if chunk is None:
            return ()
        chunk.gone = True
        lane = self._lanes[chunk.peer]
        lane.add(chunk.request, -chunk.size_bytes)
        if flown is not None:
            lane.classes[chunk.priority].flying_bytes -= chunk.size_bytes
            lane.aged -= chunk.aged
            self._bytes -= chunk.size_bytes
        if not lane.asked_bytes:
            del self._lanes[chunk.peer]  # tags mean nothing to whoever comes next
        return self._admit({chunk.peer}, now_s)

    def _admit(self, peers: set[str], now_s: float) -> tuple[int, ...]:
        """What may fly after something happened at these peers: their own chunks, and those that waited for the sum."""
        free = self._total_bytes - self._bytes
        due = {name for name, (need, old_s) in self._held_up.items() if need <= free or old_s <= now_s}
        ready: list[_Turn] = []
        for name in due | peers:
            self._held_up.pop(name, None)
            self._push_head(ready, name, now_s)
        admitted: list[int] = []
        while ready:
            turn = heapq.heappop(ready)
            chunk = turn[-1]
            flying = self._lanes[chunk.peer].flying_bytes
            need = flying + chunk.size_bytes
            if flying and need > self._peer_bytes:
                continue  # its next turn comes when something lands at this peer
            if self._bytes and need > self._total_bytes - self._bytes:
                self._hold_up(chunk, need, idle=not flying)
                if not turn[0] and not flying:  # has waited long enough for so much to be free: nobody passes it any more
                    for *_, other in ready:
                        self._hold_up(other, 0, idle=False)
                    break
                continue
            self._fly(chunk, now_s)
            admitted.append(chunk.ticket)
            self._push_head(ready, chunk.peer, now_s)
        return tuple(admitted)

    def _push_head(self, ready: list[_Turn], peer: str, now_s: float) -> None:
        lane = self._lanes.get(peer)
        if lane is not None and (head := self._head(lane, now_s)) is not None:
            heapq.heappush(ready, (not self._old(head, now_s), head.priority, head.asked_s, head.ticket, head))

    def _hold_up(self, chunk: _Chunk, need: int, *, idle: bool) -> None:
        old_s = chunk.asked_s + self.aging_s if idle else math.inf
        self._held_up[chunk.peer] = min(need, self._total_bytes), old_s

    def _old(self, chunk: _Chunk, now_s: float) -> bool:
        return now_s - chunk.asked_s >= self.aging_s

    def _head(self, lane: _Lane, now_s: float) -> _Chunk | None:
        """The chunk of this lane that is next, if priorities let it begin now."""
        heads = [head for kind in lane.classes.values() if (head := kind.head) is not None]
        if not heads:
            return None
        passed_over = [head for head in heads if head.priority is not Priority.LOAD and self._old(head, now_s)]
        if passed_over and not lane.aged:
            return passed_over[0]
        head = heads[0]
        return head if head.priority is Priority.LOAD or self._quiet(lane, head.size_bytes) else None

    def _quiet(self, lane: _Lane, size_bytes: int) -> bool:
        """Whether background may begin here: no load under way, and its own bound kept."""
        if self._loads:
            return False
        loads = lane.classes[Priority.LOAD].flying_bytes
        background = lane.flying_bytes - loads
        return not loads and (not background or background + size_bytes <= self._background_bytes)

    def _fly(self, chunk: _Chunk, now_s: float) -> None:
        lane = self._lanes[chunk.peer]
        lane.classes[chunk.priority].pop()
        chunk.aged = chunk.priority is not Priority.LOAD and self._old(chunk, now_s)
        lane.aged += chunk.aged
        del self._waiting[chunk.ticket]
        self._flying[chunk.ticket] = chunk
        self._bytes += chunk.size_bytes

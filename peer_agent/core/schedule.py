"""Which read may fly now: bytes in flight bounded per peer and over all, by priority, fair between requests.

    per peer                                            over all peers
    LOAD         request 3: [chunk][chunk]   ─┐          a peer may hold as much as is left free for the others
    PREFETCH     request 7: [chunk] ...       ├─▶ window ─────────────▶ in flight
    REPLICATION  request 9: [chunk] ...      ─┘

Rules:
- Per peer at most `peer_bytes` in flight, over all at most `total_bytes`. A chunk larger than the peer's window flies alone at
  its peer; one larger than `total_bytes` alone of all. So nothing waits for ever.
- Priorities are strict, LOAD before PREFETCH before REPLICATION, but a chunk that waited for `aging_s` goes before everything
  that waits: one such chunk per peer at a time, so a lower priority moves on however busy the higher ones are.
- Background (PREFETCH, REPLICATION) never has more than `background_bytes` in flight at a peer, and begins nothing there while
  a LOAD is in flight or waiting: a small load beside a large prefetch waits for background_bytes at most.
- Requests of the same priority at a peer share by bytes: start-time fair queueing (Goyal, Vin, Cheng, IEEE/ACM Trans. on
  Networking 5, 1997). The order of one request's chunks is kept.
- Peers do not wait for each other: each has its own queues, and the sum is shared by dynamic thresholds (Choudhury and Hahne,
  IEEE/ACM Trans. Networking 6, 1998): a peer may have as much in flight as stays free, so slow ones, however many, leave room.

Pure: tickets are the caller's, time comes in as `now_s`; it waits and wakes (peer_agent/server/peers.py).
"""

from __future__ import annotations

import enum
import heapq
from dataclasses import dataclass, field

BACKGROUND_CHUNK_BYTES = 1 << 20
"""Largest chunk that PREFETCH and REPLICATION should ask for."""


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
    start_tag: float = 0.0
    aged: bool = False
    gone: bool = False


@dataclass(slots=True)
class _Lane:
    """One peer. queues: a heap of (start tag, ticket order, chunk) per priority. finish_tags: of (priority, request)."""

    queues: tuple[list[tuple[float, int, _Chunk]], ...] = field(default_factory=lambda: tuple([] for _ in Priority))
    virtual: list[float] = field(default_factory=lambda: [0.0] * len(Priority))
    finish_tags: dict[tuple[Priority, int], float] = field(default_factory=dict)
    flying: dict[Priority, int] = field(default_factory=lambda: dict.fromkeys(Priority, 0))
    aged: int = 0  # of the chunks in flight

    @property
    def in_flight_bytes(self) -> int:
        return sum(self.flying.values())

    @property
    def background_bytes(self) -> int:
        return self.in_flight_bytes - self.flying[Priority.LOAD]


class Schedule:
    """All reads of one agent. See the module docstring."""

    def __init__(self, *, peer_bytes: int, total_bytes: int, background_bytes: int = 4 << 20, aging_s: float = 0.5) -> None:
        if min(peer_bytes, total_bytes, background_bytes) <= 0:
            raise ValueError("peer_bytes, total_bytes and background_bytes must be positive")
        self._peer_bytes = peer_bytes
        self._total_bytes = total_bytes
        self._background_bytes = background_bytes
        self._aging_s = aging_s
        self._lanes: dict[str, _Lane] = {}
        self._waiting: dict[int, _Chunk] = {}
        self._flying: dict[int, _Chunk] = {}
        self._bytes = 0
        self._asked = 0

    @property
    def in_flight_bytes(self) -> int:
        return self._bytes

    def in_flight_bytes_at(self, peer: str) -> int:
        lane = self._lanes.get(peer)
        return lane.in_flight_bytes if lane else 0

    def queued_bytes(self, peer: str, *, besides: int) -> int:
        """Bytes in flight and waiting at this peer of requests other than `besides`: what a read of it comes behind."""
        return sum(
            chunk.size_bytes
            for chunks in (self._flying, self._waiting)
            for chunk in chunks.values()
            if chunk.peer == peer and chunk.request != besides
        )

    def waiting(self) -> dict[Priority, int]:
        """Chunks that wait, by priority."""
        counts = dict.fromkeys(Priority, 0)
        for chunk in self._waiting.values():
            counts[chunk.priority] += 1
        return counts

    def ask(
        self, ticket: int, *, peer: str, request: int, priority: Priority, size_bytes: int, now_s: float
    ) -> tuple[int, ...]:
        """Queues one chunk; returns the tickets that may fly now, this one among them if there is room.

        request: whose chunk it is (one load or prefetch); requests share fairly.
        """
        lane = self._lanes.setdefault(peer, _Lane())
        chunk = _Chunk(ticket, peer, request, priority, size_bytes, now_s)
        key = priority, request
        chunk.start_tag = max(lane.virtual[priority], lane.finish_tags.get(key, 0.0))
        lane.finish_tags[key] = chunk.start_tag + size_bytes
        self._asked += 1
        heapq.heappush(lane.queues[priority], (chunk.start_tag, self._asked, chunk))
        self._waiting[ticket] = chunk
        return self._admit(now_s)

    def give_back(self, ticket: int, *, now_s: float) -> tuple[int, ...]:
        """The chunk has landed, or its caller no longer waits; returns the tickets that may fly now."""
        waited = self._waiting.pop(ticket, None)
        if waited is not None:
            waited.gone = True
        flown = self._flying.pop(ticket, None)
        if flown is not None:
            lane = self._lanes[flown.peer]
            lane.flying[flown.priority] -= flown.size_bytes
            lane.aged -= flown.aged
            self._bytes -= flown.size_bytes
        admitted = self._admit(now_s)
        chunk = waited or flown
        if chunk is not None:
            self._tidy(chunk.peer)
        return admitted

    def next_aging_s(self) -> float | None:
        """When a waiting chunk will have waited for aging_s; call `wake` then. None: nothing waits."""
        return min((chunk.asked_s + self._aging_s for chunk in self._waiting.values()), default=None)

    def wake(self, now_s: float) -> tuple[int, ...]:
        """Time has passed: tickets that may fly now."""
        return self._admit(now_s)

    def _admit(self, now_s: float) -> tuple[int, ...]:
        admitted: list[int] = []
        while True:
            heads = [chunk for lane in self._lanes.values() if (chunk := self._head(lane, now_s)) is not None]
            if not heads:
                return tuple(admitted)
            chunk = min(heads, key=lambda chunk: (not chunk.aged, chunk.priority, chunk.asked_s))
            self._fly(chunk)
            admitted.append(chunk.ticket)

    def _head(self, lane: _Lane, now_s: float) -> _Chunk | None:
        """The chunk of this lane that may fly now."""
        heads = [chunk for priority in Priority if (chunk := _first(lane.queues[priority])) is not None]
        if not heads:
            return None
        if not lane.aged:
            for chunk in heads[1:]:
                if now_s - chunk.asked_s >= self._aging_s and self._fits(lane, chunk):
                    chunk.aged = True
                    return chunk
        chunk = heads[0]
        if chunk.priority is not Priority.LOAD:
            busy = lane.flying[Priority.LOAD] > 0
            behind = lane.background_bytes and lane.background_bytes + chunk.size_bytes > self._background_bytes
            if busy or behind:
                return None
        return chunk if self._fits(lane, chunk) else None

    def _fits(self, lane: _Lane, chunk: _Chunk) -> bool:
        if not self._bytes:
            return True
        flying, free = lane.in_flight_bytes, self._total_bytes - self._bytes
        if not flying:
            return chunk.size_bytes <= free
        return flying + chunk.size_bytes <= min(self._peer_bytes, free)

    def _fly(self, chunk: _Chunk) -> None:
        lane = self._lanes[chunk.peer]
        heapq.heappop(lane.queues[chunk.priority])
        del self._waiting[chunk.ticket]
        self._flying[chunk.ticket] = chunk
        lane.virtual[chunk.priority] = max(lane.virtual[chunk.priority], chunk.start_tag)
        lane.flying[chunk.priority] += chunk.size_bytes
        lane.aged += chunk.aged
        self._bytes += chunk.size_bytes

    def _tidy(self, peer: str) -> None:
        """Forgets a lane that is empty: its tags mean nothing to whoever comes next."""
        lane = self._lanes[peer]
        if not lane.in_flight_bytes and not any(_first(queue) for queue in lane.queues):
            del self._lanes[peer]


def _first(queue: list[tuple[float, int, _Chunk]]) -> _Chunk | None:
    while queue and queue[0][2].gone:
        heapq.heappop(queue)
    return queue[0][2] if queue else None

"""What sessions hold for a time, and when that time ends. Pure; the rules are those of inventory.py."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvdir.fingerprint import Fingerprints
from peer_agent.core.slot_table import SlotTable

KeyT = TypeVar("KeyT")

AGENT = 0
"""Session number of the agent's own reads from peers; its reservations have no lease, its reader always ends them."""

PEERS = -1
"""Session number under which other agents hold locks."""

SPARE_ENTRIES = 1024


@dataclass(slots=True)
class Reservation:
    """slots: position in the list -> slot; granted and not yet committed or given back.

    contested: some of its blocks have, or had, a second writer, who may have committed them (writers.py).
    """

    session: int
    table: SlotTable
    fingerprints: Fingerprints
    slots: dict[int, int]
    expires_s: float
    contested: bool = False

    def keys(self, positions: Iterable[int]) -> Iterator[tuple[bytes, bytes]]:
        """What these positions are called where writers are listed: namespace digest and fingerprint."""
        digest, fingerprints = self.table.namespace_digest, self.fingerprints
        return ((digest, fingerprints[position]) for position in positions)


@dataclass(slots=True)
class Lock:
    """slots: with repeats, one lock count each. holder: identity of the peer that it was given to; none of an engine."""

    session: int
    table: SlotTable
    slots: list[int]
    expires_s: float
    holder: str = ""


@dataclass(slots=True)
class Session:
    """Numbers of what it holds. ended: it may still be writing."""

    reservations: set[int] = field(default_factory=set)
    locks: set[int] = field(default_factory=set)
    ended: bool = False


class Ends(Generic[KeyT]):
    """Keys by the time when they end. What ended before leaves its entry behind, until `compact` or its time."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, KeyT]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, until_s: float, key: KeyT) -> None:
        heapq.heappush(self._heap, (until_s, key))

    def due(self, now_s: float) -> Iterator[KeyT]:
        """Takes out, one by one, what ends by now_s."""
        while self._heap and self._heap[0][0] <= now_s:
            yield heapq.heappop(self._heap)[1]

    def compact(self, count: int, live: Callable[[], Iterable[tuple[float, KeyT]]]) -> None:
        """Keeps only the `count` entries that are live, when most are not: memory stays proportional to them."""
        if len(self._heap) > 2 * count + SPARE_ENTRIES:
            self._heap = list(live())
            heapq.heapify(self._heap)

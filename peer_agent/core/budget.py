"""Bytes in flight per peer: bounded, first come first served between chunks.

A load asks for one chunk at a time, so a small foreground load waits behind at most one chunk of every other load, never
behind a whole prefetch. Pure: tickets are the caller's; it waits and wakes (peer_agent/server/peers.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator


class FlightBudget:
    """At most limit_bytes in flight; one chunk larger than the limit may fly alone, so nothing can wait for ever."""

    def __init__(self, limit_bytes: int) -> None:
        if limit_bytes <= 0:
            raise ValueError("limit_bytes must be positive")
        self._limit_bytes = limit_bytes
        self._in_flight: dict[int, int] = {}
        self._waiting: OrderedDict[int, int] = OrderedDict()
        self._bytes = 0

    @property
    def in_flight_bytes(self) -> int:
        return self._bytes

    def ask(self, ticket: int, size_bytes: int) -> bool:
        """True: may fly now. False: queued; `give_back` will name the ticket."""
        self._waiting[ticket] = size_bytes
        return ticket in self._admit()

    def give_back(self, ticket: int) -> tuple[int, ...]:
        """The chunk has landed, or its caller no longer waits; returns the tickets that may fly now."""
        self._waiting.pop(ticket, None)
        self._bytes -= self._in_flight.pop(ticket, 0)
        return self._admit()

    def _admit(self) -> tuple[int, ...]:
        admitted = []
        while self._waiting:
            ticket, size_bytes = next(iter(self._waiting.items()))
            if self._in_flight and self._bytes + size_bytes > self._limit_bytes:
                break
            del self._waiting[ticket]
            self._in_flight[ticket] = size_bytes
            self._bytes += size_bytes
            admitted.append(ticket)
        return tuple(admitted)


def chunks(count: int, *, block_bytes: int, chunk_bytes: int) -> Iterator[range]:
    """Splits `count` blocks into ranges of at most chunk_bytes, at least one block each."""
    step = max(1, chunk_bytes // block_bytes)
    return (range(start, min(start + step, count)) for start in range(0, count, step))

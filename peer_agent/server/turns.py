"""Whose read flies next: coroutines wait here for what the schedule admits (peer_agent/core/schedule.py decides).

Rule: a turn that was given is always given back, however its reader ends. Does not: read.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Iterator

from peer_agent.core.schedule import Priority, Schedule


class Turns:
    """One agent's reads. clock: monotonic seconds."""

    def __init__(self, schedule: Schedule, *, clock: Callable[[], float]) -> None:
        self._schedule = schedule
        self._clock = clock
        self._tickets = itertools.count(1)
        self._waiting: dict[int, asyncio.Event] = {}

    @contextlib.asynccontextmanager
    async def turn(
        self, *, peer: str, request: int, priority: Priority, size_bytes: int, until_s: float
    ) -> AsyncIterator[bool]:
        """Waits for it until until_s at most; yields whether it came."""
        ticket = next(self._tickets)
        event = self._waiting[ticket] = asyncio.Event()
        try:
            self._wake(
                self._schedule.ask(
                    ticket, peer=peer, request=request, priority=priority, size_bytes=size_bytes, now_s=self._clock()
                )
            )
            while not event.is_set() and (left_s := until_s - self._clock()) > 0:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(left_s, self._schedule.aging_s)):
                        await event.wait()
                if not event.is_set():
                    self._wake(self._schedule.look(peer, now_s=self._clock()))
            yield event.is_set()
        finally:
            del self._waiting[ticket]
            self._wake(self._schedule.give_back(ticket, now_s=self._clock()))

    @contextlib.contextmanager
    def bringing(self, priority: Priority) -> Iterator[None]:
        """Around a load, from its first question to its answer: background begins nothing meanwhile."""
        if priority is not Priority.LOAD:
            yield
            return
        self._schedule.load_began()
        try:
            yield
        finally:
            self._wake(self._schedule.load_ended(now_s=self._clock()))

    def queued_bytes(self, peer: str, *, besides: int) -> int:
        """See Schedule.queued_bytes."""
        return self._schedule.queued_bytes(peer, besides=besides)

    def flying_bytes(self, peer: str) -> int:
        """See Schedule.flying_bytes."""
        return self._schedule.flying_bytes(peer)

    @property
    def in_flight_bytes(self) -> int:
        return self._schedule.in_flight_bytes

    def waiting(self) -> dict[Priority, int]:
        """Reads that wait, by priority."""
        return self._schedule.waiting()

    def _wake(self, tickets: Iterable[int]) -> None:
        for ticket in tickets:
            event = self._waiting.get(ticket)
            if event is not None:
                event.set()

"""Who is writing which block: one reservation, or two where the agent reads a block from two peers at once. Pure.

A hedged read needs a second slot for the same block ("twin"). Of the two, whoever commits first has written the block; the
other has lost it, and can only give its slot back. If one gives up instead, the other is the only writer from then on.

    nobody ──start──▶ first ──double──▶ first + twin ──committed (either)──▶ nobody (it is visible now)
                        ▲                    │
                        └──stopped (either)──┘

Invariants: a twin stands beside a first one, and is another reservation. Does not: know slots or sessions (inventory.py).
"""

from __future__ import annotations

from collections.abc import Iterable

from peer_agent.core.leases import Reservation

Key = tuple[bytes, bytes]
"""Namespace digest and fingerprint."""


class Writers:
    """first, twins: reservation by key. Read them freely; change them by the verbs."""

    def __init__(self) -> None:
        self.first: dict[Key, int] = {}
        self.twins: dict[Key, int] = {}

    def double(self, key: Key, number: int, *, beside: int) -> bool:
        """Adds a second writer. False: `beside` is not the one that writes it, or there are two already."""
        if not beside or self.first.get(key) != beside or key in self.twins:
            return False
        self.twins[key] = number
        return True

    def writes(self, key: Key, number: int) -> bool:
        """Whether this reservation may still commit the block."""
        return self.first.get(key) == number or self.twins.get(key) == number

    def not_lost(self, number: int, reservation: Reservation) -> list[int]:
        """Positions of an open reservation that no twin has committed."""
        positions = list(reservation.slots)
        keys = reservation.keys(positions)
        return [position for position, key in zip(positions, keys, strict=True) if self.writes(key, number)]

    def committed(self, keys: Iterable[Key]) -> None:
        """The blocks are visible: nobody else may commit them any more."""
        for key in keys:
            del self.first[key]
            if self.twins:
                self.twins.pop(key, None)

    def stopped(self, keys: Iterable[Key], number: int) -> None:
        """The reservation gives these up, or had lost them before."""
        for key in keys:
            if self.first.get(key) == number:
                twin = self.twins.pop(key, None)
                if twin is None:
                    del self.first[key]
                else:
                    self.first[key] = twin
            elif self.twins.get(key) == number:
                del self.twins[key]

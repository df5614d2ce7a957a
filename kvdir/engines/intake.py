"""What a dialect's reader is given beside an event's bytes, and how it says no."""

from __future__ import annotations

from kvdir.engines.door import Door
from kvdir.engines.events import Reason


class Refused(Exception):
    """This event is not taken. Costs only itself; counted by its reason."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.words)
        self.reason = reason


class Intake:
    """Of one message. owner: only events about this owner's blocks are taken, where the dialect names owners; empty: all."""

    __slots__ = ("_door", "owner")

    def __init__(self, door: Door | None = None, owner: str = "") -> None:
        self._door = door
        self.owner = owner

    @property
    def door(self) -> Door | None:
        """None when there is none, or nothing left to ask it."""
        return None if self._door is None or self._door.settled else self._door

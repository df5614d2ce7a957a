"""Which engines may still be writing to slots they reserved: the presence lock, and a while longer for those with a device.

When a process is killed, the kernel closes its files one after the other: the arena, whose closing drops the presence lock
(peer_agent/memory/presence.py), perhaps before the device driver, whose closing ends copies under way. Between the two a device
may still write to the arena for a process that seems gone. So slots of an engine that stored from a device stay quarantined for
GRACE_S beyond its session's end. An engine that lives holds its lock until its copies have ended, and is believed.
"""

from __future__ import annotations

from collections.abc import Callable

GRACE_S = 2.0
"""Some hundred times what a driver takes to stop its copy engines; costs nothing but the reuse of a dead engine's slots."""


class Writers:
    """is_held: whether a session's presence lock is. clock: monotonic seconds."""

    def __init__(self, is_held: Callable[[int], bool], *, clock: Callable[[], float]) -> None:
        self.is_held = is_held
        self._clock = clock
        self._devices: set[int] = set()
        self._until_s: dict[int, float] = {}

    def uses_device(self, session: int) -> None:
        """A device writes to what this session reserves."""
        self._devices.add(session)

    def ended(self, session: int) -> None:
        """The session is over, however it ended."""
        now_s = self._clock()
        self._until_s = {other: until_s for other, until_s in self._until_s.items() if until_s > now_s}
        if session in self._devices:
            self._devices.discard(session)
            self._until_s[session] = now_s + GRACE_S

    def is_writing(self, session: int) -> bool:
        return self._until_s.get(session, 0.0) > self._clock() or self.is_held(session)

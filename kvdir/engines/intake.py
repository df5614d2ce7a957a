"""What a dialect's reader is given beside an event's bytes, and how it says no."""

from __future__ import annotations

from collections.abc import Sequence

from kvdir.engines.door import Door
from kvdir.engines.events import Reason
from kvdir.engines.wire import MAX_HASHES, pack


class Refused(Exception):
    """This event is not taken. Costs only itself; counted by its reason."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.words)
        self.reason = reason


class Owner:
    """The backend (mooncake) or worker (dynamo) whose events one stream takes. Without a name: the first that is named."""

    __slots__ = ("_name",)

    def __init__(self, name: str = "") -> None:
        self._name = name

    def is_other(self, name: str) -> bool:
        """name: whose blocks an event is about; empty: it does not say."""
        self._name = self._name or name
        return bool(name) and name != self._name


class Intake:
    """Of one message. owner: None: everybody's events are taken."""

    __slots__ = ("_door", "_owner")

    def __init__(self, door: Door | None = None, owner: Owner | None = None) -> None:
        self._door = door
        self._owner = owner

    @property
    def door(self) -> Door | None:
        """None when there is none, or nothing left to ask it."""
        return None if self._door is None or self._door.settled else self._door

    def admit(self, owner: str) -> None:
        """An event is about this owner's blocks; empty: it does not say. Raises Refused."""
        if self._owner is not None and self._owner.is_other(owner):
            raise Refused(Reason.OTHER_OWNER)


def packed(hashes: Sequence[int | bytes]) -> tuple[bytes, int]:
    """An event's hashes as (bytes, width). Raises Refused."""
    if len(hashes) > MAX_HASHES:
        raise Refused(Reason.TOO_LARGE)
    found = pack(hashes)
    if found is None:
        raise Refused(Reason.BAD_HASH)
    return found


def packed_parent(parent: int | bytes | None) -> bytes:
    """Empty where there is none, or it is not told. Raises Refused."""
    return b"" if parent is None else packed([parent])[0]

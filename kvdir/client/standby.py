"""Which of one owner's publishers speaks to a store that several coordinators share (Welcome.store_id).

The memory of one coordinator is a store, too: several addresses of it (A and AAAA, a name and a number) share it, and their
publishers would replace each other for ever. Rules: a store takes each stream from one coordinator at a time, so one publisher
per store speaks and the others stand by, unconnected. The newest welcome wins: whoever spoke before steps back. When the
speaker's call ends, those who stand by try in turn, one at a time, whoever failed last at the end. A coordinator without a
store id (of an earlier version) is not in anybody's way. Does not: connect, or know why a call ended. One event loop, no lock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol


class Speaker(Protocol):
    """A publisher, as the others see it."""

    def step_back(self) -> None:
        """Ends the call under way without a goodbye; the stream goes on elsewhere."""


class Standby:
    """Shared by the publishers of one owner. A publisher's store is what its last welcome said."""

    def __init__(self) -> None:
        self._stores: dict[Speaker, str] = {}
        self._speaking: dict[str, Speaker] = {}
        self._changed = asyncio.Event()

    def waits(self, who: Speaker) -> bool:
        """Whether another one speaks for the store of `who`."""
        return self._speaking.get(self._stores.get(who, ""), who) is not who

    async def turn(self, who: Speaker, *, leaving: Callable[[], bool]) -> None:
        """Until `who` may connect, or leaves (say so with `stir`). The turn ends with `over`."""
        while self.waits(who) and not leaving():
            self._changed.clear()
            await self._changed.wait()
        store_id = self._stores.get(who, "")
        if store_id and not leaving():
            self._speaking[store_id] = who

    def welcomed(self, who: Speaker, store_id: str) -> bool:
        """The newest welcome of the store is that of `who`. Returns whether others stand by for it."""
        if self._stores.get(who, store_id) != store_id:
            self.over(who)
        self._stores[who] = store_id
        if not store_id:
            return False
        before = self._speaking.get(store_id, who)
        self._speaking[store_id] = who
        if before is not who:
            before.step_back()
        return sum(known == store_id for known in self._stores.values()) > 1

    def over(self, who: Speaker) -> None:
        """The call of `who` has ended, or was never made: the next one may try."""
        store_id = self._stores.get(who, "")
        if self._speaking.get(store_id) is who:
            del self._speaking[store_id]
            self._changed.set()

    def left(self, who: Speaker) -> None:
        """`who` will not speak again."""
        self.over(who)
        self._stores.pop(who, None)

    def stir(self) -> None:
        """Somebody who may be waiting wants to leave."""
        self._changed.set()

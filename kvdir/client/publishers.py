"""One publisher for each coordinator over one outbox, and how that goes, in words.

Rules: a coordinator that is away costs nothing but its publisher's patience; of coordinators that share a store one is spoken
to, and the others stand by (standby.py); a fenced epoch stops publishing and says so. A coordinator that is listed no more is
left without a goodbye: it may still serve others, our blocks are still there, and after a goodbye this epoch could never
publish to it again (docs/adr/0015). Does not: number or keep events (core/outbox.py), or find coordinators (discovery.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from kvdir.client.discovery import Discovery
from kvdir.client.publisher import Publisher, PublisherIdentity, PublisherStats
from kvdir.client.standby import Standby
from kvdir.location import StreamState
from kvdir.namespace import Namespace
from kvdir.obs.logs import say, say_bug

log = logging.getLogger("kvdir.publishers")


class Publishers:
    """Owns the publishers of one epoch and their tasks. new_publisher: a Publisher but for address, identity, on_fenced,
    standby.

    fenced: why this epoch may publish no more; empty while it may.
    """

    def __init__(
        self,
        coordinators: Discovery | None,
        identity: PublisherIdentity,
        new_publisher: Callable[..., Publisher],
        *,
        on_fenced: Callable[[str], None],
    ) -> None:
        self._coordinators = coordinators
        self._identity = identity
        self._new_publisher = partial(new_publisher, on_fenced=self._fenced, standby=Standby())
        self._on_fenced = on_fenced
        self._running: dict[str, tuple[Publisher, asyncio.Task[None]]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._unsubscribe: Callable[[], None] = lambda: None
        self._leaving = False
        self.fenced = ""

    def start(self) -> None:
        """Publishes to every coordinator that is known, and from now on to those that come."""
        if self._coordinators is not None:
            loop = asyncio.get_running_loop()
            self._unsubscribe = self._coordinators.subscribe(partial(_tell, loop, self._changed))
            self._changed(self._coordinators.addresses)

    def announce(self, namespaces: tuple[Namespace, ...]) -> None:
        """These are the namespaces now: every coordinator hears it before the first event of a new one."""
        self._identity = replace(self._identity, namespaces=namespaces)
        for publisher, _ in self._running.values():
            publisher.announce(namespaces)

    def doubted(self) -> None:
        """The owner's doubt has changed."""
        for publisher, _ in self._running.values():
            publisher.doubted()

    async def leave(self, *, timeout_s: float) -> None:
        """Says goodbye to all coordinators, within timeout_s: the blocks of this epoch vanish at once."""
        self._leaving = True
        for publisher, _ in self._running.values():
            publisher.leave()
        await self._end(timeout_s)

    async def abandon(self) -> None:
        """Ends without a goodbye: a newer epoch of the same name takes over, and fences this one."""
        self._leaving = True
        await self._end(0.0)

    async def _end(self, timeout_s: float) -> None:
        self._unsubscribe()
        running = [task for _, task in self._running.values()]
        if running and timeout_s:
            await asyncio.wait(running, timeout=timeout_s)
        for task in (*running, *self._ending):
            task.cancel()
        await asyncio.gather(*running, *self._ending, return_exceptions=True)

    def stats(self) -> list[PublisherStats]:
        """Also from the thread of the metrics, so of a copy."""
        return [publisher.stats() for publisher, _ in tuple(self._running.values())]

    def in_words(self) -> str:
        """For people: "synced", or what stands in the way, worst first."""
        if self.fenced:
            return f"fenced: {self.fenced}"
        stats = self.stats()
        if not stats:
            return "no coordinator configured" if self._coordinators is None else f"none found: {self._coordinators.problem}"
        speaking = [item for item in stats if not item.standby]
        away = [item for item in speaking if not item.connected]
        if away:
            return f"{away[0].address}: not connected ({away[0].last_error or 'connecting'})"
        behind = [item for item in speaking if item.state is not StreamState.SYNCED]
        if behind:
            return f"{behind[0].address}: {behind[0].state.name.lower() if behind[0].state else 'no word yet'}"
        return "synced"

    def _changed(self, addresses: tuple[str, ...]) -> None:
        """These are the coordinators now."""
        if self._leaving:
            return
        for address in [address for address in self._running if address not in addresses]:
            _, task = self._running.pop(address)
            task.cancel()
            self._ending.add(task)
            say(log, logging.WARNING, "coordinator is listed no more", address=address)
        for address in addresses:
            if address not in self._running:
                publisher = self._new_publisher(address, self._identity)
                task = asyncio.create_task(publisher.run(), name=f"publisher-{address}")
                task.add_done_callback(self._ended)
                self._running[address] = publisher, task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._ending.discard(task)
        if not task.cancelled() and task.exception() is not None:
            say_bug(log, "publisher failed", task.exception())

    def _fenced(self, reason: str) -> None:
        if not self._leaving:  # else it is the answer to our own goodbye
            self.fenced = reason
            self._on_fenced(reason)


def _tell(loop: asyncio.AbstractEventLoop, listener: Callable[[tuple[str, ...]], None], addresses: tuple[str, ...]) -> None:
    """From the thread of a source to our loop, if it still runs."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(listener, addresses)

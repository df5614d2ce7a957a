"""What this node tells the coordinators: one publisher per coordinator over one outbox, and how that goes, in words.

Rules: a coordinator that is away costs nothing but its publisher's patience; of coordinators that share a store one is spoken
to, and the others stand by (kvdir/client/standby.py); a fenced epoch stops publishing, says so, and the agent goes on serving
its engines and the peers that still ask. A coordinator that is listed no more is left without a goodbye: it may still serve
others, our blocks are still there, and after a goodbye this epoch could never publish to it again (docs/adr/0015).
Does not: number or keep events (kvdir/core/outbox.py), or find coordinators (kvdir/client/discovery.py).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from kvdir.client.discovery import Discovery
from kvdir.client.publisher import Publisher, PublisherIdentity, PublisherStats
from kvdir.client.standby import Standby
from kvdir.core.event import Event, EvictRequest, EvictResult, HeartbeatFigures, OwnerCount
from kvdir.core.outbox import OwnerOutbox
from kvdir.fingerprint import Fingerprints
from kvdir.location import StreamState, Tier
from kvdir.namespace import Namespace
from kvdir.obs.logs import say
from peer_agent.core.device_pool import DevicePools
from peer_agent.server.store import Store

log = logging.getLogger(__name__)

MAX_EVICT_BLOCKS = 8192
"""Of one request: some 20 ms of the event loop, and one event of 256 KiB. Who wants more asks again."""


class Publishing:
    """Owns the publishers and their tasks."""

    def __init__(
        self,
        coordinators: Discovery | None,
        identity: PublisherIdentity,
        outbox: OwnerOutbox,
        store: Store,
        pools: DevicePools,
        *,
        read_bytes_per_s: Callable[[], float],
        loss: float,
        rng: random.Random,
    ) -> None:
        self._store = store
        self._pools = pools
        self._read_bytes_per_s = read_bytes_per_s
        self._outbox = outbox
        self._identity = identity
        self._coordinators = coordinators
        self._new_publisher = partial(
            Publisher,
            outbox=outbox,
            snapshot=self._snapshot,
            heartbeat=self._heartbeat,
            on_fenced=self._fenced,
            evict=self._evict,
            loss=loss,
            rng=rng,
            standby=Standby(),
        )
        self._publishers: dict[str, tuple[Publisher, asyncio.Task[None]]] = {}
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

    async def leave(self, *, timeout_s: float) -> None:
        """Says goodbye to all coordinators, within timeout_s."""
        self._unsubscribe()
        self._leaving = True
        running = [task for _, task in self._publishers.values()]
        for publisher, _ in self._publishers.values():
            publisher.leave()
        if running:
            await asyncio.wait(running, timeout=timeout_s)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, *self._ending, return_exceptions=True)

    def announce(self, namespaces: tuple[Namespace, ...]) -> None:
        """These are the namespaces now: every coordinator hears it before the first event of a new one."""
        self._identity = replace(self._identity, namespaces=namespaces)
        for publisher, _ in self._publishers.values():
            publisher.announce(namespaces)

    def stats(self) -> list[PublisherStats]:
        """Also from the thread of the metrics, so of a copy."""
        return [publisher.stats() for publisher, _ in tuple(self._publishers.values())]

    def _changed(self, addresses: tuple[str, ...]) -> None:
        """These are the coordinators now."""
        if self._leaving:
            return
        for address in [address for address in self._publishers if address not in addresses]:
            _, task = self._publishers.pop(address)
            task.cancel()
            self._ending.add(task)
            say(log, logging.WARNING, "coordinator is listed no more", address=address)
        for address in addresses:
            if address not in self._publishers:
                publisher = self._new_publisher(address, self._identity)
                task = asyncio.create_task(publisher.run(), name=f"publisher-{address}")
                task.add_done_callback(self._ended)
                self._publishers[address] = publisher, task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._ending.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a publisher failed", exc_info=task.exception())

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

    def _fenced(self, reason: str) -> None:
        if self._leaving:
            return  # the answer to our own goodbye
        self.fenced = reason
        fix = "give every agent a node name of its own; this one goes on serving its engines"
        say(log, logging.ERROR, "fenced, publishing stopped", node=self._identity.node, reason=reason, fix=fix)

    def _snapshot(self) -> tuple[int, Iterable[Event]]:
        """Everything visible now, as of the last event: inventory and outbox change in one step, so they agree.

        The sketches are made anew from it, so that a fault of theirs ends here too.
        """
        entries = [
            Event.stored(tier, digest, fingerprints)
            for tier in (Tier.CPU, Tier.GPU)
            for digest in self._store.namespaces
            for fingerprints in self._published(tier, digest)
        ]
        if self._outbox.sketches is not None:
            self._outbox.sketches.restate(entries)
        return self._outbox.last_seq, entries

    def _published(self, tier: Tier, digest: bytes) -> tuple[Fingerprints, ...]:
        """What coordinators are to know of: all that is visible, but of a rank only what every rank has."""
        if self._store.completeness.tracks(digest):
            return self._store.completeness.held(tier, digest)
        return self._store.held(digest) if tier is Tier.CPU else self._pools.held(digest)

    def _count(self, tier: Tier, digest: bytes, visible: int) -> OwnerCount:
        """Blocks of `_published`."""
        completeness = self._store.completeness
        return OwnerCount(digest, tier, completeness.count(tier, digest) if completeness.tracks(digest) else visible)

    def _evict(self, request: EvictRequest) -> EvictResult:
        """What a coordinator's quota asks for, within the request's own floor. Nothing locked, pinned or used since."""
        evicted, reason = 0, ""
        if request.tier != Tier.CPU or request.namespace_digest not in self._store.namespaces:
            reason = "no such namespace and tier here"
        else:
            asked = min(request.max_blocks, MAX_EVICT_BLOCKS)
            evicted = self._store.evict(
                request.namespace_digest,
                max_blocks=asked,
                keep_blocks=request.keep_blocks,
                older_than_s=request.older_than_s,
            )
            if evicted < asked:
                reason = "the others are in use, were used since, or are to be kept"
            elif evicted < request.max_blocks:
                reason = f"no more than {MAX_EVICT_BLOCKS} at once"
        say(
            log, logging.INFO, "evicted for a quota", namespace=request.namespace_digest.hex()[:16],
            blocks=evicted, asked=request.max_blocks, keep=request.keep_blocks,
        )  # fmt: skip
        return EvictResult(request.request_id, evicted, self._outbox.last_seq, reason)

    def _heartbeat(self) -> HeartbeatFigures:
        occupancy = self._store.occupancy()
        return HeartbeatFigures(
            used_bytes=sum(item.committed * item.block_bytes for item in occupancy),
            capacity_bytes=sum(item.slots * item.block_bytes for item in occupancy),
            counts=(
                *(self._count(Tier.CPU, item.namespace_digest, item.committed) for item in occupancy),
                *(self._count(Tier.GPU, digest, blocks) for digest, blocks in self._pools.counts()),
            ),
            oldest_use_ms=int(1000 * self._store.oldest_use_s()),
            read_bytes_per_s=int(self._read_bytes_per_s()),
        )


def _tell(loop: asyncio.AbstractEventLoop, listener: Callable[[tuple[str, ...]], None], addresses: tuple[str, ...]) -> None:
    """From the thread of a source to our loop, if it still runs."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(listener, addresses)

"""What this node tells the coordinators of its arena and of the GPU blocks that are registered here.

Rules: everything that is said is as of one moment, the outbox's last number; a fenced epoch stops publishing, and the agent
goes on serving its engines and the peers that still ask. Does not: number or keep events (kvdir/core/outbox.py), connect to
coordinators (kvdir/client/publishers.py), or follow engines' own events (engines.py).
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable
from functools import partial

from kvdir.client.discovery import Discovery
from kvdir.client.publisher import Publisher, PublisherIdentity, PublisherStats
from kvdir.client.publishers import Publishers
from kvdir.core.event import Event, EvictRequest, EvictResult, HeartbeatFigures, OwnerCount, ReadFigures
from kvdir.core.outbox import OwnerOutbox
from kvdir.fingerprint import Fingerprints
from kvdir.location import Tier
from kvdir.namespace import Namespace
from kvdir.obs.logs import say
from kvdir.rpc.tls import PLAINTEXT, Dialer
from peer_agent.core.device_pool import DevicePools
from peer_agent.server.store import Store

log = logging.getLogger(__name__)

MAX_EVICT_BLOCKS = 8192
"""Of one request: some 20 ms of the event loop, and one event of 256 KiB. Who wants more asks again."""


class Publishing:
    """See the module docstring."""

    def __init__(
        self,
        coordinators: Discovery | None,
        identity: PublisherIdentity,
        outbox: OwnerOutbox,
        store: Store,
        pools: DevicePools,
        *,
        read_bytes_per_s: Callable[[], float],
        reads: Callable[[], ReadFigures],
        loss: float,
        rng: random.Random,
        dialer: Dialer = PLAINTEXT,
    ) -> None:
        self._store = store
        self._pools = pools
        self._read_bytes_per_s = read_bytes_per_s
        self._reads = reads
        self._outbox = outbox
        self._node = identity.node
        new_publisher = partial(
            Publisher,
            outbox=outbox,
            snapshot=self._snapshot,
            heartbeat=self._heartbeat,
            evict=self._evict,
            loss=loss,
            rng=rng,
            dialer=dialer,
        )
        self._publishers = Publishers(coordinators, identity, new_publisher, on_fenced=self._fenced)

    @property
    def fenced(self) -> str:
        """Why this epoch may publish no more; empty while it may."""
        return self._publishers.fenced

    def start(self) -> None:
        """Publishes to every coordinator that is known, and from now on to those that come."""
        self._publishers.start()

    async def leave(self, *, timeout_s: float) -> None:
        """Says goodbye to all coordinators, within timeout_s."""
        await self._publishers.leave(timeout_s=timeout_s)

    def announce(self, namespaces: tuple[Namespace, ...]) -> None:
        """These are the namespaces now: every coordinator hears it before the first event of a new one."""
        self._publishers.announce(namespaces)

    def stats(self) -> list[PublisherStats]:
        """Also from the thread of the metrics."""
        return self._publishers.stats()

    def in_words(self) -> str:
        """For people: "synced", or what stands in the way, worst first."""
        return self._publishers.in_words()

    def _fenced(self, reason: str) -> None:
        fix = "give every agent a node name of its own; this one goes on serving its engines"
        say(log, logging.ERROR, "fenced, publishing stopped", node=self._node, reason=reason, fix=fix)

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
            reads=self._reads(),
        )

"""A node without an agent: holds names of blocks, no bytes, and publishes them to a real coordinator.

For tests of whatever talks to a coordinator. The stream is the real one (outbox, publisher), so everything a coordinator
can see of an agent it sees of this.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Iterable
from types import TracebackType
from typing import Self

from kvdir.client.publisher import Backoff, Publisher, PublisherIdentity
from kvdir.client.standby import Standby
from kvdir.core.event import Event, EvictRequest, EvictResult, HeartbeatFigures, OwnerCount
from kvdir.core.outbox import OwnerOutbox
from kvdir.core.sketches import OwnerSketches
from kvdir.fingerprint import Fingerprints
from kvdir.index import Sketch
from kvdir.location import StreamState, Tier
from kvdir.namespace import Namespace, StateGroup
from kvdir.rpc.tls import PLAINTEXT, Dialer
from kvdir.testing.wait import eventually

EXAMPLE_NAMESPACE = Namespace(
    model="example",
    weights="rev-1",
    kv_dtype="bfloat16",
    layout="NHD",
    block_tokens=16,
    groups=(StateGroup(kind="full", layers=2, kv_heads=2, head_dim=8),),
    position="rope:theta=10000",
    parallel="replicated",
    adapter="none",
    tenant="none",
    hash_scheme="blake2b-chain",
    hash_seed="0",
    cache_policy="exact",
)


class FakeNode:
    """One lifetime of a node. Publishes while it is entered as a context."""

    def __init__(
        self,
        address: str,
        name: str,
        *,
        namespace: Namespace = EXAMPLE_NAMESPACE,
        epoch: int = 0,
        outbox: OwnerOutbox | None = None,
        loss: float = 0.0,
        seed: int = 0,
        standby: Standby | None = None,
        peer_address: str = "",
        dialer: Dialer = PLAINTEXT,
    ) -> None:
        self.name = name
        self.namespace = namespace
        self.digest = namespace.digest
        self.epoch = epoch or secrets.randbits(64) | 1
        self.outbox = OwnerOutbox(sketches=OwnerSketches(Sketch)) if outbox is None else outbox  # an empty one is falsy
        self.held: dict[Tier, set[bytes]] = {tier: set() for tier in Tier}
        self.fenced = ""
        self.evictions: list[EvictRequest] = []
        identity = PublisherIdentity(name, self.epoch, peer_address or f"{name}:7500", 0, (namespace,), "fake")
        self.publisher = Publisher(
            address,
            identity,
            self.outbox,
            snapshot=self._snapshot,
            heartbeat=self._heartbeat,
            on_fenced=self._on_fenced,
            evict=self._evict,
            loss=loss,
            rng=random.Random(seed),
            backoff=Backoff(base_s=0.02, limit_s=0.2),
            standby=standby,
            dialer=dialer,
        )
        self._task: asyncio.Task[None] | None = None

    def store(self, fingerprints: Fingerprints, tier: Tier = Tier.CPU) -> None:
        """Holds the blocks, and says so."""
        self._say(Event.stored(tier, self.digest, fingerprints), self.held[tier] | set(fingerprints))

    def remove(self, fingerprints: Fingerprints, tier: Tier = Tier.CPU) -> None:
        """Holds them no more, and says so."""
        self._say(Event.removed(tier, self.digest, fingerprints), self.held[tier] - set(fingerprints))

    @property
    def state(self) -> StreamState | None:
        """As the coordinator last said."""
        return self.publisher.stats().state

    async def synced(self, *, within_s: float = 20.0) -> None:
        """Until the coordinator acknowledged everything and calls the stream synced."""
        stats = self.publisher.stats
        await eventually(
            lambda: stats().state is StreamState.SYNCED and stats().acked_seq == self.outbox.last_seq,
            within_s=within_s,
            what=f"{self.name} synced, is {stats()}",
        )

    def also(self, address: str, standby: Standby) -> FakeNode:
        """The same lifetime, published to another coordinator."""
        other = FakeNode(address, self.name, namespace=self.namespace, epoch=self.epoch, outbox=self.outbox, standby=standby)
        other.held = self.held
        return other

    async def __aenter__(self) -> Self:
        self.begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.end()

    def begin(self) -> None:
        """Publishes from now on, until `end`."""
        self._task = asyncio.create_task(self.publisher.run())

    async def leave(self) -> None:
        """Says goodbye, and ends."""
        assert self._task is not None
        self.publisher.leave()
        await asyncio.wait({self._task}, timeout=5.0)
        await self.end()

    async def end(self) -> None:
        """Raises what ended publishing before, if anything did."""
        assert self._task is not None
        self._task.cancel()
        (outcome,) = await asyncio.gather(self._task, return_exceptions=True)
        if isinstance(outcome, Exception):
            raise outcome

    def _say(self, event: Event, held: set[bytes]) -> None:
        tier = Tier(event.tier)
        exact = abs(len(held) - len(self.held[tier])) == event.blocks
        self.held[tier] = held
        self.outbox.append(event)
        if not exact:
            self._restate()  # sketches count; our set is right

    def forget(self, fingerprints: Fingerprints, tier: Tier = Tier.CPU) -> None:
        """Holds them no more and does not say so, not even by a hole: a bug."""
        self.held[tier] -= set(fingerprints)
        self._restate()

    def _restate(self) -> list[Event]:
        entries = [
            Event.stored(tier, self.digest, Fingerprints.of(sorted(blocks))) for tier, blocks in self.held.items() if blocks
        ]
        if self.outbox.sketches is not None:
            self.outbox.sketches.restate(entries)
        return entries

    def _snapshot(self) -> tuple[int, Iterable[Event]]:
        return self.outbox.last_seq, self._restate()

    def _heartbeat(self) -> HeartbeatFigures:
        counts = tuple(OwnerCount(self.digest, tier, len(blocks)) for tier, blocks in self.held.items() if blocks)
        used_bytes = sum(count.blocks for count in counts) * self.namespace.block_bytes
        return HeartbeatFigures(
            used_bytes=used_bytes, capacity_bytes=2**30, counts=counts, oldest_use_ms=1500, read_bytes_per_s=2**20
        )

    def _evict(self, request: EvictRequest) -> EvictResult:
        """Evicts in any order: a fake has no recency. The floor holds."""
        self.evictions.append(request)
        held = self.held[Tier(request.tier)]
        victims = sorted(held)[: max(0, min(request.max_blocks, len(held) - request.keep_blocks))]
        if victims:
            self.remove(Fingerprints.of(victims), Tier(request.tier))
        return EvictResult(request.request_id, len(victims), self.outbox.last_seq)

    def _on_fenced(self, reason: str) -> None:
        self.fenced = reason


def some_fingerprints(count: int, *, seed: int = 0, width: int = 32) -> Fingerprints:
    """Random, repeatable."""
    return Fingerprints(random.Random(seed).randbytes(count * width), width)

"""One life of an engine's stream: what it holds, counted, as a stream of ours under an epoch of its own.

    batches ──▶ Residency ──▶ OwnerOutbox ──▶ one Publisher a coordinator            doubt ──▶ told before newer events

Rules: our events are exact changes, so sketches are kept; a namespace is announced before its first event; a doubt is raised
before the events that are newer than it are numbered, and ended behind those that ended it. A restarted engine is another life,
whose registration fences this one, so that what the old one held is gone at once. One event loop, no lock. Does not: know the
engine's own numbers (kvdir/engines/cursor.py) or sockets.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from kvdir.client.discovery import Discovery
from kvdir.client.publisher import Publisher, PublisherIdentity
from kvdir.client.publishers import Publishers
from kvdir.core.event import NO_DOUBT, Doubt, Event, HeartbeatFigures
from kvdir.core.outbox import OwnerOutbox
from kvdir.core.sketches import SKETCH_CELLS, OwnerSketches
from kvdir.engines import Applied, DecodedBatch, Residency
from kvdir.index import Sketch
from kvdir.namespace import Namespace
from kvdir.rpc.tls import PLAINTEXT, Dialer

GOODBYE_S = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Publishing:
    """Where lives publish, the same for all, and by what. queue_events, ring_bytes: of each outbox.

    follow: called with every life's stream, outbox and namespaces (client/events_out.py); None: nobody else reads them.
    """

    coordinators: Discovery | None
    version: str = ""
    queue_events: int = 65_536
    ring_bytes: int = 16 << 20
    dialer: Dialer = PLAINTEXT
    follow: Callable[[str, OwnerOutbox, Callable[[], Mapping[bytes, Namespace]]], None] | None = None


class EngineLife:
    """See the module docstring. stream: its name in the directory, NODE/ENGINE or NODE/ENGINE@RANK."""

    def __init__(
        self, stream: str, residency: Residency, publishing: Publishing, *, doubt: str, on_fenced: Callable[[str], None]
    ) -> None:
        self.epoch = secrets.randbits(64) or 1
        self.residency = residency
        self.doubt: Doubt = NO_DOUBT.begun(doubt) if doubt else NO_DOUBT
        self.outbox = OwnerOutbox(
            max_events=publishing.queue_events,
            max_bytes=publishing.ring_bytes,
            sketches=OwnerSketches(lambda: Sketch(SKETCH_CELLS)),
        )
        self._announced = 0
        if publishing.follow is not None:
            publishing.follow(stream, self.outbox, lambda: residency.namespaces)
        # No peer address: nobody can ask an engine for blocks.
        identity = PublisherIdentity(stream, self.epoch, "", int(time.time() * 1000), (), publishing.version)
        new_publisher = partial(
            Publisher,
            outbox=self.outbox,
            snapshot=self._snapshot,
            heartbeat=self._heartbeat,
            rng=random.Random(self.epoch),
            doubt=lambda: self.doubt,
            dialer=publishing.dialer,
        )
        self.publishers = Publishers(publishing.coordinators, identity, new_publisher, on_fenced=on_fenced)

    def start(self) -> None:
        """Registers with the coordinators."""
        self.publishers.start()

    def apply(self, batch: DecodedBatch) -> Applied:
        """Takes a batch, and says so."""
        applied = self.residency.apply(batch)
        namespaces = self.residency.namespaces
        if len(namespaces) > self._announced:
            self._announced = len(namespaces)
            self.publishers.announce(tuple(namespaces.values()))
        if applied.doubt:
            self.set_doubt(applied.doubt)
        for event in applied.events:
            self.outbox.append(event)
        return applied

    def set_doubt(self, words: str) -> None:
        """Why what is held is not known for sure; empty: it is."""
        doubt = self.doubt.begun(words) if words else self.doubt.ended()
        if doubt != self.doubt:
            self.doubt = doubt
            self.publishers.doubted()

    def _snapshot(self) -> tuple[int, Iterable[Event]]:
        """Residency and outbox change in one step, so they agree. The sketches are made anew, so a fault of theirs ends."""
        entries = list(self.residency.held())
        assert self.outbox.sketches is not None
        self.outbox.sketches.restate(entries)
        return self.outbox.last_seq, entries

    def _heartbeat(self) -> HeartbeatFigures:
        return HeartbeatFigures(counts=self.residency.counts())

"""One owner in the world of the stream model test: what it holds, what it believes to hold, and what it says.

The outbox and the sender are the real ones. What an owner believes is not what it holds once its engine has lost events; then
it is in doubt, until the engine empties itself.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

from kvdir.core.effects import RequestSketch
from kvdir.core.event import NO_DOUBT, Event, Heartbeat, HeartbeatFigures, OwnerCount, SnapshotChunk
from kvdir.core.node import Stream
from kvdir.core.outbox import OwnerOutbox
from kvdir.core.sender import StreamSender
from kvdir.core.sketches import OwnerSketches, SketchPart, SketchStatement
from kvdir.core.snapshot import snapshot_chunks
from kvdir.fingerprint import Fingerprints
from kvdir.index import Sketch
from kvdir.location import Tier
from kvdir.testing.fake_node import EXAMPLE_NAMESPACE

DIGEST = EXAMPLE_NAMESPACE.digest
UNIVERSE = [number.to_bytes(8, "little") for number in range(1, 5)]
ELSEWHERE = bytes(8)
"""A block of nobody."""
TIERS = (Tier.CPU, Tier.DISK)

Held = frozenset[tuple[bytes, Tier]]


@dataclass(eq=False)
class Link:
    """One connection: messages towards the coordinator, in order. `number` as the directory gave it."""

    stream: Stream
    number: int
    messages: deque[Any] = field(default_factory=deque)


def new_sketch() -> Sketch:
    return Sketch(64)


def _damaged(statement: SketchStatement, how: int) -> SketchStatement:
    """Garbage of one kind or another, such as no honest owner sends."""
    part, *rest = statement.parts
    kinds: tuple[tuple[SketchPart, ...], ...] = (
        (replace(part, encoded=part.encoded[:-1] or b"x"),),
        (replace(part, encoded=Sketch(128).encode()),),
        (replace(part, blocks=part.blocks + 1),),
        (replace(part, digest=bytes(15)),),
        (part, part),
        (replace(part, encoded=b""),),
    )
    return replace(statement, parts=(*kinds[how % 6], *rest))


class Owner:
    """One epoch of a node: what it holds, and what it held at every sequence number."""

    def __init__(self, node: str, epoch: int, held: Held, *, ring_events: int, sketches: bool) -> None:
        self.node, self.epoch = node, epoch
        self.outbox = OwnerOutbox(max_events=ring_events, sketches=OwnerSketches(new_sketch) if sketches else None)
        self.asked: RequestSketch | None = None
        self.damages: int | None = None
        self.sender = StreamSender(self.outbox, max_batch_events=2)
        self.link: Link | None = None
        self.held: Held = frozenset()
        self.believed: Held = frozenset()
        self.doubt = NO_DOUBT
        self.truth: list[Held] = [self.held]
        for tier in TIERS:
            self.change("stored", tier, frozenset(block for block, at in held if at is tier))

    def change(self, kind: str, tier: Tier, picks: frozenset[bytes]) -> None:
        before = self.believed
        self._change(kind, tier, picks)
        exact = kind == "cleared" or (kind != "unheard" and len(before ^ self.believed) == len(picks))
        if self.outbox.sketches is not None and not exact:
            self.outbox.sketches.restate(self._entries())
        self.truth.append(self.held)

    def _change(self, kind: str, tier: Tier, picks: frozenset[bytes]) -> None:
        chosen, packed = frozenset((pick, tier) for pick in picks), Fingerprints.of(sorted(picks))
        match kind:
            case "stored":
                self.held |= chosen
                self.believed |= chosen
                self.outbox.append(Event.stored(tier, DIGEST, packed))
            case "removed":
                self.held -= chosen
                self.believed -= chosen
                self.outbox.append(Event.removed(tier, DIGEST, packed))
            case "cleared":
                self.held = frozenset(item for item in self.held if item[1] is not tier)
                self.believed = frozenset(item for item in self.believed if item[1] is not tier)
                self.outbox.append(Event.cleared(tier, DIGEST if len(picks) % 2 else b""))
            case "unheard":  # the owner's own queue lost the event
                self.held ^= chosen
                self.believed ^= chosen
                self.outbox.lose()
            case "engine loses":  # events that the owner never saw; the next one is of something else
                self.doubt = self.doubt.begun(f"the engine lost events, the last of them behind {self.outbox.last_seq}")
                self.held ^= chosen
                self.outbox.append(Event.removed(tier, DIGEST, Fingerprints.of([ELSEWHERE])))
            case "engine empties":
                for each in TIERS[1:]:
                    self.change("cleared", each, picks)
                self._change("cleared", TIERS[0], picks)
                self.believed = self.held
                self.doubt = self.doubt.ended()

    def tell(self, messages: deque[Any]) -> None:
        """A new doubt goes out before anything else."""
        if self.sender.newly_in(self.doubt):
            messages.append(self.heartbeat(counted=False))

    def heartbeat(self, *, counted: bool) -> Heartbeat:
        said = self.sender.heartbeat(self.figures(counted=counted), self.doubt)
        return said if counted else replace(said, figures=HeartbeatFigures())

    def _entries(self) -> list[Event]:
        return [
            Event.stored(tier, DIGEST, Fingerprints.of(blocks))
            for tier in TIERS
            if (blocks := [block for block, at in self.believed if at is tier])
        ]

    def sketch(self) -> list[SketchStatement]:
        """The answer that is due, if every event was sent."""
        request = self.asked
        if request is None or not self.sender.caught_up:
            return []
        self.asked = None
        statement = self.sender.sketch(request.request_id, cells=request.cells, parts=request.parts)
        if statement and statement.parts and self.damages is not None:
            statement, self.damages = _damaged(statement, self.damages), None
        return [statement] if statement else []

    def snapshot(self, snapshot_id: int) -> list[SnapshotChunk]:
        entries = self._entries()
        self.sender.snapshot_taken(self.outbox.last_seq)
        return list(snapshot_chunks(snapshot_id, self.outbox.last_seq, entries, max_blocks=1))

    def figures(self, *, counted: bool) -> HeartbeatFigures:
        counts = tuple(OwnerCount(DIGEST, tier, sum(at is tier for _, at in self.believed)) for tier in TIERS)
        return HeartbeatFigures(counts=counts if counted else None)

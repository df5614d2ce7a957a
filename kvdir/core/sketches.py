"""The owner's half of the comparison: per (namespace, tier) a sketch of what is held, kept as events are numbered.

Rules: fed with every event that the outbox numbers, in the same step, so it stands at the outbox's last_seq. Events must be
exact changes (stored: not held before; removed: held), because a sketch counts; an owner that cannot promise that
does not keep one. Events lost before their content was known make it silent, until `restate`. O(1) per block.
Does not: compare (reconcile.py does, at the other end), or know sequence numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvdir.core.event import Event, EventKind, OwnerCount

if TYPE_CHECKING:
    from kvdir.index import BlockSketch

SKETCH_CELLS = 1024
"""Of a whole sketch: 24 KiB, of which some 700 differences decode. Both ends must agree on it, or on a multiple."""


@dataclass(frozen=True, slots=True)
class SketchPart:
    """One (namespace, tier) of an answer. encoded: see kvdir.index.BlockSketch.encode; empty: equal, or not asked for."""

    namespace_digest: bytes
    tier: int
    blocks: int
    digest: bytes
    encoded: bytes = b""


@dataclass(frozen=True, slots=True)
class SketchStatement:
    """What the owner holds as of at_seq, in answer to `request_id`. What no part names, it does not hold."""

    request_id: int
    at_seq: int
    parts: tuple[SketchPart, ...]

    @property
    def size_bytes(self) -> int:
        """Of its content on the wire, without framing."""
        return sum(len(part.encoded) + len(part.digest) + len(part.namespace_digest) for part in self.parts)


class OwnerSketches:
    """See the module docstring. known: every change up to now is in it."""

    def __init__(self, new_sketch: Callable[[], BlockSketch]) -> None:
        self._new_sketch = new_sketch
        self._sketches: dict[tuple[bytes, int], BlockSketch] = {}
        self.known = True

    def apply(self, event: Event) -> None:
        """The owner's inventory has changed so."""
        if event.kind == EventKind.CLEARED:
            for key, sketch in self._sketches.items():
                if key[1] == event.tier and event.namespace_digest in (b"", key[0]):
                    sketch.clear()
            return
        if event.kind not in (EventKind.STORED, EventKind.REMOVED):
            return
        sketch = self._sketch(event)
        change = sketch.insert if event.kind == EventKind.STORED else sketch.remove
        change(event.packed, event.width)

    def lost(self) -> None:
        """Something changed, and nobody knows what: nothing is stated until `restate`."""
        self.known = False

    def restate(self, held: Iterable[Event]) -> None:
        """Exactly this is held now (`stored` events)."""
        self._sketches = {}
        for event in held:
            self.apply(event)
        self.known = True

    def counts(self) -> tuple[OwnerCount, ...] | None:
        """Count and digest of everything held; None while that is not known."""
        if not self.known:
            return None
        return tuple(OwnerCount(digest, tier, sketch.count, sketch.digest) for (digest, tier), sketch in self._sketches.items())

    def stated(self, counts: tuple[OwnerCount, ...] | None) -> tuple[OwnerCount, ...] | None:
        """The owner's own counts with our digests, so that a fault of ours shows as a contradiction; ours if it has none."""
        if counts is None or not self.known:
            return counts if counts is not None else self.counts()
        named = {(count.namespace_digest, count.tier) for count in counts}
        unnamed = [count for count in self.counts() or () if (count.namespace_digest, count.tier) not in named]
        return tuple(
            OwnerCount(count.namespace_digest, count.tier, count.blocks, sketch.digest if sketch else bytes(16))
            for count in counts
            for sketch in [self._sketches.get((count.namespace_digest, count.tier))]
        ) + tuple(count for count in unnamed if count.blocks)

    def statement(
        self, request_id: int, at_seq: int, *, cells: int = 0, wanted: Collection[tuple[bytes, int]] = ()
    ) -> SketchStatement | None:
        """The answer to a request: sketches of the parts wanted (none named: all), folded to `cells`. None: not known."""
        if not self.known:
            return None
        return SketchStatement(
            request_id,
            at_seq,
            tuple(
                SketchPart(*key, sketch.count, sketch.digest, _encoded(sketch, cells) if not wanted or key in wanted else b"")
                for key, sketch in self._sketches.items()
                if sketch.count or key in wanted
            ),
        )

    def _sketch(self, event: Event) -> BlockSketch:
        key = (event.namespace_digest, int(event.tier))
        sketch = self._sketches.get(key)
        if sketch is None:
            sketch = self._sketches[key] = self._new_sketch()
        return sketch


def _encoded(sketch: BlockSketch, cells: int) -> bytes:
    """Folded as asked; whole when that cannot be done, which the other side will notice and count."""
    if not cells:
        return sketch.encode()
    try:
        return sketch.folded(cells).encode()
    except ValueError:
        return sketch.encode()

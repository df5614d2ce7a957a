"""Ranks of a parallel split publish a block only when all of them have it: otherwise some would load, and some could not.

A family is the ranks of one split (Namespace.family) that are served here. What is published of each of its members is the
intersection: STORED goes out for all members when the last one's block is there, REMOVED for all when the first one's goes.
What the node says otherwise agrees with that: snapshots, counts and digests in heartbeats, and what engines are told is here.
Locks and loads give each rank what is there of its own part: the bytes are right, and the other part may be on another node.

Rules:
- Every event of the owner passes through `publish`, at once and in order; what comes out goes into the outbox.
- Of ranks that live on other nodes nothing is known here: each node publishes what is complete among the ranks that it serves,
  and who looks up asks for all ranks and intersects (kvdir/core/state_lookup.py).
- When one more rank is served, nothing of the family is complete any more: it has stored nothing yet. CLEARED says so.
- Blocks are told apart by the EVENT_WIDTH bytes that events carry, as in the directory. Per tier; a namespace without a split
  costs nothing.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvdir.core.event import EVENT_WIDTH, Event, EventKind
from kvdir.fingerprint import Fingerprints
from kvdir.location import Tier
from peer_agent.core.slot_table import by_width


@dataclass(slots=True)
class _Family:
    """members: digests of the ranks served here, in the order of the bits of `holders`. holders: tier -> block -> who has it.
    complete: tier -> how many all of them have."""

    members: list[bytes] = field(default_factory=list)
    holders: dict[int, dict[bytes, int]] = field(default_factory=dict)
    complete: dict[int, int] = field(default_factory=dict)

    @property
    def everybody(self) -> int:
        return (1 << len(self.members)) - 1


class Completeness:
    """See the module docstring."""

    def __init__(self) -> None:
        self._families: dict[frozenset[bytes], _Family] = {}
        self._of: dict[bytes, _Family] = {}

    def serve(self, namespace_digest: bytes, family: Sequence[bytes]) -> tuple[Event, ...]:
        """Served from now on, and empty. family: digests of all ranks of its split, itself among them."""
        if len(family) < 2 or namespace_digest in self._of:
            return ()
        found = self._of[namespace_digest] = self._families.setdefault(frozenset(family), _Family())
        tiers = [Tier(tier) for tier, blocks in found.complete.items() if blocks]
        told = tuple(Event.cleared(tier, member) for tier in tiers for member in found.members)
        found.members.append(namespace_digest)
        found.complete.clear()
        return told

    def publish(self, event: Event) -> tuple[Event, ...]:
        """The owner's blocks have changed so: what is to be published."""
        if event.kind == EventKind.CLEARED and not event.namespace_digest:
            for family in self._families.values():
                family.holders.pop(event.tier, None)
                family.complete.pop(event.tier, None)
        found = self._of.get(event.namespace_digest)
        if found is None:
            return (event,)
        match event.kind:
            case EventKind.STORED:
                return self._stored(found, event)
            case EventKind.REMOVED:
                return self._removed(found, event)
            case _:
                return tuple(gone for part in self._held_by(found, event) for gone in self._removed(found, part))

    def tracks(self, namespace_digest: bytes) -> bool:
        """Whether it is a rank of a split, so that what is published differs from what is held."""
        return namespace_digest in self._of

    def complete(self, tier: Tier, namespace_digest: bytes, fingerprints: Fingerprints) -> bytes:
        """Of a tracked namespace: one byte per fingerprint, 1 if every rank served here has it."""
        found = self._of[namespace_digest]
        holders, everybody = found.holders.get(tier, {}), found.everybody
        return bytes([holders.get(block) == everybody for block in fingerprints.narrowed(EVENT_WIDTH)])

    def held(self, tier: Tier, namespace_digest: bytes) -> tuple[Fingerprints, ...]:
        """Of a tracked namespace: everything published, narrowed to EVENT_WIDTH, one packed list per width."""
        found = self._of[namespace_digest]
        everybody = found.everybody
        return by_width(block for block, who in found.holders.get(tier, {}).items() if who == everybody)

    def count(self, tier: Tier, namespace_digest: bytes) -> int:
        """Of a tracked namespace: blocks published."""
        return self._of[namespace_digest].complete.get(tier, 0)

    def check(self) -> None:
        """AssertionError if an invariant does not hold; for tests."""
        for found in self._families.values():
            for tier, holders in found.holders.items():
                assert all(0 < who <= found.everybody for who in holders.values()), "a block that nobody has"
                assert list(holders.values()).count(found.everybody) == found.complete.get(tier, 0), (
                    "count of complete blocks is off"
                )

    # internals

    def _stored(self, found: _Family, event: Event) -> tuple[Event, ...]:
        holders, bit, everybody = self._place(found, event)
        whole = []
        for block in _blocks(event):
            before = holders.get(block, 0)
            holders[block] = before | bit
            if before != everybody and before | bit == everybody:
                whole.append(block)
        return self._told(found, event, whole, change=1)

    def _removed(self, found: _Family, event: Event) -> tuple[Event, ...]:
        holders, bit, everybody = self._place(found, event)
        broken = []
        for block in _blocks(event):
            before = holders.get(block, 0)
            if not before & bit:
                continue
            if before == everybody:
                broken.append(block)
            if before == bit:
                del holders[block]
            else:
                holders[block] = before & ~bit
        return self._told(found, event, broken, change=-1)

    def _place(self, found: _Family, event: Event) -> tuple[dict[bytes, int], int, int]:
        bit = 1 << found.members.index(event.namespace_digest)
        return found.holders.setdefault(event.tier, {}), bit, found.everybody

    def _held_by(self, found: _Family, event: Event) -> list[Event]:
        """As removals, what is left of the event's namespace in its tier."""
        holders, bit, _ = self._place(found, event)
        left = by_width([block for block, who in holders.items() if who & bit])
        return [Event.removed(Tier(event.tier), event.namespace_digest, group) for group in left]

    def _told(self, found: _Family, event: Event, blocks: list[bytes], *, change: int) -> tuple[Event, ...]:
        if not blocks:
            return ()
        found.complete[event.tier] = found.complete.get(event.tier, 0) + change * len(blocks)
        packed = b"".join(blocks)
        return tuple(event._replace(namespace_digest=member, packed=packed) for member in found.members)


def _blocks(event: Event) -> Iterable[bytes]:
    return Fingerprints(event.packed, event.width)

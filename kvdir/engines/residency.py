"""Residency: what one engine holds, counted from its events, and what that means for our stream.

    shelf (tier, group index, width)   hash -> part          first copy
                                       hash -> copies        only where there is more than one
    part     one announced namespace: (model, block size, kind, window, adapter, tenant, width)
    family   parts that differ in adapter and tenant only, and the group indexes that share their kind

Rules:
- A block stored twice in one (tier, group) needs two removals (vLLM keeps physical copies; `copies=False` for engines whose
  events are about a set). Ours are exact changes: 0 -> 1 stored, 1 -> 0 removed, so sketches may be kept.
- Groups of one kind and window share a namespace; a block is in it only while every such group holds it.
- A report of what is held already (vLLM's kv_cache_report_mode=full) is no further copy, and cannot always be told from one.
  What starts a sequence, has two or more blocks, and is held as a whole is taken for a report: a copy that we miss costs a
  hit, while one too many would stay believed until the engine clears. One block alone is taken for a copy (a prompt of
  exactly one block computes it again), unless `full_reports` says that the engine does report.
- Removal of what is not held is counted, and nothing else: it was stored before we listened, or refused.
- `AllBlocksCleared` names no tier and takes all of them. Bounded: beyond max_blocks nothing is taken, in words.
Pure. Does not: know sequence numbers (cursor.py) or epochs: a restarted engine gets a new Residency.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvdir.core.event import EVENT_WIDTH, Event, EventKind, OwnerCount
from kvdir.engines.events import Cleared, DecodedBatch, Reason, Removed, Stored
from kvdir.engines.parts import EngineIdentity, Family, Part, Parts
from kvdir.location import Tier
from kvdir.namespace import Namespace

MAX_BLOCKS = 8 * 2**20
SNAPSHOT_BLOCKS = 4096
"""Blocks of one event of `held()`."""

Key = int | bytes
"""A hash as a dict likes it: a number of 8 bytes, else the bytes."""


class Applied(NamedTuple):
    """What one batch changed. events: for the outbox, in this order. rejected: the decoder's and ours, by reason.

    doubt: why what is held is not known for sure since this batch; empty: no new reason. cleared: nothing is held in any
    tier as of some moment in this batch, so what was missed before does not matter any more.
    """

    events: tuple[Event, ...]
    rejected: Mapping[Reason, int]
    doubt: str = ""
    cleared: bool = False


@dataclass(slots=True)
class _Shelf:
    blocks: dict[Key, Part]
    copies: dict[Key, int]


@dataclass(slots=True)
class _Pending:
    """What a batch changed in one place so far; both sets are disjoint, so their order does not matter."""

    width: int
    stored: dict[Key, None]
    removed: dict[Key, None]


class Residency:
    """See the module docstring. reannounced_blocks, copied_blocks, unknown_removals: figures since the start."""

    def __init__(
        self,
        identity: EngineIdentity,
        *,
        copies: bool = True,
        full_reports: bool = False,
        max_blocks: int = MAX_BLOCKS,
    ) -> None:
        self._parts = Parts(identity)
        self._copies = copies
        self._full_reports = full_reports
        self._max_blocks = max_blocks
        self._shelves: dict[tuple[Tier, int | None, int], _Shelf] = {}
        self._totals: dict[tuple[bytes, Tier], int] = {}
        self._pending: dict[tuple[bytes, Tier], _Pending] = {}
        self._events: list[Event] = []
        self._rejected: dict[Reason, int] = {}
        self._kept = 0
        self.reannounced_blocks = 0
        self.copied_blocks = 0
        self.unknown_removals = 0

    @property
    def namespaces(self) -> Mapping[bytes, Namespace]:
        """By digest, those seen so far; it only grows, and a publisher must announce new ones before their first event."""
        return self._parts.namespaces

    @property
    def blocks(self) -> int:
        """Kept over all tiers and groups, without further copies."""
        return self._kept

    def apply(self, batch: DecodedBatch) -> Applied:
        """Takes a batch. Raises nothing; what cannot be taken is in `rejected`."""
        self._events, self._rejected = [], dict(batch.rejected)
        cleared, doubt = False, ""
        for event in batch.events:
            if isinstance(event, Stored):
                self._store(event)
            elif isinstance(event, Removed):
                self._remove(event)
            else:
                doubt = self._clear(event) or doubt
                cleared = cleared or event.tier is None
        self._flush()
        doubts = [reason.words for reason in self._rejected if reason.leaves_doubt]
        return Applied(tuple(self._events), self._rejected, "; ".join(filter(None, [doubt, *doubts])), cleared)

    def counts(self) -> tuple[OwnerCount, ...]:
        """For a heartbeat: complete; what is not named is not held."""
        return tuple(OwnerCount(digest, int(tier), blocks) for (digest, tier), blocks in self._totals.items() if blocks)

    def held(self) -> Iterator[Event]:
        """For a snapshot: everything as `stored` events. Take it at once, not over several batches."""
        for family in self._parts.families:
            yield from self._held_of(family)

    def _held_of(self, family: Family) -> Iterator[Event]:
        for (tier, index, width), shelf in list(self._shelves.items()):
            if index not in family.indexes[:1]:
                continue
            by_part: dict[Part, list[Key]] = {}
            for key, part in shelf.blocks.items():
                if part.family is family:
                    by_part.setdefault(part, []).append(key)
            for part, keys in by_part.items():
                whole = self._complete(part, tier, index, keys)
                for at in range(0, len(whole), SNAPSHOT_BLOCKS):
                    packed, narrow = _narrow(whole[at : at + SNAPSHOT_BLOCKS], width)
                    yield Event(EventKind.STORED, tier, part.digest, packed, narrow)

    def _store(self, event: Stored) -> None:
        keys = _keys(event.packed, event.width)
        part = self._part(event, keys)
        if isinstance(part, Reason):
            self._reject(part)
            return
        if event.group.index not in part.family.indexes:
            self._learn(part.family, event.group.index)
        if not keys:
            return
        shelf = self._shelf(event.tier, event.group.index, event.width)
        blocks = shelf.blocks
        if self._kept + len(keys) > self._max_blocks:
            self._reject(Reason.TOO_MANY_BLOCKS)
            return
        fresh: Sequence[Key] = keys
        if not blocks.keys().isdisjoint(keys) or len(set(keys)) != len(keys):
            fresh = self._further(shelf, keys, starts=not event.parent)
        blocks.update(dict.fromkeys(fresh, part))
        self._kept += len(fresh)
        self._say(EventKind.STORED, part, event.tier, event.group.index, fresh)

    def _further(self, shelf: _Shelf, keys: tuple[Key, ...], *, starts: bool) -> list[Key]:
        """Those not held yet; the others are further copies, or reported again."""
        fresh = [key for key in dict.fromkeys(keys) if key not in shelf.blocks]
        again = len(keys) - len(fresh)
        if not self._copies or (starts and not fresh and (len(keys) > 1 or self._full_reports)):
            self.reannounced_blocks += again
            return fresh
        seen: set[Key] = set(fresh)
        for key in keys:
            if key in seen:
                seen.discard(key)
            else:
                shelf.copies[key] = shelf.copies.get(key, 1) + 1
        self.copied_blocks += again
        return fresh

    def _remove(self, event: Removed) -> None:
        keys = _keys(event.packed, event.width)
        shelf = self._shelves.get((event.tier, event.group.index, event.width))
        if shelf is None:
            self.unknown_removals += len(keys)
            return
        blocks, copies = shelf.blocks, shelf.copies
        gone: dict[Part, list[Key]] = {}
        for key in keys:
            part = blocks.get(key)
            if part is None:
                self.unknown_removals += 1
            elif copies and (left := copies.get(key, 1) - 1):
                copies[key] = left
                if left == 1:
                    del copies[key]
            else:
                gone.setdefault(part, []).append(key)
                del blocks[key]
                self._kept -= 1
        for part, removed in gone.items():
            self._say(EventKind.REMOVED, part, event.tier, event.group.index, removed)

    def _clear(self, event: Cleared) -> str:
        """Returns a reason for doubt, if there is one."""
        self._flush()
        others = any(tier is not Tier.GPU for tier, _, _ in self._shelves)
        for (tier, _, _), shelf in self._shelves.items():
            if event.tier in (None, tier):
                self._kept -= len(shelf.blocks)
                shelf.blocks.clear()
                shelf.copies.clear()
        for (digest, tier), blocks in self._totals.items():
            if blocks and event.tier in (None, tier):
                self._totals[digest, tier] = 0
                self._events.append(Event.cleared(tier, digest))
        if event.tier is None and others and self._copies:
            return "the engine cleared its cache without saying which tiers: those beside the GPU may still hold blocks"
        return ""

    def _part(self, event: Stored, keys: tuple[Key, ...]) -> Part | Reason:
        if event.block_tokens or not keys:
            return self._parts.of(event)
        # An offloading tier that does not describe its blocks: they came from another tier of the same group.
        for tier in Tier:
            shelf = self._shelves.get((tier, event.group.index, event.width))
            if shelf is not None and (part := shelf.blocks.get(keys[0])) is not None:
                return part
        return self._parts.of(event)

    def _say(self, kind: EventKind, part: Part, tier: Tier, index: int | None, keys: Sequence[Key]) -> None:
        whole = self._complete(part, tier, index, keys)
        if not whole:
            return
        place = (part.digest, tier)
        self._totals[place] = self._totals.get(place, 0) + (len(whole) if kind is EventKind.STORED else -len(whole))
        pending = self._pending.get(place)
        if pending is None:
            pending = self._pending[place] = _Pending(part.family.width, {}, {})
        ours, others = pending.stored, pending.removed
        if kind is EventKind.REMOVED:
            ours, others = others, ours
        if others and not others.keys().isdisjoint(whole):
            self._emit(place, pending)
        ours.update(dict.fromkeys(whole))

    def _complete(self, part: Part, tier: Tier, index: int | None, keys: Sequence[Key]) -> Sequence[Key]:
        """Those that every other group of the family holds in this tier, too, and of the same part."""
        for other in part.family.indexes:
            if other != index:
                shelf = self._shelves.get((tier, other, part.family.width))
                keys = [key for key in keys if shelf.blocks.get(key) is part] if shelf is not None else []
        return keys

    def _learn(self, family: Family, index: int | None) -> None:
        """A further group of this family came to be known: what it does not hold is not whole any more."""
        self._flush()
        for event in self._held_of(family):
            self._totals[event.namespace_digest, Tier(event.tier)] -= event.blocks
            self._events.append(event._replace(kind=EventKind.REMOVED))
        family.indexes.append(index)

    def _shelf(self, tier: Tier, index: int | None, width: int) -> _Shelf:
        key = (tier, index, width)
        shelf = self._shelves.get(key)
        if shelf is None:
            shelf = self._shelves[key] = _Shelf({}, {})
        return shelf

    def _emit(self, place: tuple[bytes, Tier], pending: _Pending) -> None:
        for kind, keys in ((EventKind.REMOVED, pending.removed), (EventKind.STORED, pending.stored)):
            if keys:
                packed, narrow = _narrow(list(keys), pending.width)
                self._events.append(Event(kind, place[1], place[0], packed, narrow))
                keys.clear()

    def _flush(self) -> None:
        for place, pending in self._pending.items():
            self._emit(place, pending)
        self._pending.clear()

    def _reject(self, reason: Reason) -> None:
        self._rejected[reason] = self._rejected.get(reason, 0) + 1


def _keys(packed: bytes, width: int) -> tuple[Key, ...]:
    if width == 8:
        return struct.unpack(f">{len(packed) // 8}Q", packed)
    return tuple([packed[at : at + width] for at in range(0, len(packed), width)])


def _narrow(keys: Sequence[Key], width: int) -> tuple[bytes, int]:
    """Packed as events carry them (core/event.py)."""
    if width == 8:
        return struct.pack(f">{len(keys)}Q", *keys), 8
    if width <= EVENT_WIDTH:
        return b"".join(keys), width  # type: ignore[arg-type]
    return b"".join([key[:EVENT_WIDTH] for key in keys]), EVENT_WIDTH  # type: ignore[index]

"""The truth: what one life of a node holds now, and what it held at every sequence number.

Owns no messages. Rules: one change a sequence number, in step with the outbox, lost events included; `at` costs as much as the
distance to the number asked for before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kvdir.location import Tier


class Item(NamedTuple):
    """One block in one tier."""

    namespace_digest: bytes
    tier: Tier
    fingerprint: bytes


class Ledger:
    """held: now. ever: everything that was held at some time, so that no claim can be invented."""

    def __init__(self) -> None:
        self.held: set[Item] = set()
        self.ever: set[Item] = set()
        self._changes: list[tuple[frozenset[Item], frozenset[Item]]] = []
        self._seen: set[Item] = set()
        self._seen_seq = 0

    @property
    def last_seq(self) -> int:
        return len(self._changes)

    def change(self, *, added: Iterable[Item] = (), removed: Iterable[Item] = ()) -> None:
        """The change of the next sequence number. What is held already is not added, what is absent not removed."""
        new = frozenset(added) - self.held
        gone = frozenset(removed) & self.held
        self.held |= new
        self.held -= gone
        self.ever |= new
        self._changes.append((new, gone))

    def silently(self, *, added: Iterable[Item] = (), removed: Iterable[Item] = ()) -> None:
        """A change that no number stands for, as a bug of the owner makes it: it becomes part of the last numbered one."""
        self.change(added=added, removed=removed)
        new, gone = self._changes.pop()
        if self._changes:
            before_new, before_gone = self._changes[-1]
            self._changes[-1] = ((before_new - gone) | (new - before_gone), (before_gone - new) | (gone - before_new))
        self._seen, self._seen_seq = set(self.held), self.last_seq

    def at(self, seq: int) -> set[Item] | None:
        """What was held after event `seq`; None for a number that was never used. The set is the ledger's own."""
        if not 0 <= seq <= self.last_seq:
            return None
        while self._seen_seq < seq:
            new, gone = self._changes[self._seen_seq]
            self._seen |= new
            self._seen -= gone
            self._seen_seq += 1
        while self._seen_seq > seq:
            self._seen_seq -= 1
            new, gone = self._changes[self._seen_seq]
            self._seen -= new
            self._seen |= gone
        return self._seen

    def counts(self) -> dict[tuple[bytes, Tier], int]:
        """Blocks by (namespace, tier), now."""
        return count(self.held)


def count(items: Iterable[Item]) -> dict[tuple[bytes, Tier], int]:
    """Blocks by (namespace, tier)."""
    out: dict[tuple[bytes, Tier], int] = {}
    for item in items:
        key = (item.namespace_digest, item.tier)
        out[key] = out.get(key, 0) + 1
    return out


def by_place(items: Iterable[Item]) -> Iterator[tuple[bytes, Tier, list[bytes]]]:
    """(namespace, tier, fingerprints), each place once, in an order that does not depend on hashing."""
    places: dict[tuple[bytes, Tier], list[bytes]] = {}
    for item in sorted(items):
        places.setdefault((item.namespace_digest, item.tier), []).append(item.fingerprint)
    for (digest, tier), fingerprints in places.items():
        yield digest, tier, fingerprints

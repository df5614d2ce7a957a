"""Blocks that prefetches brought, until a load uses them or they go: whether prefetching is worth its bytes.

Rules: bounded; the oldest are forgotten beyond MAX_BLOCKS and then count as neither used nor unused. A block counts once.
"""

from __future__ import annotations

from collections import OrderedDict

from kvdir.core.event import EVENT_WIDTH, Event, EventKind
from kvdir.fingerprint import Fingerprints

MAX_BLOCKS = 65_536


class Prefetched:
    """brought, used, unused: blocks since start. unused_bytes: of the ones that went without having been used."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self.brought = 0
        self.used = 0
        self.unused = 0
        self.unused_bytes = 0
        self._max_blocks = max_blocks
        self._waiting: OrderedDict[bytes, int] = OrderedDict()  # namespace and fingerprint: bytes

    def bring(self, namespace_digest: bytes, fingerprints: Fingerprints, *, block_bytes: int) -> None:
        """A prefetch has brought them."""
        self.brought += len(fingerprints)
        for key in _keys(namespace_digest, fingerprints.packed, fingerprints.width):
            self._waiting[key] = block_bytes
        while len(self._waiting) > self._max_blocks:
            self._waiting.popitem(last=False)

    def follow(self, event: Event) -> None:
        """What a Store tells of its blocks."""
        if event.kind == EventKind.REMOVED and self._waiting:
            self._remove(_keys(event.namespace_digest, event.packed, event.width))

    def use(self, namespace_digest: bytes, fingerprints: Fingerprints) -> None:
        """A load has found them here."""
        if self._waiting:
            keys = _keys(namespace_digest, fingerprints.packed, fingerprints.width)
            self.used += sum(self._waiting.pop(key, 0) > 0 for key in keys)

    def _remove(self, keys: list[bytes]) -> None:
        gone = [size for key in keys if (size := self._waiting.pop(key, 0))]
        self.unused += len(gone)
        self.unused_bytes += sum(gone)


def _keys(namespace_digest: bytes, packed: bytes, width: int) -> list[bytes]:
    kept = min(width, EVENT_WIDTH)  # events say no more of a fingerprint
    return [namespace_digest + packed[at : at + kept] for at in range(0, len(packed), width)]

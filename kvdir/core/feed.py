"""The feed of a directory: its changes, as items in a log; and the roster that a snapshot begins with.

Owns the translation from what a mirror is told to items, and what the newest of them said about every node, holder and
namespace. Rules:
- neighbouring blocks of one holder become one item; an item is at most ITEM_BLOCKS blocks;
- a node becomes an item only when a lookup would answer something else than its age, or more than a percent of what is
  confirmed; who was merely heard again is told in one packed item every HEARD_S;
- `grown` is called when the first item comes after `settled`: somebody has to take it, soon.
A directory has a feed only while somebody watches (server/watching.py). Does not: know watchers (watcher.py), or a clock.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from kvdir.core.feed_items import (
    BLOCK_BYTES,
    Dropped,
    Heard,
    HolderItem,
    Item,
    NamespaceGone,
    NamespaceItem,
    NodeGone,
    NodeItem,
    Page,
    Removed,
    Stored,
)
from kvdir.core.feed_log import ENTRY_BYTES, FeedLog, Taken
from kvdir.core.namespaces import Announced, KnownNamespace
from kvdir.core.sight import Digests

if TYPE_CHECKING:
    from kvdir.core.node import Stream
    from kvdir.index import Packed

ITEM_BLOCKS = 8_192
HEARD_S = 0.25
CONFIRMED_STEP = 0.01
_HEARD = struct.Struct("<II")
_NO_RUN = (Stored, -1)


class Feed:
    """Implements kvdir.core.mirror.Mirror. encode: an item as it goes over the wire, in a response of its own."""

    def __init__(
        self,
        log_id: int,
        encode: Callable[[Item], bytes],
        *,
        limit_bytes: int,
        now_s: float,
        grown: Callable[[], None] = lambda: None,
    ) -> None:
        self.log_id = log_id
        self.blocks = 0
        """Told as stored or removed so far."""
        self._encode = encode
        self._log = FeedLog(limit_bytes=limit_bytes, now_s=now_s)
        self._grown = grown
        self._has_grown = False
        self._nodes: dict[int, NodeItem] = {}
        self._holders: dict[int, HolderItem] = {}
        self._namespaces: dict[bytes, NamespaceItem] = {}
        self._tenants: dict[bytes, str] = {}
        self._gone: deque[bytes] = deque()
        self._most_gone = limit_bytes // ENTRY_BYTES + 1  # each has an item in the log, so the oldest beyond these has left it
        self._heard_s: dict[int, float] = {}
        self._heard: set[int] = set()
        self._heard_due_s = now_s + HEARD_S
        self._run: tuple[type[Stored | Removed], int] = _NO_RUN
        self._parts: list[bytes] = []
        self._run_blocks = 0
        self._run_since_s = now_s

    # -- for watchers ----------------------------------------------------------------------------------------------------

    @property
    def head(self) -> int:
        """Position of the newest item, everything told so far included."""
        self._end_run()
        return self._log.head

    @property
    def log_bytes(self) -> int:
        return self._log.bytes

    def reaches(self, position: int) -> bool:
        return self._log.reaches(position)

    def waited_s(self, position: int, now_s: float) -> float:
        """See FeedLog.waited_s."""
        return self._log.waited_s(position, now_s)

    def take(self, position: int, max_bytes: int, digests: Digests) -> Taken | None:
        """See FeedLog.take; everything told so far is there."""
        self._end_run()
        return self._log.take(position, max_bytes, digests)

    def tenant_of(self, digest: bytes) -> str | None:
        """Whose a namespace is, or was, that the log may still speak of."""
        return self._tenants.get(digest)

    def roster(self, digests: Digests, now_s: float) -> list[Item]:
        """Every namespace, node and holder as of the head: what a snapshot begins with. digests: as in `take`."""
        namespaces = [item for digest, item in self._namespaces.items() if not digests or digest in digests]
        nodes = [self._aged(item, now_s) for item in self._nodes.values()]
        return [*namespaces, *nodes, *(item for item in self._holders.values() if not digests or item.digest in digests)]

    def holders(self, digests: Digests) -> frozenset[int]:
        """The numbers of holders in these namespaces."""
        return frozenset(number for number, item in self._holders.items() if item.digest in digests)

    def encode(self, item: Item) -> bytes:
        return self._encode(item)

    def settled(self, now_s: float) -> None:
        """Watchers take now what there is."""
        self._log.clock(now_s)
        self._has_grown = False

    def tick(self, now_s: float) -> None:
        """Who was heard goes into the log, not too often."""
        self._log.clock(now_s)
        if now_s < self._heard_due_s or not self._heard:
            return
        self._heard_due_s = now_s + HEARD_S
        packed = b"".join(_HEARD.pack(slot, _age_ms(now_s - self._heard_s[slot])) for slot in sorted(self._heard))
        self._heard.clear()
        self._append(Heard(packed))

    # -- Mirror ----------------------------------------------------------------------------------------------------------

    def namespace(self, known: KnownNamespace) -> None:
        item = NamespaceItem(Announced(known.digest, known.namespace.canonical().encode(), known.block_bytes))
        self._namespaces[known.digest] = item
        self._tenants[known.digest] = known.namespace.tenant
        self._append(item, known.digest)

    def namespace_gone(self, digest: bytes) -> None:
        del self._namespaces[digest]
        self._append(NamespaceGone(digest), digest)
        self._gone.append(digest)
        if len(self._gone) > self._most_gone:
            oldest = self._gone.popleft()
            if oldest not in self._namespaces and oldest not in self._gone:
                del self._tenants[oldest]

    def node(self, slot: int, stream: Stream, now_s: float) -> None:
        item = NodeItem(slot, stream.trust(now_s), stream.hidden)
        known, heard_s = self._nodes.get(slot), stream.cursor.last_heard_s
        if known is not None and _says_the_same(known, item):
            if self._heard_s[slot] != heard_s:
                self._heard_s[slot] = heard_s
                self._heard.add(slot)
            return
        self._nodes[slot], self._heard_s[slot] = item, heard_s
        self._heard.discard(slot)
        self._append(item)

    def node_gone(self, slot: int) -> None:
        del self._nodes[slot], self._heard_s[slot]
        self._heard.discard(slot)
        self._append(NodeGone(slot))

    def holder(self, number: int, slot: int, known: KnownNamespace, tier: int, visible: bool) -> None:
        item = self._holders[number] = HolderItem(number, slot, known.digest, tier, visible)
        self._append(item, known.digest)

    def stored(self, holder: int, packed: Packed, width: int, now_s: int) -> None:
        self._add_to_run(Stored, holder, narrow(packed, width))

    def removed(self, holder: int, packed: Packed, width: int) -> None:
        self._add_to_run(Removed, holder, narrow(packed, width))

    def dropped(self, holder: int) -> None:
        self._end_run()  # which may be this holder's
        self._append(Dropped(holder), self._holders.pop(holder).digest)

    def restored(self, keys: bytes, access: bytes, holder: int) -> None:
        count = len(keys) // 8
        page = Page(keys, bytes(4 * count), bytes(4 * count), (holder.to_bytes(4, "little"),), done=0)
        self._append(page, self._holders[holder].digest)

    # -- inside ----------------------------------------------------------------------------------------------------------

    def _aged(self, item: NodeItem, now_s: float) -> NodeItem:
        return item._replace(trust=replace(item.trust, age_s=max(0.0, now_s - self._heard_s[item.slot])))

    def _add_to_run(self, kind: type[Stored | Removed], holder: int, packed: bytes) -> None:
        self._note()
        for piece in _pieces(packed):
            if self._run != (kind, holder) or self._run_blocks + len(piece) // BLOCK_BYTES > ITEM_BLOCKS:
                self._end_run()
                self._run, self._run_since_s = (kind, holder), self._log.now_s
            self._parts.append(piece)
            self._run_blocks += len(piece) // BLOCK_BYTES

    def _end_run(self) -> None:
        if not self._parts:
            return
        kind, holder = self._run
        item: Item = kind(holder, b"".join(self._parts))
        self.blocks += self._run_blocks
        self._run, self._parts, self._run_blocks = _NO_RUN, [], 0
        self._log.append(self._encode(item), self._holders[holder].digest, since_s=self._run_since_s)

    def _append(self, item: Item, digest: bytes | None = None) -> None:
        self._end_run()
        self._log.append(self._encode(item), digest)
        self._note()

    def _note(self) -> None:
        if not self._has_grown:
            self._has_grown = True
            self._grown()


def narrow(packed: Packed, width: int) -> bytes:
    """The first 8 bytes of each fingerprint."""
    if width == BLOCK_BYTES:
        return bytes(packed)
    return memoryview(packed).cast("B").cast("Q")[:: width // BLOCK_BYTES].tobytes()


def _age_ms(age_s: float) -> int:
    """Rounded up: an age is never flattered."""
    return min(math.ceil(max(0.0, age_s) * 1000), 2**32 - 1)


def _pieces(packed: bytes) -> Iterator[bytes]:
    step = ITEM_BLOCKS * BLOCK_BYTES
    if len(packed) <= step:
        yield packed
        return
    for at in range(0, len(packed), step):
        yield packed[at : at + step]


def _says_the_same(known: NodeItem, item: NodeItem) -> bool:
    """But for the age, and a share confirmed that is less than a percent off."""
    was, now = known.trust, item.trust
    if known.hidden != item.hidden or was.state is not now.state or was.epoch != now.epoch:
        return False
    if was.missing_events != now.missing_events or was.reason != now.reason:
        return False
    if (was.node, was.peer_address) != (now.node, now.peer_address):
        return False
    if was.confirmed == now.confirmed:
        return True
    return abs(was.confirmed - now.confirmed) < CONFIRMED_STEP and 0 < was.confirmed < 1 and 0 < now.confirmed < 1

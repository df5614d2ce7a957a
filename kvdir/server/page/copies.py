"""What the page is made of: plain values, copied on the coordinator's event loop, used elsewhere.

Rules: a copy of a coordinator's own directory never holds the loop for longer than TURN_NODES nodes take (of a shared store it
takes all nodes in one turn); nothing in it changes afterwards. Nodes of one copy may be a few turns apart, each with its own
age. Answers to questions (explain, story) are values, too.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvdir.core.inspect import node_view
from kvdir.core.recent_lookups import RecentLookup
from kvdir.core.story import Kind, StoryEntry
from kvdir.core.views import NodeView, StatusView
from kvdir.core.who_holds import WhoHolds, who_holds, who_is_named
from kvdir.fingerprint import Fingerprints
from kvdir.location import MinTrust
from kvdir.server.coordinator import Coordinator
from kvdir.server.shared.coordinator import SharedCoordinator

TURN_NODES = 25
"""So many nodes are copied before others have a turn."""
NOTES = 60
STORY_ENTRIES = 100
LOOKUPS = 20
REMEMBERED_CHANGES = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One moment. life: differs between two processes. now_s: monotonic; unix_ms: for people. notes: newest first; noted: how
    many there ever were.

    stale_blocks: that lookups named and owners did not hold. lookups: newest first. remarks: why it may not be asked, or only
    with care, in words.
    """

    life: str
    now_s: float
    unix_ms: int
    status: StatusView
    stale_blocks: int
    nodes: tuple[NodeView, ...]
    notes: tuple[StoryEntry, ...]
    noted: int
    lookups: tuple[RecentLookup, ...]
    remarks: tuple[str, ...]
    watchers: int
    lookup_workers: int
    heartbeat_s: float
    stale_after_s: float
    expire_after_s: float


class PageSource(Protocol):
    """Of what a page is shown. Everything is called on the coordinator's event loop. Raises KvdirError."""

    async def copy(self) -> Copy: ...

    async def explain(self, namespace_digest: bytes, fingerprints: Fingerprints) -> WhoHolds: ...

    async def story(self, node: str) -> tuple[Sequence[StoryEntry], float]:
        """Its newest entries, oldest first, and the monotonic time that they are to be compared with."""
        ...

    def lookup(self, name: str) -> RecentLookup | None:
        """A lookup by request id or trace id, if it is still known."""
        ...


class DirectoryPage:
    """PageSource over a coordinator's own directory."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._life = secrets.token_hex(8)

    async def copy(self) -> Copy:
        coordinator, directory = self._coordinator, self._coordinator.directory
        nodes: list[NodeView] = []
        for number, name in enumerate(sorted(directory.nodes), 1):
            node = directory.nodes.get(name)
            if node is not None and node.stream is not None:
                nodes.append(node_view(node.stream, now_s=coordinator.now_s()))
            if number % TURN_NODES == 0:
                await asyncio.sleep(0)
        config, counted = coordinator.config, coordinator.metrics.counted(directory, coordinator.metrics.beside())
        return Copy(
            life=self._life,
            now_s=coordinator.now_s(),
            unix_ms=int(time.time() * 1000),
            status=coordinator.status(),
            stale_blocks=counted["stale_blocks"],
            nodes=tuple(nodes),
            notes=tuple(directory.story.newest(NOTES)),
            noted=directory.story.noted,
            lookups=tuple(coordinator.recent.newest(LOOKUPS)),
            remarks=_remarks(coordinator.not_ready(), coordinator.remark()),
            watchers=len(coordinator.watching.calls),
            lookup_workers=config.lookup_workers,
            heartbeat_s=config.heartbeat_interval_ms / 1000,
            stale_after_s=config.stale_after_s,
            expire_after_s=config.expire_after_s,
        )

    async def explain(self, namespace_digest: bytes, fingerprints: Fingerprints) -> WhoHolds:
        coordinator = self._coordinator
        return who_holds(coordinator.directory, namespace_digest, fingerprints, now_s=coordinator.now_s())

    async def story(self, node: str) -> tuple[Sequence[StoryEntry], float]:
        pages, now_s = self._coordinator.directory.story.pages(), self._coordinator.now_s()
        return await asyncio.to_thread(pages.of_node, node, max_entries=STORY_ENTRIES), now_s

    def lookup(self, name: str) -> RecentLookup | None:
        return self._coordinator.recent.find(name)


class StorePage:
    """PageSource over a store that coordinators share. What happened is what this page saw change while somebody watched it."""

    def __init__(self, coordinator: SharedCoordinator) -> None:
        self._coordinator = coordinator
        self._changes = Changes()
        self._life = secrets.token_hex(8)

    async def copy(self) -> Copy:
        coordinator = self._coordinator
        now_s, config = coordinator.now_s(), coordinator.config
        nodes = coordinator.link.fleet.views(now_s)
        unknown = {digest for view in nodes for digest in view.namespaces if coordinator.link.namespaces.get(digest) is None}
        if unknown:  # announced to another coordinator: the store knows it, and with it all others
            await coordinator.questions.know(unknown.pop())
        self._changes.seen(nodes, now_s=now_s)
        return Copy(
            life=self._life,
            now_s=now_s,
            unix_ms=int(time.time() * 1000),
            status=coordinator.status(),
            stale_blocks=coordinator.counters.stale_blocks,
            nodes=nodes,
            notes=tuple(self._changes.newest(NOTES)),
            noted=self._changes.noted,
            lookups=tuple(coordinator.recent.newest(LOOKUPS)),
            remarks=_remarks(coordinator.not_ready(), coordinator.remark()),
            watchers=0,
            lookup_workers=0,
            heartbeat_s=config.heartbeat_interval_ms / 1000,
            stale_after_s=config.stale_after_s,
            expire_after_s=config.expire_after_s,
        )

    async def explain(self, namespace_digest: bytes, fingerprints: Fingerprints) -> WhoHolds:
        coordinator = self._coordinator
        answer = await coordinator.questions.lookup(namespace_digest, fingerprints, prefix=False, min_trust=MinTrust.ANY)
        return who_is_named(answer, namespace_digest, coordinator.link.fleet.views(coordinator.now_s()))

    async def story(self, node: str) -> tuple[Sequence[StoryEntry], float]:
        return self._changes.of_node(node), self._coordinator.now_s()

    def lookup(self, name: str) -> RecentLookup | None:
        return self._coordinator.recent.find(name)


class Changes:
    """What changed between two copies, where nobody else keeps a story. Bounded."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[int, str, str]] | None = None
        self._notes: deque[StoryEntry] = deque(maxlen=REMEMBERED_CHANGES)
        self.noted = 0

    def seen(self, nodes: Sequence[NodeView], *, now_s: float) -> None:
        """These are the nodes now. What was so at the first look is no change."""
        now = {view.trust.node: (view.trust.epoch, view.trust.state.name.lower(), view.trust.reason) for view in nodes}
        known = now if self._before is None else self._before
        for node in sorted(now.keys() | known.keys()):
            before, after = known.get(node), now.get(node)
            if after is None:
                self._note(now_s, node, 0, Kind.ORPHAN, "forgotten")
            elif before is None or before[0] != after[0]:
                self._note(now_s, node, after[0], Kind.REGISTERED, f"a new epoch, {after[1]}")
            elif before[1] != after[1]:
                why = f": {after[2]}" if after[2] else ""
                self._note(now_s, node, after[0], Kind.STATE, f"{before[1]} -> {after[1]}{why}")
        self._before = now

    def newest(self, count: int) -> list[StoryEntry]:
        """Newest first."""
        return list(self._notes)[: -count - 1 : -1]

    def of_node(self, node: str) -> list[StoryEntry]:
        return [note for note in self._notes if note.node == node]

    def _note(self, now_s: float, node: str, epoch: int, kind: Kind, words: str) -> None:
        self._notes.append(StoryEntry(now_s, node, epoch, kind, words))
        self.noted += 1


def _remarks(*words: str) -> tuple[str, ...]:
    return tuple(filter(None, words))

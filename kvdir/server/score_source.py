"""Where scores come from: lookups of every name, and the streams that live. A port, as lookup_source.py is for lookups."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from kvdir.core.answer import Lookup
from kvdir.core.best_tiers import Answered
from kvdir.core.namespaces import NamespaceTable
from kvdir.core.node import Stream
from kvdir.core.policy import ALL, Grant
from kvdir.core.score import WEIGHTS, ScoreName, ScorePart, Scores, score
from kvdir.core.serving import Engines, Serving
from kvdir.errors import TooLarge
from kvdir.fingerprint import Fingerprints
from kvdir.location import MinTrust, NodeTrust, Tier
from kvdir.namespace import Namespace
from kvdir.server.coordinator import Coordinator

REUSE_S = 0.01
"""As long as a node's trust is reused: so late an engine is noticed that announced its first block just now."""
MAX_NAMES = 512
"""In one score: some 0.1 ms each, however few blocks."""
MANY_NAMES = 32
MAX_KEPT = 64
"""Sets of engines for callers who see different tenants."""
LARGE_CELLS = 8_192
"""Nodes times runs. From these on scores are added up in a thread, so that the loop goes on."""


class ScoreSource(Protocol):
    """See the module docstring. namespaces: those that are known now."""

    @property
    def namespaces(self) -> NamespaceTable: ...

    def serving(self, min_trust: MinTrust, tenants: Grant = ALL) -> Iterable[Serving]:
        """Every live stream, with the models of these tenants' namespaces."""
        ...

    def engines(self, min_trust: MinTrust, tenants: Grant = ALL) -> Engines:
        """Of the live streams, at most REUSE_S old."""
        ...

    def trusts(self) -> Iterable[NodeTrust]:
        """Of the same streams."""
        ...

    async def lookup(self, namespace_digest: bytes, fingerprints: Fingerprints, min_trust: MinTrust) -> Lookup:
        """Sparse. Raises KvdirError."""
        ...

    async def refresh(self, digests: Iterable[bytes], tenants: Grant = ALL) -> None:
        """Learns of namespaces that somebody else may have heard of. Of those that nobody knows, nothing; of those of other
        tenants neither, for as much work.
        """
        ...


class RecentEngines:
    """Engines made of `serving`, and made anew after REUSE_S: a busy coordinator of thousands of nodes builds few."""

    def __init__(self, serving: Callable[[MinTrust, Grant], Iterable[Serving]], now_s: Callable[[], float]) -> None:
        self._serving = serving
        self._now_s = now_s
        self._made: dict[tuple[MinTrust, Grant], tuple[float, Engines]] = {}

    def __call__(self, min_trust: MinTrust, tenants: Grant = ALL) -> Engines:
        key, now_s = (min_trust, tenants), self._now_s()
        made = self._made.get(key)
        if made is None or now_s - made[0] >= REUSE_S:
            if len(self._made) >= MAX_KEPT:
                self._made.clear()
            made = self._made[key] = now_s, Engines(self._serving(min_trust, tenants))
        return made[1]


class DirectoryScores:
    """ScoreSource over the coordinator's own directory: never waits."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self.engines = RecentEngines(self.serving, coordinator.now_s)

    @property
    def namespaces(self) -> NamespaceTable:
        return self._coordinator.directory.namespaces

    def serving(self, min_trust: MinTrust, tenants: Grant = ALL) -> Iterable[Serving]:
        known: dict[frozenset[bytes], frozenset[str]] = {}
        for stream in self._live():
            models = known.get(stream.namespaces)
            if models is None:
                models = known[stream.namespaces] = models_of(self.namespaces, stream.namespaces, tenants)
            yield Serving(stream.node, models, min_trust.admits(stream.state))

    def trusts(self) -> Iterable[NodeTrust]:
        now_s = self._coordinator.now_s()
        return [stream.trust(now_s) for stream in self._live()]

    async def lookup(self, namespace_digest: bytes, fingerprints: Fingerprints, min_trust: MinTrust) -> Lookup:
        coordinator = self._coordinator
        return coordinator.directory.lookup(namespace_digest, fingerprints, min_trust=min_trust, now_s=coordinator.now_s())

    async def refresh(self, digests: Iterable[bytes], tenants: Grant = ALL) -> None:
        pass

    def _live(self) -> Iterator[Stream]:
        for node in self._coordinator.directory.nodes.values():
            if node.stream is not None and not node.stream.fenced and not node.stream.hidden:
                yield node.stream


def models_of(namespaces: NamespaceTable, digests: Iterable[bytes], tenants: Grant) -> frozenset[str]:
    found = (namespaces.seen(digest, tenants) for digest in digests)
    return frozenset(known.namespace.model for known in found if known is not None)


async def scored(
    source: ScoreSource,
    parts: Sequence[ScorePart],
    *,
    weights: Mapping[Tier, float] | None = None,
    min_trust: MinTrust = MinTrust.ANY,
    max_instances: int = 0,
    max_fingerprints: int,
    tenants: Grant = ALL,
) -> Scores:
    """The scores of one prompt. Raises UnknownNamespace when none of the names is known, TooLarge, and what `score` raises.

    tenants: whose namespaces there are for the caller.
    """
    names = [name for part in parts for group in part.groups for name in group.names]
    asked = sum(max(1, len(name.fingerprints)) for name in names)
    if asked > max_fingerprints:
        raise TooLarge(
            f"{asked} fingerprints in one score, max_fingerprints is {max_fingerprints}: ask with fewer blocks or names"
        )
    if len(names) > MAX_NAMES:
        raise TooLarge(f"{len(names)} names in one score, at most {MAX_NAMES}: ask about fewer parts or groups at a time")
    await source.refresh({name.namespace_digest for name in names}, tenants)
    spaces = _known(source.namespaces, names, tenants)
    unknown = tuple(dict.fromkeys(name.namespace_digest for name in names if name.namespace_digest not in spaces))
    if not spaces:
        source.namespaces.require(names[0].namespace_digest, tenants)
    asks = tuple(dict.fromkeys(name for name in names if name.namespace_digest in spaces))  # ranks of a split share names
    answers = await asyncio.gather(*(source.lookup(name.namespace_digest, name.fingerprints, min_trust) for name in asks))
    answered = {name: Answered(spaces[name.namespace_digest], answer) for name, answer in zip(asks, answers, strict=True)}
    told = [[[answered[name] for name in group.names if name in answered] for group in part.groups] for part in parts]
    work = functools.partial(
        score,
        [groups for groups in told if all(groups)],
        source.engines(min_trust, tenants),
        weights=weights or WEIGHTS,
        max_instances=max_instances,
        unknown_namespaces=unknown,
    )
    large = len(names) > MANY_NAMES or any(map(_large, answers))
    return await asyncio.to_thread(work) if large else work()


def _known(table: NamespaceTable, names: Iterable[ScoreName], tenants: Grant) -> dict[bytes, Namespace]:
    found = {name.namespace_digest: table.seen(name.namespace_digest, tenants) for name in names}
    return {digest: known.namespace for digest, known in found.items() if known is not None}


def _large(answer: Lookup) -> bool:
    """Whether what it says takes some milliseconds to add up: by runs, and by blocks where groups have to agree."""
    return len(answer.nodes) * max(len(answer.runs) // 12, answer.asked // 64) > LARGE_CELLS

"""Sums over all live streams: blocks and bytes per node, tier, namespace and tenant, each with the trust its parts allow.

Rule: a stream contributes to every namespace it announced, also when nothing of it is held, because what it lost may have
been about that. So one hole makes untrusted exactly the sums it could have changed. Reads only; O(holders), made on demand.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from kvdir.core.directory import Directory
from kvdir.core.namespaces import KnownNamespace
from kvdir.core.node import Stream
from kvdir.core.trust import Convergent, Cumulative, total
from kvdir.core.views import LoadView, SumsView, TotalView, ViewScope
from kvdir.location import Tier

_TIERS = {int(tier): tier.name.lower() for tier in Tier}

Cell = tuple[Stream, int | None, KnownNamespace | None, Cumulative, Cumulative]
"""(stream, tier or None for all, namespace, blocks, bytes)"""


def sums_view(directory: Directory, *, now_s: float) -> SumsView:
    """Every sum there is, by scope and subject; what nodes say about themselves, by node."""
    grouped: defaultdict[tuple[ViewScope, str], list[tuple[Cumulative, Cumulative]]] = defaultdict(list)
    streams = [node.stream for node in directory.nodes.values() if node.stream is not None and not node.stream.fenced]
    for stream in streams:
        for cell in _cells(directory, stream):
            figures = cell[3:]
            for key in _subjects(cell):
                grouped[key].append(figures)
    return SumsView(
        totals=tuple(
            TotalView(
                scope, subject, total((part[0] for part in parts), now_s=now_s), total((part[1] for part in parts), now_s=now_s)
            )
            for (scope, subject), parts in sorted(grouped.items())
        ),
        loads=tuple(
            LoadView(
                stream.node,
                Convergent(stream.figures.used_bytes, stream.heartbeat_s),
                Convergent(stream.figures.capacity_bytes, stream.heartbeat_s),
                Convergent(stream.figures.oldest_use_ms, stream.heartbeat_s),
                Convergent(stream.figures.read_bytes_per_s, stream.heartbeat_s),
            )
            for stream in sorted(streams, key=lambda stream: stream.node)
        ),
    )


class SumsTrust:
    """How many sums there are by scope and trust: what counting the totals of `sums_view` gives, without making any.

    A stream in doubt makes all its sums doubtful; a synced one only those of holders that are.
    """

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._trusted: dict[ViewScope, set[object]] = {scope: set() for scope in ViewScope}
        self._doubtful: dict[ViewScope, set[object]] = {scope: set() for scope in ViewScope}

    def add(self, stream: Stream) -> None:
        """One that is live. O(its holders and namespaces)."""
        trusted = stream.figure(0).trusted
        into = self._trusted if trusted else self._doubtful
        into[ViewScope.NODE].add(stream.node)
        into[ViewScope.TIER].update(_TIERS)
        for digest in stream.namespaces:
            if (known := self._directory.namespaces.get(digest)) is not None:
                _add_namespace(into, known)
        for (_, tier), holder in stream.holders.items():
            if trusted and not stream.blocks_figure(holder).trusted:
                self._doubtful[ViewScope.NODE].add(stream.node)
                self._doubtful[ViewScope.TIER].add(tier)
                _add_namespace(self._doubtful, holder.namespace)
            else:
                _add_namespace(into, holder.namespace)

    def counts(self) -> Counter[tuple[ViewScope, bool]]:
        """By (scope, trusted)."""
        out: Counter[tuple[ViewScope, bool]] = Counter()
        for scope, doubtful in self._doubtful.items():
            out[scope, False] = len(doubtful)
            out[scope, True] = len(self._trusted[scope] - doubtful)
        return +out


def _add_namespace(into: dict[ViewScope, set[object]], known: KnownNamespace) -> None:
    into[ViewScope.NAMESPACE].add(known.digest)
    into[ViewScope.TENANT].add(known.namespace.tenant)


def _cells(directory: Directory, stream: Stream) -> Iterator[Cell]:
    nothing = stream.figure(0)
    for (_, tier), holder in stream.holders.items():
        known = holder.namespace
        yield stream, tier, known, stream.blocks_figure(holder), stream.blocks_figure(holder, block_bytes=known.counted_bytes)
    for digest in stream.namespaces or (b"",):
        yield stream, None, directory.namespaces.get(digest), nothing, nothing


def _subjects(cell: Cell) -> Iterator[tuple[ViewScope, str]]:
    stream, tier, known, _, _ = cell
    yield ViewScope.NODE, stream.node
    for name in _TIERS.values() if tier is None else (_TIERS[tier],):
        yield ViewScope.TIER, name
    if known is not None:
        yield ViewScope.NAMESPACE, known.digest.hex()
        yield ViewScope.TENANT, known.namespace.tenant

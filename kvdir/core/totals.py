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
        self._subjects: set[tuple[ViewScope, str]] = set()
        self._doubtful: set[tuple[ViewScope, str]] = set()

    def add(self, stream: Stream) -> None:
        """One that is live. O(its holders and namespaces)."""
        nothing = stream.figure(0)
        for digest in stream.namespaces or (b"",):
            subjects = _subjects((stream, None, self._directory.namespaces.get(digest), nothing, nothing))
            (self._subjects if nothing.trusted else self._doubtful).update(subjects)
        for (_, tier), holder in stream.holders.items():
            trusted = nothing.trusted and stream.blocks_figure(holder).trusted
            subjects = _subjects((stream, tier, holder.namespace, nothing, nothing))
            (self._subjects if trusted else self._doubtful).update(subjects)

    def counts(self) -> Counter[tuple[ViewScope, bool]]:
        """By (scope, trusted)."""
        out = Counter((scope, False) for scope, _ in self._doubtful)
        out.update((scope, True) for scope, _ in self._subjects - self._doubtful)
        return out


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

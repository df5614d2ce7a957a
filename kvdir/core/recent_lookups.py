"""The newest lookups, as far as the page may tell of them: how many blocks were asked for and found, and whom the answer named.

Never a fingerprint. Bounded in lookups and in nodes of each; an append is all that it costs a lookup.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from kvdir.core.answer import Lookup
from kvdir.location import NodeTrust

MAX_LOOKUPS = 512
MAX_NODES = 16


class RecentLookup(NamedTuple):
    """at_s: monotonic. request_id, trace_id: "" where its caller gave none. nodes: of those named the first MAX_NODES, as they
    were trusted then; more: how many others.
    """

    at_s: float
    namespace_digest: bytes
    asked: int
    hits: int
    nodes: Sequence[NodeTrust]
    more: int
    below_trust: int
    incomplete: bool
    request_id: str
    trace_id: str


class RecentLookups:
    """A ring."""

    def __init__(self, *, max_lookups: int = MAX_LOOKUPS) -> None:
        self._ring: deque[RecentLookup] = deque(maxlen=max_lookups)

    def add(self, now_s: float, namespace_digest: bytes, answer: Lookup, *, request_id: str = "", trace_id: str = "") -> None:
        """A lookup was answered."""
        nodes = answer.nodes
        self._ring.append(
            RecentLookup(
                now_s, namespace_digest, answer.asked, answer.hits, nodes[:MAX_NODES], max(0, len(nodes) - MAX_NODES),
                answer.below_trust, answer.incomplete, request_id, trace_id,
            )
        )  # fmt: skip

    def newest(self, count: int) -> list[RecentLookup]:
        """Newest first."""
        return list(itertools.islice(reversed(self._ring), count))

    def find(self, name: str) -> RecentLookup | None:
        """The newest one with this request id or trace id."""
        if not name:
            return None
        return next((item for item in reversed(self._ring) if name in (item.request_id, item.trace_id)), None)

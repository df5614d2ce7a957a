"""Names of streams, and the instances that routers send requests to.

    NODE                 an agent: what its arena holds; counts for every instance of that node
    NODE/ENGINE          an engine without data parallelism: what its events announce
    NODE/ENGINE@RANK     one data-parallel rank of an engine; its ranks together are the instance NODE/ENGINE
    /ENGINE, /ENGINE@RANK   the same of an engine that no agent's node carries (registered with a coordinator)

Rules: NODE has no "/"; ENGINE has no "/" and no "@"; a rank is decimal without leading zeros, below MAX_RANKS. Reading is
total: names come over the wire, and one that is none of the above is a plain node under its whole name. Writing checks. Each
is the inverse of the other.
"""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

from kvdir.errors import InvalidInput

MAX_RANKS = 65_536
_STREAM = re.compile(r"(?P<node>[^/]*)/(?P<engine>[^/@]+)(?:@(?P<rank>0|[1-9][0-9]{0,4}))?", re.ASCII | re.DOTALL)


class StreamOf(NamedTuple):
    """Whose stream it is. engine: "" for an agent's own. dp_rank: None without data parallelism, which is its only rank, 0."""

    node: str
    engine: str
    dp_rank: int | None

    @property
    def instance(self) -> str:
        """Where a request can be sent: "NODE/ENGINE"; "NODE" of an agent's own stream."""
        return f"{self.node}/{self.engine}" if self.engine else self.node


@functools.lru_cache(maxsize=8192)
def parse(name: str) -> StreamOf:
    """What a stream's node name says; never fails."""
    match = _STREAM.fullmatch(name)
    if match is None or int(match["rank"] or 0) >= MAX_RANKS:
        return StreamOf(name, "", None)
    return StreamOf(match["node"], match["engine"], None if match["rank"] is None else int(match["rank"]))


def instance_of(name: str) -> str:
    """The instance that a stream belongs to; of an agent's own stream its node."""
    return parse(name).instance


def stream_name(node: str, engine: str, dp_rank: int | None = None) -> str:
    """The node name under which an engine's rank publishes. Raises InvalidInput for names that would not read back."""
    name = f"{node}/{engine}" if dp_rank is None else f"{node}/{engine}@{dp_rank}"
    if parse(name) != (node, engine, dp_rank):
        raise InvalidInput(
            f"node {node!r}, engine {engine!r}, rank {dp_rank} is no name of an engine's stream: a node has no '/', "
            f"an engine neither '/' nor '@' and at least one character, a rank is from 0 to {MAX_RANKS - 1}"
        )
    return name

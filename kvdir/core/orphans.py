"""Orphans: entries of nodes that left without a word. Judged here; dropped by the directory, if at all.

Silence alone does not tell a node that died from one that is cut off from us. So entries go only when

- the node is not connected and was silent for `limit_s`, not counting time in which we ourselves stood still;
- no reader met its owner in that time (negative feedback names the epoch that answered "absent", so it proves life);
- most of the other nodes are heard: if they are silent too, it is we who are cut off. With fewer than three nodes known
  there is no such majority, and the first two rules decide.

And being wrong costs a snapshot, never a block: the epoch is forgotten with the entries, so a node that comes back is asked to
restate everything. Fenced streams hold nothing and are forgotten after `limit_s` in any case. Dry run: judged and said only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvdir.core.node import Node, Stream

_EVERY_S = 1.0
_STOOD_STILL_S = 5.0
_MAJORITY_OF = 3


@dataclass(frozen=True, slots=True)
class Orphan:
    """spared: why its entries are kept all the same, in words; empty: they go."""

    node: str
    epoch: int
    silent_s: float
    blocks: int
    spared: str


class Orphanage:
    """found: as of the last look. dropped_nodes, dropped_blocks: since the start."""

    def __init__(self, *, limit_s: float, enforce: bool) -> None:
        self.enforce = enforce
        self.found: tuple[Orphan, ...] = ()
        self.dropped_nodes = 0
        self.dropped_blocks = 0
        self._limit_s = limit_s
        self._due_s = 0.0
        self._last_s: float | None = None
        self._resumed_s = float("-inf")

    def tick(self, nodes: Mapping[str, Node], *, now_s: float) -> list[Node]:
        """The nodes to forget now. Looks about once a second."""
        if self._last_s is not None and now_s - self._last_s > _STOOD_STILL_S:
            self._resumed_s = now_s
        self._last_s = now_s
        if now_s < self._due_s:
            return []
        self._due_s = now_s + _EVERY_S
        streams = [node.stream for node in nodes.values() if node.stream is not None]
        silent = [stream for stream in streams if self._silent_s(stream, now_s) > self._limit_s]
        cut_off = self._cut_off(streams, now_s) if silent else ""
        self.found = tuple(self._judge(stream, cut_off, now_s) for stream in silent if not stream.fenced)
        gone = [stream.node for stream in silent if stream.fenced]
        if self.enforce:
            gone += [orphan.node for orphan in self.found if not orphan.spared]
        return [nodes[name] for name in gone]

    def longest_gone(self) -> str:
        """The node whose entries may go first, to make room; empty when there is none."""
        free = [orphan for orphan in self.found if not orphan.spared]
        return max(free, key=lambda orphan: orphan.silent_s).node if free else ""

    def dropped(self, node: str, blocks: int) -> None:
        """The directory forgot a node."""
        self.dropped_nodes += 1
        self.dropped_blocks += blocks
        self.found = tuple(orphan for orphan in self.found if orphan.node != node)

    def _silent_s(self, stream: Stream, now_s: float) -> float:
        if stream.cursor.connected:
            return 0.0
        return now_s - max(stream.cursor.last_heard_s, self._resumed_s)

    def _judge(self, stream: Stream, cut_off: str, now_s: float) -> Orphan:
        spared = cut_off
        if now_s - stream.met_s <= self._limit_s:
            spared = f"a reader met its owner {now_s - stream.met_s:.0f} s ago"
        blocks = sum(holder.claimed for holder in stream.holders.values())
        return Orphan(stream.node, stream.epoch, self._silent_s(stream, now_s), blocks, spared)

    def _cut_off(self, streams: Iterable[Stream], now_s: float) -> str:
        live = [stream for stream in streams if not stream.fenced]
        heard = sum(not stream.hidden and now_s - stream.cursor.last_heard_s <= self._limit_s for stream in live)
        if len(live) < _MAJORITY_OF or 2 * heard >= len(live):
            return ""
        return f"only {heard} of {len(live)} nodes are heard: this coordinator may be the one that is cut off"

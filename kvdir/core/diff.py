"""Compares what several coordinators believe, part by part. Pure.

Rule: a part is one (node, epoch, namespace, tier), and what is compared is its digest. At different sequence numbers two
coordinators may differ, because one is behind, and it knows that itself; at one number, both exact, they must not. No clock is
involved: ages are durations, and order is by sequence number, so coordinators whose clocks disagree compare like others.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvdir.core.digests import DigestsView, StreamDigest
from kvdir.core.sketches import SketchPart
from kvdir.location import NodeTrust, StreamState

_NONE = bytes(16)
_SILENT_WORDS = "its agent is silent, and what is known of it is left out of lookups, and forgotten, in time"
_LIVES_WORDS = "the node restarted: whoever still has its old epoch drops it when the new one says hello there"


class Verdict(enum.StrEnum):
    """Of one part, the worst last."""

    EQUAL = "equal"
    BEHIND = "behind"  # fewer events were applied at some coordinator
    ABSENT = "absent"  # some coordinator does not know this epoch
    SETTLING = "settling"  # at one number, but some coordinator has applied more, or other, than the number says, and knows it
    DIFFERENT = "different"  # at one number, and not the same


@dataclass(frozen=True, slots=True)
class Side:
    """One part at one coordinator. digest: zeros for no blocks."""

    trust: NodeTrust
    applied_seq: int
    blocks: int
    digest: bytes
    exact: bool


@dataclass(frozen=True, slots=True)
class Row:
    """One part. sides: in the order of the coordinators, None where this epoch is not known. behind: of the one furthest back.

    words: what is the matter, who has to do something, and that it will.
    """

    node: str
    epoch: int
    namespace_digest: bytes
    tier: int
    verdict: Verdict
    behind: int
    words: str
    sides: tuple[Side | None, ...]


def compare(views: Mapping[str, DigestsView]) -> list[Row]:
    """views: by the name that people know each coordinator under. Rows by node, epoch, namespace and tier.

    A stream without any block has one row, with an empty namespace and tier 0.
    """
    streams = {name: {(item.trust.node, item.trust.epoch): item for item in view.streams} for name, view in views.items()}
    rows = []
    keys = {key for known in streams.values() for key in known}
    for node, epoch in sorted(keys):
        found = [known.get((node, epoch)) for known in streams.values()]
        parts = {(part.namespace_digest, part.tier) for item in found if item is not None for part in item.parts}
        for digest, tier in sorted(parts) or [(b"", 0)]:
            sides = tuple(_side(item, digest, tier) for item in found)
            rows.append(_row(tuple(views), node, epoch, digest, tier, sides))
    lives = Counter(node for node, _ in keys)
    return [replace(row, words=_LIVES_WORDS) if lives[row.node] > 1 and row.verdict is Verdict.ABSENT else row for row in rows]


def worst(rows: Sequence[Row]) -> Verdict:
    """EQUAL when there is nothing to compare."""
    order = list(Verdict)
    return max((row.verdict for row in rows), key=order.index, default=Verdict.EQUAL)


def _side(item: StreamDigest | None, digest: bytes, tier: int) -> Side | None:
    if item is None:
        return None
    empty = SketchPart(digest, tier, 0, _NONE)
    part = next((part for part in item.parts if (part.namespace_digest, part.tier) == (digest, tier)), empty)
    return Side(item.trust, item.applied_seq, part.blocks, part.digest, item.exact)


def _row(names: tuple[str, ...], node: str, epoch: int, digest: bytes, tier: int, sides: tuple[Side | None, ...]) -> Row:
    known = [side for side in sides if side is not None]
    newest = max(side.applied_seq for side in known)
    behind = newest - min(side.applied_seq for side in known)

    def row(verdict: Verdict, words: str = "") -> Row:
        return Row(node, epoch, digest, tier, verdict, behind, words, sides)

    exact = {(side.applied_seq, side.digest) for side in known if side.exact}
    contested = [seq for seq, count in Counter(seq for seq, _ in exact).items() if count > 1]
    if contested:
        return row(Verdict.DIFFERENT, _different_words(names, sides, max(contested)))
    silent = all(side.trust.state is StreamState.STALE for side in known)
    if len(known) < len(sides):
        away = " and ".join(name for name, side in zip(names, sides, strict=True) if side is None)
        coming = _SILENT_WORDS if silent else "it will when the agent publishes to it"
        return row(Verdict.ABSENT, f"{away} has not met this epoch of {node}: {coming}")
    if len({side.digest for side in known}) == 1:
        return row(Verdict.EQUAL)
    if behind:
        back = [name for name, side in zip(names, sides, strict=True) if side and side.applied_seq < newest]
        coming = _SILENT_WORDS if silent else "what is missing is asked for again, so it catches up"
        return row(Verdict.BEHIND, f"{' and '.join(back)} missed something: {coming}")
    return row(Verdict.SETTLING, "some have applied more than the number says, and know it: the agent's next digest settles it")


def _different_words(names: Sequence[str], sides: Sequence[Side | None], seq: int) -> str:
    at = [(name, side) for name, side in zip(names, sides, strict=True) if side and side.applied_seq == seq and side.exact]
    counts = ", ".join(f"{name} holds {side.blocks:,}" for name, side in at)
    unsure = [name for name, side in at if side.trust.state is not StreamState.SYNCED]
    if unsure:
        return f"at event {seq} {counts}: {' and '.join(unsure)} knows, and is repairing it"
    return (
        f"at event {seq} {counts}: the agent's next heartbeat carries its own digest, and whoever differs from it repairs "
        "itself; `kvdir reconcile NODE --coordinator ADDRESS`, at each, does it now"
    )

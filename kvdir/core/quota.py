"""Byte quotas of tenants and namespaces over the whole fleet: what is used, and who should evict how much. Pure functions.

Usage is a *cumulative* figure: the sum, over all live streams, of the bytes they hold for the subject. One lost removal offsets
it for ever, and a quota that acts on such a sum deletes a tenant's cache bit by bit (LMCache #4291). So `plan_eviction` takes
a `Trusted` number, which only `require_trusted()` gives. Victims are chosen by *convergent* last access: one cutoff age for
the fleet, and per node how many blocks to evict; which ones, the owner decides, who knows its own locks, pins and last use.

Never more than the excess: shares are rounded down, and every share names the number of blocks that must remain.
Counts only tiers that agents can evict from. Does not: keep state or time (quota_keeper.py), talk to anybody.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from kvdir.config import parse_bytes
from kvdir.core.access import Ages, cutoff_age_s
from kvdir.core.holders import Holder
from kvdir.core.namespaces import KnownNamespace, NamespaceTable
from kvdir.core.node import Stream
from kvdir.core.trust import Cumulative, Trusted, total
from kvdir.location import Tier

EVICTABLE = frozenset({int(Tier.CPU)})
"""Tiers whose blocks belong to agents. What engines keep in GPU memory is theirs."""

_NAMESPACE = "namespace:"


@dataclass(frozen=True, slots=True)
class Quota:
    """subject: a tenant ("none", "salt:<digest>") or "namespace:" with its digest in hex, or enough of its beginning."""

    subject: str
    limit_bytes: int

    def covers(self, known: KnownNamespace) -> bool:
        """Not what engines announce: how many bytes that takes nobody knows, and nobody can be asked to evict it."""
        if known.namespace.is_announced:
            return False
        if self.subject.startswith(_NAMESPACE):
            return known.digest.hex().startswith(self.subject.removeprefix(_NAMESPACE))
        return known.namespace.tenant == self.subject


def parse_quota(text: str) -> Quota:
    """From "SUBJECT=SIZE". ValueError with the accepted forms."""
    subject, equals, size = text.rpartition("=")
    digest = subject.removeprefix(_NAMESPACE)
    is_namespace = subject.startswith(_NAMESPACE) and len(digest) >= 8 and not set(digest) - set("0123456789abcdef")
    if not equals or not (is_namespace or subject == "none" or subject.startswith("salt:")):
        raise ValueError(
            f"{text!r} is not a quota; write none=10GiB, salt:<digest>=10GiB or namespace:<8 or more hex digits>=10GiB"
        )
    return Quota(subject, parse_bytes(size))


@dataclass(frozen=True, slots=True)
class Holding:
    """What one stream holds of a subject in one namespace and tier."""

    stream: Stream
    holder: Holder[Stream]

    @property
    def block_bytes(self) -> int:
        return self.holder.namespace.block_bytes


@dataclass(frozen=True, slots=True)
class Usage:
    """figure: bytes. streams: everyone who contributes, also with nothing: a loss in its stream may hide blocks."""

    figure: Cumulative
    holdings: tuple[Holding, ...]
    streams: tuple[Stream, ...]


@dataclass(frozen=True, slots=True)
class Share:
    """One node's part: evict at most max_blocks, never below keep_blocks."""

    holding: Holding
    max_blocks: int
    keep_blocks: int

    @property
    def bytes(self) -> int:
        return self.max_blocks * self.holding.block_bytes


@dataclass(frozen=True, slots=True)
class EvictionPlan:
    """older_than_s: the fleet's cutoff. Together the shares never exceed the excess."""

    older_than_s: int
    shares: tuple[Share, ...]

    @property
    def blocks(self) -> int:
        return sum(share.max_blocks for share in self.shares)

    @property
    def bytes(self) -> int:
        return sum(share.bytes for share in self.shares)


def usage(quota: Quota, streams: Iterable[Stream], namespaces: NamespaceTable, *, now_s: float) -> Usage:
    """What the subject uses now, with the trust of its weakest part. Streams that are fenced hold nothing."""
    covered = frozenset(known.digest for known in namespaces if quota.covers(known))
    figures, holdings, contributing = [], [], []
    for stream in streams:
        if stream.fenced or not covered & stream.namespaces:
            continue
        contributing.append(stream)
        figures.append(_of(stream, stream.figure(0)))
        for held in _holdings(stream, covered):
            holdings.append(held)
            figures.append(_of(stream, stream.blocks_figure(held.holder, block_bytes=held.block_bytes)))
    return Usage(total(figures, now_s=now_s), tuple(holdings), tuple(contributing))


def plan_eviction(
    used: Trusted,
    limit_bytes: int,
    holdings: Iterable[Holding],
    ages: Ages,
    *,
    max_blocks: int,
    leaving_bytes: int = 0,
    patience: float = 1.0,
) -> EvictionPlan:
    """Who should evict how much so that the excess goes, oldest blocks of the fleet first, at most max_blocks in all.

    ages: a sample. leaving_bytes: being evicted already. patience: below 1, owners found too few blocks as old as we thought,
    because blocks are also used without asking us; so they are asked with less.
    """
    excess = used - limit_bytes - leaving_bytes
    mine = [held for held in holdings if held.holder.claimed]
    if excess <= 0 or not mine or used <= 0:
        return EvictionPlan(0, ())
    bytes_of = {held.holder.number: float(held.block_bytes) for held in mine}
    cutoff_s = cutoff_age_s(ages, bytes_of, min(1.0, excess / used))
    old = [_older(held, ages, cutoff_s) for held in mine]
    old_bytes = sum(blocks * held.block_bytes for blocks, held in zip(old, mine, strict=True))
    scale = min(1.0, excess / old_bytes, max_blocks / sum(old)) if old_bytes else 0.0
    counts = [int(blocks * scale) for blocks in old]
    _round_up(counts, old, mine, excess=excess, max_blocks=max_blocks)
    shares = tuple(Share(held, count, held.holder.claimed - count) for held, count in zip(mine, counts, strict=True) if count)
    return EvictionPlan(int(cutoff_s * patience), shares)


def _older(held: Holding, ages: Ages, cutoff_s: int) -> float:
    """Estimated number of the holder's blocks that are at least cutoff_s old."""
    counts = ages.get(held.holder.number)
    sampled = counts.total() if counts else 0
    if not counts or not sampled:
        return 0.0
    return held.holder.claimed * sum(count for age_s, count in counts.items() if age_s >= cutoff_s) / sampled


def _round_up(counts: list[int], old: list[float], mine: list[Holding], *, excess: int, max_blocks: int) -> None:
    """Gives what rounding down left over, one block each, to those who were cut most; never beyond the excess."""
    left = excess - sum(count * held.block_bytes for count, held in zip(counts, mine, strict=True))
    for at in sorted(range(len(counts)), key=lambda at: counts[at] - old[at]):
        if counts[at] < min(old[at], mine[at].holder.claimed) and mine[at].block_bytes <= left and sum(counts) < max_blocks:
            counts[at] += 1
            left -= mine[at].block_bytes


def _holdings(stream: Stream, covered: frozenset[bytes]) -> Iterator[Holding]:
    for (digest, tier), holder in stream.holders.items():
        if digest in covered and tier in EVICTABLE:
            yield Holding(stream, holder)


def _of(stream: Stream, figure: Cumulative) -> Cumulative:
    """Says in the reason whose figure it is, because a sum keeps one reason."""
    return figure if figure.trusted else replace(figure, reason=f"{stream.node}: {figure.reason}")

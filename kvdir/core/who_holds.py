"""Why a lookup is answered as it is: every node that has an entry, those that are left out of the answer, and why.

Reads only, counts nothing and touches no block. For people; a lookup of the same blocks does less.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from kvdir.core.answer import Lookup
from kvdir.core.directory import Directory
from kvdir.core.holders import Holder
from kvdir.core.node import Stream
from kvdir.core.views import NodeView
from kvdir.errors import TooLarge
from kvdir.fingerprint import Fingerprints
from kvdir.location import NodeTrust, StreamState

_RUN = struct.Struct("<III")
MAX_MEMBERS = 50_000
"""Holders of runs that are told one by one: some 50 ms."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A node that is said to hold some of the blocks. tiers: blocks by tier. left_out: why no answer names it, or ""."""

    trust: NodeTrust
    blocks: int
    tiers: tuple[tuple[int, int], ...]
    left_out: str


@dataclass(frozen=True, slots=True)
class WhoHolds:
    """runs: (start, count, indices into claims), in order; what is in none of them nobody is said to hold.

    doubtful: nodes that serve the namespace, have no entry of any of these blocks, and are not trusted to have none.
    incomplete: entries were evicted, so what nobody is said to hold is unknown rather than absent.
    """

    namespace_digest: bytes
    asked: int
    runs: tuple[tuple[int, int, tuple[int, ...]], ...]
    claims: tuple[Claim, ...]
    doubtful: tuple[NodeTrust, ...]
    warming: bool
    incomplete: bool

    @property
    def hits(self) -> int:
        """Blocks for which an answer names somebody."""
        named = {number for number, claim in enumerate(self.claims) if not claim.left_out}
        return sum(count for _, count, claims in self.runs if not named.isdisjoint(claims))


@dataclass(slots=True)
class _Claims:
    """Collects claims by node, and runs that name them."""

    numbers: dict[str, int] = field(default_factory=dict)
    trusts: list[NodeTrust] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    tiers: list[Counter[int]] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    runs: list[tuple[int, int, tuple[int, ...]]] = field(default_factory=list)

    def number(self, trust: NodeTrust, left_out: str) -> int:
        number = self.numbers.setdefault(trust.node, len(self.trusts))
        if number == len(self.trusts):
            self.trusts.append(trust)
            self.left_out.append(left_out)
            self.tiers.append(Counter())
            self.blocks.append(0)
        return number

    def run(self, start: int, count: int, holders: Iterable[tuple[int, int]]) -> None:
        """holders: (number, tier)."""
        named = []
        for number, tier in holders:
            self.tiers[number][tier] += count
            if number not in named:
                named.append(number)
                self.blocks[number] += count
        if named:
            self.runs.append((start, count, tuple(named)))

    def made(self) -> tuple[Claim, ...]:
        parts = zip(self.trusts, self.blocks, self.tiers, self.left_out, strict=True)
        return tuple(Claim(trust, blocks, tuple(sorted(tiers.items())), words) for trust, blocks, tiers, words in parts)


def who_holds(directory: Directory, namespace_digest: bytes, fingerprints: Fingerprints, *, now_s: float) -> WhoHolds:
    """Everything the directory has about these blocks. Raises UnknownNamespace, TooLarge."""
    namespace = directory.namespaces.require(namespace_digest)
    if len(fingerprints) > directory.limits.max_fingerprints:
        raise TooLarge(f"{len(fingerprints)} fingerprints, max_fingerprints is {directory.limits.max_fingerprints}")
    found = directory.index.lookup(fingerprints.packed, fingerprints.width, scope=namespace.scope)
    members = sum(map(len, found.sets)) + sum(len(found.sets[number]) for _, _, number in _RUN.iter_unpack(found.runs))
    if members > 4 * MAX_MEMBERS:
        raise TooLarge(
            f"{members // 4:,} holders of {len(fingerprints)} blocks, at most {MAX_MEMBERS:,} are told: ask for fewer"
        )
    claims = _Claims()
    sets = [list(_members(directory, packed, claims, now_s)) for packed in found.sets]
    for start, count, number in _RUN.iter_unpack(found.runs):
        claims.run(start, count, sets[number])
    streams = [node.stream for node in directory.nodes.values() if node.stream is not None]
    serving = [stream.trust(now_s) for stream in streams if namespace_digest in stream.namespaces]
    return WhoHolds(
        namespace_digest,
        len(fingerprints),
        tuple(claims.runs),
        claims.made(),
        _doubtful(serving, claims),
        directory.warming,
        directory.holders.partial > 0,
    )


def who_is_named(answer: Lookup, namespace_digest: bytes, nodes: Iterable[NodeView]) -> WhoHolds:
    """The same of an answer, where only that is known: whoever is left out of it is not seen."""
    claims = _Claims()
    numbers = [claims.number(trust, "") for trust in answer.nodes]
    for run in answer:
        claims.run(run.start, run.count, [(numbers[node], tier) for node, tier in run.holders])
    serving = [view.trust for view in nodes if namespace_digest in view.namespaces]
    return WhoHolds(
        namespace_digest,
        answer.asked,
        tuple(claims.runs),
        claims.made(),
        _doubtful(serving, claims),
        answer.warming,
        answer.incomplete,
    )


def _members(directory: Directory, packed: bytes, claims: _Claims, now_s: float) -> Iterator[tuple[int, int]]:
    for number in memoryview(packed).cast("I"):
        holder = directory.holders.get(number)
        if holder is not None:
            stream = holder.owner
            yield claims.number(stream.trust(now_s), _left_out(directory, holder, stream, now_s)), holder.tier


def _left_out(directory: Directory, holder: Holder[Stream], stream: Stream, now_s: float) -> str:
    if not holder.visible:
        return "its snapshot is still being taken in"
    if stream.hidden:
        silent_s = now_s - stream.cursor.last_heard_s
        return f"not heard for {silent_s:.0f} s: left out of answers after {directory.limits.expire_after_s:g} s"
    return ""


def _doubtful(serving: Iterable[NodeTrust], claims: _Claims) -> tuple[NodeTrust, ...]:
    """Of those that serve the namespace."""
    untrusted = (trust for trust in serving if trust.state not in (StreamState.SYNCED, StreamState.FENCED))
    return tuple(trust for trust in untrusted if trust.node not in claims.numbers)

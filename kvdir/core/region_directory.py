"""Lookups in a region: what its reader found becomes the answer a coordinator would give, with the ages of now.

Rules:
- the region names only visible holders of nodes that were not hidden when they were written; a node that has been silent for
  longer since is stale, or left out, whether or not anybody lives to write that down;
- a node that has gone while it was looked up is left out; who has its slot now is another one, with another id;
- what was torn (the writer was at it, or died at it) is said, never guessed;
- states and ages are at most REUSE_S old, so that a busy reader makes none; `lag_s` is of the moment.
Cost: one native call, a few dictionary accesses and one value per lookup; the nodes of one answer are one cached tuple.
No clock: `now_ns` is CLOCK_MONOTONIC, shared by the processes of a host. Thread-safe, because what is kept changes in single
steps and is only ever made anew.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvdir.core.answer import Lookup
from kvdir.core.policy import ALL, Grant
from kvdir.core.roster import Beat, NamespaceRecord, NodeRecord, decode_namespaces
from kvdir.fingerprint import Fingerprints
from kvdir.location import MinTrust, NodeTrust, StreamState

if TYPE_CHECKING:
    from kvdir.index import BlockReader

REUSE_S = 0.005
_REUSE_NS = round(REUSE_S * 1e9)
_KEPT = 4096
_NO_SCOPE = (None, "")
_RUN = struct.Struct("<III")
_UNKNOWN = NodeTrust("", 0, StreamState.FENCED, "its record cannot be read", 0.0, 0, "")


@dataclass(frozen=True, slots=True)
class _Nodes:
    """The nodes of answers with equal ids, good until until_ns. left_out: indexes that no answer may name."""

    until_ns: int
    trusts: tuple[NodeTrust, ...]
    left_out: frozenset[int]


class RegionDirectory:
    """Over one reader, for as long as that is not stale."""

    def __init__(self, reader: BlockReader) -> None:
        self._reader = reader
        self._nodes: dict[bytes, _Nodes] = {}
        self._records: dict[int, tuple[int, NodeRecord | None]] = {}
        self._namespaces: tuple[int, dict[bytes, NamespaceRecord]] = (-1, {})
        self._scopes: dict[bytes, tuple[int, str]] = {}
        self._scopes_until_ns = 0
        self._beat: tuple[bytes, Beat | None] = (b"", None)

    @property
    def stale(self) -> bool:
        """Retired or replaced: open the region again."""
        return self._reader.stale

    def beat(self) -> Beat | None:
        """How current the region is; None before its writer has said so, or in a record of another version."""
        record = self._reader.beat()
        known = self._beat
        if record != known[0]:
            known = self._beat = record, Beat.decode(record)
        return known[1]

    def namespaces(self) -> dict[bytes, NamespaceRecord]:
        """By digest; as they were before while they are being written."""
        version, records = self._reader.namespaces()
        known = self._namespaces
        if version and version != known[0]:
            known = self._namespaces = version, {item.digest: item for item in decode_namespaces(records)}
        return known[1]

    def scope(self, namespace_digest: bytes, now_ns: int, tenants: Grant = ALL) -> int | None:
        """Of the blocks of a namespace in the index; None: it is not in this region, or of another tenant than these."""
        if now_ns >= self._scopes_until_ns:
            self._scopes = {digest: (item.scope, item.tenant) for digest, item in self.namespaces().items()}
            self._scopes_until_ns = now_ns + _REUSE_NS
        scope, tenant = self._scopes.get(namespace_digest, _NO_SCOPE)
        return scope if tenant in tenants else None

    def lookup(
        self,
        scope: int,
        fingerprints: Fingerprints,
        *,
        beat: Beat,
        now_ns: int,
        prefix: bool = False,
        min_trust: MinTrust = MinTrust.ANY,
    ) -> tuple[Lookup, bool]:
        """The answer, and whether it is torn: what the writer was just changing is not in it."""
        runs, sets, ids, hits, torn = self._reader.lookup(fingerprints.packed, fingerprints.width, scope=scope, prefix=prefix)
        nodes = self._nodes.get(ids)
        if nodes is None or now_ns >= nodes.until_ns:
            nodes = self._read_nodes(ids, beat, now_ns)
        asked, lag_s = len(fingerprints.packed) // fingerprints.width, beat.lag_s(now_ns)
        answer = Lookup(runs, sets, nodes.trusts, hits, asked, beat.warming, 0, lag_s, beat.incomplete, "replica")
        if nodes.left_out or min_trust is not MinTrust.ANY:
            answer = without(answer, nodes.left_out, min_trust, prefix=prefix)
        return answer, torn

    def nodes(self, beat: Beat, now_ns: int) -> Iterator[tuple[NodeTrust, bool]]:
        """Every node as of now, and whether answers leave it out. For tools."""
        for node in memoryview(self._reader.nodes()).cast("I"):
            if self._reader.node(node)[0]:
                yield self._node(node, beat, now_ns)

    def stored_blocks(self) -> int:
        return self._reader.stats().blocks

    def _node(self, node: int, beat: Beat, now_ns: int) -> tuple[NodeTrust, bool]:
        """As of now, and whether answers leave it out."""
        version, raw = self._reader.node(node)
        known = self._records.get(node)
        if known is None or known[0] != version:
            known = self._records[node] = version, NodeRecord.decode(raw)
        record = known[1]
        if record is None:
            return _UNKNOWN, True
        expired = 0 < beat.expire_after_s * 1e9 < now_ns - record.heard_ns
        return record.as_of(now_ns, stale_after_ns=round(beat.stale_after_s * 1e9)), record.hidden or expired

    def _read_nodes(self, ids: bytes, beat: Beat, now_ns: int) -> _Nodes:
        read = [self._node(node, beat, now_ns) for node in memoryview(ids).cast("I")]
        left_out = frozenset(index for index, (_, out) in enumerate(read) if out)
        if len(self._nodes) >= _KEPT:
            self._nodes, self._records = {}, {}
        nodes = self._nodes[ids] = _Nodes(now_ns + _REUSE_NS, tuple([trust for trust, _ in read]), left_out)
        return nodes


def without(answer: Lookup, left_out: frozenset[int], min_trust: MinTrust, *, prefix: bool) -> Lookup:
    """Leaves out nodes, and those below min_trust, which are counted; what nobody else holds is no hit any more."""
    below = {index for index, node in enumerate(answer.nodes) if index not in left_out and not min_trust.admits(node.state)}
    gone = left_out | below
    if not gone:
        return answer
    kept = [index for index in range(len(answer.nodes)) if index not in gone]
    index_of = {old: new for new, old in enumerate(kept)}
    sets: list[bytes] = []
    number_of: list[int] = []
    for packed in answer.sets:
        values = [index_of[v >> 8] << 8 | v & 0xFF for v in memoryview(packed).cast("I") if v >> 8 in index_of]
        number_of.append(len(sets) if values else -1)
        if values:
            sets.append(array("I", sorted(values)).tobytes())
    runs, hits = bytearray(), 0
    for start, count, number in _RUN.iter_unpack(answer.runs):
        if number_of[number] >= 0:
            runs += _RUN.pack(start, count, number_of[number])
            hits += count
        elif prefix:
            break
    return replace(
        answer,
        runs=bytes(runs),
        sets=tuple(sets),
        nodes=tuple(answer.nodes[index] for index in kept),
        hits=hits,
        below_trust=len(below),
    )

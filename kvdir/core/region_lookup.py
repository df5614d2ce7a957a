"""Lookups in a region: what its reader found becomes the answer a coordinator would give, with the ages of now.

Rules:
- the region names only visible holders of nodes that were not hidden when they were written; a node that has been silent for
  longer since is stale, or left out, whether or not anybody lives to write that down;
- what was torn (the writer was at it, or died at it) is said, never guessed;
- states and ages are at most REUSE_S old, so that a busy reader makes none; `lag_s` is of the moment.
Cost: one native call, a few dictionary accesses and one value per lookup; the nodes of one answer are one cached tuple.
No clock: `now_ns` is CLOCK_MONOTONIC, shared by the processes of a host. Thread-safe, because what is kept changes in single
steps and is only ever made anew.
"""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass, replace
from typing import Protocol

from kvdir.core.answer import Lookup
from kvdir.core.roster import Beat, NamespaceRecord, NodeRecord, decode_namespaces
from kvdir.fingerprint import Fingerprints
from kvdir.location import MinTrust, NodeTrust, StreamState

REUSE_S = 0.005
_KEPT = 4096
_RUN = struct.Struct("<III")
_UNKNOWN = NodeTrust("", 0, StreamState.FENCED, "its record cannot be read", 0.0, 0, "")

Found = tuple[bytes, list[bytes], bytes, int, bool]
"""runs, sets, node slots (u32), hits, torn"""


class Reader(Protocol):
    """A region opened for reading; `kvdir.index.RegionReader` is one."""

    def lookup(self, fingerprints: bytes, width: int, *, scope: int, prefix: bool = False) -> Found: ...
    def node(self, slot: int) -> tuple[int, bytes]: ...
    def beat(self) -> bytes: ...
    def namespaces(self) -> tuple[int, bytes]: ...
    @property
    def stale(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class _Nodes:
    """The nodes of answers with equal slots, as of at_ns. left_out: indexes that no answer may name."""

    at_ns: int
    trusts: tuple[NodeTrust, ...]
    left_out: frozenset[int]


class RegionLookup:
    """Over one reader, for as long as that is not stale."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._nodes: dict[bytes, _Nodes] = {}
        self._records: dict[int, tuple[int, NodeRecord | None]] = {}
        self._namespaces: dict[bytes, NamespaceRecord] = {}
        self._namespaces_version = -1
        self._namespaces_at_ns = 0
        self._beat_record = b""
        self._beat: Beat | None = None

    @property
    def stale(self) -> bool:
        """Retired or replaced: open the region again."""
        return self._reader.stale

    def beat(self) -> Beat | None:
        """How current the region is; None before its writer has said so, or in a record of another version."""
        record = self._reader.beat()
        if record != self._beat_record:
            self._beat = Beat.decode(record)
            self._beat_record = record
        return self._beat

    def namespaces(self, now_ns: int) -> dict[bytes, NamespaceRecord]:
        """By digest."""
        if 0 <= now_ns - self._namespaces_at_ns < REUSE_S * 1e9:
            return self._namespaces
        version, records = self._reader.namespaces()
        if version != self._namespaces_version:
            self._namespaces = {item.digest: item for item in decode_namespaces(records)}
            self._namespaces_version = version
        self._namespaces_at_ns = now_ns
        return self._namespaces

    def lookup(
        self,
        namespace: NamespaceRecord,
        fingerprints: Fingerprints,
        *,
        beat: Beat,
        now_ns: int,
        prefix: bool = False,
        min_trust: MinTrust = MinTrust.ANY,
    ) -> tuple[Lookup, bool]:
        """The answer, and whether it is torn: what the writer was just changing is not in it."""
        runs, sets, slots, hits, torn = self._reader.lookup(
            fingerprints.packed, fingerprints.width, scope=namespace.scope, prefix=prefix
        )
        asked = len(fingerprints.packed) // fingerprints.width
        lag_s = beat.lag_s(now_ns)
        if not hits:
            return Lookup(b"", (), (), 0, asked, beat.warming, 0, lag_s, beat.incomplete, "replica"), torn
        nodes = self._nodes.get(slots)
        if nodes is None or not 0 <= now_ns - nodes.at_ns < REUSE_S * 1e9:
            nodes = self._read_nodes(slots, beat, now_ns)
        answer = Lookup(runs, tuple(sets), nodes.trusts, hits, asked, beat.warming, 0, lag_s, beat.incomplete, "replica")
        if nodes.left_out or min_trust is not MinTrust.ANY:
            answer = _without(answer, nodes.left_out, min_trust, prefix=prefix)
        return answer, torn

    def trust(self, slot: int, beat: Beat, now_ns: int) -> tuple[NodeTrust, bool]:
        """A node as of now, and whether answers leave it out."""
        version, raw = self._reader.node(slot)
        known = self._records.get(slot)
        if known is None or known[0] != version:
            known = self._records[slot] = version, NodeRecord.decode(raw)
        record = known[1]
        if record is None:
            return _UNKNOWN, True
        expired = 0 < beat.expire_after_s * 1e9 < now_ns - record.heard_ns
        return record.as_of(now_ns, stale_after_ns=round(beat.stale_after_s * 1e9)), record.hidden or expired

    def _read_nodes(self, slots: bytes, beat: Beat, now_ns: int) -> _Nodes:
        read = [self.trust(slot, beat, now_ns) for slot in memoryview(slots).cast("I")]
        left_out = frozenset(index for index, (_, out) in enumerate(read) if out)
        nodes = _Nodes(now_ns, tuple([trust for trust, _ in read]), left_out)
        if len(self._nodes) >= _KEPT:
            self._nodes = {}
        self._nodes[slots] = nodes
        return nodes


def _without(answer: Lookup, left_out: frozenset[int], min_trust: MinTrust, *, prefix: bool) -> Lookup:
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

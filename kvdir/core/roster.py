"""The records of a region's roster, as bytes: nodes, namespaces, and the page that says how current the region is.

A region (kvdir/index) stores them without reading them; whoever writes a region and whoever looks up in it agree here.

Rules: little-endian, first byte the version of the record; a record that cannot be read is None, never a guess. Times are
nanoseconds of CLOCK_MONOTONIC, which all processes of one host share: an age is the reader's clock minus the record's, so it
grows also when the writer is gone. Texts are cut where the record ends: the reason first; an address that does not fit is left
out, since half of one would be another node's. No clock, no I/O.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from kvdir.index import NODE_RECORD_BYTES
from kvdir.location import NodeTrust, StreamState
from kvdir.namespace import NO_TENANT

VERSION: Final = 1
NAMESPACES_VERSION: Final = 2
BEAT_RECORD_BYTES: Final = 192

_NODE = struct.Struct(
    "<BBBxHHHxxQQdQ"
)  # version, state, hidden; lengths of name, address, reason; epoch, missing, confirmed, heard
_BEAT = struct.Struct("<BBHIQQII")
"""Version, flags, length of source; pid; beat, as of; stale and expire after, ms."""
_NAMESPACE = struct.Struct("<32sQIHH")
"""Digest, block bytes, block tokens, length of the tenant and of the name."""
_COUNT = struct.Struct("<BxxxI")
_WARMING, _INCOMPLETE, _DIRECT = 1, 2, 4
_STATES = frozenset(StreamState)
SILENT = "not heard within the limit"


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """A node as the writer of the region saw it. trust.age_s is meaningless here; heard_ns takes its place.

    hidden: left out of lookups, because it was silent for too long or has gone.
    """

    trust: NodeTrust
    heard_ns: int
    hidden: bool = False

    def encode(self, limit_bytes: int = NODE_RECORD_BYTES) -> bytes:
        """At most limit_bytes, which is at least 64."""
        trust = self.trust
        room = limit_bytes - _NODE.size
        name = _cut(trust.node, room)
        whole = name == trust.node.encode()
        address = trust.peer_address.encode() if whole else b""
        if len(name) + len(address) > room:
            address = b""
        reason = _cut(trust.reason, room - len(name) - len(address))
        head = _NODE.pack(
            VERSION,
            trust.state,
            self.hidden,
            len(name),
            len(address),
            len(reason),
            trust.epoch,
            trust.missing_events,
            trust.confirmed,
            max(0, self.heard_ns),
        )
        return b"".join((head, name, address, reason))

    @classmethod
    def decode(cls, record: bytes) -> NodeRecord | None:
        """None: another version, or cut short. Bytes behind the record are ignored. A state not known here is a gap."""
        if len(record) < _NODE.size or record[0] != VERSION:
            return None
        _, state, hidden, names, addresses, reasons, epoch, missing, confirmed, heard_ns = _NODE.unpack_from(record)
        end = _NODE.size + names + addresses + reasons
        if end > len(record):
            return None
        at = _NODE.size
        text = [record[at : at + names], record[at + names : at + names + addresses], record[end - reasons : end]]
        name, address, reason = (part.decode("utf-8", "replace") for part in text)
        known = StreamState(state) if state in _STATES else StreamState.GAP
        return cls(NodeTrust(name, epoch, known, reason, 0.0, missing, address, confirmed), heard_ns, bool(hidden))

    def as_of(self, now_ns: int, *, stale_after_ns: int) -> NodeTrust:
        """For an answer: with its age; stale once silent for longer than stale_after_ns (0: never), whatever was written."""
        age_s = max(0, now_ns - self.heard_ns) / 1e9
        trust = self.trust
        silent = 0 < stale_after_ns < now_ns - self.heard_ns and trust.state not in (StreamState.STALE, StreamState.FENCED)
        if not silent:
            return replace(trust, age_s=age_s)
        return replace(trust, age_s=age_s, state=StreamState.STALE, reason="; ".join(filter(None, (SILENT, trust.reason))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """How current a region is. beat_ns: when the writer last wrote this. as_of_ns: what the directory held then is in here.

    direct: the region is the directory's own, so nothing is behind as long as the writer lives. source: the coordinator that it
    came from, by name and address; "" when there has been none. stale_after_s, expire_after_s: when a silent node is
    stale, and left out; 0: never, here. pid: the writer's.
    """

    beat_ns: int
    as_of_ns: int
    pid: int = 0
    source: str = ""
    warming: bool = False
    incomplete: bool = False
    direct: bool = False
    stale_after_s: float = 0.0
    expire_after_s: float = 0.0

    def encode(self, limit_bytes: int = BEAT_RECORD_BYTES) -> bytes:
        source = _cut(self.source, limit_bytes - _BEAT.size)
        flags = self.warming * _WARMING | self.incomplete * _INCOMPLETE | self.direct * _DIRECT
        stale_ms, expire_ms = (min(round(value * 1e3), 2**32 - 1) for value in (self.stale_after_s, self.expire_after_s))
        head = _BEAT.pack(VERSION, flags, len(source), self.pid, self.beat_ns, max(0, self.as_of_ns), stale_ms, expire_ms)
        return head + source

    @classmethod
    def decode(cls, record: bytes) -> Beat | None:
        """None: another version, cut short, or nothing written yet."""
        if len(record) < _BEAT.size or record[0] != VERSION:
            return None
        _, flags, length, pid, beat_ns, as_of_ns, stale_ms, expire_ms = _BEAT.unpack_from(record)
        if _BEAT.size + length > len(record):
            return None
        return cls(
            beat_ns=beat_ns,
            as_of_ns=as_of_ns,
            pid=pid,
            source=record[_BEAT.size : _BEAT.size + length].decode("utf-8", "replace"),
            warming=bool(flags & _WARMING),
            incomplete=bool(flags & _INCOMPLETE),
            direct=bool(flags & _DIRECT),
            stale_after_s=stale_ms / 1e3,
            expire_after_s=expire_ms / 1e3,
        )

    def silent_s(self, now_ns: int) -> float:
        """Since the writer was last alive."""
        return max(0, now_ns - self.beat_ns) / 1e9

    def lag_s(self, now_ns: int) -> float:
        """How far what is in here may be behind the directory; grows while nothing comes."""
        return max(0, now_ns - (self.beat_ns if self.direct else self.as_of_ns)) / 1e9


@dataclass(frozen=True, slots=True)
class NamespaceRecord:
    """A namespace that lookups may ask for. name: for people. tenant: as the namespace has it. The scope of its blocks in the
    index follows from the digest.
    """

    digest: bytes
    name: str
    block_bytes: int
    block_tokens: int
    tenant: str = NO_TENANT

    @property
    def scope(self) -> int:
        """As kvdir/core/namespaces.py gives it."""
        return int.from_bytes(self.digest[:8], "little")


def encode_namespaces(records: Iterable[NamespaceRecord]) -> bytes:
    """Any number; names are cut at 128 bytes."""
    listed = list(records)
    parts = [_COUNT.pack(NAMESPACES_VERSION, len(listed))]
    for item in listed:
        tenant, name = item.tenant.encode(), _cut(item.name, 128)
        parts += [_NAMESPACE.pack(item.digest, item.block_bytes, item.block_tokens, len(tenant), len(name)), tenant, name]
    return b"".join(parts)


def decode_namespaces(records: bytes) -> tuple[NamespaceRecord, ...]:
    """What can be read: none of another version, and those before the end of bytes that are cut short."""
    if len(records) < _COUNT.size or records[0] != NAMESPACES_VERSION:
        return ()
    _, count = _COUNT.unpack_from(records)
    at, out = _COUNT.size, []
    for _ in range(count):
        end = at + _NAMESPACE.size
        if end > len(records):
            break
        digest, block_bytes, block_tokens, tenants, names = _NAMESPACE.unpack_from(records, at)
        at = end + tenants + names
        if at > len(records):
            break
        tenant, name = (part.decode("utf-8", "replace") for part in (records[end : end + tenants], records[end + tenants : at]))
        out.append(NamespaceRecord(digest, name, block_bytes, block_tokens, tenant))
    return tuple(out)


def _cut(text: str, room: int) -> bytes:
    """As UTF-8, whole characters only, with "…" where something is missing (and fits)."""
    packed = text.encode()
    if len(packed) <= room:
        return packed
    mark = "…".encode()
    if room < len(mark):
        return b""
    return packed[: room - len(mark)].decode("utf-8", "ignore").encode() + mark

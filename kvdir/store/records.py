"""What the functions in Redis answer, as values; and what INFO says. Pure. Layouts: meta.lua."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvdir.store.base import HolderRecord, NodeEntry, Position, Roster

_NUMBER = struct.Struct("<I")
_EPOCH = struct.Struct("<Q")
_FIXED = 11  # visible, tier, epoch, length of the namespace


def number_bytes(holder: int) -> bytes:
    """A holder number as it lies in Redis."""
    return _NUMBER.pack(holder)


def pack_numbers(holders: Iterable[int]) -> bytes:
    return b"".join(map(_NUMBER.pack, holders))


def number_of(packed: bytes) -> int:
    (number,) = _NUMBER.unpack(packed)
    return int(number)


def epoch_bytes(epoch: int) -> bytes:
    return _EPOCH.pack(epoch)


def holder_record(number: bytes, packed: bytes) -> HolderRecord:
    (epoch,) = _EPOCH.unpack_from(packed, 2)
    end = _FIXED + packed[_FIXED - 1]
    return HolderRecord(number_of(number), packed[end:].decode(), epoch, packed[_FIXED:end], packed[1], packed[:1] == b"1")


def holder_records(fields: Sequence[bytes]) -> Iterator[HolderRecord]:
    """From (number, record) ..."""
    return (holder_record(number, packed) for number, packed in _pairs(fields))


def changed_roster(known: Roster, reply: Sequence[Any]) -> Roster:
    """The roster after a reply of the function `roster`."""
    version, whole, *fields = reply
    holders = {} if whole else dict(known.holders)
    for number, packed in _pairs(fields):
        if packed:
            holders[number_of(number)] = holder_record(number, packed)
        else:
            holders.pop(number_of(number), None)
    return Roster(int(version), holders)


def node_entries(reply: Sequence[Any]) -> tuple[NodeEntry, ...]:
    """A reply of the function `nodes`."""
    now_ms, *fields = reply
    entries = []
    for at in range(0, len(fields), 6):
        node, token, packed, seq, saved_ms, record = fields[at : at + 6]
        (epoch,) = _EPOCH.unpack(packed)
        age_s = max(0.0, (now_ms - saved_ms) / 1000)
        entries.append(NodeEntry(node.decode(), epoch, int(token), position(epoch, seq), record, age_s))
    return tuple(entries)


def position(epoch: int, seq: int) -> Position | None:
    return Position(epoch, seq) if seq >= 0 else None


def _pairs(fields: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
    return zip(fields[::2], fields[1::2], strict=True)


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What INFO of one server says; as far as it is of use here."""

    fields: Mapping[str, str]

    @classmethod
    def parse(cls, reply: bytes) -> ServerInfo:
        lines = (line.partition(":") for line in reply.decode(errors="replace").split("\r\n"))
        return cls({name: value for name, separator, value in lines if separator})

    def _int(self, name: str) -> int:
        return int(self.fields.get(name, "0") or 0)

    @property
    def version(self) -> str:
        """As people say it: "Redis 7.0.15", "Valkey 8.1.1"."""
        if "valkey_version" in self.fields:
            return f"Valkey {self.fields['valkey_version']}"
        return f"Redis {self.fields.get('redis_version', '?')}"

    @property
    def has_functions(self) -> bool:
        """Redis 7.0 and Valkey 7.2 brought them; Valkey calls itself redis_version 7.2.4."""
        return int(self.fields.get("redis_version", "0").partition(".")[0] or 0) >= 7

    @property
    def is_replica(self) -> bool:
        return self.fields.get("role") == "slave"

    @property
    def master(self) -> str:
        return f"{self.fields.get('master_host', '?')}:{self.fields.get('master_port', '?')}"

    @property
    def max_bytes(self) -> int:
        """0: no bound."""
        return self._int("maxmemory")

    @property
    def used_bytes(self) -> int:
        return self._int("used_memory")

    @property
    def evicted(self) -> int:
        return self._int("evicted_keys")

    @property
    def evicts(self) -> bool:
        """Whether it takes our keys away when memory is short; ours have no time to live, so volatile-* does not."""
        return self.max_bytes > 0 and self.fields.get("maxmemory_policy", "noeviction").startswith("allkeys")

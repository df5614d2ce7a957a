"""What a lookup worker counted, in a small file that the main process reads for /metrics.

    slot 0 | slot 1        each: length u32, CRC-32 u32, JSON

Rules: the slot that is older is overwritten, so one is always whole, whoever dies in the middle. The file gets its memory when
it is made and needs none after that: a full /dev/shm ends no worker. A worker that takes the place of a dead one goes on from
its file, so counters never fall. `alive_ns` (CLOCK_MONOTONIC) is the sign of life, and says which slot is newer.
"""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from kvdir.obs.call_figures import MethodFigures

SLOT_BYTES = 16 * 1024
_HEAD = struct.Struct("<II")


@dataclass(slots=True)
class ProcessFigures:
    """counters: by the names of kvdir.core.admission.Counters, and `passed_on`. methods: as CallFigures.methods."""

    alive_ns: int = 0
    counters: dict[str, int] = field(default_factory=dict)
    methods: dict[str, MethodFigures] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """In place of the older of the last two. Raises OSError when the file cannot be made."""
        body = msgspec.json.encode(self)
        record = _HEAD.pack(len(body), zlib.crc32(body)) + body
        if len(record) > SLOT_BYTES:
            raise ValueError(f"{len(record)} bytes of figures, {SLOT_BYTES} fit")
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(file).st_size != 2 * SLOT_BYTES:
                os.posix_fallocate(file, 0, 2 * SLOT_BYTES)
            first, second = (_decode(os.pread(file, SLOT_BYTES, at)) for at in (0, SLOT_BYTES))
            newer_first = first is not None and (second is None or first.alive_ns > second.alive_ns)
            os.pwrite(file, record, SLOT_BYTES if newer_first else 0)
        finally:
            os.close(file)


def read(path: Path) -> ProcessFigures | None:
    """None: not there, or not readable."""
    try:
        raw = path.read_bytes()
    except OSError:
        return None
    slots = (_decode(raw[at : at + SLOT_BYTES]) for at in (0, SLOT_BYTES))
    return max((item for item in slots if item is not None), key=lambda item: item.alive_ns, default=None)


def _decode(slot: bytes) -> ProcessFigures | None:
    if len(slot) < _HEAD.size:
        return None
    length, checksum = _HEAD.unpack_from(slot)
    body = slot[_HEAD.size : _HEAD.size + length]
    if len(body) != length or zlib.crc32(body) != checksum:
        return None
    try:
        return msgspec.json.decode(body, type=ProcessFigures)
    except msgspec.DecodeError:
        return None

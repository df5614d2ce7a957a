"""A checkpoint of the directory: what it believed, so that a restarted coordinator has hints at once. Encoding only.

    file   "KVDIRCP1" frame*                           frame   kind 4 | length u32 | crc32 u32 | payload
    HEAD   {"version", "seed", "now_s", "unix_s", "coordinator", "blocks"}   first, once
    NSPC   {"digest", "canonical", "block_bytes"}                       namespaces, before whoever names them
    NODE   {"node", "epoch", "peer_address", ..., "holders": [[digest, tier, id], ...]}
    BLKS   blocks u32 | ids u32 | ids * u32 | blocks * u64 keys | blocks * u32 last access (seconds of now_s's clock)
    DONE   {"blocks"}  the sum over BLKS of blocks * ids                last, once: without it the file ended early

The index keeps keys, not fingerprints, and keys are mixed with a secret seed: so the seed is in the file (keep it as private
as the coordinator's memory), and a restored index is opened with it.

Written while the directory goes on: a page at a time, so pages are of different moments, and what changed behind the walk is
as it was. That is right for hints and for nothing else: nothing restored is ever trusted, a stream's sequence is not even
kept, and its next absolute statement replaces it all. Numbers little-endian. Does not: touch files (server/checkpoint.py).
"""

from __future__ import annotations

import json
import struct
import zlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from kvdir.core.directory import Directory
from kvdir.core.holders import Holder
from kvdir.core.node import Stream
from kvdir.errors import KvdirError

MAGIC = b"KVDIRCP1"
VERSION = 1
MAX_FRAME_BYTES = 64 * 2**20
PAGE_BLOCKS = 4096
_FRAME = struct.Struct("<4sII")
_BLOCKS = struct.Struct("<II")
_KINDS = frozenset({b"HEAD", b"NSPC", b"NODE", b"BLKS", b"DONE"})


class CheckpointRefused(KvdirError):
    """The file cannot be used; the message says why. The coordinator starts empty, which costs hints and nothing else."""

    code = "checkpoint"


@dataclass(frozen=True, slots=True)
class Head:
    """now_s: the writer's monotonic clock; unix_s: its wall clock, to tell how old the file is. blocks: about as many follow.

    Blocks come in the order of keys, which is the order of the table: an index that had to grow under them would have them
    all at its lower end, one long cluster. So open it with room for `blocks`.
    """

    version: int
    seed: int
    now_s: int
    unix_s: float
    coordinator: str
    blocks: int = 0


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks that have the same holders (ids as in NODE). keys: u64, access: u32, little-endian, as many as `count`."""

    ids: tuple[int, ...]
    keys: bytes
    access: bytes

    @property
    def count(self) -> int:
        return len(self.keys) // 8


# -- writing ---------------------------------------------------------------------------------------------------------------


def frames(directory: Directory, head: Head, *, page_blocks: int = PAGE_BLOCKS) -> Iterator[bytes]:
    """The file, piece by piece; each piece costs about a millisecond at most. The directory may change in between."""
    yield MAGIC + _frame(b"HEAD", _json(head_fields(head)))
    for known in directory.namespaces:
        canonical = known.namespace.canonical()
        yield _frame(b"NSPC", _json({"digest": known.digest.hex(), "canonical": canonical, "block_bytes": known.block_bytes}))
    ids: dict[Holder[Stream], int] = {}
    for node in tuple(directory.nodes.values()):
        stream = node.stream
        if stream is not None and not stream.fenced and not stream.hidden:
            fences = [[epoch, newer] for epoch, newer in node.fenced.items()]
            yield _frame(b"NODE", _json(_node(stream, ids) | {"fenced": fences}))
    total, cursor = 0, 0
    while True:
        cursor, groups = _page(directory, cursor, ids, page_blocks)
        for group in groups:
            total += group.count * len(group.ids)
            yield _frame(b"BLKS", _encode_blocks(group))
        if not cursor:
            break
        yield b""  # a page without anything of ours is a page, too: let others run
    yield _frame(b"DONE", _json({"blocks": total}))


def _node(stream: Stream, ids: dict[Holder[Stream], int]) -> dict[str, Any]:
    holders = []
    for (digest, tier), holder in stream.holders.items():
        ids[holder] = len(ids)
        holders.append([digest.hex(), tier, ids[holder]])
    return {
        "node": stream.node,
        "epoch": stream.epoch,
        "peer_address": stream.peer_address,
        "started_unix_ms": stream.started_unix_ms,
        "namespaces": sorted(digest.hex() for digest in stream.namespaces),
        "holders": holders,
    }


def _page(directory: Directory, cursor: int, ids: dict[Holder[Stream], int], page_blocks: int) -> tuple[int, list[Blocks]]:
    """Holders that came after the nodes were written are left out; a number that was given anew is another holder."""
    index, holders = directory.index, directory.holders
    cursor, packed_keys, packed_numbers, sets = index.dump(cursor, page_blocks)
    access = memoryview(index.key_access(packed_keys)).cast("I")
    members = []
    for packed in sets:
        named = (holders.get(number) for number in memoryview(packed).cast("I"))
        members.append(tuple(ids[holder] for holder in named if holder is not None and holder in ids))
    keys: dict[int, array[int]] = {number: array("Q") for number, of in enumerate(members) if of}
    times: dict[int, array[int]] = {number: array("I") for number in keys}
    for key, number, then_s in zip(
        memoryview(packed_keys).cast("Q"), memoryview(packed_numbers).cast("I"), access, strict=True
    ):
        if number in keys:
            keys[number].append(key)
            times[number].append(then_s)
    return cursor, [Blocks(members[number], keys[number].tobytes(), times[number].tobytes()) for number in keys]


def _encode_blocks(blocks: Blocks) -> bytes:
    head = _BLOCKS.pack(blocks.count, len(blocks.ids))
    return head + array("I", blocks.ids).tobytes() + blocks.keys + blocks.access


def _frame(kind: bytes, payload: bytes) -> bytes:
    return _FRAME.pack(kind, len(payload), zlib.crc32(payload)) + payload


# -- reading ---------------------------------------------------------------------------------------------------------------


def parse(chunks: Iterable[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """(kind, payload) of every frame, checked, from the file in pieces of any size. Raises CheckpointRefused.

    Consume it to the end before you believe anything: only then is the file known to be whole.
    """
    reader = _Reader(chunks)
    magic = reader.take(len(MAGIC))
    if magic != MAGIC:
        raise CheckpointRefused(f"it begins with {magic!r}: not a checkpoint, or one of another release")
    expected = total = 0
    kind = b""
    while kind != b"DONE":
        raw = reader.take(_FRAME.size)
        if len(raw) < _FRAME.size:
            raise CheckpointRefused("it ends early: writing it was interrupted, or it was cut")
        previous, (kind, length, crc) = kind, _FRAME.unpack(raw)
        if kind not in _KINDS or (kind == b"HEAD") != (previous == b"") or length > MAX_FRAME_BYTES:
            raise CheckpointRefused(f"it is damaged: a frame {kind!r} of {length} bytes makes no sense there")
        payload = reader.take(length)
        if len(payload) < length:
            raise CheckpointRefused("it ends early: writing it was interrupted, or it was cut")
        if zlib.crc32(payload) != crc:
            raise CheckpointRefused("it is damaged: a checksum does not fit")
        if kind == b"BLKS":
            blocks = decode_blocks(payload)
            total += blocks.count * len(blocks.ids)
        elif kind == b"DONE":
            expected = decode_json(payload).get("blocks", -1)
        yield kind, payload
    if expected != total:
        raise CheckpointRefused(f"it is damaged: it claims {expected} blocks and has {total}")
    if reader.take(1):
        raise CheckpointRefused("it is damaged: something follows its end")


def decode_head(payload: bytes) -> Head:
    """Raises CheckpointRefused for another version."""
    fields = decode_json(payload)
    version = fields.get("version")
    if version != VERSION:
        raise CheckpointRefused(f"it has version {version}, this release reads {VERSION}")
    try:
        return Head(
            VERSION,
            int(fields["seed"]),
            int(fields["now_s"]),
            float(fields["unix_s"]),
            str(fields["coordinator"]),
            int(fields["blocks"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointRefused(f"it is damaged: its head cannot be read ({error})") from error


def decode_json(payload: bytes) -> dict[str, Any]:
    """Raises CheckpointRefused."""
    try:
        fields = json.loads(payload)
    except ValueError as error:
        raise CheckpointRefused(f"it is damaged: {error}") from error
    if not isinstance(fields, dict):
        raise CheckpointRefused("it is damaged: a frame is not an object")
    return fields


def decode_blocks(payload: bytes) -> Blocks:
    """Raises CheckpointRefused when the lengths do not fit."""
    count, holders = _BLOCKS.unpack_from(payload) if len(payload) >= _BLOCKS.size else (0, 0)
    keys_at = _BLOCKS.size + 4 * holders
    access_at = keys_at + 8 * count
    if len(payload) != access_at + 4 * count or not count:
        raise CheckpointRefused(f"it is damaged: {len(payload)} bytes for {count} blocks of {holders} holders")
    ids = tuple(memoryview(payload)[_BLOCKS.size : keys_at].cast("I"))
    if max(Counter(ids).values(), default=0) > 1:
        raise CheckpointRefused("it is damaged: a holder is named twice")
    return Blocks(ids, payload[keys_at:access_at], payload[access_at:])


class _Reader:
    """Bytes out of pieces."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = iter(chunks)
        self._piece = b""
        self._at = 0

    def take(self, count: int) -> bytes:
        """Exactly so many bytes, or fewer at the end."""
        parts: list[bytes] = []
        missing = count
        while missing:
            if self._at == len(self._piece):
                piece = next(self._chunks, None)
                if piece is None:
                    break
                self._piece, self._at = piece, 0
            part = self._piece[self._at : self._at + missing]
            parts.append(part)
            self._at += len(part)
            missing -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


def _json(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()


def head_fields(head: Head) -> dict[str, Any]:
    """The fields of HEAD."""
    return {
        "version": head.version,
        "seed": head.seed,
        "now_s": head.now_s,
        "unix_s": head.unix_s,
        "coordinator": head.coordinator,
        "blocks": head.blocks,
    }

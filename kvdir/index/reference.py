"""The pure oracle of the index: the contract of `kvdir.index`, as simple as it can be said.

Owns: the meaning. Tests compare the native index with it, step by step and byte by byte (keys and encoded sketches). It is
slow, takes about a kilobyte per block, and is never used instead of the native index.

Where the contract leaves room, this is the exact end of it: prefix lookups look at every position, dropped blocks are
gone at once (so there is nothing to sweep), a dump walks in the order of keys, and with a bound the blocks used least lately
go first, exactly. A block counts as 24 bytes of the bound; `max_blocks` says it in blocks, for tests that have few of them.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Self

from kvdir.index.answers import Evicted, IndexStats, Lookup

__all__ = ["ReferenceIndex", "ReferenceSketch"]

Packed = bytes | bytearray | memoryview

_U32 = (1 << 32) - 1
_U64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_HOLDERS = 1 << 24
_LEAST_MAX_BYTES = 128 * 2**10
_BLOCK_BYTES = 24
_REGIONS = 4
_HEADER = struct.Struct("<4sHHIIq16s")  # magic, version, regions, cells, 0, count, digest
_CELL = struct.Struct("<QQII")  # low, high, check, count


def _scramble(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _U64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _U64
    return x ^ x >> 31


def _bytes_of(buffer: Packed, name: str) -> bytes:
    view = memoryview(buffer)
    if not view.contiguous:
        raise ValueError(f"{name} must be one contiguous piece of memory: pass a packed copy, e.g. bytes(...)")
    return view.tobytes()


def _split(fingerprints: Packed, width: int) -> list[bytes]:
    if width not in (8, 16, 32):
        raise ValueError(f"width must be 8, 16 or 32 bytes, not {width}")
    data = _bytes_of(fingerprints, "fingerprints")
    if len(data) % width:
        raise ValueError(f"fingerprints are {len(data)} bytes, which is not a multiple of the width {width}")
    return [data[i : i + width] for i in range(0, len(data), width)]


def _check(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ValueError(f"{name} must be between {least} and {most}, not {value}")


class ReferenceSketch:
    """Oracle of `kvdir.index.Sketch`; `encode` gives the same bytes. Layout: csrc/sketch.hpp."""

    def __init__(self, cells: int = 1024) -> None:
        _check("cells", cells, 4, 1 << 18)
        if cells % _REGIONS:
            raise ValueError("cells must be a multiple of 4, one part per hash region")
        self._cells = [[0, 0, 0, 0] for _ in range(cells)]
        self._count = 0
        self._digest = [0, 0]

    def insert(self, fingerprints: Packed, width: int) -> None:
        for fingerprint in _split(fingerprints, width):
            self._apply(fingerprint[:16].ljust(16, b"\0"), 1)

    def remove(self, fingerprints: Packed, width: int) -> None:
        for fingerprint in _split(fingerprints, width):
            self._apply(fingerprint[:16].ljust(16, b"\0"), -1)

    def clear(self) -> None:
        self.__init__(len(self._cells))  # type: ignore[misc]

    def copy(self) -> Self:
        other = type(self)(len(self._cells))
        other._cells = [list(cell) for cell in self._cells]
        other._count = self._count
        other._digest = list(self._digest)
        return other

    def folded(self, cells: int) -> Self:
        if cells < _REGIONS or cells % _REGIONS or len(self._cells) % cells:
            raise ValueError("cells of a folded sketch must be a multiple of 4 that divides the cells it has")
        other = type(self)(cells)
        for index, cell in enumerate(self._cells):
            target = other._cells[index * cells // len(self._cells)]
            target[:] = [(a + b) & mask for a, b, mask in zip(target, cell, (_U64, _U64, _U32, _U32), strict=True)]
        other._count, other._digest = self._count, list(self._digest)
        return other

    @property
    def count(self) -> int:
        return self._count

    @property
    def digest(self) -> bytes:
        return struct.pack("<QQ", *self._digest)

    def encode(self) -> bytes:
        header = _HEADER.pack(b"KVSK", 1, _REGIONS, len(self._cells), 0, self._count, self.digest)
        return header + b"".join(_CELL.pack(*cell) for cell in self._cells)

    def difference(self, other: Packed) -> tuple[bytes, bytes] | None:
        rest = self._minus(self._decode(_bytes_of(other, "other")))
        here: list[bytes] = []
        there: list[bytes] = []
        while len(here) + len(there) <= len(self._cells):
            found = next(rest._pure(), None)
            if found is None:
                empty = not rest._count and not any(rest._digest) and not any(map(any, rest._cells))
                return (b"".join(here), b"".join(there)) if empty else None
            item, sign = found
            (here if sign == 1 else there).append(item)
            rest._apply(item, -sign)
        return None

    def _apply(self, item: bytes, sign: int) -> None:
        low, high = struct.unpack("<QQ", item)
        first = _scramble((low + _scramble(high ^ _GOLDEN)) & _U64)
        second = _scramble((high + _scramble((low + _GOLDEN) & _U64)) & _U64)
        for index in self._places(first):
            cell = self._cells[index]
            cell[0] = (cell[0] + sign * low) & _U64
            cell[1] = (cell[1] + sign * high) & _U64
            cell[2] = (cell[2] + sign * (second >> 32)) & _U32
            cell[3] = (cell[3] + sign) & _U32
        self._count += sign
        self._digest[0] = (self._digest[0] + sign * first) & _U64
        self._digest[1] = (self._digest[1] + sign * second) & _U64

    def _places(self, first: int) -> list[int]:
        size = len(self._cells) // _REGIONS
        return [region * size + ((first >> 16 * region & 0xFFFF) * size >> 16) for region in range(_REGIONS)]

    def _pure(self) -> Iterator[tuple[bytes, int]]:
        """Items that a cell names, with +1 for here and -1 for there."""
        for index, (low, high, check, count) in enumerate(self._cells):
            if count not in (1, _U32):
                continue
            sign = 1 if count == 1 else -1
            low, high, check = sign * low & _U64, sign * high & _U64, sign * check & _U32
            first = _scramble((low + _scramble(high ^ _GOLDEN)) & _U64)
            second = _scramble((high + _scramble((low + _GOLDEN) & _U64)) & _U64)
            if check == second >> 32 and index in self._places(first):
                yield struct.pack("<QQ", low, high), sign

    def _minus(self, other: Self) -> Self:
        rest = self.copy()
        masks = (_U64, _U64, _U32, _U32)
        for cell, theirs in zip(rest._cells, other._cells, strict=True):
            cell[:] = [(a - b) & mask for a, b, mask in zip(cell, theirs, masks, strict=True)]
        rest._count = self._count - other._count
        rest._digest = [(a - b) & _U64 for a, b in zip(self._digest, other._digest, strict=True)]
        return rest

    def _decode(self, data: bytes) -> Self:
        damaged = "other is not an encoded sketch, or it was damaged: fetch it again"
        if len(data) < _HEADER.size:
            raise ValueError(damaged)
        magic, version, regions, cells, zero, count, digest = _HEADER.unpack_from(data)
        if magic != b"KVSK" or zero:
            raise ValueError(damaged)
        if (version, regions) != (1, _REGIONS):
            raise ValueError("other sketch has an unknown version: upgrade the older side")
        if cells != len(self._cells):
            raise ValueError("other sketch has another number of cells: use the same on both sides")
        if len(data) != _HEADER.size + cells * _CELL.size:
            raise ValueError(damaged)
        other = type(self)(cells)
        other._cells = [list(cell) for cell in _CELL.iter_unpack(data[_HEADER.size :])]
        other._count = count
        other._digest = list(struct.unpack("<QQ", digest))
        if not other._is_consistent():
            raise ValueError(damaged)
        return other

    def _is_consistent(self) -> bool:
        """Every item stands once in each region, so all regions have the same sums."""
        size = len(self._cells) // _REGIONS
        sums = set()
        for start in range(0, len(self._cells), size):
            low, high, check, count = (sum(column) for column in zip(*self._cells[start : start + size], strict=True))
            sums.add((low & _U64, high & _U64, check & _U32, count & _U32))
        return len(sums) == 1 and next(iter(sums))[3] == self._count & _U32


@dataclass(slots=True)
class _Block:
    holders: set[int] = field(default_factory=set)
    access_s: int = 0


class ReferenceIndex:
    """Oracle of `kvdir.index.Index`: a dict from key to a set of holders."""

    def __init__(self, *, expected_blocks: int = 0, seed: int = 0, max_bytes: int = 0, max_blocks: int = 0) -> None:
        _check("expected_blocks", expected_blocks, 0, 1 << 31)
        if max_bytes:
            _check("max_bytes", max_bytes, _LEAST_MAX_BYTES, _U64)
        self._most = max_blocks or max_bytes // _BLOCK_BYTES
        _check("seed", seed, 0, _U64)
        self._seed = seed
        self._blocks: dict[int, _Block] = {}

    def store(
        self,
        fingerprints: Packed,
        width: int,
        *,
        scope: int,
        holder: int,
        now_s: int,
        sketch: ReferenceSketch | None = None,
    ) -> int:
        _check("holder", holder, 0, _HOLDERS - 1)
        _check("now_s", now_s, 0, _U32)
        added = 0
        for fingerprint, key in self._keyed(fingerprints, width, scope):
            block = self._blocks.setdefault(key, _Block())
            block.access_s = max(block.access_s, now_s)
            if holder in block.holders:
                continue
            block.holders.add(holder)
            added += 1
            if sketch is not None:
                sketch.insert(fingerprint, width)
        return added

    def remove(
        self, fingerprints: Packed, width: int, *, scope: int, holder: int, sketch: ReferenceSketch | None = None
    ) -> int:
        _check("holder", holder, 0, _HOLDERS - 1)
        removed = 0
        for fingerprint, key in self._keyed(fingerprints, width, scope):
            if not self._take(key, holder):
                continue
            removed += 1
            if sketch is not None:
                sketch.remove(fingerprint, width)
        return removed

    def lookup(
        self, fingerprints: Packed, width: int, *, scope: int, prefix: bool = False, touch_s: int | None = None
    ) -> Lookup:
        if touch_s is not None:
            _check("touch_s", touch_s, 0, _U32)
        runs: list[list[int]] = []
        numbers: dict[frozenset[int], int] = {}
        common: frozenset[int] | None = None
        for position, (_, key) in enumerate(self._keyed(fingerprints, width, scope)):
            block = self._blocks.get(key)
            holders = frozenset(block.holders) if block else frozenset()
            if prefix:
                common = holders if common is None else common & holders
                if not common:
                    break
            if not block:
                continue
            if touch_s is not None:
                block.access_s = max(block.access_s, touch_s)
            number = numbers.setdefault(holders, len(numbers))
            if runs and runs[-1][0] + runs[-1][1] == position and runs[-1][2] == number:
                runs[-1][1] += 1
            else:
                runs.append([position, 1, number])
        packed_runs = b"".join(struct.pack("<III", *run) for run in runs)
        return Lookup(packed_runs, [_pack(holders) for holders in numbers], sum(run[1] for run in runs))

    def drop(self, holder: int) -> int:
        _check("holder", holder, 0, _HOLDERS - 1)
        return sum(self._take(key, holder) for key in list(self._blocks))

    def holder_blocks(self, holder: int) -> int:
        _check("holder", holder, 0, _HOLDERS - 1)
        return sum(holder in block.holders for block in self._blocks.values())

    def last_access(self, fingerprints: Packed, width: int, *, scope: int) -> bytes:
        blocks = [self._blocks.get(key) for _, key in self._keyed(fingerprints, width, scope)]
        return struct.pack(f"<{len(blocks)}I", *(block.access_s if block else 0 for block in blocks))

    def keys(self, fingerprints: Packed, width: int, *, scope: int) -> bytes:
        keys = [key for _, key in self._keyed(fingerprints, width, scope)]
        return struct.pack(f"<{len(keys)}Q", *keys)

    def key_access(self, keys: Packed, /) -> bytes:
        blocks = [self._blocks.get(key) for key in _keys_of(keys)]
        return struct.pack(f"<{len(blocks)}I", *(block.access_s if block else 0 for block in blocks))

    def restore(self, keys: Packed, access: Packed, *, holder: int) -> int:
        _check("holder", holder, 0, _HOLDERS - 1)
        named, times = _keys_of(keys), _bytes_of(access, "access")
        if len(times) != 4 * len(named):
            raise ValueError(f"access is {len(times)} bytes for {len(named)} keys: pass one u32 per key")
        added = 0
        for key, (access_s,) in zip(named, struct.iter_unpack("<I", times), strict=True):
            if not key:
                continue
            block = self._blocks.setdefault(key, _Block())
            block.access_s = max(block.access_s, access_s)
            added += holder not in block.holders
            block.holders.add(holder)
        return added

    def heads(self, keys: Packed, *, scope: int) -> bytes:
        offset, multiplier = self._mix(scope)
        heads = []
        for key in _keys_of(keys):
            x = (key ^ key >> 31 ^ key >> 62) * pow(multiplier, -1, 1 << 64) & _U64
            x = (x ^ x >> 27 ^ x >> 54) * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) & _U64
            heads.append(x ^ x >> 30 ^ x >> 60 ^ offset)
        return struct.pack(f"<{len(heads)}Q", *heads)

    def make_room(self, blocks: int, *, holder: int) -> Evicted | None:
        _check("blocks", blocks, 0, 1 << 31)
        _check("holder", holder, 0, _HOLDERS - 1)
        if not self._most:
            return None
        if blocks > self._most:
            raise MemoryError("the bound is smaller than the batch")
        excess = max(0, len(self._blocks) + blocks - self._most)
        oldest = sorted(self._blocks, key=lambda key: self._blocks[key].access_s)[:excess]
        numbers: dict[frozenset[int], int] = {}
        named = [numbers.setdefault(frozenset(self._blocks.pop(key).holders), len(numbers)) for key in oldest]
        if not oldest:
            return None
        packed = struct.pack(f"<{len(oldest)}Q", *oldest), struct.pack(f"<{len(named)}I", *named)
        return Evicted(*packed, [_pack(holders) for holders in numbers])

    def dump(self, cursor: int, max_blocks: int) -> tuple[int, bytes, bytes, list[bytes]]:
        _check("cursor", cursor, 0, _U64)
        _check("max_blocks", max_blocks, 1, _U64)
        rest = sorted(key for key in self._blocks if key >= cursor)
        keys = rest[:max_blocks]
        numbers: dict[frozenset[int], int] = {}
        named = [numbers.setdefault(frozenset(self._blocks[key].holders), len(numbers)) for key in keys]
        following = rest[max_blocks] if len(rest) > max_blocks else 0
        sets = [_pack(holders) for holders in numbers]
        return following, struct.pack(f"<{len(keys)}Q", *keys), struct.pack(f"<{len(named)}I", *named), sets

    def sweep(self, max_blocks: int) -> int:
        _check("max_blocks", max_blocks, 0, _U64)
        return 0

    def stats(self) -> IndexStats:
        sets = {frozenset(block.holders) for block in self._blocks.values()}
        holders = frozenset().union(*sets)
        return IndexStats(len(self._blocks), len(self._blocks), 0, len(sets), len(holders), False)

    def _keyed(self, fingerprints: Packed, width: int, scope: int) -> Iterator[tuple[bytes, int]]:
        """Each fingerprint with its key: a bijection of its first 8 bytes that seed and scope choose (csrc/mix.hpp)."""
        offset, multiplier = self._mix(scope)
        for fingerprint in _split(fingerprints, width):
            x = int.from_bytes(fingerprint[:8], "little") ^ offset
            x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _U64
            x = (x ^ x >> 27) * multiplier & _U64
            yield fingerprint, (x ^ x >> 31) or 1

    def _mix(self, scope: int) -> tuple[int, int]:
        _check("scope", scope, 0, _U64)
        offset = _scramble(_scramble((self._seed + _GOLDEN) & _U64) ^ scope)
        return offset, _scramble((offset + _GOLDEN) & _U64) | 1

    def _take(self, key: int, holder: int) -> bool:
        block = self._blocks.get(key)
        if block is None or holder not in block.holders:
            return False
        block.holders.remove(holder)
        if not block.holders:
            del self._blocks[key]
        return True


def _keys_of(keys: Packed) -> list[int]:
    data = _bytes_of(keys, "keys")
    if len(data) % 8:
        raise ValueError(f"keys are {len(data)} bytes: pass whole u64, at most 2**32 - 1 of them")
    return [key for (key,) in struct.iter_unpack("<Q", data)]


def _pack(holders: frozenset[int]) -> bytes:
    return struct.pack(f"<{len(holders)}I", *sorted(holders))

"""The block index: which holders have which block.

Owns the contract between Python and the native core (`_native`, C++ in csrc/), and nothing else. `reference` is the
pure oracle that tests compare the native index with; it is never used as a silent fallback: without the extension,
importing this package fails.

Rules: packed buffers in, packed bytes out, never a Python object per block; batches release the GIL; no clock (callers
pass `now_s`), no I/O. A *holder* is an opaque number (0 <= holder < 2**24) that the directory gives to one
(node, epoch, namespace, tier): so clearing a tier, fencing an epoch or replacing a snapshot is one `drop`, whose cost is in
the number of distinct holder sets, not of blocks. A *scope* is a 64-bit number for (namespace, state group) that is
mixed into the key. Design: ../../ARCHITECTURE.md and docs/adr/.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Self

from kvdir import __version__
from kvdir.index._native import Index, RegionIndex, RegionReader, Sketch
from kvdir.index.answers import Evicted, IndexStats, Lookup, RegionError, RegionLookup

if TYPE_CHECKING:
    from os import PathLike

__all__ = [
    "LEAST_MAX_BYTES",
    "NODE_RECORD_BYTES",
    "BlockIndex",
    "BlockReader",
    "BlockSketch",
    "Evicted",
    "Index",
    "IndexStats",
    "Lookup",
    "Packed",
    "RegionError",
    "RegionIndex",
    "RegionLookup",
    "RegionReader",
    "Sketch",
    "create_region",
    "open_index",
]

NODE_RECORD_BYTES = 1008  # NodeEntry::record in csrc/roster.hpp

Packed = bytes | bytearray | memoryview

LEAST_MAX_BYTES = 128 * 2**10
"""The smallest bound of an index (csrc/index.hpp): what is there before the first block, and room for 3,000 of them."""


class BlockSketch(Protocol):
    """Invertible Bloom lookup table over a set of fingerprints, and an order-free digest of the same set (design 04).

    Items are the first 16 bytes of a fingerprint (8-byte ones zero-padded). 1,024 cells by default in four hash regions;
    a cell is two 64-bit key sums, a 32-bit check sum and a 32-bit count: 24 bytes. Updates are O(1) per item.
    Source: Goodrich and Mitzenmacher, "Invertible Bloom Lookup Tables", 2011; Eppstein et al., SIGCOMM 2011.
    """

    def insert(self, fingerprints: Packed, width: int) -> None: ...
    def remove(self, fingerprints: Packed, width: int) -> None: ...
    def clear(self) -> None: ...
    def copy(self) -> Self: ...
    def folded(self, cells: int) -> Self:
        """The same set in fewer cells (a multiple of 4 that divides ours), so fewer bytes for a small difference."""

    @property
    def count(self) -> int:
        """Items inserted minus removed."""

    @property
    def digest(self) -> bytes:
        """16 bytes, independent of order: equal sets have equal digests."""

    def encode(self) -> bytes:
        """Versioned little-endian form: magic, version, cells, count, digest, then the cells."""

    def difference(self, other: Packed) -> tuple[bytes, bytes] | None:
        """(only here, only in `other`) as packed 16-byte items, `other` being an encoded sketch of the same size.

        None when the difference is too large to decode. Raises ValueError for another size, version or garbage.
        """


class BlockIndex(Protocol):
    """Contract of the native index and of its oracle; `kvdir.testing.check_index` runs it against any implementation.

    Fingerprint arguments: `fingerprints` packed, `width` 8, 16 or 32; ValueError when the length is not a multiple of it.
    Only the first 8 bytes and the scope make the key: the directory is a hint, the owner verifies the whole.
    """

    def store(
        self, fingerprints: Packed, width: int, *, scope: int, holder: int, now_s: int, sketch: BlockSketch | None = None
    ) -> int:
        """Adds the holder to each block; returns how many did not have it before. `sketch` receives exactly those.

        The sketch must be of the same implementation as the index, or TypeError. Last access never goes back in time.
        MemoryError when nothing is left: the blocks before the one that did not fit are stored and counted. With a bound it
        comes when `make_room` was not asked first.
        """

    def remove(self, fingerprints: Packed, width: int, *, scope: int, holder: int, sketch: BlockSketch | None = None) -> int:
        """Takes the holder from each block; returns how many had it. `sketch` loses exactly those."""

    def lookup(
        self, fingerprints: Packed, width: int, *, scope: int, prefix: bool = False, touch_s: int | None = None
    ) -> Lookup:
        """Sparse: every position on its own. Prefix: from position 0 for as long as one holder has every block so far.

        Prefix lookups probe every k-th position and refine where the set changes; a hole between two equal sets can
        go unseen, because the owner is asked anyway. `touch_s` refreshes the last access of all blocks found (seconds),
        which then costs as much as a sparse lookup of them.
        """

    def drop(self, holder: int) -> int:
        """Removes a holder everywhere, in O(distinct sets); returns how many blocks lost it. The number may be reused."""

    def holder_blocks(self, holder: int) -> int:
        """Blocks that have the holder now; O(1)."""

    def last_access(self, fingerprints: Packed, width: int, *, scope: int) -> bytes:
        """u32 little-endian seconds per position, 0 for a miss."""

    def keys(self, fingerprints: Packed, width: int, *, scope: int) -> bytes:
        """The 64-bit keys (u64 little-endian) under which the blocks are or would be stored."""

    def key_access(self, keys: Packed, /) -> bytes:
        """As `last_access`, for keys (u64 little-endian) as `dump` gives them."""

    def restore(self, keys: Packed, access: Packed, *, holder: int) -> int:
        """Adds the holder under keys made by an index with the same seed; `access`: u32 little-endian per key.

        Returns how many did not have it before. For checkpoints: no fingerprint, so no sketch. Key 0 is passed over.
        """

    def heads(self, keys: Packed, *, scope: int) -> bytes:
        """The first 8 bytes of the fingerprints that were stored under these keys in this scope: the inverse of `keys`."""

    def make_room(self, blocks: int, *, holder: int) -> Evicted | None:
        """Of an index with a bound: evicts until the holder can be given that many blocks more; call it before `store`.

        The blocks used least lately go first, near enough (csrc/evict.hpp); `holder_blocks` of those that lose them falls.
        Returns everything that was evicted since the last call, None for nothing. `store`, `remove` and `restore` may evict,
        too (other holders of its blocks, when memory for a set is short), so ask again behind it, with 0. MemoryError, and
        nothing evicted, when not even an empty index could hold so many; 1,024 always fit. Without a bound: None.
        """

    def dump(self, cursor: int, max_blocks: int) -> tuple[int, bytes, bytes, list[bytes]]:
        """(next cursor or 0 at the end, keys u64 LE, set numbers u32 LE into the list, sets as packed u32 holders).

        Start with 0. The cursor is the next key: blocks present during the whole walk appear exactly once, in the order
        of their keys, whatever is stored, removed or dropped meanwhile.
        """

    def sweep(self, max_blocks: int) -> int:
        """Frees up to `max_blocks` slots of blocks whose last holder was dropped; returns how many were freed."""

    def stats(self) -> IndexStats: ...


class BlockReader(Protocol):
    """Contract of `RegionReader` and its fakes: lookups in a region that another process writes, without asking it.

    `kvdir.testing.check_region` runs it. Thread-safe; up to 2,048 blocks a lookup keep the GIL. Nothing here waits for the
    writer: what it is in the way of for too long (about a tenth of a millisecond) is answered as if it were not there.
    RegionError after `close`.
    """

    def lookup(self, fingerprints: Packed, width: int, *, scope: int, prefix: bool = False) -> RegionLookup:
        """As `BlockIndex.lookup`, with nodes for holders; those that are not visible, or whose node is unknown, are left out. A
        prefix ends at the first block that nobody else has.
        """

    def node(self, node: int, /) -> tuple[int, bytes]:
        """(version, record) of a node that an answer named; (0, b"") when it is gone, also when another has its slot, or when
        the record was being written all the while.
        """

    def nodes(self) -> bytes:
        """Packed u32: all nodes that are known, as answers name them."""

    def namespaces(self) -> tuple[int, bytes]:
        """(version, records); (0, b"") when there are none yet, or when they were being written all the while."""

    def beat(self) -> bytes:
        """The writer's last beat; empty when there is none yet, or when it was being written all the while."""

    def stats(self) -> IndexStats: ...

    def close(self) -> None: ...

    @property
    def stale(self) -> bool:
        """The region was replaced, closed or removed: close this and open the path again."""

    @property
    def generation(self) -> int:
        """Random number of this region, never 0."""

    @property
    def writer_pid(self) -> int:
        """Of the writer, in its own pid namespace."""


def create_region(
    path: str | PathLike[str],
    *,
    expected_blocks: int = 0,
    seed: int = 0,
    max_bytes: int = 0,
    mode: int = 0o600,
    publish: bool = True,
) -> RegionIndex:
    """An empty native index in a file at `path`, preferably below /dev/shm, that any number of `RegionReader` map read-only.

    The caller becomes the path's one writer for as long as this index (or a `successor` of it) lives; what a dead writer left
    is replaced and its readers are told. publish: at once; otherwise readers see it from `publish()` on. max_bytes: bound of
    the index, as in `open_index`; the roster, a kilobyte a node, comes on top. mode: who may read it, e.g. 0o640. Raises
    RegionError: in use, no room, no permission, or something else is at `path`.

    `successor(...)`: another empty index for the same path, which takes this one's place with `publish()`; until then readers
    stay here. `close()`: readers are told, the file goes, the path is free. `retire()`: tells readers only. Changes in a
    process that was forked from the writer raise RegionError.
    """
    region = RegionIndex(path, expected_blocks=expected_blocks, seed=seed, max_bytes=max_bytes, mode=mode, release=__version__)
    if publish:
        region.publish()
    return region


def open_index(*, expected_blocks: int = 0, seed: int = 0, max_bytes: int = 0) -> BlockIndex:
    """An empty native index in anonymous memory. `seed` keys the mixing function: random in production, fixed in tests.

    max_bytes: `stats().bytes` never rises above it (see `make_room`); 0: no bound. ValueError below LEAST_MAX_BYTES.
    """
    return Index(expected_blocks=expected_blocks, seed=seed, max_bytes=max_bytes)

"""What the index answers: plain tuples, so that the native core can make them and `kvdir.index` can export them.

Owns the shape of answers, and the one error. Stands on its own because `_native` imports it while `kvdir.index` is still being
imported.
"""

from typing import NamedTuple

from kvdir.errors import KvdirError

__all__ = ["Evicted", "IndexStats", "Lookup", "RegionError", "RegionLookup"]


class RegionError(KvdirError):
    """A region cannot be had, or not any more; the message says why and what to do."""

    code = "region"


class Lookup(NamedTuple):
    """Answer of `lookup`.

    runs: u32 little-endian triples (start, count, set), ascending by start; neighbouring hits with the same holder set form
        one run; positions in no run are misses.
    sets: for each set named in `runs`, the holders as packed u32 little-endian, ascending, never empty.
    hits: number of positions found.
    """

    runs: bytes
    sets: list[bytes]
    hits: int


class RegionLookup(NamedTuple):
    """Answer of `RegionReader.lookup`; nodes in place of holder numbers.

    runs, hits: as Lookup. sets: packed u32 little-endian, node index << 8 | tier, ascending, as in kvdir.v1.LookupResponse.
    nodes: packed u32 little-endian: for each node index the id to ask `RegionReader.node` for. It stands for a node slot as
        long as one node has it: the slot in the lower 16 bits, and how often it was cleared in the upper ones.
    torn: some positions are misses only because the writer was at work all the time, or died in the middle of it.
    """

    runs: bytes
    sets: tuple[bytes, ...]
    nodes: bytes
    hits: int
    torn: bool


class Evicted(NamedTuple):
    """What an index with a bound has let go of: the holders in `sets[numbers[i]]` have lost block `keys[i]`.

    keys: u64 little-endian. numbers: u32 little-endian per key. sets: packed u32 holders, never empty.
    """

    keys: bytes
    numbers: bytes
    sets: list[bytes]


class IndexStats(NamedTuple):
    """Figures about the index itself.

    blocks: live ones; those that wait to be swept are not counted. capacity: slots, of which at most 0.8 are used.
    bytes: what the index takes once every page in use is resident; it never shrinks. The roster of a region is not in it.
    sets: distinct holder sets. holders: those with at least one block. growing: a step of growth is under way.
    """

    blocks: int
    capacity: int
    bytes: int
    sets: int
    holders: int
    growing: bool

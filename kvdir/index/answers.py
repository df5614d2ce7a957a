"""What the index answers: plain tuples, so that the native core can make them and `kvdir.index` can export them.

Owns the shape of answers only. Stands on its own because `_native` imports it while `kvdir.index` is still being imported.
"""

from typing import NamedTuple

__all__ = ["IndexStats", "Lookup"]


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


class IndexStats(NamedTuple):
    """Figures about the index itself.

    blocks: live ones; those that wait to be swept are not counted. capacity: slots, of which at most 0.8 are used.
    bytes: what the whole region takes once every page in use is resident; it never shrinks.
    sets: distinct holder sets. holders: those with at least one block. growing: a step of growth is under way.
    """

    blocks: int
    capacity: int
    bytes: int
    sets: int
    holders: int
    growing: bool

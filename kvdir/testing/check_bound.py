"""The part of the index's contract that is about its bound; `check_index` runs it with the rest.

What is exact: the bound, every count, and the list of what went. What is not: the order; blocks used clearly later stay.
"""

import struct
from collections import Counter
from collections.abc import Callable

from kvdir.index import LEAST_MAX_BYTES, BlockIndex, Evicted
from kvdir.testing.index_fixture import Implementation, access_of, fingerprints, numbers_of, refuses, runs_of

__all__ = ["BOUND_CHECKS", "lost_of"]

BATCH = 512
MANY = 20 * BATCH  # more than the smallest bound has room for


def lost_of(evicted: Evicted | None) -> Counter[int]:
    """How many blocks each holder has lost."""
    lost: Counter[int] = Counter()
    if evicted is not None:
        for number, count in Counter(numbers_of(evicted.numbers)).items():
            lost.update(dict.fromkeys(numbers_of(evicted.sets[number]), count))
    return lost


def _fill(index: BlockIndex, blocks: range, *, holder: int, now_s: int) -> Counter[int]:
    """Stores in batches, making room before and asking behind, as the contract has it; returns what was lost."""
    lost: Counter[int] = Counter()
    for start in range(blocks.start, blocks.stop, BATCH):
        batch = fingerprints(range(start, min(start + BATCH, blocks.stop)))
        lost += lost_of(index.make_room(len(batch) // 16, holder=holder))
        index.store(batch, 16, scope=0, holder=holder, now_s=now_s)
        lost += lost_of(index.make_room(0, holder=holder))
    return lost


def an_index_never_takes_more_than_its_bound(made: Implementation) -> None:
    index = made.open_index(seed=1, max_bytes=LEAST_MAX_BYTES)
    stored: Counter[int] = Counter()
    lost: Counter[int] = Counter()
    for start in range(0, MANY, BATCH):
        holder = start // BATCH % 3
        lost += _fill(index, range(start, start + BATCH), holder=holder, now_s=start // BATCH)
        stored[holder] += BATCH
        assert index.stats().bytes <= LEAST_MAX_BYTES
        assert all(index.holder_blocks(each) == stored[each] - lost[each] for each in range(3))
    assert lost.total() > 0, "nothing was evicted: the bound is larger than it should be"
    assert index.stats().blocks == MANY - lost.total() >= 1024
    assert index.lookup(fingerprints(range(MANY)), 16, scope=0).hits == index.stats().blocks


def what_was_used_last_stays(made: Implementation) -> None:
    index = made.open_index(seed=1, max_bytes=LEAST_MAX_BYTES)
    _fill(index, range(1000), holder=1, now_s=10)
    _fill(index, range(1000, 2000), holder=1, now_s=20)
    index.lookup(fingerprints(range(500)), 16, scope=0, touch_s=30)
    room = 2000
    while index.lookup(fingerprints(range(500, 1000)), 16, scope=0).hits:
        assert room < MANY, "the oldest blocks never went"
        _fill(index, range(room, room + BATCH), holder=2, now_s=30)
        room += BATCH
        old = index.lookup(fingerprints(range(500, 1000)), 16, scope=0).hits
        assert old == 0 or index.lookup(fingerprints(range(1000, 2000)), 16, scope=0).hits >= 900
    assert index.lookup(fingerprints(range(500)), 16, scope=0).hits >= 400, "what was looked up counts as used"


def what_went_is_listed_block_by_block(made: Implementation) -> None:
    index = made.open_index(seed=1, max_bytes=LEAST_MAX_BYTES)
    shared = fingerprints(range(BATCH))
    for holder in (1, 2, 3):
        index.make_room(BATCH, holder=holder)
        index.store(shared, 16, scope=0, holder=holder, now_s=1)
    index.remove(shared[: 16 * 100], 16, scope=0, holder=2)
    names = dict(zip(struct.iter_unpack("<Q", index.keys(shared, 16, scope=0)), range(BATCH), strict=True))
    gone: dict[int, tuple[int, ...]] = {}
    for start in range(BATCH, MANY, BATCH):
        evicted = index.make_room(BATCH, holder=9)
        if evicted is not None:
            numbers = numbers_of(evicted.numbers)
            keys = struct.iter_unpack("<Q", evicted.keys)
            gone |= {names[key]: numbers_of(evicted.sets[at]) for key, at in zip(keys, numbers, strict=True) if key in names}
        index.store(fingerprints(range(start, start + BATCH)), 16, scope=0, holder=9, now_s=2)
    assert gone == {number: (1, 3) if number < 100 else (1, 2, 3) for number in range(BATCH)}
    assert [index.holder_blocks(holder) for holder in (1, 2, 3)] == [0, 0, 0]
    assert access_of(index, shared) == (0,) * BATCH
    assert index.store(shared, 16, scope=0, holder=2, now_s=3) == BATCH if index.make_room(BATCH, holder=2) else True
    assert runs_of(index.lookup(shared, 16, scope=0)) == [(0, BATCH, (2,))]


def dead_blocks_go_before_living_ones(made: Implementation) -> None:
    index = made.open_index(seed=1, max_bytes=LEAST_MAX_BYTES)
    stored = 0
    while not _fill(index, range(stored, stored + BATCH), holder=stored // BATCH, now_s=1):
        stored += BATCH
    for holder in range(stored // BATCH):
        index.drop(holder)
    last = stored // BATCH
    held = index.holder_blocks(last)
    assert lost_of(index.make_room(1024, holder=0))[last] <= held // 4
    assert index.holder_blocks(last) == index.stats().blocks


def a_bound_is_refused_when_nothing_would_fit(made: Implementation) -> None:
    refuses(lambda: made.open_index(max_bytes=LEAST_MAX_BYTES - 1), "max_bytes", str(LEAST_MAX_BYTES))
    index = made.open_index(seed=1, max_bytes=LEAST_MAX_BYTES)
    _fill(index, range(1000), holder=1, now_s=1)
    assert index.make_room(1024, holder=1) is None or index.stats().blocks >= 900
    before = index.stats().blocks
    try:
        index.make_room(10 * MANY, holder=1)
    except MemoryError:
        assert index.stats().blocks == before, "what cannot be had must cost nothing"
    else:
        raise AssertionError("room for more than the bound was promised")
    refuses(lambda: index.make_room(-1, holder=1), "blocks")
    refuses(lambda: index.make_room(1, holder=2**24), "holder")


def without_a_bound_nothing_is_evicted(made: Implementation) -> None:
    index = made.open_index(seed=1)
    assert not _fill(index, range(MANY), holder=1, now_s=1)
    assert index.stats().blocks == MANY


def keys_give_back_the_heads_of_fingerprints(made: Implementation) -> None:
    for seed, scope in ((0, 0), (1, 7), (2**64 - 1, 2**64 - 1)):
        index = made.open_index(seed=seed)
        for width in (8, 16, 32):
            keys = index.keys(fingerprints(range(100), width), width, scope=scope)
            assert index.heads(keys, scope=scope) == fingerprints(range(100), 8)
    refuses(lambda: index.heads(bytes(7), scope=0), "whole u64")
    refuses(lambda: index.heads(bytes(8), scope=-1), "scope")


BOUND_CHECKS: tuple[Callable[[Implementation], None], ...] = (
    an_index_never_takes_more_than_its_bound,
    what_was_used_last_stays,
    what_went_is_listed_block_by_block,
    dead_blocks_go_before_living_ones,
    a_bound_is_refused_when_nothing_would_fit,
    without_a_bound_nothing_is_evicted,
    keys_give_back_the_heads_of_fingerprints,
)

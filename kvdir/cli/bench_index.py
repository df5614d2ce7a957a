"""The index's figures: native against a dict of sets and against the gather floor, medians in one run.

Owns the measuring; `kvdir bench index` and bench/index.py print it. Everything goes through the Python API on packed
16-byte fingerprints. What is compared runs in turns, so that a busy machine slows both sides; every lookup asks for other
blocks than the one before, so that no cache keeps the answer. The native index starts empty and grows, like the dict.
The dict pays for Python's garbage collector as every program does; `dict_store_gc_off_blocks_per_s` is without it.
Does not: judge a figure.
"""

import gc
import resource
from collections.abc import Callable
from statistics import median
from time import perf_counter

import numpy as np
import numpy.typing as npt

from kvdir.index import LEAST_MAX_BYTES, BlockIndex, open_index
from kvdir.index._native import GatherFloor

__all__ = ["run_index_bench"]

WIDTH = 16
SCOPE = 1
BATCH_BLOCKS = 1024
QUESTION_BLOCKS = 8192
HOLDERS = 256
LIVE_BLOCKS = 100_000
CHURNED_BLOCKS = 5_000_000
STORE_ROUNDS = 5
LOOKUP_ROUNDS = 200

Blocks = npt.NDArray[np.uint64]  # shape (blocks, 2): 16-byte fingerprints
Advance = Callable[..., None]


def run_index_bench(entries: int, *, advance: Advance = lambda n=1.0, text=None: None) -> dict[str, object]:
    """Measures with so many blocks in the index (at least 10,000). `advance(share, text)` reports progress; shares sum to 1."""
    blocks = _random_blocks(np.random.default_rng(1), entries)
    return {
        "entries": entries,
        **_store(blocks, advance),
        **_lookup(blocks, advance),
        **_drop(blocks, advance),
        **_churn(entries, advance),
        **_bound(blocks),
    }


def _random_blocks(rng: np.random.Generator, count: int) -> Blocks:
    return rng.integers(0, 2**64, size=(count, 2), dtype=np.uint64)


def _batches(blocks: Blocks, size: int = BATCH_BLOCKS) -> list[memoryview]:
    packed = blocks.data.cast("B")
    step = size * WIDTH
    return [packed[start : start + step] for start in range(0, len(packed), step)]


def _fill(index: BlockIndex, batches: list[memoryview], *, holder: int) -> float:
    """Stores all batches; returns the seconds it took."""
    begin = perf_counter()
    for batch in batches:
        index.store(batch, WIDTH, scope=SCOPE, holder=holder, now_s=1)
    return perf_counter() - begin


def _fill_dict(keys: list[int], *, holder: int) -> float:
    """The same in plain Python: key -> set of holders."""
    table: dict[int, set[int]] = {}
    begin = perf_counter()
    for key in keys:
        holders = table.get(key)
        if holders is None:
            table[key] = {holder}
        else:
            holders.add(holder)
    return perf_counter() - begin


def _fill_dict_gc_off(keys: list[int], *, holder: int) -> float:
    gc.collect()
    gc.disable()
    try:
        return _fill_dict(keys, holder=holder)
    finally:
        gc.enable()


def _store(blocks: Blocks, advance: Advance) -> dict[str, object]:
    batches, keys = _batches(blocks), blocks[:, 0].tolist()
    taken_s: dict[str, list[float]] = {name: [] for name in ("new", "again", "sized", "dict", "dict_gc_off")}
    for _ in range(STORE_ROUNDS):
        index = open_index(seed=1)
        taken_s["new"].append(_fill(index, batches, holder=0))
        taken_s["again"].append(_fill(index, batches, holder=1))
        index = open_index(seed=1, expected_blocks=len(blocks))
        taken_s["sized"].append(_fill(index, batches, holder=0))
        del index
        taken_s["dict"].append(_fill_dict(keys, holder=0))
        taken_s["dict_gc_off"].append(_fill_dict_gc_off(keys, holder=0))
        advance(0.5 / STORE_ROUNDS, "store")
    rates = {name: len(blocks) / median(rounds) for name, rounds in taken_s.items()}
    return {
        "store_blocks_per_s": rates["new"],
        "store_again_blocks_per_s": rates["again"],
        "store_sized_blocks_per_s": rates["sized"],
        "dict_store_blocks_per_s": rates["dict"],
        "dict_store_gc_off_blocks_per_s": rates["dict_gc_off"],
        "store_to_dict_ratio": rates["new"] / rates["dict"],
    }


def _lookup(blocks: Blocks, advance: Advance) -> dict[str, object]:
    batches = _batches(blocks, QUESTION_BLOCKS)
    before_bytes = _resident_bytes()
    index = open_index(seed=1)
    _fill(index, batches, holder=0)
    resident_bytes = _resident_bytes() - before_bytes
    figures: dict[str, object] = {
        "bytes_per_block_unique": index.stats().bytes / len(blocks),
        "rss_bytes_per_block_unique": resident_bytes / len(blocks),
    }
    figures |= _sparse(index, blocks)
    figures["lookup_prefix_8192_1_us"] = _prefix_us(index, blocks, holders=1)
    advance(0.1, "lookup")
    for holder in range(1, HOLDERS):
        _fill(index, batches, holder=holder)
        advance(0.2 / HOLDERS, f"{HOLDERS} holders")
    figures["lookup_prefix_8192_256_us"] = _prefix_us(index, blocks, holders=HOLDERS)
    figures["bytes_per_block_256_holders"] = index.stats().bytes / len(blocks)
    return figures


def _sparse(index: BlockIndex, blocks: Blocks) -> dict[str, object]:
    floor = GatherFloor(index.stats().capacity)
    rng = np.random.default_rng(2)
    lookup_s, floor_s = [], []
    for _ in range(LOOKUP_ROUNDS):
        question = blocks[rng.integers(0, len(blocks), QUESTION_BLOCKS)].data.cast("B")
        begin = perf_counter()
        floor.read(question, WIDTH)
        middle = perf_counter()
        answer = index.lookup(question, WIDTH, scope=SCOPE)
        lookup_s.append(perf_counter() - middle)
        floor_s.append(middle - begin)
        assert answer.hits == QUESTION_BLOCKS
    lookup_us, floor_us = median(lookup_s) * 1e6, median(floor_s) * 1e6
    return {
        "lookup_sparse_8192_us": lookup_us,
        "gather_floor_8192_us": floor_us,
        "sparse_to_floor_ratio": lookup_us / floor_us,
    }


def _prefix_us(index: BlockIndex, blocks: Blocks, *, holders: int) -> float:
    rng = np.random.default_rng(3)
    taken_s = []
    for _ in range(LOOKUP_ROUNDS):
        start = int(rng.integers(0, len(blocks) - QUESTION_BLOCKS + 1))
        question = blocks[start : start + QUESTION_BLOCKS].data.cast("B")
        begin = perf_counter()
        answer = index.lookup(question, WIDTH, scope=SCOPE, prefix=True)
        taken_s.append(perf_counter() - begin)
        assert answer.hits == QUESTION_BLOCKS
        assert len(answer.sets[0]) == 4 * holders
    return median(taken_s) * 1e6


def _drop(blocks: Blocks, advance: Advance) -> dict[str, object]:
    """Drops a node that has every block, in prompts of 100 that each have their own few other holders: the hard case."""
    rng = np.random.default_rng(4)
    index = open_index(seed=1)
    prompts = _batches(blocks, 100)
    for prompt in prompts:
        for holder in rng.choice(np.arange(1, HOLDERS), size=3, replace=False).tolist():
            index.store(prompt, WIDTH, scope=SCOPE, holder=holder, now_s=1)
    batches = _batches(blocks)
    taken_s = []
    sets = index.stats().sets
    for _ in range(STORE_ROUNDS):
        _fill(index, batches, holder=0)
        begin = perf_counter()
        dropped = index.drop(0)
        taken_s.append(perf_counter() - begin)
        assert dropped == len(blocks)
        advance(0.1 / STORE_ROUNDS, "drop")
    return {"drop_node_1m_ms": median(taken_s) * 1e3, "drop_node_sets": sets}


def _churn(entries: int, advance: Advance) -> dict[str, object]:
    """Prompts of 1,000 blocks with two holders each come, and the oldest go. Scaled down with fewer entries than that."""
    rng = np.random.default_rng(5)
    live, churned = (LIVE_BLOCKS, CHURNED_BLOCKS) if entries >= LIVE_BLOCKS else (entries, 50 * entries)
    index = open_index(seed=1)
    present: list[tuple[memoryview, list[int]]] = []
    before = (0, 0)
    prompts = live // 1000
    for turn in range(prompts + churned // 1000):
        prompt = _random_blocks(rng, 1000).data.cast("B")
        holders = rng.choice(64, size=2, replace=False).tolist()
        for holder in holders:
            index.store(prompt, WIDTH, scope=SCOPE, holder=holder, now_s=1)
        present.append((prompt, holders))
        if len(present) > prompts:
            oldest, held_by = present.pop(0)
            for holder in held_by:
                index.remove(oldest, WIDTH, scope=SCOPE, holder=holder)
        if turn == prompts:  # full, and the first prompt has gone
            before = (index.stats().bytes, _resident_bytes())
        if turn % 100 == 0:
            advance(0.1 * 100 / (prompts + churned // 1000), "churn")
    assert index.stats().blocks == prompts * 1000
    return {
        "churn_growth_bytes": index.stats().bytes - before[0],
        "churn_rss_growth_bytes": _resident_bytes() - before[1],
    }


def _bound(blocks: Blocks) -> dict[str, object]:
    """Stores into an index that is full at half of the blocks, once while it fills, and once while the oldest go."""
    batches = _batches(blocks)
    index = open_index(seed=1, max_bytes=max(LEAST_MAX_BYTES, 12 * len(blocks)))
    taken_s, evicted = {True: 0.0, False: 0.0}, 0
    stored = {True: 0, False: 0}
    for now_s, batch in enumerate(batches * 2):
        begin = perf_counter()
        gone = index.make_room(len(batch) // WIDTH, holder=0)
        index.store(batch, WIDTH, scope=SCOPE, holder=0, now_s=now_s)
        full = gone is not None
        taken_s[full] += perf_counter() - begin
        stored[full] += len(batch) // WIDTH
        evicted += len(gone.keys) // 8 if gone is not None else 0
    return {
        "bound_filling_blocks_per_s": stored[False] / taken_s[False],
        "bound_evicting_blocks_per_s": stored[True] / taken_s[True],
        "bound_evicted_blocks": evicted,
    }


def _resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()

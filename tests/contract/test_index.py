"""The index contract, run against the native index and its oracle; and what only the native one promises."""

import gc
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import pytest

from kvdir.index import Index, Lookup, Sketch, open_index
from kvdir.index.reference import ReferenceIndex, ReferenceSketch
from kvdir.testing.check_index import CHECKS, Implementation
from kvdir.testing.index_fixture import fingerprints

IMPLEMENTATIONS = {
    "native": Implementation(open_index, Sketch),
    "reference": Implementation(ReferenceIndex, ReferenceSketch),  # type: ignore[arg-type]  # each takes its own sketch
}


@pytest.mark.parametrize("made", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS.keys())
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(check: Callable[[Implementation], None], made: Implementation) -> None:
    check(made)


@pytest.mark.parametrize("width", [8, 16, 32])
def test_keys_and_sketches_are_byte_identical_when_made_by_the_oracle(width: int) -> None:
    blocks = fingerprints(range(500), width)
    native, oracle = Index(seed=2**64 - 1), ReferenceIndex(seed=2**64 - 1)
    assert native.keys(blocks, width, scope=2**64 - 1) == oracle.keys(blocks, width, scope=2**64 - 1)
    for cells in (4, 12, 1024, 4000):
        sketch, reference = Sketch(cells), ReferenceSketch(cells)
        for each in (sketch, reference):
            each.insert(blocks, width)
            each.remove(fingerprints(range(600, 1300), width), width)
        assert sketch.count == reference.count == -200
        assert sketch.encode() == reference.encode()


def test_a_fingerprint_that_would_be_key_0_gets_key_1() -> None:
    oracle = ReferenceIndex(seed=1)
    zero = _fingerprint_of_key_0(oracle)
    assert oracle.keys(zero, 8, scope=0) == Index(seed=1).keys(zero, 8, scope=0) == struct.pack("<Q", 1)


def _fingerprint_of_key_0(oracle: ReferenceIndex) -> bytes:
    """Only x = 0 mixes to 0, and x is the fingerprint xor the offset, which is what an all-zero run of the mix reveals."""
    from kvdir.index import reference

    offset = reference._scramble(reference._scramble((1 + reference._GOLDEN) % 2**64))
    return struct.pack("<Q", offset)


@pytest.mark.parametrize("dtype", ["u1", "<u8", "<i4"])
def test_numpy_arrays_are_taken_when_contiguous(dtype: str) -> None:
    index = Index(seed=1)
    array = np.frombuffer(fingerprints(range(64)), dtype=dtype)
    assert index.store(array, 16, scope=0, holder=1, now_s=1) == 64  # type: ignore[arg-type]
    array.flags.writeable = False
    assert index.lookup(array.reshape(64, -1), 16, scope=0).hits == 64  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="contiguous"):
        index.lookup(np.arange(64, dtype=np.uint64)[::2], 8, scope=0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="contiguous"):
        index.lookup(np.zeros((8, 8), dtype="u1", order="C")[:, :4], 8, scope=0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda index: index.store([1, 2], 8, scope=0, holder=1, now_s=1), "must be a buffer"),
        (lambda index: index.store("text", 8, scope=0, holder=1, now_s=1), "must be a buffer"),
        (lambda index: index.store(b"", 8, scope=0, holder=1), "now_s"),
        (lambda index: index.store(b"", 8, scope=0, now_s=1), "holder"),
        (lambda index: index.lookup(b"", 8), "scope"),
        (lambda index: index.store(b"", 8.0, scope=0, holder=1, now_s=1), "float"),
        (lambda index: index.store(b"", 8, scope=0, holder=1, now_s=1, sketch=ReferenceSketch()), "kvdir.index.Sketch"),
        (lambda index: index.store(b"", 8, 0, 1, 1), "positional"),
        (lambda index: type("Sub", (Index,), {}), "not an acceptable base type"),
    ],
)
def test_type_errors_name_the_argument_when_an_object_is_of_the_wrong_kind(call: Callable[[Any], object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call(Index())


def test_calls_leave_no_references_behind() -> None:
    """Counts references to everything passed in, and objects alive, over thousands of good and bad calls."""
    blocks, sketch = fingerprints(range(64)), Sketch()
    strided = memoryview(blocks)[::2]

    def calls() -> None:
        index = Index(seed=1)
        index.store(blocks, 16, scope=2**40, holder=2**20, now_s=2**20, sketch=sketch)
        answer = index.lookup(blocks, 16, scope=2**40, prefix=True, touch_s=2**30)
        assert type(answer) is Lookup
        index.lookup(blocks, 16, scope=2**40)
        index.dump(0, 100)
        index.keys(blocks, 16, scope=1)
        index.last_access(blocks, 16, scope=1)
        index.stats()
        index.remove(blocks, 16, scope=2**40, holder=2**20, sketch=sketch)
        sketch.copy().difference(sketch.encode())
        for bad in (strided, b"123", None):
            with pytest.raises((ValueError, TypeError)):
                index.store(bad, 16, scope=0, holder=1, now_s=1)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="holder"):
            index.drop(-1)

    calls()
    gc.collect()
    before = (sys.getrefcount(blocks), sys.getrefcount(sketch), sys.getrefcount(Lookup), len(gc.get_objects()))
    memory = psutil.Process().memory_info().rss
    for _ in range(2000):
        calls()
    gc.collect()
    after = (sys.getrefcount(blocks), sys.getrefcount(sketch), sys.getrefcount(Lookup), len(gc.get_objects()))
    assert after[:3] == before[:3]
    assert after[3] - before[3] < 200
    assert psutil.Process().memory_info().rss - memory < 8 << 20


def test_an_exported_buffer_is_given_back_after_each_call() -> None:
    index, buffer = Index(), bytearray(fingerprints(range(4)))
    index.store(buffer, 16, scope=0, holder=1, now_s=1)
    with pytest.raises(ValueError, match="width"):
        index.store(buffer, 5, scope=0, holder=1, now_s=1)
    buffer.extend(b"may grow again")  # BufferError while anything still exports it


def test_threads_may_share_an_index_and_a_sketch() -> None:
    index, sketch = Index(seed=1), Sketch(64)
    barrier = threading.Barrier(4)
    failures: list[BaseException] = []

    def work(holder: int) -> None:
        try:
            barrier.wait(timeout=10)
            for start in range(0, 20_000, 500):
                blocks = fingerprints(range(start, start + 500), 8)
                index.store(blocks, 8, scope=0, holder=holder, now_s=1, sketch=sketch)
                assert index.lookup(blocks, 8, scope=0).hits == 500
                index.dump(0, 50)
                index.remove(blocks[:800], 8, scope=0, holder=holder, sketch=sketch)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(holder,)) for holder in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=50)
    assert not failures
    assert sketch.count == 4 * 16_000
    assert [index.drop(holder) for holder in range(4)] == [16_000] * 4


def test_memory_stays_flat_when_blocks_come_and_go() -> None:
    index = Index(seed=1)
    live, step = 20_000, 1000
    for start in range(0, live, step):
        index.store(fingerprints(range(start, start + step), 8), 8, scope=0, holder=1, now_s=1)
    rng = np.random.default_rng(1)
    sizes = []
    for turn in range(400):
        fresh = rng.bytes(step * 8)
        index.store(fresh, 8, scope=0, holder=turn % 7, now_s=1)
        if turn % 3 == 0:
            index.drop(turn % 7)
        else:
            index.remove(fresh, 8, scope=0, holder=turn % 7)
        sizes.append(index.stats().bytes)
    assert sizes[-1] <= sizes[20]
    assert index.stats().blocks <= live


def test_the_bytes_reported_are_the_bytes_resident() -> None:
    blocks = np.random.default_rng(1).bytes(300_000 * 8)
    gc.collect()
    before = psutil.Process().memory_info().rss
    index = Index(seed=1)
    for start in range(0, len(blocks), 8000):
        index.store(blocks[start : start + 8000], 8, scope=0, holder=1, now_s=1)
    resident = psutil.Process().memory_info().rss - before
    assert 0.85 * resident <= index.stats().bytes + (1 << 20)
    assert index.stats().bytes <= resident * 1.15 + (1 << 20)
    assert index.stats().bytes / index.stats().blocks < 27


def test_the_last_holder_number_costs_one_page_and_not_its_whole_range() -> None:
    index = Index()
    before = index.stats().bytes
    index.store(fingerprints(range(10)), 16, scope=0, holder=2**24 - 1, now_s=1)
    assert index.stats().bytes - before < 1 << 16


EXHAUST = """
import os, resource
from kvdir.index import Index
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20),) * 2)
index, stored = Index(seed=1), 0
first = os.urandom(80_000)
stored += index.store(first, 8, scope=0, holder=1, now_s=1)
try:
    while True:
        stored += index.store(os.urandom(80_000), 8, scope=0, holder=1, now_s=1)
except MemoryError as error:
    assert "raise the limit" in str(error), error
assert 1_000_000 < stored <= index.stats().blocks == index.holder_blocks(1) < stored + 10_000
assert index.lookup(first, 8, scope=0).hits == 10_000
assert index.drop(1) >= stored
assert index.store(first, 8, scope=0, holder=2, now_s=1) == 10_000, "room of dropped blocks is used again"
assert index.lookup(first, 8, scope=0).hits == 10_000
"""


def test_a_full_index_keeps_what_it_has_and_takes_more_after_a_drop_when_address_space_is_limited() -> None:
    subprocess.run([sys.executable, "-c", EXHAUST], check=True, timeout=50)

"""Contract suite of the block index: run it against any implementation of `BlockIndex` and `BlockSketch`.

Owns what every index must do; performance and memory are not in here. `check_index(implementation)` runs everything;
`CHECKS` lets a test runner show each check on its own:

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_contract(check): check(Implementation(open_index, Sketch))

Each check makes its own index, raises AssertionError on the first breach, and needs nothing but the standard library.
"""

import struct
from collections.abc import Callable
from functools import partial

from kvdir.index import Lookup, Packed
from kvdir.testing.check_bound import BOUND_CHECKS
from kvdir.testing.check_sketch import SKETCH_CHECKS
from kvdir.testing.index_fixture import Implementation, access_of, dump_all, fingerprints, refuses, runs_of

__all__ = ["CHECKS", "Implementation", "check_index"]


def check_index(implementation: Implementation) -> None:
    for check in CHECKS:
        check(implementation)


def store_counts_pairs_that_are_new(made: Implementation) -> None:
    index = made.open_index(seed=1)
    assert index.store(fingerprints(range(10)), 16, scope=0, holder=3, now_s=1) == 10
    assert index.store(fingerprints(range(5, 15)), 16, scope=0, holder=3, now_s=1) == 5
    assert index.store(fingerprints(range(15)), 16, scope=0, holder=4, now_s=1) == 15
    assert index.store(b"", 16, scope=0, holder=4, now_s=1) == 0
    assert (index.holder_blocks(3), index.holder_blocks(4), index.holder_blocks(5)) == (15, 15, 0)
    assert index.stats().blocks == 15


def a_block_twice_in_one_batch_counts_once(made: Implementation) -> None:
    index = made.open_index(seed=1)
    assert index.store(fingerprints([1, 2, 1, 1, 2]), 16, scope=0, holder=3, now_s=1) == 2
    assert index.remove(fingerprints([2, 2, 3, 2]), 16, scope=0, holder=3) == 1
    assert index.stats().blocks == 1


def the_first_8_bytes_and_the_scope_make_the_key(made: Implementation) -> None:
    index = made.open_index(seed=1)
    for width in (8, 16, 32):
        assert index.keys(fingerprints(range(9), width), width, scope=5) == index.keys(fingerprints(range(9), 8), 8, scope=5)
    assert index.keys(fingerprints([1]), 16, scope=5) != index.keys(fingerprints([1]), 16, scope=6)
    assert index.keys(fingerprints([1]), 16, scope=5) != made.open_index(seed=2).keys(fingerprints([1]), 16, scope=5)
    keys = set(struct.iter_unpack("<Q", index.keys(fingerprints(range(5000)), 16, scope=5)))
    assert len(keys) == 5000, "different first 8 bytes of one scope must have different keys"
    assert (0,) not in keys
    index.store(fingerprints(range(3), 32), 32, scope=5, holder=1, now_s=1)
    assert runs_of(index.lookup(fingerprints(range(4), 8), 8, scope=5)) == [(0, 3, (1,))]
    assert index.lookup(fingerprints(range(4), 8), 8, scope=6).hits == 0


def remove_takes_one_holder(made: Implementation) -> None:
    index = made.open_index(seed=1)
    blocks = fingerprints(range(4))
    index.store(blocks, 16, scope=0, holder=1, now_s=1)
    index.store(blocks, 16, scope=0, holder=2, now_s=1)
    assert index.remove(fingerprints([1, 2, 9]), 16, scope=0, holder=1) == 2
    assert index.remove(fingerprints([1, 2]), 16, scope=0, holder=1) == 0
    assert index.remove(fingerprints([1]), 16, scope=1, holder=2) == 0
    assert runs_of(index.lookup(blocks, 16, scope=0)) == [(0, 1, (1, 2)), (1, 2, (2,)), (3, 1, (1, 2))]
    assert index.remove(fingerprints([1]), 16, scope=0, holder=2) == 1
    assert runs_of(index.lookup(blocks, 16, scope=0)) == [(0, 1, (1, 2)), (2, 1, (2,)), (3, 1, (1, 2))]
    assert index.stats().blocks == 3


def sparse_answers_every_position(made: Implementation) -> None:
    index = made.open_index(seed=1)
    for holder, blocks in ((7, range(10)), (5, range(4, 8)), (2**24 - 1, [6, 30])):
        index.store(fingerprints(blocks), 16, scope=0, holder=holder, now_s=1)
    answer = index.lookup(fingerprints([0, 1, 20, 4, 5, 6, 30, 21, 22, 9, 9, 0]), 16, scope=0)
    assert runs_of(answer) == [
        (0, 2, (7,)),
        (3, 2, (5, 7)),
        (5, 1, (5, 7, 2**24 - 1)),
        (6, 1, (2**24 - 1,)),
        (9, 3, (7,)),
    ]
    assert answer.hits == 9
    assert len(answer.sets) == 4, "each set is listed once"
    assert index.lookup(b"", 16, scope=0) == Lookup(b"", [], 0)
    assert made.open_index().lookup(fingerprints(range(3)), 16, scope=0) == Lookup(b"", [], 0)


def prefix_goes_as_far_as_one_holder_has_everything(made: Implementation) -> None:
    index = made.open_index(seed=1)
    chain = fingerprints(range(600))
    assert index.lookup(chain, 16, scope=0, prefix=True).hits == 0
    for holder, blocks in ((1, range(300)), (2, range(130)), (3, range(300, 600)), (4, range(1, 600))):
        index.store(fingerprints(blocks), 16, scope=0, holder=holder, now_s=1)
    answer = index.lookup(chain, 16, scope=0, prefix=True)
    assert runs_of(answer) == [(0, 1, (1, 2)), (1, 129, (1, 2, 4)), (130, 170, (1, 4))]
    assert answer.hits == 300, "holder 4 lacks block 0, so nobody has more than 300 in a row"
    assert index.lookup(chain[16:], 16, scope=0, prefix=True).hits == 599
    assert index.lookup(fingerprints([999]) + chain, 16, scope=0, prefix=True) == Lookup(b"", [], 0)


def prefix_ends_are_exact_at_every_length(made: Implementation) -> None:
    index = made.open_index(seed=1)
    chain = fingerprints(range(220), 8)
    for held in (1, 2, 63, 64, 65, 66, 127, 128, 129, 200):
        index.store(chain[: held * 8], 8, scope=0, holder=1, now_s=1)
        index.store(chain[: held // 2 * 8], 8, scope=0, holder=2, now_s=1)
        for asked in (1, 2, 63, 64, 65, 66, 128, 129, 220):
            question = chain[: asked * 8]
            answer = index.lookup(question, 8, scope=0, prefix=True)
            assert answer.hits == min(asked, held)
            assert runs_of(answer) == runs_of(index.lookup(question, 8, scope=0))
        index.drop(1)
        index.drop(2)


def a_prefix_claims_no_more_than_its_ends_say(made: Implementation) -> None:
    """A hole may go unseen only between two blocks that have exactly the set claimed for it."""
    index = made.open_index(seed=1)
    index.store(fingerprints([n for n in range(500) if n % 97 != 5]), 16, scope=0, holder=1, now_s=1)
    index.store(fingerprints(range(250)), 16, scope=0, holder=2, now_s=1)
    chain = fingerprints(range(500))
    truth = {start + i: holders for start, count, holders in runs_of(index.lookup(chain, 16, scope=0)) for i in range(count)}
    for start, count, holders in runs_of(index.lookup(chain, 16, scope=0, prefix=True)):
        exact = [at for at in range(start, start + count) if truth.get(at) == holders]
        assert exact, "a run needs at least one block that has its set"
        assert (exact[0], exact[-1]) == (start, start + count - 1)


def drop_forgets_a_holder_everywhere(made: Implementation) -> None:
    index = made.open_index(seed=1)
    for holder, blocks in ((1, range(100)), (2, range(50, 150)), (3, range(90, 120))):
        index.store(fingerprints(blocks), 16, scope=0, holder=holder, now_s=1)
        index.store(fingerprints(blocks), 16, scope=1, holder=holder, now_s=1)
    assert index.drop(1) == 200
    assert index.drop(1) == 0
    assert (index.holder_blocks(1), index.holder_blocks(2), index.stats().blocks) == (0, 200, 200)
    for scope in (0, 1):
        answer = index.lookup(fingerprints(range(150)), 16, scope=scope)
        assert runs_of(answer) == [(50, 40, (2,)), (90, 30, (2, 3)), (120, 30, (2,))]
        assert len(answer.sets) == 2, "sets that a drop made equal are one set"
    assert index.stats().sets == 2
    assert index.drop(99) == 0


def a_dropped_number_starts_again(made: Implementation) -> None:
    index = made.open_index(seed=1)
    blocks = fingerprints(range(80))
    for now_s in range(1, 6):
        assert index.store(blocks, 16, scope=0, holder=1, now_s=now_s) == 80
        assert index.store(blocks[: 40 * 16], 16, scope=0, holder=2, now_s=now_s) == (40 if now_s % 2 else 0)
        assert index.drop(1) == 80
        assert runs_of(index.lookup(blocks, 16, scope=0)) == [(0, 40, (2,))]
        if now_s % 2 == 0:
            assert index.drop(2) == 40
            assert index.stats()[0] == 0
            assert index.lookup(blocks, 16, scope=0).hits == 0


def sweeping_changes_no_answer(made: Implementation) -> None:
    index = made.open_index(seed=1)
    index.store(fingerprints(range(1000)), 16, scope=0, holder=1, now_s=1)
    index.store(fingerprints(range(300, 400)), 16, scope=0, holder=2, now_s=1)
    index.drop(1)
    before = (index.lookup(fingerprints(range(1000)), 16, scope=0), index.stats().blocks, dump_all(index, 64))
    freed = 0
    while swept := index.sweep(64):
        assert swept <= 64
        freed += swept
    assert freed <= 900
    assert before == (index.lookup(fingerprints(range(1000)), 16, scope=0), index.stats().blocks, dump_all(index, 64))


def last_access_is_the_newest(made: Implementation) -> None:
    index = made.open_index(seed=1)
    blocks = fingerprints(range(200))
    index.store(blocks[: 100 * 16], 16, scope=0, holder=1, now_s=50)
    assert access_of(index, blocks) == (50,) * 100 + (0,) * 100
    index.store(blocks[: 10 * 16], 16, scope=0, holder=2, now_s=60)
    index.store(blocks[: 20 * 16], 16, scope=0, holder=3, now_s=40)
    assert access_of(index, blocks) == (60,) * 10 + (50,) * 90 + (0,) * 100
    index.lookup(blocks, 16, scope=0)
    index.lookup(blocks, 16, scope=1, touch_s=80)
    assert access_of(index, blocks) == (60,) * 10 + (50,) * 90 + (0,) * 100
    index.lookup(blocks, 16, scope=0, prefix=True, touch_s=70)
    assert access_of(index, blocks) == (70,) * 100 + (0,) * 100
    index.lookup(fingerprints([3, 150, 99]), 16, scope=0, touch_s=2**32 - 1)
    assert access_of(index, fingerprints([2, 3, 150, 99])) == (70, 2**32 - 1, 0, 2**32 - 1)
    for holder in (1, 2, 3):
        index.drop(holder)
    assert not any(access_of(index, blocks))
    index.store(blocks, 16, scope=0, holder=1, now_s=7)
    assert access_of(index, blocks) == (7,) * 200


def a_dump_has_every_block_once(made: Implementation) -> None:
    index = made.open_index(seed=1)
    assert index.dump(0, 10) == (0, b"", b"", [])
    index.store(fingerprints(range(700)), 16, scope=0, holder=1, now_s=1)
    index.store(fingerprints(range(200)), 16, scope=0, holder=2, now_s=1)
    index.store(fingerprints(range(100)), 16, scope=9, holder=3, now_s=1)
    index.drop(3)
    keys = [key for (key,) in struct.iter_unpack("<Q", index.keys(fingerprints(range(700)), 16, scope=0))]
    expected = {key: (1, 2) if number < 200 else (1,) for number, key in enumerate(keys)}
    for page_blocks in (1, 7, 699, 700, 701, 10_000):
        assert dump_all(index, page_blocks) == expected


def a_dump_goes_on_while_the_index_changes(made: Implementation) -> None:
    index = made.open_index(seed=1)
    staying = fingerprints(range(300))
    index.store(staying, 16, scope=0, holder=1, now_s=1)
    seen: list[int] = []
    cursor, turn = 0, 0
    while True:
        cursor, keys, _, _ = index.dump(cursor, 20)
        seen += [key for (key,) in struct.iter_unpack("<Q", keys)]
        if not cursor:
            break
        turn += 1
        index.store(fingerprints(range(turn * 1000, turn * 1000 + 300)), 16, scope=0, holder=2, now_s=1)
        if turn % 4 == 0:
            index.drop(2)
    assert len(seen) == len(set(seen)), "a block was dumped twice"
    assert {key for (key,) in struct.iter_unpack("<Q", index.keys(staying, 16, scope=0))} <= set(seen)


def a_dump_restores_into_an_index_with_the_same_seed(made: Implementation) -> None:
    index, again = made.open_index(seed=1), made.open_index(seed=1)
    blocks = fingerprints(range(3000))
    index.store(blocks, 16, scope=7, holder=1, now_s=50)
    index.store(blocks[: 100 * 16], 16, scope=7, holder=2, now_s=60)
    _, keys, _, _ = index.dump(0, 10_000)
    access = index.key_access(keys)
    assert access == index.key_access(memoryview(keys))
    assert sorted(struct.unpack("<3000I", access)) == [50] * 2900 + [60] * 100
    assert again.restore(keys, access, holder=5) == 3000
    assert again.restore(keys, access, holder=5) == 0
    assert again.restore(bytes(8), bytes(4), holder=5) == 0
    assert runs_of(again.lookup(blocks, 16, scope=7)) == [(0, 3000, (5,))]
    assert again.last_access(blocks, 16, scope=7) == index.last_access(blocks, 16, scope=7)
    assert (again.holder_blocks(5), again.stats().blocks) == (3000, 3000)
    assert again.remove(blocks, 16, scope=7, holder=5) == 3000
    assert again.key_access(keys) == bytes(4 * 3000)
    refuses(lambda: again.restore(bytes(9), bytes(4), holder=1), "whole u64")
    refuses(lambda: again.restore(bytes(8), bytes(5), holder=1), "one u32 per key")
    refuses(lambda: again.key_access(bytes(7)), "whole u64")


def growing_keeps_every_block(made: Implementation) -> None:
    index = made.open_index(seed=1)
    total, step = 6000, 73
    for start in range(0, total, step):
        held = min(start + step, total)
        index.store(fingerprints(range(start, held)), 16, scope=0, holder=start % 3, now_s=1)
        probe = fingerprints(range(0, held, 61))
        assert index.lookup(probe, 16, scope=0).hits == len(probe) // 16
    assert index.lookup(fingerprints(range(total + 50)), 16, scope=0).hits == total
    assert index.stats().blocks == total
    assert index.remove(fingerprints(range(0, total, 2)), 16, scope=0, holder=0) == index.drop(0)


def figures_count_what_is_there(made: Implementation) -> None:
    index = made.open_index(expected_blocks=1000, seed=1)
    assert index.stats()[0] == index.stats().sets == index.stats().holders == 0
    index.store(fingerprints(range(10)), 16, scope=0, holder=1, now_s=1)
    index.store(fingerprints(range(6)), 16, scope=0, holder=2, now_s=1)
    index.store(fingerprints(range(3)), 16, scope=1, holder=2, now_s=1)
    stats = index.stats()
    assert (stats.blocks, stats.sets, stats.holders) == (13, 3, 2)
    assert stats.capacity >= stats.blocks
    index.remove(fingerprints(range(3)), 16, scope=1, holder=2)
    assert (index.stats().blocks, index.stats().sets, index.stats().holders) == (10, 2, 2)
    index.drop(1)
    assert (index.stats().blocks, index.stats().sets, index.stats().holders) == (6, 1, 1)


def every_contiguous_buffer_is_taken(made: Implementation) -> None:
    index = made.open_index(seed=1)
    data = fingerprints(range(6), 8)
    wide = memoryview(bytearray(data)).cast("Q")
    for buffer in (data, bytearray(data), memoryview(data), memoryview(data).cast("B", (6, 8)), wide, wide.toreadonly()):
        index.drop(1)
        assert index.store(buffer, 8, scope=0, holder=1, now_s=1) == 6
        assert index.lookup(buffer, 8, scope=0).hits == 6
    strided = memoryview(fingerprints(range(12), 8))[::2]
    refuses(lambda: index.store(strided, 8, scope=0, holder=1, now_s=1), "contiguous")
    refuses(lambda: index.lookup(strided, 8, scope=0), "contiguous")


def bad_input_is_refused_and_changes_nothing(made: Implementation) -> None:
    index = made.open_index(seed=1)
    sketch = made.open_sketch(64)
    good = fingerprints(range(4))
    index.store(good, 16, scope=0, holder=1, now_s=1, sketch=sketch)
    before = (index.stats(), sketch.encode(), index.last_access(good, 16, scope=0))

    def store(data: Packed = good, width: int = 16, scope: int = 0, holder: int = 2, now_s: int = 2) -> int:
        return index.store(data, width, scope=scope, holder=holder, now_s=now_s, sketch=sketch)

    for width in (0, 7, 12, 64, 2**70):
        refuses(partial(store, width=width), "width")
    refuses(lambda: store(good[:-1]), "63 bytes", "multiple")
    for holder in (-1, 2**24, 2**70):
        refuses(partial(store, holder=holder), "holder")
        refuses(partial(index.remove, good, 16, scope=0, holder=holder), "holder")
        refuses(partial(index.drop, holder), "holder")
        refuses(partial(index.holder_blocks, holder), "holder")
    for scope in (-1, 2**64):
        refuses(partial(store, scope=scope), "scope")
        refuses(partial(index.lookup, good, 16, scope=scope), "scope")
    for seconds in (-1, 2**32):
        refuses(partial(store, now_s=seconds), "now_s")
        refuses(partial(index.lookup, good, 16, scope=0, touch_s=seconds), "touch_s")
    refuses(lambda: index.dump(-1, 10), "cursor")
    refuses(lambda: index.dump(0, 0), "max_blocks")
    refuses(lambda: index.sweep(-1), "max_blocks")
    refuses(lambda: made.open_index(expected_blocks=-1), "expected_blocks")
    refuses(lambda: made.open_index(seed=2**64), "seed")
    assert before == (index.stats(), sketch.encode(), index.last_access(good, 16, scope=0))


def a_sketch_receives_exactly_what_changed(made: Implementation) -> None:
    index, sketch, expected = made.open_index(seed=1), made.open_sketch(64), made.open_sketch(64)
    for width in (8, 16, 32):
        index.store(fingerprints(range(20), width), width, scope=width, holder=1, now_s=1, sketch=sketch)
        expected.insert(fingerprints(range(20), width), width)
        index.store(fingerprints([3, 30, 30], width), width, scope=width, holder=1, now_s=1, sketch=sketch)
        expected.insert(fingerprints([30], width), width)
        index.remove(fingerprints([5, 5, 40], width), width, scope=width, holder=1, sketch=sketch)
        expected.remove(fingerprints([5], width), width)
        index.remove(fingerprints([6], width), width, scope=width, holder=2, sketch=sketch)
    assert sketch.encode() == expected.encode()
    assert sketch.count == 60


CHECKS: tuple[Callable[[Implementation], None], ...] = (
    store_counts_pairs_that_are_new,
    a_block_twice_in_one_batch_counts_once,
    the_first_8_bytes_and_the_scope_make_the_key,
    remove_takes_one_holder,
    sparse_answers_every_position,
    prefix_goes_as_far_as_one_holder_has_everything,
    prefix_ends_are_exact_at_every_length,
    a_prefix_claims_no_more_than_its_ends_say,
    drop_forgets_a_holder_everywhere,
    a_dropped_number_starts_again,
    sweeping_changes_no_answer,
    last_access_is_the_newest,
    a_dump_has_every_block_once,
    a_dump_goes_on_while_the_index_changes,
    a_dump_restores_into_an_index_with_the_same_seed,
    growing_keeps_every_block,
    figures_count_what_is_there,
    every_contiguous_buffer_is_taken,
    bad_input_is_refused_and_changes_nothing,
    a_sketch_receives_exactly_what_changed,
    *BOUND_CHECKS,
    *SKETCH_CHECKS,
)

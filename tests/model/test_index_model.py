"""The native index against its oracle, step by step: Hypothesis looks for a sequence of calls after which they differ.

Few numbers, scopes and holders, so that everything meets everything: duplicates inside a batch, holders dropped and used
again, sets made equal by drops, sweeps in between, and batches large enough that small tables grow many times.
"""

import struct

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvdir.index import Index, Lookup, Sketch
from kvdir.index.reference import ReferenceIndex, ReferenceSketch
from kvdir.testing.index_fixture import dump_all, fingerprints, runs_of

POOL = {width: fingerprints(range(4000), width) for width in (8, 16, 32)}
EVERYTHING = range(4000)

scopes = st.sampled_from([0, 1, 2**64 - 1])
holders = st.sampled_from([0, 1, 2, 3, 70_000, 2**24 - 1])
widths = st.sampled_from([8, 16, 32])
seconds = st.integers(0, 100)
numbers = st.one_of(
    st.lists(st.integers(0, 60), max_size=30),
    st.builds(lambda start, count: list(range(start, min(start + count, 4000))), st.integers(0, 3999), st.integers(0, 1500)),
    st.builds(lambda start: [*range(start, start + 200), *range(start, start + 100)], st.integers(0, 3700)),
)


def packed(chosen: list[int], width: int) -> bytes:
    pool = POOL[width]
    return b"".join(pool[number * width : (number + 1) * width] for number in chosen)


class IndexModel(RuleBasedStateMachine):
    @initialize(expected=st.sampled_from([0, 1, 500, 5000]), seed=st.integers(0, 2**64 - 1))
    def open(self, expected: int, seed: int) -> None:
        self.native = Index(expected_blocks=expected, seed=seed)
        self.oracle = ReferenceIndex(seed=seed)
        self.sketch = Sketch(64)
        self.oracle_sketch = ReferenceSketch(64)

    @rule(chosen=numbers, width=widths, scope=scopes, holder=holders, now_s=seconds, sketched=st.booleans())
    def store(self, chosen: list[int], width: int, scope: int, holder: int, now_s: int, sketched: bool) -> None:
        blocks = packed(chosen, width)
        sketches = (self.sketch, self.oracle_sketch) if sketched else (None, None)
        added = self.native.store(blocks, width, scope=scope, holder=holder, now_s=now_s, sketch=sketches[0])
        assert added == self.oracle.store(blocks, width, scope=scope, holder=holder, now_s=now_s, sketch=sketches[1])

    @rule(chosen=numbers, width=widths, scope=scopes, holder=holders, sketched=st.booleans())
    def remove(self, chosen: list[int], width: int, scope: int, holder: int, sketched: bool) -> None:
        blocks = packed(chosen, width)
        sketches = (self.sketch, self.oracle_sketch) if sketched else (None, None)
        removed = self.native.remove(blocks, width, scope=scope, holder=holder, sketch=sketches[0])
        assert removed == self.oracle.remove(blocks, width, scope=scope, holder=holder, sketch=sketches[1])

    @rule(holder=holders)
    def drop(self, holder: int) -> None:
        assert self.native.drop(holder) == self.oracle.drop(holder)

    @rule(most=st.integers(0, 2000))
    def sweep(self, most: int) -> None:
        assert self.native.sweep(most) <= most

    @rule(chosen=numbers, width=widths, scope=scopes, touch_s=st.none() | seconds)
    def lookup_sparse(self, chosen: list[int], width: int, scope: int, touch_s: int | None) -> None:
        blocks = packed(chosen, width)
        ours = self.native.lookup(blocks, width, scope=scope, touch_s=touch_s)
        theirs = self.oracle.lookup(blocks, width, scope=scope, touch_s=touch_s)
        assert ours == theirs

    @rule(chosen=numbers, width=widths, scope=scopes)
    def lookup_prefix(self, chosen: list[int], width: int, scope: int) -> None:
        """The oracle looks everywhere. The native index may miss a hole between two blocks that have one set."""
        blocks = packed(chosen, width)
        ours = self.native.lookup(blocks, width, scope=scope, prefix=True)
        exact = self.oracle.lookup(blocks, width, scope=scope, prefix=True)
        sparse = self.oracle.lookup(blocks, width, scope=scope)
        assert ours.hits >= exact.hits
        if not _unseen(ours, sparse):
            assert ours == exact

    @rule(chosen=numbers, scope=scopes)
    def last_access(self, chosen: list[int], scope: int) -> None:
        blocks = packed(chosen, 8)
        assert self.native.last_access(blocks, 8, scope=scope) == self.oracle.last_access(blocks, 8, scope=scope)

    @rule(page_blocks=st.integers(1, 3000))
    def dump(self, page_blocks: int) -> None:
        assert dump_all(self.native, page_blocks) == dump_all(self.oracle, 100_000)  # type: ignore[arg-type]

    @rule()
    def subtract_sketches(self) -> None:
        assert self.sketch.difference(self.oracle_sketch.encode()) == (b"", b"")

    @invariant()
    def figures_agree(self) -> None:
        ours, theirs = self.native.stats(), self.oracle.stats()
        assert (ours[0], ours.sets, ours.holders) == (theirs[0], theirs.sets, theirs.holders)
        for holder in (0, 70_000, 2**24 - 1):
            assert self.native.holder_blocks(holder) == self.oracle.holder_blocks(holder)

    def teardown(self) -> None:
        if not hasattr(self, "native"):
            return
        for scope in (0, 1, 2**64 - 1):
            ours = self.native.lookup(POOL[16], 16, scope=scope)
            assert ours == self.oracle.lookup(POOL[16], 16, scope=scope)
        assert self.sketch.encode() == self.oracle_sketch.encode()


def _unseen(prefix: Lookup, sparse: Lookup) -> bool:
    """Whether the prefix claims something else than what stands there; asserts that the ends of each run are true."""
    truth = {start + i: held for start, count, held in runs_of(sparse) for i in range(count)}
    unseen = False
    for start, count, held in runs_of(prefix):
        assert truth.get(start) == held
        assert truth.get(start + count - 1) == held
        unseen |= any(truth.get(at) != held for at in range(start, start + count))
    return unseen


IndexModel.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
test_native_and_oracle_agree_after_any_sequence_of_calls = IndexModel.TestCase


def test_a_table_that_grows_from_one_page_keeps_every_block_at_every_size() -> None:
    index, oracle = Index(seed=9), ReferenceIndex(seed=9)
    for start in range(0, 4000, 40):
        blocks = packed(list(range(start, start + 40)), 16)
        for each in (index, oracle):
            each.store(blocks, 16, scope=0, holder=start % 4, now_s=start)
        if start % 200 == 0:
            assert index.lookup(POOL[16], 16, scope=0) == oracle.lookup(POOL[16], 16, scope=0)
            assert dump_all(index, 333) == dump_all(oracle, 10_000)  # type: ignore[arg-type]
    seen = struct.unpack("<4000I", index.last_access(POOL[16], 16, scope=0))
    assert seen == tuple(number // 40 * 40 for number in EVERYTHING)

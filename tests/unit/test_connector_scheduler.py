"""The scheduler half of vLLM's connector: offers, their limits, what a failed load costs, and blocks that are held."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvdir.fingerprint import Fingerprints
from kvdir.namespace import Namespace, StateGroup
from kvdir.testing.clock import ManualClock
from peer_agent.connectors.vllm.connector_scheduler import Lately, Options, SchedulerHalf
from peer_agent.connectors.vllm.connector_values import CacheGroup, StepReport

BLOCK = 32
WINDOW = 64


def namespace(**group: Any) -> Namespace:
    state = StateGroup(**({"kind": "full", "layers": 1, "kv_heads": 1, "head_dim": 8} | group))
    return Namespace.create(
        model="m", weights="w", kv_dtype="float32", layout="l", block_tokens=BLOCK, groups=(state,), position="none",
        parallel="replicated", adapter="none", hash_scheme="vllm:sha256", hash_seed="builtin", cache_policy="exact",
    )  # fmt: skip


def group(hashes_per_block: int = 1, **state: Any) -> CacheGroup:
    made = namespace(**state)
    return CacheGroup(state=made.groups[0], namespaces=(made,), block_tokens=BLOCK, hashes_per_block=hashes_per_block)


FULL = group()
SLIDING = group(kind="sliding_window", window_tokens=WINDOW)


def hashes(count: int, seed: int = 0) -> list[bytes]:
    return [bytes([seed, number]) * 16 for number in range(count)]


class Cluster:
    """A directory that knows which blocks there are. silent: no answer yet."""

    def __init__(self) -> None:
        self.held: list[set[bytes]] = [set(), set()]
        self.silent = False
        self.questions = 0

    def ask(self, request_id: str, wanted: Sequence[Fingerprints]) -> list[Any] | None:
        self.questions += 1
        if self.silent:
            return None
        return [np.array([name in held for name in group], np.bool_) for group, held in zip(wanted, self.held, strict=False)]

    def forget(self, request_id: str) -> None:
        pass


class Bench:
    def __init__(self, *groups: CacheGroup, **options: Any) -> None:
        self.clock = ManualClock()
        self.cluster = Cluster()
        self.held: Counter[int] = Counter()
        self.half = SchedulerHalf(
            groups or (FULL,), self.cluster, block_tokens=BLOCK, hold=self.held.update, release=self.held.subtract,
            clock_s=self.clock, options=Options(**options),
        )  # fmt: skip

    def load(self, request_id: str, names: list[bytes], *, tokens: int, computed: int = 0) -> Any:
        """Offer, allocation and step of one request; the job, or None."""
        offer = self.half.matched(request_id, names, tokens=tokens, computed=computed)
        if offer:
            ids = [range(1, 1 + len(names))] * len(self.half._groups)
            self.half.allocated(request_id, names, ids, external_tokens=offer)
        return next(iter(self.half.plan(()).loads), None)

    def end(self, request_id: str, *, failed: bool = False, silent: bool = False) -> None:
        report = StepReport(failed={request_id} if failed else set(), silent=int(silent))
        self.half.ended(report, loaded=[request_id])


def test_offer_ends_before_the_last_token_when_everything_is_there():
    bench, names = Bench(), hashes(4)
    bench.cluster.held[0] = set(names)
    assert bench.half.matched("a", names, tokens=4 * BLOCK, computed=0) == 3 * BLOCK
    assert bench.half.matched("b", names, tokens=4 * BLOCK + 1, computed=0) == 4 * BLOCK


def test_offer_begins_behind_what_is_computed_when_the_engine_has_a_prefix():
    bench, names = Bench(), hashes(4)
    bench.cluster.held[0] = set(names[2:])
    job = bench.load("a", names, tokens=4 * BLOCK + 1, computed=2 * BLOCK)
    assert list(job.groups[0].fingerprints) == names[2:]
    assert job.groups[0].block_ids == (3, 4)


def test_nothing_is_offered_when_the_first_block_is_missing_or_computed_is_inside_a_block():
    bench, names = Bench(), hashes(4)
    bench.cluster.held[0] = set(names[1:])
    assert bench.half.matched("a", names, tokens=200, computed=0) == 0
    assert bench.half.matched("b", names, tokens=200, computed=BLOCK + 1) == 0


def test_window_needs_only_its_last_blocks_when_the_rest_is_full_attention():
    bench, names = Bench(FULL, SLIDING), hashes(6)
    bench.cluster.held = [set(names), {names[3], names[4]}]
    assert bench.half.matched("a", names, tokens=6 * BLOCK + 1, computed=0) == 5 * BLOCK
    bench.cluster.held[1] = {names[4]}
    assert bench.half.matched("b", names, tokens=6 * BLOCK + 1, computed=0) == 0


def test_blocks_outside_the_window_are_not_loaded_when_the_engine_has_no_page_for_them():
    bench, names = Bench(FULL, SLIDING), hashes(4)
    bench.cluster.held = [set(names), set(names)]
    assert bench.half.matched("a", names, tokens=4 * BLOCK + 1, computed=0) == 4 * BLOCK
    bench.half.allocated("a", names, ([1, 2, 3, 4], [0, 0, 7, 8]), external_tokens=4 * BLOCK)
    (job,) = bench.half.plan(()).loads
    assert [blocks.block_ids for blocks in job.groups] == [(1, 2, 3, 4), (7, 8)]
    assert list(job.groups[1].fingerprints) == names[2:]


def test_engine_is_told_to_ask_again_when_nobody_has_answered():
    bench, names = Bench(), hashes(4)
    bench.cluster.silent = True
    assert bench.half.matched("a", names, tokens=200, computed=0) is None


def test_answer_is_not_asked_for_again_when_the_request_could_not_be_admitted_at_once():
    bench, names = Bench(), hashes(4)
    for _ in range(5):
        bench.half.matched("a", names, tokens=200, computed=0)
    assert bench.cluster.questions == 1
    bench.clock.advance(1)
    bench.half.matched("a", names, tokens=200, computed=0)
    assert bench.cluster.questions == 2


def test_request_is_offered_nothing_more_when_its_load_has_failed():
    bench, names = Bench(), hashes(4)
    bench.cluster.held[0] = set(names)
    bench.load("a", names, tokens=200)
    bench.end("a", failed=True)
    assert bench.half.matched("a", names, tokens=200, computed=0) == 0
    assert bench.half.matched("b", names, tokens=200, computed=0) == 4 * BLOCK


def test_nobody_is_offered_anything_for_a_while_when_a_load_got_no_answer():
    bench, names = Bench(), hashes(4)
    bench.cluster.held[0] = set(names)
    bench.load("a", names, tokens=200)
    bench.end("a", failed=True, silent=True)
    assert bench.half.matched("b", names, tokens=200, computed=0) == 0
    bench.clock.advance(2)
    assert bench.half.matched("b", names, tokens=200, computed=0) == 4 * BLOCK


def test_second_request_waits_when_the_first_is_loading_the_same_blocks():
    bench, names = Bench(twin_wait_s=0.5), hashes(4)
    bench.cluster.held[0] = set(names)
    bench.load("a", names, tokens=200)
    assert bench.half.matched("b", names, tokens=200, computed=0) is None
    bench.end("a")
    assert bench.half.matched("b", names, tokens=200, computed=4 * BLOCK) == 0


def test_second_request_computes_when_the_first_takes_too_long():
    bench, names = Bench(twin_wait_s=0.5), hashes(4)
    bench.cluster.held[0] = set(names)
    bench.load("a", names, tokens=200)
    assert bench.half.matched("b", names, tokens=200, computed=0) is None
    bench.clock.advance(0.6)
    assert bench.half.matched("b", names, tokens=200, computed=0) == 0


def test_request_waits_no_longer_when_it_waits_for_one_load_after_another():
    bench, names = Bench(twin_wait_s=0.5), hashes(4)
    bench.cluster.held[0] = set(names)
    bench.load("a", names[:2], tokens=2 * BLOCK + 1)
    bench.load("b", names, tokens=200, computed=2 * BLOCK)
    assert bench.half.matched("c", names, tokens=200, computed=0) is None
    bench.clock.advance(0.4)
    bench.end("a")
    assert bench.half.matched("c", names, tokens=200, computed=2 * BLOCK) is None
    bench.clock.advance(0.2)
    assert bench.half.matched("c", names, tokens=200, computed=2 * BLOCK) == 0


def test_second_request_computes_when_the_load_it_waited_for_has_failed():
    bench, names = Bench(), hashes(4)
    bench.cluster.held[0] = set(names)
    bench.load("a", names, tokens=200)
    assert bench.half.matched("b", names, tokens=200, computed=0) is None
    bench.half.ended(StepReport(failed={"a"}), loaded=())  # one worker of several
    bench.half.ended(StepReport(), loaded=["a"])
    assert bench.half.matched("b", names, tokens=200, computed=0) == 0
    assert bench.half.matched("c", names, tokens=200, computed=0) == 4 * BLOCK


def test_full_blocks_are_held_until_every_worker_has_saved_them():
    bench, names = Bench(workers=2), hashes(3)
    job = bench.half.save("a", names, lambda: [[5, 6, 7, 8]], computed_tokens=3 * BLOCK + 7)
    assert job.groups[0].block_ids == (5, 6, 7)
    assert bench.held == Counter((5, 6, 7))
    assert bench.half.busy
    bench.half.ended(StepReport(saved=Counter({job.number: 1})), loaded=())
    assert bench.held[5] == 1
    bench.half.ended(StepReport(saved=Counter({job.number: 1})), loaded=())
    assert not +bench.held
    assert not bench.half.busy
    assert bench.half.held_blocks == 0


def test_only_blocks_whose_saves_have_just_begun_are_worth_waiting_for():
    bench = Bench()
    bench.half.save("a", hashes(2), lambda: [[5, 6]], computed_tokens=2 * BLOCK)
    assert list(bench.half.just_held()) == [5, 6]
    bench.clock.advance(0.1)
    assert not list(bench.half.just_held())


def test_block_is_saved_once_when_several_requests_fill_it():
    bench, names = Bench(), hashes(3)
    assert bench.half.save("a", names, lambda: [[5, 6, 7]], computed_tokens=3 * BLOCK)
    assert bench.half.save("b", [*names, *hashes(1, 9)], lambda: [[5, 6, 7, 8]], computed_tokens=4 * BLOCK).groups[
        0
    ].block_ids == (8,)


def test_block_is_offered_to_the_agent_again_when_it_may_have_been_evicted():
    bench, names = Bench(), hashes(1)
    assert bench.half.save("a", names, lambda: [[5]], computed_tokens=BLOCK)
    assert bench.half.save("b", names, lambda: [[5]], computed_tokens=BLOCK) is None
    bench.clock.advance(61)
    assert bench.half.save("c", names, lambda: [[5]], computed_tokens=BLOCK)


def test_block_table_is_not_asked_for_when_no_block_became_full():
    bench, names = Bench(), hashes(1)
    assert bench.half.save("a", names, lambda: [[5, 6]], computed_tokens=BLOCK)
    assert bench.half.save("a", names, lambda: pytest.fail("asked for"), computed_tokens=BLOCK + 9) is None


def test_blocks_stay_unsaved_and_come_later_when_too_many_are_held():
    bench, names = Bench(held_most=2), hashes(3)
    first = bench.half.save("a", names, lambda: [[5, 6, 7]], computed_tokens=3 * BLOCK)
    assert first.groups[0].block_ids == (5, 6)
    assert bench.half.save("a", names, lambda: [[5, 6, 7]], computed_tokens=3 * BLOCK) is None
    bench.half.ended(StepReport(saved=Counter({first.number: 1})), loaded=())
    assert bench.half.save("a", names, lambda: [[5, 6, 7]], computed_tokens=3 * BLOCK).groups[0].block_ids == (7,)


def test_loaded_blocks_are_not_saved_when_the_load_brought_them():
    bench, names = Bench(), hashes(4)
    bench.cluster.held[0] = set(names[:3])
    bench.load("a", names, tokens=4 * BLOCK)
    bench.end("a")
    assert bench.half.save("a", names, lambda: [[1, 2, 3, 4]], computed_tokens=4 * BLOCK).groups[0].block_ids == (4,)


def test_recomputed_blocks_are_saved_when_the_load_failed():
    bench, names = Bench(), hashes(4)
    bench.cluster.held[0] = set(names[:3])
    bench.load("a", names, tokens=4 * BLOCK)
    bench.end("a", failed=True)
    assert bench.half.save("a", names, lambda: [[1, 2, 3, 4]], computed_tokens=4 * BLOCK).groups[0].block_ids == (1, 2, 3, 4)


def test_blocks_are_saved_by_the_next_request_when_the_load_failed_after_its_own_was_aborted():
    bench, names = Bench(), hashes(4)
    bench.cluster.held[0] = set(names[:3])
    bench.load("a", names, tokens=4 * BLOCK)
    bench.half.finished("a")
    bench.end("a", failed=True)
    assert bench.half.save("b", names, lambda: [[1, 2, 3, 4]], computed_tokens=4 * BLOCK).groups[0].block_ids == (1, 2, 3, 4)
    assert not bench.half._failing


@pytest.mark.parametrize(("options", "loads", "saves"), [({"loads": False}, False, True), ({"saves": False}, True, False)])
def test_role_says_whether_blocks_are_offered_or_saved(options: dict[str, bool], loads: bool, saves: bool):
    bench, names = Bench(**options), hashes(4)
    bench.cluster.held[0] = set(names)
    assert bool(bench.half.matched("a", names, tokens=200, computed=0)) == loads
    assert (bench.half.save("a", names, lambda: [[1, 2, 3, 4]], computed_tokens=128) is not None) == saves


def test_nothing_is_offered_or_saved_any_more_when_the_cache_was_reset():
    bench, names = Bench(), hashes(4)
    bench.cluster.held[0] = set(names)
    bench.half.stop()
    assert bench.half.matched("a", names, tokens=200, computed=0) == 0
    assert bench.half.save("a", names, lambda: [[1, 2, 3, 4]], computed_tokens=128) is None


def test_wide_blocks_are_named_by_their_last_hash_when_hashes_cover_less():
    bench, names = Bench(group(hashes_per_block=2)), hashes(5)
    bench.cluster.held[0] = {names[1], names[3]}
    job = bench.load("a", names, tokens=3 * BLOCK)
    assert list(job.groups[0].fingerprints) == [names[1], names[3]]


def test_memory_of_offers_is_bounded_when_there_is_no_end_of_them():
    lately = Lately(10.0, 100)
    assert not any(lately.seen(number.to_bytes(4, "big"), 0.0) for number in range(10_000))
    assert len(lately._new) + len(lately._old) <= 201

"""Who is asked for what, who serves what, and what a block's result is."""

from __future__ import annotations

import struct
from collections.abc import Iterable

from kvdir.location import NodeTrust, StreamState, Tier
from peer_agent.core.cost import Recompute
from peer_agent.core.effects import LoadStatus
from peer_agent.core.figures import PathFigures
from peer_agent.core.nominees import Claim, PeerFigures, claims
from peer_agent.core.orders import BACKGROUND_LIMITS, Ask, Fetch, Limits, Outcome, Terms
from peer_agent.core.plan import ReadPlan
from peer_agent.core.sources import Verdict

BLOCK = 256 << 10
FAST = PeerFigures(path=PathFigures(latency_s=1e-3, bytes_per_s=1e9, round_trip_s=1e-3, reads=9.0), connected=True)
SLOW = PeerFigures(path=PathFigures(latency_s=1e-3, bytes_per_s=1e8, round_trip_s=1e-3, reads=9.0), connected=True)
ONE_EACH = Limits(parallel_asks=1)


def node(name: str, state: StreamState = StreamState.SYNCED) -> NodeTrust:
    return NodeTrust(node=name, epoch=7, state=state, reason="", age_s=0.0, missing_events=0, peer_address=f"{name}:1")


def claim(name: str, positions: Iterable[int], state: StreamState = StreamState.SYNCED) -> Claim:
    return Claim.of(node(name, state), positions)


def plan_of(
    count: int,
    *found: Claim,
    local: Iterable[int] = (),
    figures: dict[str, PeerFigures] | None = None,
    deadline_s: float = 1.0,
    recompute: Recompute | None = None,
    limits: Limits | None = None,
) -> ReadPlan:
    terms = Terms(
        block_bytes=BLOCK,
        began_s=0.0,
        deadline_s=deadline_s,
        recompute=recompute or Recompute(),
        limits=limits or Limits(),
    )
    plan = ReadPlan(count, terms)
    plan.hold(local, LoadStatus.HIT_LOCAL)
    known = figures or {}
    plan.nominate(found, me="me", figures=lambda name: known.get(name, FAST))
    return plan


def names(asks: Iterable[Ask]) -> list[str]:
    return [ask.node.node for ask in asks]


def statuses(plan: ReadPlan) -> list[LoadStatus]:
    return [LoadStatus(value) for value in plan.results]


def all_of(fetch: Fetch, outcome: Outcome) -> bytes:
    return bytes([outcome]) * len(fetch.positions)


def verdicts(plan: ReadPlan) -> dict[str, Verdict]:
    return {story.node: story.verdict for story in plan.explain().nominees}


# claims


def test_claims_come_from_runs_when_sets_share_nodes():
    runs = struct.pack("<6I", 0, 2, 0, 3, 1, 1)
    sets = [struct.pack("<2I", 0 << 8 | Tier.CPU, 1 << 8 | Tier.CPU), struct.pack("<I", 1 << 8 | Tier.CPU)]
    found = claims(runs, sets, [node("a"), node("b")])
    assert {claim.node.node: claim.positions.tolist() for claim in found} == {"a": [0, 1], "b": [0, 1, 3]}


def test_blocks_on_a_tier_that_agents_do_not_serve_are_no_claim():
    assert claims(struct.pack("<3I", 0, 2, 0), [struct.pack("<I", Tier.DISK)], [node("a")]) == []


# asks


def test_asks_for_the_whole_remaining_list_when_the_directory_claims_less():
    (ask,) = plan_of(4, claim("a", [1]), local=[0]).next_asks(0)
    assert (ask.positions, ask.claimed, ask.until_s) == ((1, 2, 3), 1, 1)


def test_all_who_cover_something_are_asked_at_once_when_claims_differ():
    assert sorted(names(plan_of(4, claim("a", [0]), claim("b", [1]), claim("c", [2, 3])).next_asks(0))) == ["a", "b", "c"]


def test_largest_claim_comes_first_and_gets_half_of_the_time_when_others_are_left():
    (ask,) = plan_of(4, claim("a", [1]), claim("b", [1, 2]), limits=ONE_EACH).next_asks(0)
    assert (ask.node.node, ask.until_s) == ("b", 0.5)


def test_a_second_owner_is_not_asked_when_it_would_save_nothing():
    plan = plan_of(2, claim("a", [0, 1]), claim("b", [0, 1]))
    assert names(plan.next_asks(0)) == ["a"]
    assert verdicts(plan)["b"] is Verdict.NOT_NEEDED


def test_a_second_owner_is_asked_when_two_end_clearly_earlier():
    assert names(plan_of(64, claim("a", range(64)), claim("b", range(64))).next_asks(0)) == ["a", "b"]


def test_a_second_owner_on_this_host_is_not_asked_because_it_would_end_nothing_earlier():
    near = PeerFigures(path=FAST.path, same_host=True, connected=True)
    two = [claim("a", range(64)), claim("b", range(64))]
    assert names(plan_of(64, *two, figures={"a": near, "b": near}).next_asks(0)) == ["a"]
    assert names(plan_of(64, *two, figures={"a": near}).next_asks(0)) == ["a", "b"]


def test_a_second_owner_is_asked_when_the_first_is_not_trusted():
    plan = plan_of(2, claim("a", [0, 1], StreamState.GAP), claim("b", [0, 1], StreamState.GAP))
    assert names(plan.next_asks(0)) == ["a", "b"]


def test_this_node_is_never_asked_when_the_directory_names_it():
    assert plan_of(2, claim("me", [0, 1])).next_asks(0) == ()


def test_trusted_and_near_come_first_when_claims_are_equal():
    near = PeerFigures(path=FAST.path, same_host=True, connected=True)
    plan = plan_of(
        2, claim("gap", [0, 1], StreamState.GAP), claim("far", [0, 1]), claim("near", [0, 1]),
        figures={"near": near}, limits=ONE_EACH,
    )  # fmt: skip
    order = []
    while asks := plan.next_asks(0):
        order += names(asks)
        plan.unreachable(asks[0], late=False, now_s=0)
    assert order == ["near", "far", "gap"]
    assert statuses(plan) == [LoadStatus.MISS] * 2


def test_the_next_owner_is_asked_when_an_answer_is_overdue():
    plan = plan_of(2, claim("a", [0, 1]), claim("b", [0, 1]))
    plan.next_asks(0)
    wake_s = plan.next_wake_s(0)
    assert plan.next_asks(wake_s / 2) == ()
    assert names(plan.next_asks(wake_s)) == ["b"]


def test_gaps_are_asked_of_an_untrusted_node_when_its_claims_are_covered():
    plan = plan_of(2, claim("a", [0]), claim("b", [0], StreamState.GAP))
    asks = plan.next_asks(0)
    assert [(ask.node.node, ask.positions, ask.claimed) for ask in asks] == [("a", (0, 1), 1), ("b", (0, 1), 1)]


def test_who_failed_and_is_due_again_comes_after_who_has_not_failed():
    """Or a few dead nodes use up the asks of every load, each time their pause is over."""
    failed = PeerFigures(path=FAST.path, skip_until_s=0.5)
    plan = plan_of(2, claim("a", [0, 1]), claim("b", [0]), figures={"a": failed, "b": SLOW}, limits=ONE_EACH)
    assert names(plan.next_asks(0.6)) == ["b"]


def test_not_asked_when_the_breaker_is_open():
    plan = plan_of(1, claim("a", [0]), figures={"a": PeerFigures(path=FAST.path, skip_until_s=0.5)})
    assert plan.next_asks(0) == ()
    assert verdicts(plan) == {"a": Verdict.BREAKER}
    assert names(plan.next_asks(0.6)) == ["a"]


def test_late_when_the_time_left_is_below_the_first_byte():
    plan = plan_of(2, claim("a", [0]), deadline_s=1e-3)
    assert plan.next_asks(0) == ()
    assert statuses(plan) == [LoadStatus.LATE, LoadStatus.MISS]
    assert verdicts(plan) == {"a": Verdict.NO_TIME}


def test_stops_when_enough_nominees_were_asked():
    plan = plan_of(1, *(claim(name, [0]) for name in "abcd"), limits=Limits(max_asks=2, parallel_asks=1))
    asked = 0
    while asks := plan.next_asks(0):
        plan.unreachable(asks[0], late=True, now_s=0)
        asked += len(asks)
    assert asked == 2
    assert statuses(plan) == [LoadStatus.LATE]
    assert list(verdicts(plan).values()).count(Verdict.TOO_MANY) == 2


# answers and outcomes


def test_claimed_and_absent_is_stale_when_nobody_else_has_it():
    plan = plan_of(3, claim("a", [0, 1]))
    (ask,) = plan.next_asks(0)
    assert plan.answered(ask, [1, 2], now_s=0) == (0,)
    assert plan.next_asks(0) == ()
    (fetch,) = plan.next_fetches(0)
    assert fetch.positions == (1, 2)
    plan.fetched(fetch, all_of(fetch, Outcome.HERE), now_s=0)
    assert statuses(plan) == [LoadStatus.STALE, LoadStatus.HIT_PEER, LoadStatus.HIT_PEER]
    assert plan.idle
    assert plan.next_asks(0) == ()
    assert plan.next_fetches(0) == ()


def test_another_holder_is_asked_when_the_first_turns_out_to_be_stale():
    plan = plan_of(1, claim("a", [0]), claim("b", [0]))
    (ask,) = plan.next_asks(0)
    plan.answered(ask, [], now_s=0)
    assert names(plan.next_asks(0)) == ["b"]


def test_corrupt_is_tried_once_more_at_the_same_node_when_nobody_else_has_it():
    plan = plan_of(1, claim("a", [0]))
    (ask,) = plan.next_asks(0)
    plan.answered(ask, [0], now_s=0)
    for _ in range(2):
        assert plan.next_asks(0) == ()
        (fetch,) = plan.next_fetches(0)
        plan.fetched(fetch, all_of(fetch, Outcome.CORRUPT), now_s=0)
    assert plan.next_asks(0) == ()
    assert plan.next_fetches(0) == ()
    assert statuses(plan) == [LoadStatus.CORRUPT]


def test_corrupt_is_tried_elsewhere_when_somebody_else_has_it():
    plan = plan_of(1, claim("a", [0]), claim("b", [0]))
    (ask,) = plan.next_asks(0)
    plan.answered(ask, [0], now_s=0)
    (fetch,) = plan.next_fetches(0)
    plan.fetched(fetch, all_of(fetch, Outcome.CORRUPT), now_s=0)
    (other,) = plan.next_asks(0)
    assert other.node.node == "b"
    assert plan.next_fetches(0) == ()
    plan.answered(other, [0], now_s=0)
    plan.next_asks(0)
    (again,) = plan.next_fetches(0)
    assert again.ask == other


def test_a_block_that_is_written_here_is_set_aside_until_it_is_released():
    plan = plan_of(1, claim("a", [0]))
    (ask,) = plan.next_asks(0)
    plan.answered(ask, [0], now_s=0)
    (fetch,) = plan.next_fetches(0)
    plan.fetched(fetch, all_of(fetch, Outcome.BUSY), now_s=0)
    assert plan.set_aside == (0,)
    assert plan.next_fetches(0) == ()
    plan.released([0])
    (again,) = plan.next_fetches(0)
    assert again.positions == (0,)


def test_the_rest_goes_to_others_when_a_source_is_lost():
    plan = plan_of(64, claim("a", range(64)), claim("b", range(64)))
    asks = plan.next_asks(0)
    for ask in asks:
        plan.answered(ask, range(64), now_s=0)
    fetches = plan.next_fetches(0)
    plan.lost(asks[0])
    for fetch in fetches:
        plan.fetched(fetch, all_of(fetch, Outcome.LOST if fetch.ask == asks[0] else Outcome.HERE), now_s=0.01)
    while fetches := plan.next_fetches(0.01):
        assert {fetch.ask for fetch in fetches} == {asks[1]}
        for fetch in fetches:
            plan.fetched(fetch, all_of(fetch, Outcome.HERE), now_s=0.01)
    assert set(statuses(plan)) == {LoadStatus.HIT_PEER}
    assert verdicts(plan) == {"a": Verdict.LOST, "b": Verdict.ANSWERED}


def test_a_hit_is_final_when_later_news_are_bad():
    plan = plan_of(1, claim("a", [0]))
    plan.hold([0], LoadStatus.HIT_PEER)
    plan.out_of_time()
    assert statuses(plan) == [LoadStatus.HIT_PEER]


def test_a_block_without_a_slot_is_not_tried_again():
    plan = plan_of(2, claim("a", [0, 1]))
    (ask,) = plan.next_asks(0)
    plan.answered(ask, [0, 1], now_s=0)
    (fetch,) = plan.next_fetches(0)
    plan.fetched(fetch, bytes([Outcome.NO_ROOM, Outcome.HERE]), now_s=0)
    assert plan.next_fetches(0) == ()
    assert plan.over(0)
    assert statuses(plan) == [LoadStatus.MISS, LoadStatus.HIT_PEER]


def test_bytes_that_did_not_arrive_do_not_count_against_the_budget():
    plan = plan_of(4, claim("a", range(4)), limits=Limits(max_read_bytes=2 * BLOCK))
    (ask,) = plan.next_asks(0)
    plan.answered(ask, range(4), now_s=0)
    (first,) = plan.next_fetches(0)
    assert first.positions == (0, 1)
    plan.fetched(first, bytes([Outcome.STALE, Outcome.HERE]), now_s=0)
    (second,) = plan.next_fetches(0)
    assert second.positions == (2,)
    plan.fetched(second, all_of(second, Outcome.HERE), now_s=0)
    assert plan.next_fetches(0) == ()
    assert plan.explain().nominees[0].remark == "the load's byte budget was spent"


def test_nothing_is_planned_that_would_arrive_after_the_deadline():
    plan = plan_of(100, claim("a", range(100)), figures={"a": SLOW}, deadline_s=0.04)  # 2.6 ms a block
    (ask,) = plan.next_asks(0)
    plan.answered(ask, range(100), now_s=0.001)
    fetches = plan.next_fetches(0.001)
    assert 10 < sum(len(fetch.positions) for fetch in fetches) < 15
    assert fetches[0].positions[0] == 0, "the head first"
    plan.out_of_time()
    assert set(statuses(plan)) == {LoadStatus.LATE}


# hedges


def test_an_overdue_read_is_doubled_once_and_the_loser_is_named():
    plan = plan_of(64, claim("a", range(64)), claim("b", range(64)))
    first, second = plan.next_asks(0)
    plan.answered(first, range(64), now_s=0)
    plan.next_asks(0)
    stuck = plan.next_fetches(0)
    plan.answered(second, range(64), now_s=0)
    now_s = 0.0
    hedges: list[Fetch] = []
    while now_s < 0.9 and not hedges:
        for fetch in plan.next_fetches(now_s):
            if fetch.hedges is None:
                plan.fetched(fetch, all_of(fetch, Outcome.HERE), now_s=now_s)
            else:
                hedges.append(fetch)
        now_s = plan.next_wake_s(now_s)
    assert [hedge.hedges for hedge in hedges] == [stuck[0].number, stuck[1].number][: len(hedges)]
    assert hedges[0].ask == second
    needless = plan.fetched(hedges[0], all_of(hedges[0], Outcome.HERE), now_s=now_s)
    assert needless == (stuck[0],)
    assert plan.hedges_won == 1


def test_reads_made_twice_keep_their_own_budget():
    limits = Limits(fetches_per_source=1, min_chunk_bytes=BLOCK, max_chunk_bytes=BLOCK, hedge_share=2 / 64)
    plan = plan_of(64, *(claim(name, range(64)) for name in "abcd"), limits=limits)
    for ask in plan.next_asks(0):
        plan.answered(ask, range(64), now_s=0)
    *stuck, last = plan.next_fetches(0)
    assert len(stuck) == 3
    plan.fetched(last, all_of(last, Outcome.HERE), now_s=0.5)
    while fetches := plan.next_fetches(0.5):
        for fetch in fetches:
            plan.fetched(fetch, all_of(fetch, Outcome.HERE), now_s=0.5)
    assert plan.hedges == plan.hedges_won == 2
    assert plan.results.count(LoadStatus.HIT_PEER) == 63


def test_a_background_read_is_never_made_twice():
    plan = plan_of(8, *(claim(name, range(8), StreamState.GAP) for name in "ab"), limits=BACKGROUND_LIMITS)
    for ask in plan.next_asks(0):
        plan.answered(ask, range(8), now_s=0)
    stuck, *others = plan.next_fetches(0)
    for fetch in others:
        plan.fetched(fetch, all_of(fetch, Outcome.HERE), now_s=0.5)
    assert stuck in plan.overdue(0.5)
    assert all(fetch.hedges is None for fetch in plan.next_fetches(0.5))


def test_an_overdue_read_is_told_again_when_it_has_taken_twice_as_long():
    plan = plan_of(1, claim("a", [0]))
    (ask,) = plan.next_asks(0)
    plan.answered(ask, [0], now_s=0)
    (fetch,) = plan.next_fetches(0)
    due_s = plan.next_wake_s(0)
    assert plan.overdue(due_s / 2) == ()
    assert plan.overdue(due_s) == (fetch,)
    assert plan.overdue(due_s) == ()
    assert plan.next_wake_s(due_s) == 2 * due_s
    assert plan.overdue(2 * due_s) == (fetch,)
    plan.overdue(0.6)
    assert plan.next_wake_s(0.6) == 1.0, "never after the deadline"


# cost


def test_a_short_prefix_over_a_slow_path_is_not_fetched():
    price = Recompute(block_tokens=16, prefill_tokens_per_s=20_000)  # 0.8 ms a block
    plan = plan_of(4, claim("a", range(4)), figures={"a": SLOW}, recompute=price)
    assert plan.next_asks(0) == ()
    assert statuses(plan) == [LoadStatus.SKIPPED] * 4
    assert verdicts(plan) == {"a": Verdict.NOT_WORTH}


def test_the_same_prefix_is_fetched_when_the_engine_is_slow():
    price = Recompute(block_tokens=16, prefill_tokens_per_s=500)  # 32 ms a block
    assert names(plan_of(4, claim("a", range(4)), figures={"a": SLOW}, recompute=price).next_asks(0)) == ["a"]


def test_the_head_is_fetched_and_the_tail_skipped_when_only_a_slow_node_has_the_tail():
    price = Recompute(block_tokens=16, prefill_tokens_per_s=16_000)  # 1 ms a block; 0.3 ms from a, 2.6 ms from b
    plan = plan_of(16, claim("a", range(8)), claim("b", range(16)), figures={"b": SLOW}, recompute=price)
    (ask,) = plan.next_asks(0)
    assert ask.node.node == "a"
    plan.answered(ask, range(8), now_s=0)
    (fetch,) = plan.next_fetches(0)
    plan.fetched(fetch, all_of(fetch, Outcome.HERE), now_s=0.01)
    assert plan.next_asks(0.01) == ()
    assert statuses(plan) == [LoadStatus.HIT_PEER] * 8 + [LoadStatus.SKIPPED] * 8

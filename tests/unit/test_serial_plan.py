"""Who is asked for what, and what a block's result is."""

from __future__ import annotations

import struct

from kvdir.location import NodeTrust, StreamState, Tier
from peer_agent.core.effects import LoadStatus
from peer_agent.core.serial_plan import Claim, PeerFigures, ReadPlan, claims


def node(name: str, state: StreamState = StreamState.SYNCED) -> NodeTrust:
    return NodeTrust(node=name, epoch=7, state=state, reason="", age_s=0.0, missing_events=0, peer_address=f"{name}:1")


def plan_of(count: int, *found: Claim, local: tuple[int, ...] = (), figures: dict[str, PeerFigures] | None = None) -> ReadPlan:
    plan = ReadPlan(count)
    plan.hold(local, LoadStatus.HIT_LOCAL)
    plan.nominate(found, me="me", figures=figures or {})
    return plan


def statuses(plan: ReadPlan) -> list[LoadStatus]:
    return [LoadStatus(value) for value in plan.results]


def test_claims_come_from_runs_when_sets_share_nodes():
    runs = struct.pack("<6I", 0, 2, 0, 3, 1, 1)
    sets = [struct.pack("<2I", 0 << 8 | Tier.CPU, 1 << 8 | Tier.CPU), struct.pack("<I", 1 << 8 | Tier.CPU)]
    found = claims(runs, sets, [node("a"), node("b")])
    assert {claim.node.node: claim.positions for claim in found} == {"a": {0, 1}, "b": {0, 1, 3}}


def test_blocks_on_a_tier_that_agents_do_not_serve_are_no_claim():
    assert claims(struct.pack("<3I", 0, 2, 0), [struct.pack("<I", Tier.GPU)], [node("a")]) == []


def test_asks_for_the_whole_remaining_list_when_the_directory_claims_less():
    plan = plan_of(4, Claim(node("a"), frozenset({1})), local=(0,))
    ask = plan.next_ask(now_s=0, deadline_s=1)
    assert ask is not None
    assert ask.positions == (1, 2, 3)
    assert ask.claimed == {1}
    assert ask.until_s == 1


def test_largest_claim_comes_first_and_gets_half_of_the_time_when_others_are_left():
    plan = plan_of(4, Claim(node("a"), frozenset({1})), Claim(node("b"), frozenset({1, 2})))
    ask = plan.next_ask(now_s=10, deadline_s=12)
    assert ask is not None
    assert (ask.node.node, ask.until_s) == ("b", 11)


def test_this_node_is_never_nominated_when_the_directory_names_it():
    assert plan_of(2, Claim(node("me"), frozenset({0, 1}))).next_ask(now_s=0, deadline_s=1) is None


def test_trusted_and_near_come_first_when_claims_are_equal():
    positions = frozenset({0, 1})
    far, near = Claim(node("far"), positions), Claim(node("near"), positions)
    gap = Claim(node("gap", StreamState.GAP), positions)
    plan = plan_of(2, gap, far, near, figures={"near": PeerFigures(same_host=True)})
    order = []
    while ask := plan.next_ask(now_s=0, deadline_s=1):
        order.append(ask.node.node)
        plan.unreachable(ask, late=False)
    assert order == ["near", "far", "gap"]
    assert statuses(plan) == [LoadStatus.MISS] * 2


def test_claimed_and_absent_is_stale_when_nobody_else_has_it():
    plan = plan_of(3, Claim(node("a"), frozenset({0, 1})))
    ask = plan.next_ask(now_s=0, deadline_s=1)
    assert ask is not None
    assert plan.answered(ask, {1, 2}) == (0,)
    plan.read(ask, {1: LoadStatus.HIT_PEER, 2: LoadStatus.HIT_PEER})
    assert statuses(plan) == [LoadStatus.STALE, LoadStatus.HIT_PEER, LoadStatus.HIT_PEER]
    assert plan.next_ask(now_s=0, deadline_s=1) is None


def test_gaps_are_asked_of_an_untrusted_node_when_its_claims_are_served():
    trusted, lossy = Claim(node("a"), frozenset({0})), Claim(node("b", StreamState.GAP), frozenset({0}))
    plan = plan_of(2, trusted, lossy)
    ask = plan.next_ask(now_s=0, deadline_s=1)
    assert ask is not None
    plan.answered(ask, {0})
    plan.read(ask, {0: LoadStatus.HIT_PEER})
    again = plan.next_ask(now_s=0, deadline_s=1)
    assert again is not None
    assert (again.node.node, again.positions, again.claimed) == ("b", (1,), frozenset())


def test_corrupt_is_tried_once_more_at_the_same_node_when_nobody_else_has_it():
    plan = plan_of(1, Claim(node("a"), frozenset({0})))
    for _ in range(2):
        ask = plan.next_ask(now_s=0, deadline_s=1)
        assert ask is not None
        plan.answered(ask, {0})
        plan.read(ask, {0: LoadStatus.CORRUPT})
    assert plan.next_ask(now_s=0, deadline_s=1) is None
    assert statuses(plan) == [LoadStatus.CORRUPT]


def test_late_when_the_time_left_is_below_the_round_trip():
    plan = plan_of(2, Claim(node("a"), frozenset({0})), figures={"a": PeerFigures(round_trip_s=0.5)})
    assert plan.next_ask(now_s=0, deadline_s=0.4) is None
    assert statuses(plan) == [LoadStatus.LATE, LoadStatus.MISS]


def test_skipped_when_the_breaker_is_open():
    plan = plan_of(1, Claim(node("a"), frozenset({0})), figures={"a": PeerFigures(skip_until_s=5)})
    assert plan.next_ask(now_s=0, deadline_s=1) is None
    assert plan.next_ask(now_s=6, deadline_s=7) is not None


def test_stops_when_enough_nominees_were_asked():
    plan = ReadPlan(1, max_nominees=2)
    plan.nominate([Claim(node(name), frozenset({0})) for name in "abcd"], me="me", figures={})
    asked = 0
    while ask := plan.next_ask(now_s=0, deadline_s=1):
        plan.unreachable(ask, late=True)
        asked += 1
    assert asked == 2
    assert statuses(plan) == [LoadStatus.LATE]


def test_a_hit_is_final_when_later_news_are_bad():
    plan = plan_of(1, Claim(node("a"), frozenset({0})))
    plan.hold([0], LoadStatus.HIT_PEER)
    plan.out_of_time()
    assert statuses(plan) == [LoadStatus.HIT_PEER]

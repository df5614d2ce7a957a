"""Whole loads over simulated peers: what is promised whatever the peers do, and how near to the optimum it is."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdir.location import StreamState
from peer_agent.core.cost import Recompute
from peer_agent.core.effects import LoadStatus
from peer_agent.core.figures import Figures
from peer_agent.core.orders import Outcome
from peer_agent.core.schedule import Priority
from peer_agent.testing.simulated_peers import PLANE, SimulatedLoad, SimulatedPeer, SimulatedPeers

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
BLOCKS = 256


def peer(name: str, *, blocks: Iterable[int] = range(BLOCKS), **terms: object) -> SimulatedPeer:
    held = frozenset(blocks)
    return SimulatedPeer(name=name, **({"claims": held, "holds": held} | terms))  # type: ignore[arg-type]


def measured(*peers: SimulatedPeer) -> Figures:
    """Figures of someone who has read from these peers before."""
    figures = Figures()
    for owner in peers:
        for size_bytes in (64 * KIB, MIB, 8 * MIB) * 5:
            took_s = owner.latency_s + size_bytes / owner.bytes_per_s
            figures.observe(owner.name, PLANE, size_bytes=size_bytes, took_s=took_s, queued_bytes=0, now_s=0.0)
            figures.observe_lock(owner.name, took_s=owner.round_trip_s, now_s=0.0)
    return figures


def one_load(*peers: SimulatedPeer, block_bytes: int = 256 * KIB, known: bool = True, **terms: object) -> SimulatedLoad:
    world = SimulatedPeers(peers, figures=measured(*peers) if known else None)
    load = world.load(BLOCKS, block_bytes=block_bytes, **terms)  # type: ignore[arg-type]
    world.run()
    return load


# speed


def test_four_equal_owners_take_a_quarter_of_the_time_of_one():
    alone = one_load(peer("a"))
    four = one_load(*(peer(name) for name in "abcd"))
    assert four.statuses[LoadStatus.HIT_PEER] == BLOCKS
    assert four.took_s < 0.30 * alone.took_s


@pytest.mark.parametrize("known", [True, False], ids=["measured", "unmeasured"])
def test_near_the_optimal_split_when_one_owner_is_ten_times_slower(known: bool):
    peers = [peer(name) for name in "abc"] + [peer("slow", bytes_per_s=1e8)]
    load = one_load(*peers, known=known)
    optimum_s = BLOCKS * 256 * KIB / sum(owner.bytes_per_s for owner in peers)
    assert load.statuses[LoadStatus.HIT_PEER] == BLOCKS
    assert load.took_s < 1.3 * optimum_s + 4e-3  # the constant: connecting, locking, the first byte


def test_a_wrong_figure_costs_little_when_an_owner_is_slower_than_it_was():
    before = [peer("a"), peer("b")]
    now = [peer("a"), peer("b", bytes_per_s=2e8)]
    world = SimulatedPeers(now, figures=measured(*before))
    load = world.load(64, block_bytes=256 * KIB)
    world.run()
    assert load.statuses == {LoadStatus.HIT_PEER: 64}
    assert load.took_s < 1.75 * 64 * 256 * KIB / 1.2e9 + 4e-3


def test_near_the_optimal_split_when_owners_hold_overlapping_parts():
    peers = [peer("all"), peer("head", blocks=range(BLOCKS // 2)), peer("tail", blocks=range(BLOCKS * 3 // 4, BLOCKS))]
    load = one_load(*peers)
    assert load.statuses[LoadStatus.HIT_PEER] == BLOCKS
    assert load.took_s < 1.3 * BLOCKS * 256 * KIB / 3e9 + 4e-3


def test_the_slow_owner_alone_brings_what_only_it_holds():
    peers = [peer("fast", blocks=range(200)), peer("slow", blocks=range(BLOCKS), bytes_per_s=1e8)]
    load = one_load(*peers)
    assert load.statuses[LoadStatus.HIT_PEER] == BLOCKS
    assert load.took_s < 1.3 * (BLOCKS - 200) * 256 * KIB / 1e8 + 4e-3


def test_more_bytes_come_from_the_faster_owner():
    load = one_load(peer("fast"), peer("half", bytes_per_s=5e8))
    served = {story.node: story.served for story in load.plan.explain().nominees}
    assert 1.5 < served["fast"] / served["half"] < 2.7


# trouble


def test_hedging_bounds_the_tail_when_an_owner_falls_silent_in_mid_read():
    healthy = one_load(peer("a"), peer("b"))
    load = one_load(peer("a"), peer("b", silent=(healthy.took_s / 2, math.inf)))
    assert load.statuses[LoadStatus.HIT_PEER] == BLOCKS
    assert load.plan.hedges_won > 0
    assert load.took_s < 6 * healthy.took_s


def test_an_owner_that_nobody_asked_yet_helps_when_the_only_one_falls_silent():
    small = {"block_bytes": 4 * KIB}  # too little for a second owner to be worth a lock
    healthy = one_load(peer("a"), peer("b"), **small)
    load = one_load(peer("a", silent=(healthy.took_s * 0.8, math.inf)), peer("b"), **small)
    assert load.statuses[LoadStatus.HIT_PEER] == BLOCKS
    assert load.took_s < 0.1


def test_a_silent_owner_costs_no_more_than_its_own_blocks():
    load = one_load(
        peer("good", blocks=range(100)), peer("silent", blocks=range(100, BLOCKS), silent=(0, math.inf)), timeout_s=0.5
    )
    assert load.statuses == {LoadStatus.HIT_PEER: 100, LoadStatus.LATE: BLOCKS - 100}
    assert load.took_s <= 0.5


def test_a_silent_node_that_claims_nothing_more_is_not_waited_for():
    load = one_load(
        peer("good", blocks=range(100)),
        peer("gappy", blocks=range(50), state=StreamState.GAP, silent=(0, math.inf)),
    )
    assert load.statuses == {LoadStatus.HIT_PEER: 100, LoadStatus.MISS: BLOCKS - 100}
    assert load.took_s < 0.2


def test_blocks_nobody_claims_are_found_when_the_owner_lost_events():
    load = one_load(peer("gappy", claims=range(0, BLOCKS, 5), holds=range(BLOCKS), state=StreamState.GAP))
    assert load.statuses == {LoadStatus.HIT_PEER: BLOCKS}


def test_one_stopped_one_dead_and_two_good_owners_end_early():
    load = one_load(
        peer("stopped", silent=(0, math.inf)), peer("dead", lost_at_s=0.0), peer("c"), peer("d"), known=False, timeout_s=2.0
    )
    assert load.statuses == {LoadStatus.HIT_PEER: BLOCKS}
    assert load.took_s < 0.25


def test_an_owner_that_recovered_is_tried_again_when_its_figures_have_faded():
    owner = peer("a", bytes_per_s=1e6)
    price = Recompute(block_tokens=16, prefill_tokens_per_s=10_000)
    world = SimulatedPeers([owner], figures=measured(owner))
    early = world.load(BLOCKS, block_bytes=256 * KIB, recompute=price)
    world.run()
    owner.bytes_per_s = 1e9
    later = world.load(BLOCKS, block_bytes=256 * KIB, recompute=price, at_s=world.now_s + 300)
    world.run()
    assert early.statuses == {LoadStatus.SKIPPED: BLOCKS}
    assert later.statuses == {LoadStatus.HIT_PEER: BLOCKS}


# cost


@pytest.mark.parametrize(
    ("blocks", "bytes_per_s", "prefill", "fetched"),
    [
        (4, 1e8, 40_000, False),  # a short prefix over a slow path: 1.6 ms against 12 ms
        (4, 1e8, 2_000, True),  # the same, and an engine that needs 32 ms for it
        (BLOCKS, 1e8, 40_000, False),  # a long one is no better where a block costs more than it saves
        (BLOCKS, 1e9, 40_000, True),  # 102 ms against 67 ms
        (2, 1e9, 40_000, False),  # 0.8 ms against one round trip and 0.5 ms
        (2, 1e9, 0, True),  # nobody said what a block is worth: every hit is
    ],
)
def test_a_prefix_is_fetched_when_it_is_faster_than_recomputing_it(
    blocks: int, bytes_per_s: float, prefill: float, fetched: bool
):
    owner = peer("a", blocks=range(blocks), bytes_per_s=bytes_per_s)
    load = one_load(owner, recompute=Recompute(block_tokens=16, prefill_tokens_per_s=prefill))
    assert load.statuses[LoadStatus.HIT_PEER if fetched else LoadStatus.SKIPPED] == blocks
    assert load.plan.net_gain_s(load.took_s) >= 0


# fairness


def foreground_s(*, beside_prefetch: bool, peers: int = 1) -> float:
    world = SimulatedPeers([peer(str(at), blocks=range(2048)) for at in range(peers)])
    if beside_prefetch:
        prefetch = world.load(2048, block_bytes=2 * MIB, timeout_s=60.0, priority=Priority.PREFETCH)
    warm = world.load(1, block_bytes=64 * KIB, at_s=0.5)
    load = world.load(1, block_bytes=2 * MIB, at_s=1.0)
    world.run()
    assert warm.statuses == load.statuses == {LoadStatus.HIT_PEER: 1}
    if beside_prefetch:
        assert prefetch.statuses == {LoadStatus.HIT_PEER: 2048}
        assert prefetch.took_s > 2.0, "the prefetch was over before the load began"
    return load.took_s


def test_a_small_load_takes_at_most_three_times_as_long_beside_a_large_prefetch():
    assert foreground_s(beside_prefetch=True) < 3 * foreground_s(beside_prefetch=False)


def test_a_slow_owner_does_not_delay_loads_from_another():
    slow, fast = peer("slow", blocks=range(64), bytes_per_s=1e6), peer("fast", blocks=range(64))
    world = SimulatedPeers([slow])
    world.load(64, block_bytes=2 * MIB, timeout_s=5.0)
    world.peers["fast"] = fast
    load = world.load(64, block_bytes=256 * KIB, at_s=1.0)
    alone = SimulatedPeers([peer("fast", blocks=range(64))])
    reference = alone.load(64, block_bytes=256 * KIB)
    world.run()
    alone.run()
    assert load.took_s < 1.3 * reference.took_s + 1e-3


# whatever happens

positions = st.frozensets(st.integers(0, 31))
owners = st.builds(
    SimulatedPeer,
    name=st.just("?"),
    claims=positions,
    holds=positions,
    bytes_per_s=st.sampled_from([1e6, 1e8, 1e9, 1e10]),
    latency_s=st.sampled_from([1e-5, 1e-3, 2e-2]),
    round_trip_s=st.sampled_from([1e-4, 1e-3, 0.1]),
    state=st.sampled_from(StreamState),
    silent=st.sampled_from([(math.inf, math.inf), (0.0, math.inf), (0.004, 0.05), (0.02, math.inf)]),
    lost_at_s=st.sampled_from([math.inf, math.inf, 0.0, 0.01]),
    spoiled=st.dictionaries(st.integers(0, 31), st.sampled_from([Outcome.STALE, Outcome.CORRUPT, Outcome.NO_ROOM]), max_size=4),
)


@settings(max_examples=150, deadline=None)
@given(
    peers=st.lists(owners, max_size=7),
    block_bytes=st.sampled_from([4 * KIB, MIB]),
    timeout_s=st.sampled_from([0.002, 0.05, 1.0]),
    prefill=st.sampled_from([0.0, 1e3, 1e6]),
    loads=st.integers(1, 3),
)
def test_every_load_ends_in_time_and_every_block_in_one_status_whatever_the_owners_do(
    peers: list[SimulatedPeer], block_bytes: int, timeout_s: float, prefill: float, loads: int
):
    for number, owner in enumerate(peers):
        owner.name, owner.free_s = str(number), 0.0
    world = SimulatedPeers(peers, peer_bytes=4 * MIB, total_bytes=16 * MIB)
    price = Recompute(block_tokens=16, prefill_tokens_per_s=prefill)
    running = [
        world.load(32, block_bytes=block_bytes, timeout_s=timeout_s, at_s=0.003 * number, recompute=price)
        for number in range(loads)
    ]
    world.run()
    honest = [owner for owner in peers if owner.lost_at_s == math.inf and owner.silent[0] == math.inf]
    for load in running:
        assert load.took_s <= timeout_s
        assert len(load.plan.results) == 32
        story = load.plan.explain()
        assert sum(story.blocks.values()) == 32
        assert sum(nominee.served for nominee in story.nominees) == story.blocks[LoadStatus.HIT_PEER]
        held = set().union(*(owner.holds for owner in peers))
        for at, status in enumerate(load.plan.results):
            if LoadStatus(status).hit:
                assert at in held
            elif timeout_s == 1.0 and not prefill and block_bytes == 4 * KIB:
                good = [owner.name for owner in honest if at in owner.holds & owner.claims and at not in owner.spoiled]
                assert len(peers) > 4 or not good, f"{good} would have served block {at}: {story}"
    assert world.schedule.in_flight_bytes == 0
    assert sum(world.schedule.waiting().values()) == 0

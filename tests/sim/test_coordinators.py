"""Several coordinators on simulated time: faults between one agent and one of them, clocks that disagree, and slow ones."""

from __future__ import annotations

import pytest

from kvdir.core.diff import Verdict, compare, worst
from kvdir.location import StreamState
from kvdir.testing.sim.cluster import LocalCluster
from kvdir.testing.sim.invariants import Violation
from kvdir.testing.sim.network import Faults


def verdict(cluster: LocalCluster) -> Verdict:
    return worst(compare({site.coordinator.name: site.digests_view() for site in cluster.sites}))


def test_partition_between_one_agent_and_one_coordinator_is_doubted_there_only_and_heals() -> None:
    with LocalCluster(nodes=2, coordinators=3) as cluster:
        cluster.node(0).store(range(20))
        cluster.node(1).store(range(10))
        cluster.settle()
        cluster.sites[1].network.partition(0)
        cluster.node(0).remove(range(5))
        cluster.advance(cluster.limits.stale_after_s + 1)
        assert [site.directory.trust(0).state for site in cluster.sites] == [
            StreamState.SYNCED, StreamState.STALE, StreamState.SYNCED,
        ]  # fmt: skip
        assert all(site.directory.trust(1).state is StreamState.SYNCED for site in cluster.sites)
        assert verdict(cluster) is Verdict.BEHIND
        cluster.sites[1].network.rejoin(0)
        assert cluster.settle() <= 4
        assert verdict(cluster) is Verdict.EQUAL
        asked = [site.directory.holders(range(20)) for site in cluster.sites]
        assert asked[0] == asked[1] == asked[2]


def test_clocks_that_disagree_by_days_change_nothing() -> None:
    """Nothing is ordered or aged by a wall clock: not events, not epochs, not even a checkpoint's age in one process."""

    def course(offsets_s: tuple[float, ...]) -> tuple[list[object], float]:
        with LocalCluster(nodes=2, coordinators=2, seed=3) as cluster:
            for site, node, offset_s in zip(cluster.sites, cluster.nodes, offsets_s, strict=True):
                site.clock_offset_s = node.clock_offset_s = offset_s
            cluster.node(0).store(range(20))
            cluster.node(1).restart()
            cluster.node(1).store(range(5, 30))
            cluster.settle()
            cluster.sites[1].write_checkpoint()
            cluster.sites[1].restart_coordinator(warm=True)
            heartbeats = cluster.settle()
            return [site.directory.holders(range(30)) for site in cluster.sites], heartbeats

    assert course((0.0, 0.0)) == course((-86_400.0, 500_000.0))


def test_slow_coordinator_holds_up_nobody_and_ends_equal() -> None:
    with LocalCluster(nodes=2, coordinators=2) as cluster:
        cluster.sites[1].network.faults = Faults(delay_s=0.4, jitter_s=0.2)
        for round in range(10):
            cluster.node(round % 2).store(range(10 * round, 10 * round + 10))
            cluster.advance(0.05)
        cluster.advance(0.1)
        assert len(cluster.sites[0].directory.claims(0)) == 50, "the quick one has everything at once"
        assert len(cluster.sites[1].directory.claims(0)) < 50
        assert cluster.settle(heartbeats=8) > 0
        assert verdict(cluster) is Verdict.EQUAL


def test_settling_fails_when_a_coordinator_believes_something_else() -> None:
    """The check itself: without it, the histories above would prove nothing."""
    with LocalCluster(nodes=1, coordinators=2, watch=False) as cluster:
        cluster.node(0).store(range(10))
        cluster.settle()
        cluster.sites[1].network.partition(0)
        cluster.node(0).store(range(10, 12))
        with pytest.raises(Violation, match="node-0"):
            cluster.settle(heartbeats=2)

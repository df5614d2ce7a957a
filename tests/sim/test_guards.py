"""Nothing destructive acts on a figure that is not trusted; what was restored is a hint. On the simulated cluster."""

from __future__ import annotations

import pytest

from kvdir.location import StreamState
from kvdir.server.config import CoordinatorConfig
from kvdir.testing import LocalCluster

BLOCK_BYTES = 512
QUOTA_BLOCKS = 60


def quota_config(*, enforce: bool = True) -> CoordinatorConfig:
    quota = (f"none={QUOTA_BLOCKS * BLOCK_BYTES}",)
    return CoordinatorConfig(quota=quota, quota_enforce=enforce, quota_interval_s=1.0, quota_max_blocks=8)


def held(cluster: LocalCluster) -> int:
    return sum(len(node.held) for node in cluster.nodes)


@pytest.mark.parametrize("seed", range(5))
def test_cache_stays_above_the_quota_when_evictions_are_not_heard(seed: int) -> None:
    with LocalCluster(nodes=2, seed=seed, config=quota_config()) as cluster:
        assert cluster.block_bytes[cluster.digests[0]] == BLOCK_BYTES
        cluster.node(0).store(range(40))
        cluster.node(1).store(range(40, 80))
        cluster.settle()
        cluster.network.drop_events(seed % 2, share=1.0)  # every event of one agent is lost, its evictions among them
        for _ in range(40):
            cluster.advance(1)
            assert held(cluster) >= QUOTA_BLOCKS
        cluster.network.heal()
        cluster.advance(40)
        cluster.settle()
        assert QUOTA_BLOCKS - 8 <= held(cluster) <= QUOTA_BLOCKS
        assert cluster.network.sent["node-0", "evict_request"] + cluster.network.sent["node-1", "evict_request"] >= 3


def test_nothing_is_evicted_when_the_quota_is_only_watched() -> None:
    with LocalCluster(nodes=2, config=quota_config(enforce=False)) as cluster:
        cluster.node(0).store(range(80))
        cluster.settle()
        cluster.advance(20)
        assert held(cluster) == 80
        (watched,) = cluster.coordinator.quotas.watched
        assert "over" in watched.verdict or "dry" in watched.verdict, watched.verdict


def test_nothing_is_evicted_when_one_stream_is_not_trusted() -> None:
    with LocalCluster(nodes=3, config=quota_config()) as cluster:
        for number in range(3):
            cluster.node(number).store(range(number * 40, number * 40 + 40))
        cluster.settle()
        cluster.network.partition(2)
        cluster.advance(cluster.limits.stale_after_s + 1)
        before = held(cluster)
        cluster.advance(20)
        assert cluster.directory.trust(2).state is StreamState.STALE
        assert held(cluster) == before


def test_lookups_have_hints_and_no_trust_when_a_coordinator_starts_from_a_checkpoint() -> None:
    with LocalCluster(nodes=3) as cluster:
        for number in range(3):
            cluster.node(number).store(range(number * 10, number * 10 + 10))
        cluster.settle()
        cluster.write_checkpoint()
        cluster.node(0).remove([5])
        cluster.network.partition(2)
        cluster.restart_coordinator(warm=True)
        assert cluster.directory.holders([5, 15, 25]) == [{"node-0"}, {"node-1"}, {"node-2"}]
        assert not any(cluster.directory.blocks(number).trusted for number in range(3))
        cluster.advance(4)
        assert cluster.directory.blocks(0).require_trusted() == 9
        assert cluster.directory.holders([5, 15, 25]) == [set(), {"node-1"}, {"node-2"}]
        assert not cluster.directory.blocks(2).trusted
        cluster.network.heal()
        cluster.settle()


def test_restored_hints_go_when_their_node_was_reborn_meanwhile() -> None:
    with LocalCluster(nodes=1) as cluster:
        cluster.node(0).store([1, 2])
        cluster.settle()
        cluster.write_checkpoint()
        cluster.node(0).restart()
        cluster.node(0).store([2, 3])
        cluster.restart_coordinator(warm=True)
        cluster.settle()
        assert cluster.directory.holders([1, 2, 3]) == [set(), {"node-0"}, {"node-0"}]
